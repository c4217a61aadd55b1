"""`terrazzo.compile`: a graph gives what the eager program gives, and what cannot be a graph is told."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import terrazzo
from ranks import run_ranks
from tensor.models import Block, batch_of_words
from terrazzo.errors import CaptureError
from terrazzo.fsdp import fully_shard, trace
from terrazzo.graphs import CompileWarning
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def same(mine: Any, expected: Any, tolerance: float = 0.0) -> None:
    """The same kind of tensor, in the same layout, with the same values."""
    assert type(mine) is type(expected)
    if isinstance(expected, DTensor):
        assert mine.placements == expected.placements and mine.shape == expected.shape
        mine, expected = mine._local, expected._local
    assert mine.dtype == expected.dtype and mine.requires_grad == expected.requires_grad
    torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


def same_gradients(mine: nn.Module, expected: nn.Module, tolerance: float = 0.0) -> None:
    for (name, p), q in zip(mine.named_parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            same(p.grad, q.grad, tolerance)


def graphs(compiled: Any) -> int:
    report = terrazzo.compile_report(compiled)
    assert all(graph.error is None for graph in report.graphs), str(report)
    return len(report.graphs)


def compiled(target: Any, **options: Any) -> Any:
    return terrazzo.compile(target, **({"backend": "aot_eager", "fullgraph": True} | options))


# ------------------------------------------------------------------ a transformer


class LanguageModel(nn.Module):
    """One block between an embedding and a head; activations are sharded over the sequence between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 32)
        self.block = Block(32, 4)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.block(self.words(words))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallel(model: LanguageModel, mesh: Any) -> LanguageModel:
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "block.norm1": SequenceParallel(),
        "block.norm2": SequenceParallel(),
        "block.attention": gathered,
        "block.attention.q": ColwiseParallel(use_local_output=False),
        "block.attention.k": ColwiseParallel(use_local_output=False),
        "block.attention.v": ColwiseParallel(use_local_output=False),
        "block.attention.out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "block.mlp": gathered,
        "block.mlp.up": ColwiseParallel(use_local_output=False),
        "block.mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


def train(backend: str, tolerance: float) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    alone = LanguageModel()
    eager = parallel(copy.deepcopy(alone), mesh)
    model = parallel(copy.deepcopy(alone), mesh)
    fast = compiled(model, backend=backend)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager, alone)]
    for step in range(3):
        batch = batch_of_words(step, batch=4)
        losses = []
        for run, owner, optimizer in zip((fast, eager, alone), (model, eager, alone), optimizers, strict=True):
            given = batch if owner is alone else [distribute_tensor(t, mesh, [Replicate()]) for t in batch]
            optimizer.zero_grad()
            with loss_parallel():
                losses.append(run(*given))
                losses[-1].backward()
        same(losses[0], losses[1], tolerance)
        same_gradients(model, eager, tolerance)
        for owner, optimizer in zip((model, eager, alone), optimizers, strict=True):
            nn.utils.clip_grad_norm_(owner.parameters(), 0.5)
            optimizer.step()
        torch.testing.assert_close(losses[0].full_tensor(), losses[2], rtol=1e-4, atol=1e-4)
    assert graphs(fast) == 1
    assert not torch.equal(losses[0].full_tensor(), torch.tensor(0.0))


def test_a_tensor_parallel_block_trains_as_the_eager_one_in_one_graph():
    run_ranks(2, train, "aot_eager", 1e-6)


@pytest.mark.long  # a minute of C++; the layers below are of the same kinds
def test_the_whole_block_by_inductor():
    run_ranks(2, train, "inductor", 1e-4, timeout=580)


def feed_forward() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    alone = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    eager, model = (parallelize_module(copy.deepcopy(alone), mesh, plan) for _ in range(2))
    fast = compiled(model, backend="inductor")
    x = torch.randn(2, 6, 32)
    given = distribute_tensor(x, mesh, [Shard(1)])
    losses = [run(given).square().sum() for run in (fast, eager)]
    for loss in losses:
        loss.backward()
    same(losses[0], losses[1], 1e-4)
    same_gradients(model, eager, 1e-4)
    torch.testing.assert_close(losses[0].full_tensor(), alone(x).square().sum(), rtol=1e-4, atol=1e-4)
    assert graphs(fast) == 1


@pytest.mark.long  # the page docs/compile.md does it, too
def test_compiled_by_inductor():
    run_ranks(2, feed_forward, timeout=580)


# ------------------------------------------------------------------ modules


class Mixed(nn.Module):
    """Dropout, tied weights, batch statistics, a write to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Parameter(torch.ones(3))
        self.drop = nn.Dropout(0.5)
        self.recompute = False

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.first(x)).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(x), inplace=True)
        x = checkpoint(self.hidden, x, use_reentrant=False) if self.recompute else self.hidden(x)
        return self.drop(self.second(x))


def replicated(module: nn.Module, mesh: Any) -> nn.Module:
    return terrazzo.tensor.distribute_module(copy.deepcopy(module), mesh)


def modules() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    model = replicated(Mixed(), mesh)
    model.second.weight = model.first.weight
    eager = copy.deepcopy(model)
    fast = compiled(model)
    assert isinstance(fast, Mixed) and list(fast.state_dict()) == list(model.state_dict())
    assert fast.first.weight is model.first.weight
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1) for m in (model, eager)]
    drawn = []
    for recompute in (False, True):
        model.recompute = eager.recompute = recompute
        for step in range(2):
            x = distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)])
            results = []
            for run, optimizer in zip((fast, eager), optimizers, strict=True):
                torch.manual_seed(10 + step)
                first, second = x.clone().requires_grad_(), x.clone()
                out = run(first) + run(second)
                out.square().mean().backward()
                results.append((out, first.grad))
                optimizer.step()
                optimizer.zero_grad(set_to_none=step == 0)
                results[-1] += (torch.rand(3),)  # as many numbers were drawn
            for mine, expected in zip(*results, strict=True):
                same(mine, expected, 1e-6)
            drawn.append(results[0][0].full_tensor() == 0)
        for a, b in zip(model.buffers(), eager.buffers(), strict=True):
            same(a, b, 1e-6)
        same_gradients(model, eager, 1e-6)
    assert model.unused.grad is None
    assert not torch.equal(drawn[0], drawn[1])
    assert graphs(fast) == 4  # with and without a gradient of x, with and without recomputing
    # Evaluation is another graph, once.
    for _ in range(2):
        for mode in (False, True):
            fast.train(mode)
            eager.train(mode)
            with torch.no_grad():
                torch.manual_seed(0)
                mine = fast(x)
                torch.manual_seed(0)
                same(mine, eager(x), 1e-6)
    assert graphs(fast) == 6
    again = copy.deepcopy(fast)
    assert type(again) is type(fast) and again.first.weight is not fast.first.weight
    again.eval()
    eager.eval()
    with torch.no_grad():
        again.first.weight.zero_()
        assert again(x).full_tensor().abs().max() == 0
        same(fast.eval()(x), eager(x), 1e-6)


@pytest.mark.long
def test_buffers_dropout_recomputation_ties_and_copies():
    run_ranks(2, modules)


# ------------------------------------------------------------------ functions


def functions() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(torch.randn(6, 6), mesh, [Shard(1)]).requires_grad_()
    plain = torch.randn(3, requires_grad=True)
    scale = 2.0

    def f(x: Any, more: dict[str, Any], flag: bool = True, *, p: Any = None) -> Any:
        y = x @ w
        return {
            "y": y.sum(0),
            "rest": (None, 3, "a", y if flag else None, more["n"] * scale, plain * 2),
            "same": x,
            "again": more["n"],
            "placements": y.placements,
            "p": p,
        }

    fast = compiled(f)
    for flag in (True, False, True):
        expected, mine = f(x, {"n": plain}, flag), fast(x, {"n": plain}, flag)
        assert mine.keys() == expected.keys() and type(mine["rest"]) is tuple
        assert mine["same"] is x and mine["again"] is plain and mine["placements"] == expected["placements"]
        assert mine["rest"][:3] == (None, 3, "a") and (mine["rest"][3] is None) == (not flag)
        same(mine["y"], expected["y"])
        assert mine["y"].placements == expected["y"].placements
        grads = []
        for result in (expected, mine):
            loss = result["y"].sin().sum() + distribute_tensor(torch.zeros(()), mesh, [Replicate()])
            total = result["rest"][4].sum() + result["rest"][5].sum()
            loss.backward(retain_graph=True)
            total.backward()
            grads.append((x.grad, w.grad, plain.grad))
            x.grad = w.grad = plain.grad = None
        for a, b in zip(*grads, strict=True):
            same(a, b)
    assert graphs(fast) == 2
    scale = 3.0
    same(fast(x, {"n": plain})["rest"][4], plain * 3)
    assert graphs(fast) == 3  # called without the flag, and with another scale
    with torch.no_grad():
        assert not fast(x, {"n": plain})["y"].requires_grad
    with torch.inference_mode():
        same(fast(x.detach(), {"n": plain})["y"], f(x.detach(), {"n": plain})["y"])

    # Writes to inputs, a result that is a view of an input, terms, integers.
    def g(a: Any, b: Any) -> Any:
        a.add_(b)
        a[0] = 1.0
        return a.view(24), (b @ b.t()).sum(), a

    fast = compiled(g)
    for _ in range(2):
        pairs = [
            [distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Replicate()]) for _ in range(2)] for _ in "12"
        ]
        mine, expected = fast(*pairs[0]), g(*pairs[1])
        for a, b in zip(mine, expected, strict=True):
            same(a, b)
        same(pairs[0][0], pairs[1][0])
        assert mine[2] is pairs[0][0]
        pairs[0][0].zero_()
        assert mine[0].full_tensor().abs().max() == 0, "a view of what was written"
    assert graphs(fast) == 1


def test_arguments_results_closures_and_writes():
    run_ranks(2, functions)


def reduced_precision() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    model = replicated(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)), mesh)
    eager = copy.deepcopy(model)
    fast = compiled(model)
    for dtype in (torch.bfloat16, None, torch.bfloat16):
        outs = []
        for run in (fast, eager):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                outs.append(run(x))
            outs[-1].float().sum().backward()
        same(*outs)
        assert outs[0].dtype == (dtype or torch.float32)
        same_gradients(model, eager)
    assert graphs(fast) == 2


def test_autocast_as_in_eager():
    run_ranks(2, reduced_precision)


# ------------------------------------------------------------------ several graphs


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: torch.Tensor, power: int = 1) -> torch.Tensor:
        return self.layer(x).pow(power) * self.factor


def recompiles() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = replicated(Scaled(), mesh)
    fast = compiled(model, fullgraph=False, recompile_limit=4)
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])

    def differs() -> set[str]:
        return set(terrazzo.compile_report(fast).graphs[-1].differs)

    fast(x)
    assert differs() == set()
    fast(x.redistribute(placements=[Replicate()]))
    assert differs() == {"argument 0"}
    fast(x, 2)
    assert differs() == {"argument 1"}
    model.factor = 3.0
    same(fast(x, 2), model(x, 2))
    report = terrazzo.compile_report(fast)
    assert report.graphs[-1].differs == {"factor": ("1.0", "3.0")} and report.recompiles == 3
    assert "factor: 1.0 before, 3.0 here" in str(report)
    with pytest.warns(CompileWarning, match=r"4 graphs already.*yet another way \(argument 1"):
        same(fast(x, 5), model(x, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = len(fast._program._sizes)
        same(fast(x, 6), model(x, 6))
        same(fast(x, 2), model(x, 2))
    assert len(fast._program._sizes) == kept, "calls beyond the limit take no memory"
    report = terrazzo.compile_report(fast)
    assert len(report.graphs) == 4 and [graph.calls for graph in report.graphs] == [1, 1, 1, 2]
    # Another layer is another program.
    fast = compiled(model)
    same(fast(x), model(x))
    model.layer = replicated(nn.Linear(4, 2), mesh)
    same(fast(x), model(x))
    model.layer.register_forward_hook(lambda module, args, result: result * 2)
    same(fast(x), model(x))
    for p in model.parameters():
        p.requires_grad_(False)
    same(fast(x), model(x))
    assert graphs(fast) == 4


def test_what_makes_another_graph():
    run_ranks(2, recompiles)


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 6 else (x * 3).view(-1, 2)[: x.shape[0] // 2].sum(1)


def with_sizes(x: torch.Tensor) -> Any:
    return x * x.shape[0], x.shape, x.shape[0]


def by_type(x: torch.Tensor) -> torch.Tensor:
    return x * (x.shape[0] if isinstance(x.shape[0], int) else 100.0)


def by_text(x: torch.Tensor) -> torch.Tensor:
    return x * len(f"{x.shape[0]}")


def in_parts(x: torch.Tensor) -> torch.Tensor:
    return sum(part.sum(1) for part in x.chunk(3, 1))


def test_sizes_that_change_need_one_more_graph_not_one_each():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    eager = copy.deepcopy(model)
    fast = compiled(model)

    def check(tokens: torch.Tensor) -> None:
        for run in (fast, eager):
            run.zero_grad()
        outs = [run(tokens) for run in (fast, eager)]
        for out in outs:
            F.cross_entropy(out.flatten(0, 1), tokens.flatten() % 4).backward()
        same(*outs, 1e-6)
        same_gradients(model, eager, 1e-6)

    for length in range(3, 13):
        check(torch.randint(16, (4, length)))
    assert graphs(fast) == 2
    for batch in (2, 3, 7):
        check(torch.randint(16, (batch, 5)))
        check(torch.randint(16, (3 * batch, 6))[batch : 2 * batch])
    assert graphs(fast) == 3
    check(torch.randint(16, (7, 1)))  # one is as no other size: it is broadcast
    assert graphs(fast) == 4
    # What a program does depends on the size.
    fast = compiled(in_blocks, recompile_limit=20)
    for size in (2, 4, 6, 8, 10, 12, 6, 14):
        x = torch.randn(size)
        same(fast(x), in_blocks(x))
    assert graphs(fast) <= 4
    fast = compiled(with_sizes)
    for size in (2, 3, 4):
        x = torch.randn(size)
        mine = fast(x)
        same(mine[0], x * size)
        assert mine[1] == x.shape and mine[2] == size and type(mine[1]) is torch.Size and type(mine[2]) is int
    # What is a number to eager programs must not be a symbol to a graph.
    for program in (by_type, by_text):
        fast = compiled(program)
        for size in (2, 3, 14, 15):
            x = torch.randn(size)
            same(fast(x), program(x))


@pytest.mark.long
def test_code_of_inductor_has_every_size_that_backward_needs():
    fast = terrazzo.compile(in_parts, fullgraph=True)
    for size in (5, 7, 8, 9, 6):
        a, b = (torch.ones(2, size, requires_grad=True) for _ in range(2))
        fast(a).square().sum().backward()
        in_parts(b).square().sum().backward()
        same(a.grad, b.grad, 1e-6)
    assert graphs(fast) < 5


def test_sizes_that_change_inside_fully_shard():
    run_ranks(2, blocks_of_all_lengths)


def blocks_of_all_lengths() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    eager = Block(16, 2)
    block = compiled(copy.deepcopy(eager))
    for each in (block, eager):
        fully_shard(each, mesh=mesh)
    for length in (4, 6, 5, 8):
        x = torch.randn(2, length, 16)
        outs = [run(x) for run in (block, eager)]
        for out in outs:
            out.square().mean().backward()
        same(*outs, 1e-6)
    same_gradients(block, eager, 1e-6)
    assert graphs(block) == 2


# ------------------------------------------------------------------ what cannot be a graph


def test_an_lstm_on_a_cpu_is_refused_unless_it_is_one_of_simple_operations():
    lstm, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    with pytest.raises(CaptureError, match="mkldnn.enabled = False"):
        compiled(lstm)(x)
    with torch.backends.mkldnn.flags(enabled=False):
        eager = copy.deepcopy(lstm)
        for run in (compiled(lstm), eager):
            run(x)[0].square().sum().backward()
    same_gradients(lstm, eager, 1e-6)


def takes_item(x: Any) -> Any:
    y = x * 2
    return y * y.sum().item()  # the line


def branches(x: Any) -> Any:
    if (x > 0).all():  # the line
        return x + 1
    return x - 1


def finds(x: Any) -> Any:
    return x.to_local().nonzero()  # the line


def seeds(x: Any) -> Any:
    torch.manual_seed(3)
    return F.dropout(x)  # the line


def turns(x: Any) -> Any:
    plain.t_()
    return x


def replaces(x: Any) -> Any:
    held[0].data = x
    return x


def differentiates(x: Any) -> Any:
    w = x.detach().requires_grad_()
    (w * held[0]).sum().backward()
    return x


def counts(x: Any) -> Any:
    held.append(1)
    return x * 2


def names(x: Any) -> Any:
    return x, object()


held: list[Any] = []
plain = torch.ones(2, 3)
WITH_LINE = [takes_item, branches, finds, seeds]
REASONS = {
    takes_item: "needs a value",
    branches: "needs a value",
    finds: "shape of the result",
    seeds: "sets the state of a random generator",
    turns: "changes the shape, layout or storage",
    replaces: "changes the shape, layout or storage",
    differentiates: "calls backward",
    counts: "changes held",
    names: "returns a object",
}


def refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    for function, reason in REASONS.items():
        held[:] = [distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_()]
        state = torch.get_rng_state()
        with pytest.raises(CaptureError, match=reason) as info:
            compiled(function)(x)
        assert torch.equal(torch.get_rng_state(), state) and len(held) == 1 and held[0].grad is None
        if function in WITH_LINE:
            with open(info.value.file) as file:
                assert "the line" in file.readlines()[info.value.line - 1]
            assert info.value.file.endswith("test_compile.py")
        # Otherwise it runs eagerly, and says so once.
        fast = compiled(function, fullgraph=False)
        with pytest.warns(CompileWarning, match=reason):
            mine = fast(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = fast(x)
        expected = function(x)
        if isinstance(expected, torch.Tensor):
            same(mine, expected)
            same(again, expected)
        assert reason in terrazzo.compile_report(fast).graphs[0].error
    # An argument of which nothing is known, and a tensor that hides in one.
    for value in (object(), torch.randn(2, 2).to_sparse()):
        with pytest.raises(CaptureError, match="is called with"):
            compiled(lambda x, y: x)(x, value)
    hidden = [torch.ones(4, 4)] * 1001  # too long to be searched
    with pytest.raises(CaptureError, match="test_compile"):
        compiled(lambda y: y * hidden[0])(torch.ones(4, 4))
    kept = {"a": (torch.ones(4, 4),)}
    assert torch.equal(compiled(lambda y: y * kept["a"][0])(torch.ones(4, 4)), torch.ones(4, 4))
    # What is sharded inside would be gathered while it is captured.
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(inner[0], mesh=mesh)
    with pytest.raises(CaptureError, match="contains a FSDPLinear"):
        compiled(inner.forward)(torch.ones(2, 4))
    # An error of the program is its own.
    bad = compiled(lambda x: x @ x[:3], fullgraph=False)
    with warnings.catch_warnings(), pytest.raises(RuntimeError) as info:
        warnings.simplefilter("ignore")
        bad(x)
    assert not isinstance(info.value, CaptureError)


def test_what_cannot_be_captured_says_where_or_runs_eagerly():
    run_ranks(2, refusals)


# ------------------------------------------------------------------ with others


def sharded(way: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    alone = nn.Sequential(*[Block(16, 2) for _ in range(3)])
    model, eager = copy.deepcopy(alone), copy.deepcopy(alone)
    for i, block in enumerate(model):
        if way == "module":
            model[i] = compiled(block)
        elif way == "forward":
            block.forward = compiled(block.forward)
        fully_shard(model[i], mesh=mesh)
        fully_shard(eager[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    fully_shard(eager, mesh=mesh)
    if way == "root":
        assert compiled(model) is model
        with pytest.raises(TypeError, match="are compiled already"):
            compiled(model)
    for m in (model, eager):
        m.set_coalesce_bytes(0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager)]
    for step in range(3):
        x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(step))
        outs, kinds = [], []
        for m, optimizer in zip((model, eager), optimizers, strict=True):
            with trace(m) as steps:
                outs.append(m(x))
                outs[-1].square().mean().backward()
            kinds.append([(each.kind, each.unit, each.why, each.moves, each.backward) for each in steps.operations])
            optimizer.step()
            assert m[0].norm1.weight.grad is not None
        same(*outs)
        same_gradients(model, eager)
        # Blocks are gathered ahead as eager ones are: the next in forward, the one before in backward; the last stays.
        assert kinds[0] == kinds[1]
        ahead = [(unit, backward) for _, unit, why, _, backward in kinds[0] if why == "prefetch"]
        assert not step or ahead == [(2, False), (3, False), (2, True), (1, True)]
        for optimizer in optimizers:
            optimizer.zero_grad()
    for block in model:
        assert 0 < graphs(block if way == "module" else block.forward) <= 2
    if way == "root":
        model.eval()(x)
        found = terrazzo.compile_report(model)
        assert found.name == "FSDPSequential" and not any(graph.error for graph in found.graphs)
        assert sum(graph.calls for graph in found.graphs) == 3 * 4  # blocks, calls


@pytest.mark.parametrize("way", ["module", "forward", "root"])
def test_inside_fully_shard(way):
    run_ranks(2, sharded, way)


class Gathered(nn.Module):
    """A parameter as forward uses it, of one that is sharded."""

    def forward(self, p: DTensor) -> DTensor:
        return p.redistribute(placements=[Replicate()])


def gathered_in_the_graph() -> None:
    """A model of sharded tensors is one graph, with a gather and a reduction for each in it."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    alone = nn.Sequential(*[nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5)) for _ in range(2)])
    model = copy.deepcopy(alone)
    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    sent: list[int] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        sent.append(sum("_c10d_functional.wait_tensor" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    fast = terrazzo.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        x = torch.randn(4, 5)
        fast(distribute_tensor(x, mesh, [Shard(0)])).square().mean().backward()
        alone(x).square().mean().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert p.grad.placements == (Shard(0),)
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    assert sent == [8, 8], "forward gathers eight parameters, and backward reduces their gradients"


def test_whole_sharded_models_are_one_graph():
    run_ranks(2, gathered_in_the_graph)


def around() -> None:
    """Checkpointed from outside, called by another compiled program, and by one under torch.compile."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()])
    model = replicated(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()), mesh)
    eager = copy.deepcopy(model)
    inner = compiled(model)
    outer = compiled(lambda x: inner(inner(x)))
    dynamo = torch.compile(lambda x: inner(inner(x)), backend="eager")
    for run in (
        lambda f, x: checkpoint(f, f(x), use_reentrant=False),
        lambda f, x: outer(x) if f is inner else f(f(x)),
        lambda f, x: dynamo(x) if f is inner else f(f(x)),
    ):
        outs = []
        for f in (inner, eager):
            torch.manual_seed(4)
            f.zero_grad()
            outs.append(run(f, x))
            outs[-1].sum().backward()
        same(*outs)
        same_gradients(model, eager)
    assert graphs(outer) == 1
    torch._dynamo.reset()


def test_under_checkpointing_and_other_compilers():
    run_ranks(2, around)


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class UsesCompiled(nn.Module):
    """Parts of it were compiled by PyTorch; what they read is compared, too."""

    def __init__(self) -> None:
        super().__init__()
        self.given = torch.compile(Twice(4, 4), backend="aot_eager")
        self.own = Twice(4, 4)
        self.own.compile(backend="aot_eager", fullgraph=True)
        self.scale = 2.0
        self.function = torch.compile(lambda x: x.sigmoid() * self.scale, backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.own(self.given(x)))


def test_what_pytorch_compiles_inside_is_a_part_of_the_graph():
    model = UsesCompiled()
    plain = [copy.deepcopy(m) for m in (model.given._orig_mod, model.own)]
    x = torch.randn(3, 4)
    run = compiled(model)
    for scale in (2.0, 3.0, 2.0):
        model.scale = scale
        expected = plain[1](plain[0](x)).sigmoid() * scale
        found = run(x)
        torch.testing.assert_close(found, expected)
        for m in (model, *plain):
            m.zero_grad()
        found.sum().backward()
        expected.sum().backward()
        for m, n in zip((model.given._orig_mod, model.own), plain, strict=True):
            torch.testing.assert_close(m.weight.grad, n.weight.grad)
    assert graphs(run) == 2
    torch.testing.assert_close(model(x), expected)  # eagerly, compiled by PyTorch
    torch.testing.assert_close(run(x), expected)
    torch._dynamo.reset()


def test_flex_attention_is_refused_with_its_line():
    from torch.nn.attention.flex_attention import flex_attention

    q, flex = torch.ones(1, 1, 8, 8), torch.compile(flex_attention, backend="aot_eager")
    with pytest.raises(CaptureError, match=r"test_compile.py:\d+ .*flex_attention, whose kernel"):
        compiled(lambda q: flex(q, q, q))(q)
    with pytest.warns(CompileWarning, match="flex_attention"):
        terrazzo.compile(lambda q: flex_attention(q, q, q), backend="aot_eager")(q)
    torch._dynamo.reset()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="backend must be one of"):
        terrazzo.compile(nn.Linear(1, 1), backend="other")
    with pytest.raises(ValueError, match="at least 1"):
        terrazzo.compile(nn.Linear(1, 1), recompile_limit=0)
    with pytest.raises(TypeError, match="module or a function"):
        terrazzo.compile(3)
    module = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="compiled already"):
        terrazzo.compile(terrazzo.compile(module))
    module.forward = lambda x: x
    with pytest.raises(TypeError, match="compile that function"):
        terrazzo.compile(module)


def test_a_backend_of_ones_own_is_given_the_graphs():
    seen: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    x = torch.randn(3, requires_grad=True)
    terrazzo.compile(lambda x: x.sin().sum(), backend=backend, fullgraph=True)(x).backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert "aten.sin.default" in seen[0] and "aten.cos.default" in seen[1]
