"""What PyTorch offers around modules and autograd works on distributed models: hooks, copies, functional calls, and
more."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ranks import run_ranks
from terrazzo.errors import DTensorError
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from tests.tensor.models import GPT, ConvNet, batch_of_words, distribute, tensor_parallel, whole, worst_difference
from tests.tensor.test_gpt import WAYS

R = Replicate()
PLAIN = "tensor parallel by plan, plain activations"
TOLERANCE = 1e-5


def twins(**sizes: Any) -> tuple[nn.Module, nn.Module, list[torch.Tensor], list[DTensor]]:
    """A GPT on one device and under data x tensor parallelism, with a batch for each."""
    torch.manual_seed(0)
    reference = GPT(blocks=1, **sizes)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = distribute(copy.deepcopy(reference), mesh, lambda n, p: [R, tensor_parallel(n, p)])
    data = batch_of_words(0)
    return reference, model, list(data), [distribute_tensor(t, mesh, [Shard(0), R]) for t in data]


def same(mine: Any, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(whole(mine).detach(), expected.detach(), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ a convolutional net


def train_convnet() -> list[tuple[float, float, str]]:
    torch.manual_seed(0)
    reference = ConvNet()
    mesh = init_device_mesh("cpu", (4,))
    model = distribute(copy.deepcopy(reference), mesh, lambda n, p: [R])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (reference, model)]
    rows = []
    for _ in range(3):
        images, targets = torch.randn(10, 3, 12, 12), torch.randint(0, 10, (10,))
        expected = reference(images, targets)
        expected.backward()
        loss = model(*(distribute_tensor(t, mesh, [Shard(0)]) for t in (images, targets)))
        loss.backward()
        rows.append((abs(whole(loss).item() - expected.item()), *worst_difference(model, reference, grads=True)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), buffer in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert (whole(mine) - buffer).abs().max() < TOLERANCE, name
    model.eval(), reference.eval()
    same(model(*(distribute_tensor(t, mesh, [Shard(0)]) for t in (images, targets))), reference(images, targets))
    return rows


def test_convolutional_net_under_data_parallelism():
    """Batch normalisation uses the statistics of the whole batch, as on one device."""
    for rows in run_ranks(4, train_convnet):
        for loss, gradient, where in rows:
            assert max(loss, gradient) < TOLERANCE, where


# ------------------------------------------------------------------ user functions


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        assert type(x) is type(gradient)
        return gradient * 3 * ctx.factor * x**2, None


def user_function() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x0, w0 = torch.randn(6, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    for placement in (Shard(0), Shard(1), R):
        x, w = (distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in ((x0, placement), (w0, R)))
        mine, expected = (Cube.apply(a @ b, 0.5).square().sum() for a, b in ((x, w), (x0, w0)))
        got = torch.autograd.grad(mine, [x, w], create_graph=True)
        wanted = torch.autograd.grad(expected, [x0, w0], create_graph=True)
        for a, b in zip(got, wanted, strict=True):
            same(a, b, 1e-4)
        second = torch.autograd.grad(sum(g.sum() for g in got), [x, w])
        for a, b in zip(second, torch.autograd.grad(sum(g.sum() for g in wanted), [x0, w0]), strict=True):
            same(a, b, 1e-3)
    kept = []
    gc.disable()
    try:
        for _ in range(2):
            y = Cube.apply(x @ w, 0.5)
            kept += [weakref.ref(y), weakref.ref(y._local), weakref.ref(y._local.grad_fn)]
            y.sum().backward()
            del y
        assert not any(ref() is not None for ref in kept), "freed by reference counts alone"
    finally:
        gc.enable()


def test_user_functions_are_differentiated_and_freed():
    run_ranks(4, user_function)


# ------------------------------------------------------------------ hooks


def hooks() -> None:
    reference, model, data, brought = twins()
    seen: list[dict[str, Any]] = []
    for m, batch in ((reference, data), (model, brought)):
        said: dict[str, Any] = {"order": []}
        seen.append(said)
        weight, mlp = m.blocks[0].mlp.up.weight, m.blocks[0].mlp
        weight.register_hook(lambda g, said=said: said.__setitem__("tensor", g.clone()) or g * 2)
        weight.register_post_accumulate_grad_hook(lambda p, said=said: said.__setitem__("accumulated", p.grad.clone()))
        mlp.register_full_backward_hook(lambda _m, gi, go, said=said: said.__setitem__("full", (gi[0], go[0])))
        mlp.register_full_backward_pre_hook(lambda _m, go, said=said: said["order"].append("pre") or (go[0] * 3,))
        m.norm.register_forward_hook(lambda _m, _i, out, said=said: said.__setitem__("activation", out))
        m.norm.register_forward_hook(lambda _m, _i, out: out.retain_grad())
        loss = m(*batch)
        loss.backward()
    mine, expected = seen[1], seen[0]
    assert mine["order"] == expected["order"] == ["pre"]
    assert all(isinstance(g, DTensor) for g in (mine["tensor"], mine["accumulated"], *mine["full"]))
    same(mine["tensor"], expected["tensor"])
    same(mine["accumulated"], expected["accumulated"])
    same(mine["accumulated"], 2 * expected["tensor"])
    for a, b in zip(mine["full"], expected["full"], strict=True):
        same(a, b)
    same(mine["activation"].grad, expected["activation"].grad)
    assert worst_difference(model, reference, grads=True)[0] < TOLERANCE


def test_hooks():
    run_ranks(4, hooks)


# ------------------------------------------------------------------ functional forms and modes


def functional() -> None:
    reference, model, data, brought = twins()
    found = []
    for m, batch in ((reference, data), (model, brought)):
        parameters = {name: p.detach() for name, p in m.named_parameters()}

        def loss_of(parameters: Any, m: Any = m, batch: Any = batch) -> torch.Tensor:
            return torch.func.functional_call(m, parameters, tuple(batch))

        found.append(torch.func.grad(loss_of)(parameters))
    for name, expected in found[0].items():
        assert isinstance(found[1][name], DTensor) and not found[1][name].requires_grad
        same(found[1][name], expected)
    # A gradient step inside a loss, differentiated through, with a parameter that the inner function closes over.
    results = []
    for m, batch in ((reference, data), (model, brought)):
        weight = m.head.weight
        rate = torch.tensor(0.1) if m is reference else distribute_tensor(torch.tensor(0.1), weight.device_mesh)
        rate.requires_grad_()

        def inner(w: Any, m: Any = m, batch: Any = batch) -> torch.Tensor:
            return torch.func.functional_call(m, {"head.weight": w}, tuple(batch))

        step, value = torch.func.grad_and_value(inner)(weight)
        with sdpa_kernel(SDPBackend.MATH):
            loss = inner(weight - rate * torch.func.grad(inner)(weight))
            results.append((step, value, *torch.autograd.grad(loss, [rate, weight, m.norm.weight])))
    for mine, expected in zip(results[1], results[0], strict=True):
        assert mine.requires_grad == expected.requires_grad
        same(mine, expected)


def test_functional_call_and_grad():
    run_ranks(4, functional)


def modes() -> None:
    reference, model, data, brought = twins()
    expected = reference(*data)
    with torch.no_grad():
        loss = model(*brought)
        assert not loss.requires_grad and loss.grad_fn is None
        same(loss, expected)
        with torch.enable_grad():
            assert model(*brought).requires_grad
    with torch.inference_mode():
        loss = model(*brought)
        assert loss.is_inference()
        same(loss, expected)
    model.requires_grad_(False)
    assert not model(*brought).requires_grad
    model.blocks[0].mlp.requires_grad_()
    model(*brought).backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n, p in model.named_parameters() if ".mlp." in n
    }


def test_grad_modes_and_frozen_parameters():
    run_ranks(4, modes)


def forward_mode() -> str:
    _, model, _, brought = twins()
    weight = model.head.weight
    messages = []
    try:
        with forward_ad.dual_level():
            forward_ad.make_dual(weight.detach(), weight.detach())
    except DTensorError as error:
        messages.append(str(error))
    try:
        torch.func.jvp(lambda w: (w * w).sum(), (weight.detach(),), (weight.detach(),))
    except DTensorError as error:
        messages.append(str(error))
    assert len(messages) == 2
    return messages[0]


def test_forward_mode_is_refused():
    for message in run_ranks(4, forward_mode):
        assert "forward-mode" in message


# ------------------------------------------------------------------ copies and files


def copies(folder: str) -> None:
    _, model, _, brought = twins(tied=True)
    loss = model(*brought)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.head.weight is twin.words.weight and isinstance(twin.head.weight, nn.Parameter)
        assert twin.head.weight.placements == model.head.weight.placements
        assert twin.head.weight._local.data_ptr() != model.head.weight._local.data_ptr()
        same(twin(*brought), whole(loss))
        twin(*brought).backward()
        assert model.head.weight.grad is None and twin.head.weight.grad is not None
    # A pickled mesh would keep a hash that is salted per process, and equal no mesh of another.
    assert b"DeviceMesh" not in pickle.dumps(model.head.weight)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": 3}, buffer)
    for weights_only in (True, False):
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=weights_only)["model"]
        for name, value in model.state_dict().items():
            same(loaded[name], whole(value), 0)
            assert loaded[name].placements == value.placements, name
        assert loaded["head.weight"]._local.data_ptr() == loaded["words.weight"]._local.data_ptr()


def test_copies_and_files(tmp_path):
    run_ranks(4, copies, str(tmp_path))


def state_dicts() -> None:
    reference, model, data, brought = twins()
    _, other, _, _ = twins()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
            p[0] = 0
    kept = other.head.weight
    other.load_state_dict(model.state_dict())
    assert other.head.weight is kept
    same(other(*brought), reference(*data))
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert other.head.weight is not kept and isinstance(other.head.weight, nn.Parameter)
    same(other(*brought), reference(*data))
    optimizer = torch.optim.AdamW(other.parameters())
    other(*brought).backward()
    optimizer.step()
    restored = torch.optim.AdamW(other.parameters())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(optimizer.state.values(), restored.state.values(), strict=True):
        assert isinstance(b["exp_avg"], DTensor) and b["exp_avg"].placements == a["exp_avg"].placements
        same(a["exp_avg"], whole(b["exp_avg"]), 0)


def test_state_dicts():
    run_ranks(4, state_dicts)


def conversions() -> None:
    reference, model, data, brought = twins()
    parameter = model.head.weight
    model.to(torch.float64), reference.to(torch.float64)
    assert model.head.weight is parameter and parameter.dtype is torch.float64
    assert all(p.dtype is torch.float64 for p in model.parameters())
    same(model(*brought), reference(*data), 1e-9)
    model.bfloat16()
    assert model(*brought).dtype is torch.bfloat16
    model.to_empty(device="cpu")
    with torch.device("meta"):
        empty = GPT(blocks=1)
    meta = distribute(empty, parameter.device_mesh, lambda n, p: [R, tensor_parallel(n, p)])
    assert meta.head.weight.is_meta and meta.head.weight.placements == parameter.placements
    meta.to_empty(device="cpu")
    assert meta.head.weight.device.type == "cpu" and meta.head.weight.placements == parameter.placements
    assert tuple(meta.head.weight.to_local().shape) == tuple(parameter.to_local().shape)


def test_conversions_of_modules():
    run_ranks(4, conversions)


def threads() -> list[str]:
    """Every thread meets every plan for the first time, in a world of one: ranks' collectives must not interleave."""
    from terrazzo.tensor.dispatch.keys import routes

    mesh = init_device_mesh("cpu", (1,))
    routes.clear()
    errors: list[str] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            w0 = torch.randn(8, 8, generator=generator)
            for n in range(2, 30):
                x0 = torch.randn(n, 8, generator=generator)
                x, w = distribute_tensor(x0, mesh, [Shard(0)]), distribute_tensor(w0, mesh, [R]).requires_grad_()
                v = w0.clone().requires_grad_()
                for a, b in ((x, w), (x0, v)):
                    F.layer_norm((a @ b).relu(), (8,)).softmax(-1)[:, 0].sum().backward()
                same(w.grad, v.grad)
        except Exception as error:
            errors.append(repr(error))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    return errors


def test_threads_with_cold_caches():
    assert run_ranks(1, threads) == [[]]


# ------------------------------------------------------------------ compilation and capture


def compiled(plain_activations: bool) -> None:
    import torch._dynamo.utils

    torch._dynamo.reset()
    if plain_activations:
        torch.manual_seed(0)
        reference, data = GPT(blocks=1), list(batch_of_words(0))
        model, brought = WAYS[PLAIN].place(copy.deepcopy(reference), init_device_mesh("cpu", (2,))), data
    else:
        reference, model, data, brought = twins()
    torch._dynamo.utils.counters.clear()
    fast = torch.compile(model, backend="eager" if plain_activations else "aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            loss = fast(*brought)
            loss.backward()
            expected = reference(*data)
            expected.backward()
    same(loss, expected)
    assert worst_difference(model, reference, grads=True)[0] < TOLERANCE
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0 if plain_activations else graphs == 0, "what is plain is compiled, what is distributed is not"
    torch._dynamo.reset()


@pytest.mark.parametrize("plain_activations", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled_model_gives_the_same_gradients(plain_activations):
    run_ranks(2 if plain_activations else 4, compiled, plain_activations)


def captured() -> list[str]:
    """Forward and backward of a distributed model as one graph of plain operations on locals."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from terrazzo.tensor.dispatch.keys import routes
    from terrazzo.tensor.dtensor import wrap

    _, model, _, brought = twins()
    names = [name for name, _ in model.named_parameters()]
    layouts = [p._layout for p in model.parameters()]
    batch_layout = brought[0]._layout

    def step(locals_: list[torch.Tensor], words: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        parameters = [wrap(t.detach().requires_grad_(), layout) for t, layout in zip(locals_, layouts, strict=True)]
        batch = (wrap(words, batch_layout), wrap(targets, batch_layout))
        loss = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), batch)
        return [loss.detach()._local, *(g._local for g in torch.autograd.grad(loss, parameters))]

    inputs = ([p._local.detach() for p in model.parameters()], brought[0]._local, brought[1]._local)
    routes.clear()  # captured as the first thing that runs
    graph = make_fx(step)(*inputs)
    expected = step(*inputs)
    for a, b in zip(graph(*inputs), expected, strict=True):
        same(a, b)
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.long
def test_capture_of_forward_and_backward_on_locals():
    for operations in run_ranks(4, captured):
        assert "aten.mm.default" in operations
        assert any(name.startswith("_c10d_functional.") for name in operations)


def transforms() -> None:
    mesh = init_device_mesh("cpu", (4,))
    plain = torch.randn(4, 8), torch.randn(8, 8)
    x, w = (distribute_tensor(t, mesh, [Shard(d)]) for d, t in enumerate(plain))

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b).relu().square().sum(0)

    for mine, expected in zip(torch.func.jacrev(f, (0, 1))(x, w), torch.func.jacrev(f, (0, 1))(*plain), strict=True):
        same(mine, expected)
    mine, expected = (torch.autograd.functional.jvp(lambda a, b=b: f(a, b), a, a)[1] for a, b in ((x, w), plain))
    same(mine, expected)
    same(torch.func.vmap(lambda row: row @ w)(x), torch.func.vmap(lambda row: row @ plain[1])(plain[0]))
    with pytest.raises(DTensorError, match="forward-mode"):
        torch.func.hessian(lambda a: a.square().sum())(x)


def test_transforms_that_work_and_those_that_say_that_they_do_not():
    run_ranks(4, transforms)


def dropout_recomputed() -> None:
    mesh = init_device_mesh("cpu", (4,))
    results = []
    for reentrant in (None, True, False):
        torch.manual_seed(5)
        x, w = (distribute_tensor(torch.randn(8, 8), mesh, [Shard(d)]).requires_grad_() for d in (0, 1))

        def f(x: torch.Tensor, w: Any = w) -> torch.Tensor:
            return F.dropout(x @ w, 0.5).sin()

        (f(x) if reentrant is None else checkpoint(f, x, use_reentrant=reentrant)).sum().backward()
        results.append((x.grad.full_tensor(), w.grad.full_tensor()))
    assert all(torch.equal(a, b) for pair in results[1:] for a, b in zip(pair, results[0], strict=True))


def test_recomputed_dropout_drops_the_same():
    run_ranks(4, dropout_recomputed)
