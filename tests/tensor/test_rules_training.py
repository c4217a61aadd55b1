"""Optimizers, clipping, scaling, averaging and initialisation on distributed parameters, against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ranks import run_ranks
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh

R = Replicate()
PLACEMENTS = [Shard(0), R, Shard(1), Shard(0), R, Shard(0)]
SHAPES = [(8, 6), (5,), (3, 8), (2, 3), (4, 4), (7, 2)]  # some uneven, some leave ranks empty


def whole(t: Any) -> torch.Tensor:
    return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()


def close(mine: Iterable[Any], theirs: Iterable[Any]) -> None:
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        torch.testing.assert_close(whole(a), whole(b), rtol=1e-5, atol=1e-6, msg=lambda m, i=i: f"tensor {i}: {m}")


def line():
    return init_device_mesh("cpu", (4,))


def parameters() -> tuple[list[torch.Tensor], list[DTensor]]:
    """The same parameters on one device and distributed."""
    torch.manual_seed(0)
    plain = [torch.randn(s).requires_grad_() for s in SHAPES]
    mesh = line()
    placed = [distribute_tensor(p.detach(), mesh, [q]).requires_grad_() for p, q in zip(plain, PLACEMENTS, strict=True)]
    return plain, placed


def set_gradients(plain: list[torch.Tensor], placed: list[DTensor], step: int) -> None:
    torch.manual_seed(step)
    for p, q in zip(plain, placed, strict=True):
        p.grad = torch.randn(p.shape)
        q.grad = distribute_tensor(p.grad.clone(), q.device_mesh, q.placements)


# ------------------------------------------------------------------ optimizers

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "SGD momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1e-1}),
}
FUSED = ("AdamW", "Adam amsgrad", "SGD momentum", "Adagrad")
FORMS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def steps_equal_one_device(name: str, form: str) -> None:
    make, options = OPTIMIZERS[name]
    plain, placed = parameters()
    one, many = make(plain, **options, **FORMS[form]), make(placed, **options, **FORMS[form])
    for step in range(3):
        set_gradients(plain, placed, step)
        one.step()
        many.step()
    close(placed, plain)
    assert [p.placements[0] for p in placed] == PLACEMENTS
    for p, q in zip(plain, placed, strict=True):
        for key, value in one.state[p].items():
            if torch.is_tensor(value):
                close([many.state[q][key]], [value])


@pytest.mark.parametrize(("name", "form"), [(n, f) for n in OPTIMIZERS for f in FORMS if f != "fused" or n in FUSED])
def test_optimizers(name, form):
    run_ranks(4, steps_equal_one_device, name, form)


# ------------------------------------------------------------------ clipping and scaling


def clipping() -> None:
    for foreach in (None, True, False):
        for norm_type in (2.0, 1.0, 3.0, float("inf")):
            plain, placed = parameters()
            set_gradients(plain, placed, 1)
            expected = nn.utils.clip_grad_norm_(plain, 0.5, norm_type, foreach=foreach)
            total = nn.utils.clip_grad_norm_(placed, 0.5, norm_type, foreach=foreach)
            close([total], [expected])
            close([p.grad for p in placed], [p.grad for p in plain])
        plain, placed = parameters()
        set_gradients(plain, placed, 2)
        nn.utils.clip_grad_value_(plain, 0.1, foreach=foreach)
        nn.utils.clip_grad_value_(placed, 0.1, foreach=foreach)
        close([p.grad for p in placed], [p.grad for p in plain])


def test_clipping():
    run_ranks(4, clipping)


def overflow_on_one_rank() -> None:
    plain, placed = parameters()
    set_gradients(plain, placed, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(placed, lr=0.1)
    before = [whole(p).clone() for p in placed]
    scaler.scale(placed[0].sum())  # the scale comes to life with its first use
    if placed[0].device_mesh.get_local_rank() == 2:
        placed[0].grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0, "every rank must see the overflow of one"
    close(placed, before)
    set_gradients(plain, placed, 4)
    scaler.step(optimizer)
    for p in plain:
        p.grad /= 2.0
    torch.optim.SGD(plain, lr=0.1).step()
    close(placed, plain)


def test_an_overflow_on_one_rank_skips_the_step_everywhere():
    run_ranks(4, overflow_on_one_rank)


# ------------------------------------------------------------------ terms


def terms_and_what_is_not_linear() -> None:
    mesh = line()
    rank = mesh.get_coordinate()[0]
    local = torch.arange(6.0).reshape(2, 3) - rank
    total = sum(torch.arange(6.0).reshape(2, 3) - r for r in range(4))
    mean, largest = total / 4, torch.arange(6.0).reshape(2, 3)
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(lambda x: x + 1, lambda x: 1 - x, lambda x: x * 3, lambda x: x / 2, lambda x: 2 / (x + 20), lambda x: x**2),
        *(torch.relu, torch.exp, torch.abs, torch.sign, lambda x: x * x, lambda x: x - x, lambda x: x > 1),
        *(lambda x: x.clamp(min=0), lambda x: torch.where(x > 0, x, -x), lambda x: x.sum(), lambda x: x.mean(0)),
        *(
            lambda x: x.max(),
            lambda x: x.t() @ x,
            lambda x: x.int(),
            lambda x: x.bfloat16(),
            lambda x: torch.cat([x, x]),
        ),
        *(lambda x: torch.add(x, x, alpha=2), lambda x: x.addcmul(x, x), lambda x: x.masked_fill(x > 0, 7.0)),
        *(lambda x: F.pad(x, (1, 1), value=2.0), lambda x: F.pad(x, (1, 1)), lambda x: x.new_full((2, 3), 5.0) + x),
        *(
            lambda x: torch.lerp(x, x * 2, 0.5),
            lambda x: F.linear(x, x, x[:, 0]),
            lambda x: x.flip(0),
            lambda x: x.std(),
        ),
        *(
            lambda x: x.cumsum(0),
            lambda x: x.clone().add_(1.0),
            lambda x: x.clone().mul_(2).sub_(x),
            lambda x: x.tril(),
        ),
        *(lambda x: x.clone().fill_(3.0), lambda x: x.clone().zero_(), lambda x: torch.full_like(x, 2.0) + x),
    ]
    for kind, value in ((Partial(), total), (Partial("avg"), mean), (Partial("max"), largest)):
        for i, function in enumerate(functions):
            terms = DTensor.from_local(local.clone(), mesh, [kind])
            expected = function(value.clone())
            result = function(terms)
            assert result.dtype == expected.dtype, (i, kind)
            torch.testing.assert_close(
                result.full_tensor(), expected, msg=lambda m, i=i, kind=kind: f"{i}, {kind}: {m}"
            )


def test_terms_never_pass_what_is_not_linear():
    run_ranks(4, terms_and_what_is_not_linear)


# ------------------------------------------------------------------ modules' utilities


def averages_and_parametrizations() -> None:
    mesh = line()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        for key, p in list(module._parameters.items()):
            if p is not None:
                module.register_parameter(key, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))

    model = distribute_module(copy.deepcopy(reference), mesh, shard)
    multi_avg = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averages = [torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=multi_avg) for m in (reference, model)]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(8, 6)
        for m, average, data in (
            (reference, averages[0], x),
            (model, averages[1], distribute_tensor(x, mesh, [Shard(0)])),
        ):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            optimizer.zero_grad()
            m(data).square().sum().backward()
            optimizer.step()
            average.update_parameters(m)
    close(model.parameters(), reference.parameters())
    close(model.buffers(), reference.buffers())
    close(averages[1].parameters(), averages[0].parameters())

    torch.manual_seed(1)
    plain = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
    placed = distribute_module(copy.deepcopy(plain), mesh, shard)
    x = torch.randn(4, 6)
    for m, data in ((plain, x), (placed, distribute_tensor(x, mesh, [R]))):
        m(data).square().sum().backward()
    close([p.grad for p in placed.parameters()], [p.grad for p in plain.parameters()])


def test_averages_and_parametrizations():
    run_ranks(4, averages_and_parametrizations)


INITIALISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform": lambda t: nn.init.uniform_(t, -1, 2),
    "normal": lambda t: nn.init.normal_(t, 1, 2),
    "truncated normal": lambda t: nn.init.trunc_normal_(t, std=0.5),
    "xavier uniform": nn.init.xavier_uniform_,
    "xavier normal": nn.init.xavier_normal_,
    "kaiming uniform": nn.init.kaiming_uniform_,
    "kaiming normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda t: nn.init.sparse_(t, 0.5),
    "eye": nn.init.eye_,
    "dirac": lambda t: nn.init.dirac_(t.view(*t.shape, 1)),
    "constant": lambda t: nn.init.constant_(t, 3.0),
    "zeros": nn.init.zeros_,
}


def initialised_alike_everywhere() -> None:
    line_mesh, square = line(), init_device_mesh("cpu", (2, 2))
    for name, function in INITIALISERS.items():
        values = []
        for mesh, placements in (
            (line_mesh, [R]),
            (line_mesh, [Shard(0)]),
            (line_mesh, [Shard(1)]),
            (square, [Shard(0), R]),
        ):
            t = distribute_tensor(torch.zeros(30, 20), mesh, placements)
            torch.manual_seed(5)
            function(t)
            assert list(t.placements) == placements
            values.append(t.full_tensor())
        for other in values[1:]:
            torch.testing.assert_close(other, values[0], msg=lambda m, name=name: f"{name}: {m}")
        torch.manual_seed(5)
        plain = torch.zeros(30, 20)
        function(plain)
        close = torch.testing.assert_close
        if name in ("eye", "dirac", "constant", "zeros"):
            close(values[0], plain)
        else:  # other numbers, of the same kind
            close(values[0].mean(), plain.mean(), rtol=0.2, atol=0.25 * float(plain.std()))
            close(values[0].std(), plain.std(), rtol=0.15, atol=0)


def test_initialisers_do_not_depend_on_placements():
    run_ranks(4, initialised_alike_everywhere)
