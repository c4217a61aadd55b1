"""Each parallel style on its own, and plans: placements, values and gradients against one device."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import device_type, run_ranks
from terrazzo.errors import DTensorError, ParallelPlanError, UnsupportedModuleError
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from tests.tensor.models import GPT, MLP, batch_of_words, whole, worst_difference
from tests.tensor.test_gpt import plain_tensor_parallel, sequence_parallel

pytestmark = pytest.mark.on_late(both=True)

R = Replicate()


def mesh_of(*shape: int) -> Any:
    return init_device_mesh(device_type(), shape or (4,), mesh_dim_names=("dp", "tp")[-max(len(shape), 1) :])


def same(mine: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(whole(mine).detach(), expected.detach(), rtol=1e-5, atol=1e-5)


def part(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(4, dim)[dist.get_rank()]


# ------------------------------------------------------------------ one style, one module


def columns_and_rows() -> None:
    mesh, x = mesh_of(), torch.randn(3, 5, 8)
    for style, inputs, outputs, weight, bias in [
        (ColwiseParallel(), x, lambda y: part(y, -1), Shard(0), Shard(0)),
        (ColwiseParallel(output_layouts=R), x, lambda y: y, Shard(0), Shard(0)),
        (ColwiseParallel(input_layouts=Shard(-1)), part(x, -1), lambda y: part(y, -1), Shard(0), Shard(0)),
        (RowwiseParallel(), part(x, -1), lambda y: y, Shard(1), R),
        (RowwiseParallel(input_layouts=R), x, lambda y: y, Shard(1), R),
        (RowwiseParallel(output_layouts=Shard(-1)), part(x, -1), lambda y: part(y, -1), Shard(1), R),
    ]:
        reference = nn.Linear(8, 12)
        layer = parallelize_module(copy.deepcopy(reference), mesh, style)
        assert layer.weight.placements == (weight,) and layer.bias.placements == (bias,)
        assert isinstance(layer.weight, nn.Parameter)
        given, whole_input = inputs.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = layer(given), reference(whole_input)
        assert not isinstance(y, DTensor)
        same(y, outputs(expected))
        # The loss is of the whole output: each rank contributes its part, or all contribute the same.
        (y * outputs(torch.ones_like(expected))).sum().backward()
        expected.sum().backward()
        assert worst_difference(layer, reference, grads=True)[0] < 1e-5, style
        same(given.grad, whole_input.grad if inputs is x else part(whole_input.grad, -1))
        twin = parallelize_module(copy.deepcopy(reference), mesh, type(style)(use_local_output=False))
        assert isinstance(twin(distribute_tensor(x, mesh)), DTensor)
        same(twin(distribute_tensor(x, mesh)), expected)


def uneven_features() -> None:
    """The features between two layers need not divide: the second one knows how many there are."""
    mesh, x = mesh_of(), torch.randn(3, 5, 7)
    for features in (7, 9, 3):  # 2, 2, 2, 1; 3, 3, 3 and 1, 1, 1 and none
        reference = nn.Sequential(nn.Linear(7, features), nn.Tanh(), nn.Linear(features, 5))
        model = copy.deepcopy(reference)
        styles = {"0": ColwiseParallel(input_layouts=Shard(-1)), "2": RowwiseParallel()}
        parallelize_module(model, mesh, styles)
        given, whole_input = part(x, -1).clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = model(given), reference(whole_input)
        same(y, expected)
        y.sum().backward()
        expected.sum().backward()
        assert worst_difference(model, reference, grads=True)[0] < 1e-5
        if given.numel():
            same(given.grad, part(whole_input.grad, -1))


def embeddings() -> None:
    mesh, words = mesh_of(), torch.randint(0, 10, (3, 7))
    for style, outputs, weight in [
        (ColwiseParallel(), lambda y: part(y, -1), Shard(1)),
        (RowwiseParallel(input_layouts=R), lambda y: y, Shard(0)),
        (RowwiseParallel(input_layouts=R, output_layouts=Shard(0)), None, Shard(0)),
    ]:
        for padding in (None, 4):
            reference = nn.Embedding(10, 8, padding_idx=padding)
            layer = parallelize_module(copy.deepcopy(reference), mesh, style)
            assert layer.weight.placements == (weight,)
            y, expected = layer(words), reference(words)
            if outputs is not None:
                same(y, outputs(expected))
                (y * y).sum().backward()
                expected.square().sum().backward()
                assert worst_difference(layer, reference, grads=True)[0] < 1e-5, style


def sequences() -> None:
    mesh, x = mesh_of(), torch.randn(3, 8, 6)
    for reference in (nn.LayerNorm(6), nn.RMSNorm(6), nn.LayerNorm(6, bias=False)):
        with torch.no_grad():
            for p in reference.parameters():
                p.normal_()
        mine = copy.deepcopy(reference)
        if dist.get_rank():  # only the source rank's values count
            with torch.no_grad():
                for p in mine.parameters():
                    p.zero_()
        mine = parallelize_module(mine, mesh, SequenceParallel())
        given, whole_input = part(x, 1).clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = mine(given), reference(whole_input)
        assert y.placements == (Shard(1),)
        same(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert worst_difference(mine, reference, grads=True)[0] < 1e-5
        same(given.grad, part(whole_input.grad, 1))
        same(mine(distribute_tensor(x, mesh)), expected)
    local = parallelize_module(nn.LayerNorm(6), mesh, SequenceParallel(sequence_dim=0, use_local_output=True))
    assert tuple(local(part(torch.randn(8, 6), 0)).shape) == (2, 6)
    dropout = parallelize_module(nn.Dropout(0.5), mesh, SequenceParallel())
    kept = dropout(part(torch.ones(3, 8, 600), 1)).full_tensor()
    assert not torch.equal(kept[:, :2], kept[:, 2:4]), "ranks drop different elements"


class Two(nn.Module):
    def forward(self, a: Any, b: Any, *, c: Any = None) -> Any:
        assert c is None or isinstance(c, DTensor)
        self.seen = (a, b, c)
        return a, b


def preparations() -> None:
    mesh, x = mesh_of(), torch.randn(8, 4)
    module = parallelize_module(
        Two(),
        mesh,
        PrepareModuleInputOutput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(R, None),
            input_kwarg_layouts={"c": Shard(0)},
            desired_input_kwarg_layouts={"c": Shard(1)},
            output_layouts=(R, None),
            desired_output_layouts=(Shard(1), None),
        ),
    )
    first, second = module(part(x, 0), "text", c=part(x, 0))
    a, b, c = module.seen
    assert (a.placements, b, c.placements) == ((R,), "text", (Shard(1),))
    same(a, x), same(c, x)
    assert second == "text" and not isinstance(first, DTensor)
    same(first, part(x, 1))
    module(
        distribute_tensor(x, mesh, [Shard(1)]), None
    )  # not as the plan says: brought to the desired one all the same
    assert module.seen[0].placements == (R,)
    linear = parallelize_module(
        nn.Linear(4, 4),
        mesh,
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=R, use_local_output=True),
    )
    assert tuple(linear(part(x, 0)).shape) == (8, 4)
    output = parallelize_module(
        nn.Linear(4, 4),
        mesh,
        PrepareModuleOutput(output_layouts=R, desired_output_layouts=Shard(0), use_local_output=False),
    )
    assert output(x).placements == (Shard(0),)
    for wrong in (
        lambda: PrepareModuleInput(input_layouts=Shard(0)),
        lambda: PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R,)),
        lambda: PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=R),
        lambda: module(x),
        lambda: module("text", "text"),
        lambda: parallelize_module(nn.LayerNorm(4), mesh, SequenceParallel())("text"),
    ):
        with pytest.raises(ParallelPlanError):
            wrong()


def test_linear_layers_by_columns_and_rows():
    run_ranks(4, columns_and_rows)


def test_features_that_do_not_divide() -> None:
    run_ranks(4, uneven_features)


def test_embeddings_by_columns_and_rows():
    run_ranks(4, embeddings)


def test_normalisation_and_dropout_along_the_sequence():
    run_ranks(4, sequences)


def test_inputs_and_outputs_are_brought_to_placements():
    run_ranks(4, preparations)


def test_descriptions_are_those_of_the_arguments():
    assert repr(SequenceParallel()) == "SequenceParallel(sequence_dim=1, use_local_output=False)"
    described = repr(PrepareModuleOutput(output_layouts=R, desired_output_layouts=Shard(0)))
    assert described.startswith("PrepareModuleOutput(output_layouts=(") and "use_local_output=True" in described


# ------------------------------------------------------------------ plans


class Doubled(ParallelStyle):
    """A style of a user's own."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        self.source = self.src_data_rank
        module.register_forward_hook(lambda _m, _i, out: 2 * out)
        return module


def plans() -> None:
    mesh, x = mesh_of(), torch.randn(2, 8)
    reference = nn.Sequential(MLP(8), nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}))
    model = parallelize_module(
        copy.deepcopy(reference),
        mesh,
        {"0": {"up": ColwiseParallel(), "down": RowwiseParallel()}, "1.[ab]": ColwiseParallel(output_layouts=R)},
    )
    same(model[1]["b"](model[1]["a"](model[0](x))), reference[1]["b"](reference[1]["a"](reference[0](x))))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parallelize_module(model, mesh, {"0.sideways": ColwiseParallel(), "?.a": Doubled()})
        parallelize_module(model, mesh)
    assert [str(w.message).split(" matches")[0] for w in said] == [
        "parallelize_plan: '0.sideways'",
        "parallelize_plan: '?.a'",
        "parallelize_module without a parallelize_plan does nothing",
    ]
    assert all(w.filename == __file__ for w in said), "warnings point at the caller"
    with mesh:
        style = Doubled()
        assert parallelize_module(reference[0], parallelize_plan={"": style}, src_data_rank=3) is reference[0]
        assert style.source == 3
    for wrong, error in [
        (lambda: parallelize_module(model, mesh_of(2, 2), {"0": Doubled()}), DTensorError),
        (lambda: parallelize_module(model, mesh, {"0": "columns"}), ParallelPlanError),
        (lambda: parallelize_module(nn.Conv1d(2, 2, 1), mesh, ColwiseParallel()), UnsupportedModuleError),
        (lambda: parallelize_module(nn.Conv1d(2, 2, 1), mesh, ColwiseParallel()), NotImplementedError),
        (lambda: parallelize_module(nn.Linear(2, 2), None, ColwiseParallel()), DTensorError),
    ]:
        with pytest.raises(error):
            wrong()


def sources() -> None:
    mesh, rank = mesh_of(), dist.get_rank()
    for source, expected in ((0, 0.0), (2, 2.0)):
        layer = nn.Linear(4, 4)
        nn.init.constant_(layer.weight, rank)
        parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=source)
        assert layer.weight.full_tensor().unique().tolist() == [expected]
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, rank)
    parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=None)
    assert layer.weight.full_tensor().unique().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert layer.weight.requires_grad and layer.weight.is_leaf
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert not parallelize_module(frozen, mesh, RowwiseParallel()).bias.requires_grad


def tied() -> None:
    mesh = mesh_of()
    model = sequence_parallel(GPT(tied=True), mesh)
    assert model.head.weight is model.words.weight and model.head.weight.placements == (Shard(0),)
    assert sum(p is model.head.weight for p in model.parameters()) == 1
    plain_tensor_parallel(GPT(tied=True), mesh)
    with pytest.raises(ParallelPlanError, match=r"words\.weight and head\.weight share one parameter"):
        parallelize_module(GPT(tied=True), mesh, {"words": ColwiseParallel(), "head": ColwiseParallel()})


def test_plans_find_modules_by_pattern():
    run_ranks(4, plans)


def test_source_of_the_values():
    run_ranks(4, sources)


def test_tied_parameters_stay_tied_or_are_refused():
    run_ranks(4, tied)


# ------------------------------------------------------------------ what it costs


def bytes_of_a_step() -> dict[str, int]:
    mesh, model = mesh_of(), sequence_parallel(GPT(blocks=1), mesh_of())
    words, targets = (distribute_tensor(t, mesh) for t in batch_of_words(0))
    with loss_parallel(), CommDebugMode() as seen:
        model(words, targets).backward()
    return seen.get_comm_bytes("backward").by_kind()


def test_sequence_parallel_scatters_the_gradients_that_it_gathers_for():
    """Backward of a gather before cut columns is a reduce-scatter; all-reduces are for replicated parameters only."""
    activation = 8 * 16 * 32 * 4 * 3 // 4
    for moved in run_ranks(4, bytes_of_a_step):
        assert moved["reduce_scatter"] == 3 * activation  # before attention, mlp and head
        # What attention, mlp and words scattered, and places, which have no batch.
        assert moved["all_gather"] == 3 * activation + activation // 8
        assert moved["all_reduce"] < activation


# ------------------------------------------------------------------ against PyTorch's own


def against_torch() -> tuple[float, float]:
    """The same plan by torch.distributed.tensor.parallel: the same loss and gradients."""
    import torch.distributed.tensor as theirs
    import torch.distributed.tensor.parallel as their_parallel

    mesh = mesh_of()
    torch.manual_seed(0)
    reference = GPT()
    mine = plain_tensor_parallel(copy.deepcopy(reference), mesh)
    other = their_parallel.parallelize_module(
        copy.deepcopy(reference),
        mesh,
        {
            "words": their_parallel.RowwiseParallel(input_layouts=theirs.Replicate()),
            "blocks.*.attention.[qkv]": their_parallel.ColwiseParallel(),
            "blocks.*.attention.out": their_parallel.RowwiseParallel(),
            "blocks.*.mlp.up": their_parallel.ColwiseParallel(),
            "blocks.*.mlp.down": their_parallel.RowwiseParallel(),
            "head": their_parallel.ColwiseParallel(output_layouts=theirs.Replicate()),
        },
    )
    losses = [model(*batch_of_words(0)) for model in (mine, other)]
    for loss in losses:
        loss.backward()
    worst = 0.0
    for (name, p), q in zip(mine.named_parameters(), other.parameters(), strict=True):
        assert isinstance(p, DTensor) == isinstance(q, theirs.DTensor), name
        if isinstance(p, DTensor):
            assert str(p.placements) == str(q.placements) or p.placements[0].is_shard(q.placements[0].dim), name
            a, b = p.grad.full_tensor(), q.grad.full_tensor()
        else:
            a, b = p.grad, q.grad
        worst = max(worst, (a - b).abs().max().item())
    return abs(losses[0] - losses[1]).item(), worst


def test_the_same_as_pytorchs_parallel_styles():
    for loss, gradient in run_ranks(4, against_torch):
        assert max(loss, gradient) < 1e-5


def resharded_inputs(rows: int, width: int, results: int) -> None:
    from torch.distributed.tensor.parallel.input_reshard import input_reshard as theirs

    from terrazzo.tensor.parallel.input_reshard import input_reshard

    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, results))
    mesh, x = mesh_of(), torch.randn(rows, width)
    models = [first, input_reshard(copy.deepcopy(first), mesh, 0)]
    if rows % 4 == width % 4 == results % 4 == 0:  # PyTorch's takes the parts for even ones
        models.append(theirs(copy.deepcopy(first), mesh, 0))
    whole = distribute_module(copy.deepcopy(first), mesh)
    models += [whole, input_reshard(copy.deepcopy(whole), mesh, 0)]
    for model in models:
        inputs = distribute_tensor(x, mesh, [Replicate()]) if isinstance(model[0].weight, DTensor) else x
        model(inputs).square().sum().backward()
        for p, q in zip(model.parameters(), first.parameters(), strict=True):
            grad = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
            torch.testing.assert_close(grad, q.grad)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        models[1](torch.ones(5, width + 1))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        first(x)  # the hooks of the call that failed are gone
    assert rows * width in kept


@pytest.mark.parametrize("sizes", [(8, 8, 4), (5, 6, 3)])
def test_inputs_that_are_kept_in_parts(sizes):
    run_ranks(4, resharded_inputs, *sizes)
