"""Forms of calls that PyTorch takes, the types of errors that it raises, and tensors and placements of its own."""

import copy
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import placement_types as their_types

from ranks import run_ranks
from terrazzo.errors import CommError, DTensorError, ParallelPlanError, TerrazzoError
from terrazzo.layout import Layout
from terrazzo.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    placement_types,
    zeros,
)
from terrazzo.tensor.experimental import local_map
from terrazzo.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

R = Replicate()


def line():
    return init_device_mesh("cpu", (4,))


# ------------------------------------------------------------------ types of errors


def check_error_types():
    mesh, other = line(), init_device_mesh("cpu", (2, 2))
    x, whole = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]), torch.ones(8, 8)
    calls = [
        (lambda: distribute_tensor(x, other), ValueError),
        (lambda: distribute_tensor(x, mesh, [R]), ValueError),
        (lambda: distribute_tensor(whole, other, [R]), ValueError),
        (lambda: distribute_tensor(whole * nn.Parameter(whole), mesh, [R]), RuntimeError),
        (lambda: distribute_tensor(whole, mesh, ["rows"]), RuntimeError),
        (lambda: zeros(3, device_mesh=other, placements=[R]), AssertionError),
        (lambda: zeros(3, device_mesh=mesh, layout=torch.sparse_coo), AssertionError),
        (lambda: DTensor.from_local(x, mesh), RuntimeError),
        (lambda: DTensor.from_local(torch.ones(1), mesh, [Partial()]).__create_chunk_list__(), ValueError),
        (lambda: distribute_module(nn.Linear(2, 2), mesh, input_fn=lambda inputs: inputs), ValueError),
        (lambda: parallelize_module(nn.Linear(2, 2), mesh, {"": "columns"}), TypeError),
        (lambda: parallelize_module(nn.Linear(2, 2), other, ColwiseParallel()), ValueError),
        (lambda: PrepareModuleInput(input_layouts=R, desired_input_layouts=(R, None)), AssertionError),
        (lambda: PrepareModuleInput(input_layouts=R), AssertionError),
        (lambda: PrepareModuleOutput(output_layouts=R, desired_output_layouts=(R, R)), AssertionError),
        (
            lambda: parallelize_module(
                nn.Identity(), mesh, PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R, R))
            )(whole),
            ValueError,
        ),
    ]
    for call, kind in calls:
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, TerrazzoError)
    # PyTorch asks for shards of the classes; a plain target is for those alone.
    with loss_parallel(), pytest.raises(ValueError, match="loss_parallel"):
        F.cross_entropy(x, torch.zeros(8, dtype=torch.int64))
    with loss_parallel():
        F.cross_entropy(x, distribute_tensor(torch.zeros(8, dtype=torch.int64), mesh))


def check_run_check():
    mesh, first = line(), dist.get_rank() == 0
    one = torch.ones(4, 4)
    parts = {
        "dtype": one.double() if first else one,
        "shape": one[:2] if first else one,
        "dims": one[0] if first else one,
        "strides": one.t() if first else one,
        "requires_grad": one.clone().requires_grad_(first),
    }
    for what, part in parts.items():
        with pytest.raises(ValueError, match="do not fit together"):
            DTensor.from_local(part, mesh, [Shard(0)], run_check=True)
        if what not in ("dims", "shape"):
            DTensor.from_local(part, mesh, [Shard(0)])
    # Parts that are uneven, and one that is empty, differ in nothing that matters, whatever the order of their dims.
    for whole in (torch.randn(5, 3), torch.randn(3, 5).t()):
        box = Layout.of(mesh, [Shard(0)], (5, 3)).box()
        x = DTensor.from_local(whole[box.slices()], mesh, [Shard(0)], run_check=True, shape=(5, 3))
        assert torch.equal(x.full_tensor(), whole)
    parameter = torch.full((2,), float(dist.get_rank()), requires_grad=True)
    x = DTensor.from_local(parameter, mesh, [R], run_check=True)
    assert x.to_local().tolist() == [0.0, 0.0] and x.requires_grad
    x.sum().backward()
    assert parameter.grad.tolist() == [1.0, 1.0]
    # The first rank's values to the last bit, whatever the other ranks hold.
    values = torch.tensor([[1.0, 0.1, float("nan")], [1e-30, -0.0, float("inf")]]).t()
    mine = values if first else torch.tensor([[1e10, 0.3, 1.0], [float("inf"), 2.0, float("nan")]]).t()
    for placements, requires_grad in (([R], False), ([R], True)):
        x = DTensor.from_local(mine.clone().requires_grad_(requires_grad), mesh, placements, run_check=True)
        assert torch.equal(x.to_local().detach().t().contiguous().view(torch.int32), values.t().view(torch.int32))
        assert x.stride() == values.stride() and x.requires_grad is requires_grad
    start = mine.clone().requires_grad_()
    weight = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [R])
    (DTensor.from_local(start, mesh, [R], run_check=True).nan_to_num(0.0, 0.0, 0.0) * weight).sum().backward()
    expected = torch.arange(6.0).view(3, 2).masked_fill(~values.isfinite(), 0.0)  # where the first rank's are clipped
    assert torch.equal(start.grad, expected)
    written = DTensor.from_local(mine.clone().requires_grad_(), mesh, [R], run_check=True)
    written.zero_()
    assert written.full_tensor().sum() == 0


def test_errors_are_also_of_pytorchs_types():
    run_ranks(4, check_error_types)


def test_run_check():
    run_ranks(4, check_run_check)


# ------------------------------------------------------------------ PyTorch's own objects


def check_pytorchs_objects():
    mesh, whole = line(), torch.ones(8, 8)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    for placement, name in (
        (theirs.Shard(0), "Shard"),
        (theirs.Replicate(), "Replicate"),
        (theirs.Partial(), "Partial"),
    ):
        for call in (
            lambda p: distribute_tensor(whole, mesh, [p]),
            lambda p: DTensor.from_local(whole, mesh, [p]),
            lambda p: x.redistribute(placements=[p]),
            lambda p: zeros(3, device_mesh=mesh, placements=[p]),
            lambda p: ColwiseParallel(input_layouts=p),
            lambda p: PrepareModuleInput(input_layouts=p, desired_input_layouts=R),
            lambda p: PrepareModuleInput(input_kwarg_layouts={"a": R}, desired_input_kwarg_layouts={"a": p}),
            lambda p: PrepareModuleOutput(output_layouts=(R, p), desired_output_layouts=(R, R)),
            lambda p: local_map(torch.relu, [p]),
        ):
            with pytest.raises(ValueError, match=f"import {name} from terrazzo.tensor"):
                call(placement)
    foreign = theirs.distribute_tensor(whole, mesh, [theirs.Shard(0)])
    for call in (lambda: distribute_tensor(foreign, mesh, [R]), lambda: DTensor.from_local(foreign, mesh, [R])):
        with pytest.raises(DTensorError, match="interop.from_torch_dtensor"):
            call()


def test_pytorchs_objects_are_named_in_the_error():
    run_ranks(4, check_pytorchs_objects)


def test_placement_types():
    assert (placement_types.Shard, placement_types.Replicate, placement_types.Partial) == (Shard, Replicate, Partial)
    assert isinstance(Shard(0), placement_types.Placement)
    for size in range(12):
        for ranks in range(1, 6):
            expected = [their_types.Shard.local_shard_size_and_offset(size, ranks, rank) for rank in range(ranks)]
            got = [Shard.local_shard_size_and_offset(size, ranks, rank) for rank in range(ranks)]
            assert got == expected == [Shard(3).local_shard_size_and_offset(size, ranks, r) for r in range(ranks)]


# ------------------------------------------------------------------ tensors


def check_writes_to_what_a_leaf_gave():
    mesh = line()
    for write in (lambda t: t.fill_(42.0), lambda t: t.zero_(), lambda t: t.mul_(3), lambda t: t[:, 0].fill_(5.0)):
        found = []
        for make, placements in ((theirs.DTensor, [theirs.Shard(0)]), (DTensor, [Shard(0)])):
            leaf = torch.arange(8.0).view(2, 4).requires_grad_()
            x = make.from_local(leaf, mesh, placements)
            write(x)
            (x * x).sum().backward()
            found.append((x.to_local().detach(), leaf.grad, leaf.detach().clone()))
        for got, expected in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(got, expected)


def check_plain_tensors_of_one_element():
    mesh, whole = line(), torch.randn(8, 3)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    for one in (torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([[2.0]]), torch.tensor([2])):
        for call in (
            lambda t, one=one: one + t,
            lambda t, one=one: t * one,
            lambda t, one=one: torch.where(t > 0, t, one),
        ):
            torch.testing.assert_close(call(x).full_tensor(), call(whole))
    factor = torch.tensor([2.0], requires_grad=True)
    (x * factor).sum().backward()
    torch.testing.assert_close(factor.grad, whole.sum()[None])
    with pytest.raises(RuntimeError, match="mixed with DTensors"):
        torch.ones(3) + x


def check_saves(path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0), Shard(0)])
    torch.save({"x": nn.Parameter(x)}, f"{path}/{dist.get_rank()}.pt")
    return x.to_local()


def test_a_file_is_read_without_a_process_group(tmp_path):
    parts = run_ranks(4, check_saves, str(tmp_path))
    loaded = [torch.load(tmp_path / f"{rank}.pt", weights_only=True)["x"] for rank in range(4)]
    for rank, (x, part) in enumerate(zip(loaded, parts, strict=True)):
        assert torch.equal(x.to_local(), part) and isinstance(x, nn.Parameter)
        assert x.shape == (6, 2) and x.placements == (Shard(0), Shard(0)) and x.device_mesh.mesh_dim_names == ("a", "b")
        assert x.device_mesh.get_coordinate() == (rank // 2, rank % 2)
        assert torch.equal((x * 2).to_local(), part * 2)
    again = copy.deepcopy(loaded[1])
    torch.save(again, tmp_path / "again.pt")
    assert torch.equal(torch.load(tmp_path / "again.pt").to_local(), parts[1])
    with pytest.raises(CommError, match="init_process_group"):
        loaded[0].full_tensor()


def test_writes_to_what_a_leaf_gave():
    run_ranks(4, check_writes_to_what_a_leaf_gave)


def test_plain_tensors_of_one_element():
    run_ranks(4, check_plain_tensors_of_one_element)


# ------------------------------------------------------------------ modules


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight

    def forward(self, index):
        return self.head(self.middle(self.words(index)))


def plans():
    return {"words": RowwiseParallel(input_layouts=R)}, {"head": ColwiseParallel(output_layouts=R)}


def check_shared_parameters():
    mesh, index = line(), torch.tensor([[1, 5, 7]])
    torch.manual_seed(0)
    reference = Tied()
    reference(index).square().sum().backward()

    def trained(model):
        assert model.head.weight is model.words.weight and model.head.weight.placements == (Shard(0),)
        assert isinstance(model.head.weight, nn.Parameter)
        model(index).square().sum().backward()
        torch.testing.assert_close(model.words.weight.grad.full_tensor(), reference.words.weight.grad)

    # One call; two calls for the model, in either order; two calls for its modules.
    words, head = plans()
    trained(parallelize_module(copy.deepcopy(reference).requires_grad_(), mesh, words | head))
    for first, second in ((words, head), (head, words)):
        model = copy.deepcopy(reference)
        trained(parallelize_module(parallelize_module(model, mesh, first), mesh, second))
    model = copy.deepcopy(reference)
    parallelize_module(model.words, mesh, words["words"])
    assert not isinstance(model.head.weight, DTensor)
    parallelize_module(model.head, mesh, head["head"])
    trained(model)
    # Placed otherwise, the two would train apart.
    model = copy.deepcopy(reference)
    parallelize_module(model.words, mesh, ColwiseParallel())
    with pytest.raises(ParallelPlanError, match="share one parameter"):
        parallelize_module(model.head, mesh, ColwiseParallel())
    # A module that gets the plain parameter again starts from its values.
    plain, layer = nn.Parameter(torch.ones(4, 4)), nn.Linear(4, 4, bias=False)
    kept = []
    for _ in range(2):
        layer.weight = plain
        kept.append(parallelize_module(layer, mesh, ColwiseParallel()).weight)
        assert layer.weight.full_tensor().eq(1).all()
        with torch.no_grad():
            layer.weight.zero_()
    assert kept[0] is not kept[1]


def check_distribute_module():
    mesh, index = line(), torch.tensor([[1, 5, 7]])
    reference = Tied()

    def partition(name, module, mesh):
        if name == "head":
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))

    model = distribute_module(copy.deepcopy(reference), mesh, partition)
    assert model.words.weight is model.head.weight and model.words.weight.placements == (Shard(0),)
    assert model.middle.weight.placements == (R,)

    def inputs_of_two(inputs, mesh):
        return tuple(distribute_tensor(x, mesh) for x in inputs)

    def outputs_of_two(outputs, mesh):
        return outputs.full_tensor()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = distribute_module(copy.deepcopy(reference), mesh, partition, inputs_of_two, outputs_of_two)
    assert [w.category for w in said] == [FutureWarning] * 2 and all(w.filename == __file__ for w in said)
    torch.testing.assert_close(model(index), reference(index))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = distribute_module(
            copy.deepcopy(reference),
            mesh,
            partition,
            lambda module, inputs, mesh, more=None: inputs_of_two(inputs, mesh),
            lambda *args: outputs_of_two(args[1], args[2]),
        )
    torch.testing.assert_close(model(index), reference(index))


def check_local_map_forms():
    mesh = line()
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).requires_grad_()
    options = {"out_placements": [Partial()], "in_placements": ([Shard(0)],)}

    @local_map(**options, device_mesh=mesh)
    def total(part):
        return part.sum()

    def plain(part):
        return part.sum()

    results = [
        total(x),
        local_map(plain, **options)(x),
        local_map(plain, [Partial()], ([Shard(0)],), mesh)(x),
        local_map(plain, [Partial()], ([Shard(0)],), None, mesh)(x),
        local_map(plain, [Partial()], ([Shard(0)],), ([Shard(0)],), mesh)(x),
    ]
    assert total.__name__ == "total"
    for result in results:
        assert result.placements == (Partial(),) and result.item() == 28.0
    gradients = [torch.autograd.grad(r.full_tensor(), x)[0].full_tensor() for r in results]
    assert all(torch.equal(a, b) for a, b in pairwise(gradients))


def test_shared_parameters_stay_shared():
    run_ranks(4, check_shared_parameters)


def test_distribute_module():
    run_ranks(4, check_distribute_module)


def test_local_map_forms():
    run_ranks(4, check_local_map_forms)


def outs_of_another_type() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.rand(4, 4)
    mine = distribute_tensor(whole, mesh, [Shard(0)])
    for name, of in (("abs", 1), ("round", 1), ("tril", 1), ("mm", 2), ("exp", 1), ("add", 2), ("maximum", 2)):
        plain, ours = torch.zeros(4, 4, dtype=torch.float64), torch.zeros_like(mine, dtype=torch.float64)
        try:
            getattr(torch, name)(*[whole] * of, out=plain)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error).split(",")[0]):
                getattr(torch, name)(*[mine] * of, out=ours)
        else:
            getattr(torch, name)(*[mine] * of, out=ours)
            torch.testing.assert_close(ours.full_tensor(), plain)
    numbers = torch.zeros_like(mine, dtype=torch.int32)
    with pytest.raises(TypeError, match="can't be cast"):  # before the shapes, as on one device
        torch.cat([numbers, distribute_tensor(torch.zeros(2), mesh, [Replicate()])], out=numbers)


def norms_in_a_wider_type() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(4, 6)
    wide = torch.float64
    for placement in (Shard(0), Shard(1), R):
        mine = distribute_tensor(whole, mesh, [placement])
        for call in (
            lambda x: x.norm(dtype=wide),
            lambda x: x.norm(2, 0, False, wide),
            lambda x: torch.norm(x, 3, 0, dtype=wide),
            lambda x: torch.norm(x, 2, 1, False, None, wide),
            lambda x: torch.linalg.vector_norm(x, dtype=wide),
        ):
            torch.testing.assert_close(call(mine).full_tensor(), call(whole))


def test_norms_in_a_wider_type() -> None:
    run_ranks(2, norms_in_a_wider_type)


def test_outs_of_another_type() -> None:
    run_ranks(2, outs_of_another_type)
