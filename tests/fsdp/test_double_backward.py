"""Gradients of gradients: a backward through a backward gathers what it needs, and is that of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fsdp.compare import (
    INPUTS,
    OUTPUTS,
    WIDTH,
    Counted,
    apart,
    assert_same_parameters,
    batches,
    checked,
    mine,
    shard_blocks,
    whole,
)
from ranks import device_type, run_ranks
from terrazzo.errors import FSDPError
from terrazzo.fsdp import FSDPModule, fully_shard
from terrazzo.fsdp.group import group_of
from terrazzo.fsdp.plan.state import Where
from terrazzo.fsdp.run.root import root_of
from terrazzo.tensor import DTensor, init_device_mesh

pytestmark = pytest.mark.on_late(both=True)


class Smooth(nn.Module):
    """Has second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Critic(nn.Module):
    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.blocks = nn.ModuleList([Smooth() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        self.embedded = x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


class Recomputing(Critic):
    recomputes = True


Program = Callable[[Any, Tensor, Tensor], Tensor]


def penalty(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """As of a critic whose slope is to be one."""
    x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return ((out - y) ** 2).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


def among_others(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """With a forward before it, one after it, and an evaluation."""
    first = model(y @ torch.ones(OUTPUTS, INPUTS)).mean()
    between = penalty(model, x, y)
    with torch.no_grad():
        model(x)
    return first + between - model(x.detach() + 1).mean()


def of_a_backward(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Through `.grad` of the inputs, which `backward` has left."""
    x.requires_grad_()
    (((model(x) - y) ** 2).sum() / 10).backward(create_graph=True)
    model.zero_grad()
    return x.grad.square().sum(1).mean()


def of_what_is_within(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The modules have no inputs that require gradients, so nobody sees where backward leaves the root."""
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum() / 10, model.embedded, create_graph=True)
    return slope.square().sum(1).mean()


def third(model: Any, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    (first,) = torch.autograd.grad(((model(x) - y) ** 2).sum() / 10, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().sum(1).mean()


PROGRAMS: list[Program] = [penalty, among_others, of_a_backward, of_what_is_within, third]


def check_program(program: Program, make: Callable[[], nn.Module], shard: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model: Any = make()
    reference = copy.deepcopy(model)
    shard(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, reference))
    with checked(model):
        for x, y in batches(2):
            program(model, mine(x).clone(), mine(y)).backward()
            program(reference, x, y).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
    assert_same_parameters(model, reference)


def check_ways() -> None:
    ways: list[Callable[[Any], Any]] = [shard_blocks]
    if dist.get_world_size() == 4:
        ways = [
            lambda m: apart(shard_blocks(m, reshard_after_forward=True)),
            lambda m: apart(shard_blocks(m, reshard_after_forward=False)),
            lambda m: shard_blocks(m, reshard_after_forward=2),
            lambda m: shard_blocks(m, mesh=init_device_mesh(device_type(), (2, 2))),
        ]
    for shard in ways:
        for program in PROGRAMS:
            check_program(program, Critic, shard)
        check_program(penalty, Recomputing, shard)


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.proof), 2, pytest.param(4, marks=pytest.mark.proof)]
)
def test_gradients_of_gradients(world):
    run_ranks(world, check_ways)


def check_memory() -> None:
    """Each group is freed when the first backward leaves it, and gathered again when the second enters it."""
    model = apart(shard_blocks(Critic(), reshard_after_forward=True))
    x = torch.randn(2, INPUTS, requires_grad=True)
    out = model(x).sum()
    with Counted() as first:
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
    assert first.count("all_gather") == 4
    assert all(type(p) is not nn.Parameter for p in model.parameters())
    with Counted() as second:
        slope.square().sum().backward()
    assert second.count("all_gather") == 4, "and then it is there for the rest"
    assert all(type(p) is not nn.Parameter for p in model.parameters())


def test_groups_are_freed_in_between():
    run_ranks(2, check_memory)


def check_other_thread() -> None:
    """What another thread has recorded comes later in autograd's order, as on accelerators, whose backward has one."""
    torch.manual_seed(0)
    reference = Critic()
    model = copy.deepcopy(reference)
    apart(shard_blocks(model, reshard_after_forward=True))
    found = []
    for module in (reference, model):
        x = torch.ones(2, INPUTS, requires_grad=True)
        out = module(x).sum()
        with ThreadPoolExecutor(1) as pool:
            (slope,) = pool.submit(torch.autograd.grad, out, x, create_graph=True).result()
        slope.square().sum().backward()
        found.append([whole(p.grad) for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.cpu_only("is so on accelerators anyhow")
def test_first_backward_on_another_thread():
    run_ranks(2, check_other_thread)


# ------------------------------------------------------------------ torch.func


def check_transforms() -> None:
    torch.manual_seed(0)
    reference = Critic()
    model = copy.deepcopy(reference)
    shard_blocks(model, reshard_after_forward=True)
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(dist.get_rank()))

    def square(module: Any) -> Callable[[Tensor], Tensor]:
        return lambda t: module(t).square().sum()

    def all_of(module: Any) -> list[Any]:
        value, pull = torch.func.vjp(module, x)
        return [
            torch.func.grad(square(module))(x),  # the first forward of all, inside a transform
            value,
            pull(torch.ones_like(value)),
            torch.func.jvp(module, (x,), (torch.ones_like(x),)),
            torch.func.vmap(module)(x),
            torch.func.vmap(torch.func.grad(square(module)))(x),
            torch.func.jacrev(module)(x[0]),
            torch.autograd.functional.hessian(square(module), x[0]),
        ]

    torch.testing.assert_close(all_of(model), all_of(reference))
    check_program(penalty, Critic, shard_blocks)  # nothing of a transform is left

    scaled = {name: p.detach() * 0.9 for name, p in model.named_parameters()}
    for call in (
        lambda values: torch.func.functional_call(model, values, (x,)),
        torch.func.grad(lambda values: torch.func.functional_call(model, values, (x,)).sum()),
    ):
        with pytest.raises(FSDPError, match="'embed.weight' was replaced by .*functional_call"):
            call(scaled)
    torch.testing.assert_close(model(x), reference(x))


def test_transforms_of_torch_func():
    run_ranks(2, check_transforms)


def check_backward_after_vmap() -> None:
    """Backward through what ran inside `torch.func.vmap`, where autograd knows the tensors inside the wrappers only."""
    torch.manual_seed(0)
    reference = Critic()
    model = copy.deepcopy(reference)
    shard_blocks(model, reshard_after_forward=True)
    found = []
    for module in (reference, model):
        x = torch.randn(3, 1, INPUTS, generator=torch.Generator().manual_seed(1)).requires_grad_()
        once = torch.func.vmap(module)(x)
        twice = torch.func.vmap(torch.func.vmap(module))(x)
        for loss in (once.square().sum(), twice.sum().exp()):
            loss.backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        found.append((x.grad, {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}))
    torch.testing.assert_close(found[1], found[0])
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_backward_after_vmap():
    run_ranks(2, check_backward_after_vmap)


def total(tensors: Any) -> Tensor:
    """A sum in which every element has another weight in the gradient."""
    return sum((each.square().sum() for each in tensors), torch.zeros(()))


def dual(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x))))
        return primal, tangent


def squared(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x).square().sum()


# What a backward for the parameters may run through afterwards: values, and derivatives with respect to inputs.
TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),)),
    "tangents alone": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1:],
    "forward mode": dual,
    "grad": lambda m, x: [torch.func.grad(squared(m))(x)],
    "grad, and the value": lambda m, x: torch.func.grad_and_value(squared(m))(x),
    "vjp": lambda m, x: (lambda value, pull: (value, *pull(value)))(*torch.func.vjp(m, x)),
    "the value of a vjp": lambda m, x: torch.func.vjp(m, x)[:1],
    "grads of samples": lambda m, x: [torch.func.vmap(torch.func.grad(squared(m)))(x)],
    "jacrev": lambda m, x: [torch.func.jacrev(m)(x[0])],
    "jacfwd": lambda m, x: [torch.func.jacfwd(m)(x[0])],
    "hessian": lambda m, x: [torch.func.hessian(squared(m))(x[0])],
    "grad of a grad": lambda m, x: [torch.func.grad(lambda t: torch.func.grad(squared(m))(t).square().sum())(x)],
    "jvp of a grad": lambda m, x: torch.func.jvp(torch.func.grad(squared(m)), (x,), (x,)),
    "among others": lambda m, x: [m(x), torch.func.grad(squared(m))(x), *torch.func.jvp(m, (x,), (x,)), m(x + 1)],
}


def check_backward_after_transforms() -> None:
    torch.manual_seed(0)
    reference = Critic()
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(1))
    models: list[Any] = [copy.deepcopy(reference) for _ in range(2)]
    for model in models:
        shard_blocks(model, reshard_after_forward=True)
    apart(models[1])
    for model in models:
        for name, transform in TRANSFORMS.items():
            for module in (reference, model):
                module.zero_grad()
                total(transform(module, x)).backward()
            for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert isinstance(p, DTensor) and (p.grad is None) is (q.grad is None), (name, n)
                if q.grad is not None:
                    where = f"{name}, {n}: "
                    torch.testing.assert_close(
                        whole(p.grad), q.grad, rtol=1e-4, atol=1e-4, msg=lambda text, where=where: where + text
                    )
    for transform in TRANSFORMS.values():  # of which no backward comes
        transform(model, x)
    model.zero_grad()
    check_program(penalty, Critic, shard_blocks)
    total([model(x)]).backward()
    assert root_of(group_of(model)).state.where.count(Where.UNSHARDED) == 0


def test_backward_after_transforms():
    run_ranks(2, check_backward_after_transforms)


def check_no_graph() -> None:
    """What is reduced has no graph, which is said."""
    model = fully_shard(nn.Linear(INPUTS, OUTPUTS))
    loss = model(torch.randn(2, INPUTS)).square().sum()
    with pytest.warns(UserWarning, match="gradients of sharded parameters have no graph"):
        loss.backward(create_graph=True)
    assert not model.weight.grad.requires_grad


def test_gradients_of_parameters_have_no_graph():
    run_ranks(2, check_no_graph)
