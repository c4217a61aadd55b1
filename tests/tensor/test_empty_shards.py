"""A rank whose shard is empty: its second derivatives communicate with other ranks', and autocast gives it their type.

Three rows over four ranks leave one without any. PyTorch's own functions of nothing are not all differentiable twice,
and would then leave the other ranks waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ranks import run_ranks
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.dispatch.keys import forget

Case = tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...] | None]
"""A function of one or two tensors, and their shapes."""

CONVOLUTIONS: dict[str, Case] = {
    "conv1d": (lambda x, w: F.conv1d(x, w, w[:, 0, 0], padding=1), (3, 3, 4), (3, 3, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (3, 2, 3, 3), (3, 2, 3, 3)),
    "conv3d": (lambda x, w: F.conv3d(input=x, weight=w, bias=w[:, 0, 0, 0, 0]), (3, 1, 2, 2, 2), (3, 1, 2, 2, 2)),
    "grouped": (lambda x, w: F.conv1d(x, w, groups=3), (3, 3, 4), (3, 1, 3)),
    "transposed": (lambda x, w: F.conv_transpose1d(x, w, w[0, :, 0]), (3, 3, 2), (3, 3, 2)),
    "transposed in 2-d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (3, 2, 2, 2), (2, 3, 2, 2)),
}
OTHERS: dict[str, Case] = {
    "linear": (lambda x, w: F.linear(x, w, w[:, 0]), (2, 3, 3), (3, 3)),
    "mm": (lambda x, w: x @ w, (3, 3), (3, 3)),
    "bmm": (lambda x, w: torch.bmm(x, w), (3, 2, 3), (3, 3, 2)),
    "baddbmm": (lambda x, w: torch.baddbmm(x, x, w), (3, 3, 3), (3, 3, 3)),
    "einsum": (lambda x, w: torch.einsum("ij,kj->ik", x, w), (3, 3), (3, 3)),
    "bilinear": (lambda x, w: F.bilinear(x, x, w), (3, 3), (2, 3, 3)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (3, 2, 4, 4), None),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (3, 2, 4, 4), None),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (2, 1)), (3, 2, 4, 4), None),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (3, 1, 3, 3), None),
    "pad": (lambda x: F.pad(x, (1, 1), mode="reflect"), (3, 2, 4), None),
    "layer_norm": (lambda x, w: F.layer_norm(x, (3,), w), (3, 3), (3,)),
    "group_norm": (lambda x, w: F.group_norm(x, 3, w), (3, 3, 4), (3,)),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), (3, 3, 4), (3,)),
    "softmax": (lambda x: F.softmax(x, 0), (3, 2), None),
    "logsumexp": (lambda x: x.logsumexp(0), (3, 2), None),
    "amax": (lambda x: x.amax(0), (3, 2), None),
    "prod": (lambda x: x.prod(0), (3, 2), None),
    "cumprod": (lambda x: x.cumprod(0), (3, 2), None),
    "std": (lambda x: x.std(), (3, 2), None),
    "norm": (lambda x: torch.linalg.vector_norm(x, 3, dim=0), (3, 2), None),
    "sort": (lambda x: x.sort(0).values, (3, 2), None),
    "cosine_similarity": (lambda x, w: F.cosine_similarity(x, w, dim=0), (3, 3), (3, 3)),
    "cdist": (lambda x, w: torch.cdist(x, w), (3, 3), (27, 3)),
    "mse_loss": (lambda x, w: F.mse_loss(x, w), (3, 3), (3, 3)),
}


KINDS = {"convolutions": CONVOLUTIONS, "others": OTHERS}


def derivatives(case: Case, given: list[Any]) -> list[Any]:
    """The result, the gradients, and the gradients of the gradients' squares."""
    result = case[0](*given)
    first = torch.autograd.grad((result**3).sum(), given, create_graph=True)
    return [result, *first, *torch.autograd.grad(sum((g * g).sum() for g in first), given)]


def layouts(case: Case) -> list[list[Any]]:
    """Each dim of each tensor cut, the other tensor whole or cut alike."""
    x, w = ([Replicate(), *(Shard(d) for d in range(len(shape or ())))] for shape in case[1:])
    return [[p, q] for p in x for q in ([Replicate()] if case[2] is None else w) if p.is_shard() or q.is_shard()]


def check_twice(kind: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for name, case in KINDS[kind].items():
        torch.manual_seed(0)
        given = [torch.randn(s, dtype=torch.float64) for s in case[1:] if s is not None]
        wanted = derivatives(case, [t.clone().requires_grad_() for t in given])
        for placements in layouts(case):
            mine: list[Any] = [
                distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(given, placements, strict=False)
            ]
            for ours, theirs in zip(derivatives(case, mine), wanted, strict=True):
                torch.testing.assert_close(ours.full_tensor(), theirs, msg=f"{name}, {placements}")


def types_under_autocast(kind: str) -> list[tuple[Any, ...]]:
    """Of the result and the gradients, on one device and here."""
    mesh = init_device_mesh("cpu", (4,))
    found: list[tuple[Any, ...]] = []
    for name, case in KINDS[kind].items():
        given = [torch.ones(s) for s in case[1:] if s is not None]
        for placements in [None, *layouts(case)]:
            made: list[Any] = given
            if placements is not None:
                made = [distribute_tensor(t, mesh, [p]) for t, p in zip(given, placements, strict=False)]
            made = [t.detach().requires_grad_() for t in made]
            with torch.autocast("cpu", torch.bfloat16):
                result = case[0](*made)
            local = result.to_local() if isinstance(result, DTensor) else result
            found.append((name, str(placements), result.dtype, local.dtype))
            found.append(tuple(g.dtype for g in torch.autograd.grad(result.float().sum(), made)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind):
    run_ranks(4, check_twice, kind)


@pytest.mark.parametrize("kind", [pytest.param("convolutions", marks=pytest.mark.long), "others"])
def test_types_under_autocast(kind):
    found = run_ranks(4, types_under_autocast, kind)
    assert all(of_rank == found[0] for of_rank in found)
    plain: dict[str, Any] = {}
    for name, placements, *types in (row for row in found[0] if len(row) == 4):
        assert types == plain.setdefault(name, types), f"{name}, {placements}"


def normalised_without_eps() -> None:
    """A rank without samples or channels adds nothing to the parameters' gradients, not even what is no number."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    x, w, mean, var = torch.randn(3, 3, 4), torch.rand(3), torch.randn(3), torch.rand(3) + 1
    functions: dict[str, Callable[..., Tensor]] = {
        "group_norm": lambda x, w, mean, var: F.group_norm(x, 3, w, w, eps=0.0),
        "instance_norm": lambda x, w, mean, var: F.instance_norm(x, weight=w, bias=w, eps=0.0),
        "batch_norm": lambda x, w, mean, var: F.batch_norm(x, mean, var, w, w, eps=0.0),
    }
    for name, function in functions.items():
        plain = w.clone().requires_grad_()
        function(x, plain, mean, var).square().sum().backward()
        for dim in (0, 1):
            mine: Any = distribute_tensor(w, mesh, [Replicate()]).requires_grad_()
            rest = [distribute_tensor(t, mesh, [Replicate()]) for t in (mean, var)]
            function(distribute_tensor(x, mesh, [Shard(dim)]), mine, *rest).square().sum().backward()
            torch.testing.assert_close(mine.grad.full_tensor(), plain.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_parameters_of_normalisation_without_eps():
    run_ranks(4, normalised_without_eps)


# ------------------------------------------------------------------ what cannot be differentiated twice


def refused_twice() -> list[tuple[str, str]]:
    """Per case what second derivatives of fused attention, which has none, raise on this rank."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    given = [torch.randn(3, 3, 3, 4) for _ in range(3)]
    hidden = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])  # a query without keys
    found: list[tuple[str, str]] = []
    for mask, causal in ((None, False), (None, True), (hidden, False), (torch.randn(3, 3, 3, 3), False)):
        plain = [t.clone().requires_grad_() for t in given]
        F.scaled_dot_product_attention(*plain, mask, is_causal=causal).square().sum().backward()
        for placements in ([Shard(0)] * 3, [Shard(1)] * 3, [Shard(2), Replicate(), Replicate()]):
            mine: list[Any] = [
                distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(given, placements, strict=True)
            ]
            placed = None if mask is None else distribute_tensor(mask, mesh, [Replicate()])
            result = F.scaled_dot_product_attention(*mine, placed, is_causal=causal)
            first = torch.autograd.grad(result.square().sum(), mine, create_graph=True)
            for m, p in zip(first, plain, strict=True):
                torch.testing.assert_close(m.full_tensor(), p.grad)
            try:
                torch.autograd.grad(sum(g.square().sum() for g in first), mine)
                found.append((str(placements), "nothing"))
            except RuntimeError as error:
                found.append((str(placements), str(error)))
    return found


def test_all_ranks_refuse_what_has_no_second_derivative():
    found = run_ranks(4, refused_twice)
    assert all(of_rank == found[0] for of_rank in found)
    assert all("is not implemented" in message for _, message in found[0])


# ------------------------------------------------------------------ what a plan tries


def recomputed(keeps: Any) -> None:
    """The first call of a function tries it on other tensors; what is recomputed is the program's calls alone."""
    mesh = init_device_mesh("cpu", (4,))
    x, w = torch.randn(5, 8, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ w) @ w.mT).softmax(-1).sum(0).exp()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    how = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if keeps else {}
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        forget()
        plain = [t.clone().requires_grad_() for t in (x, w)]
        block(*plain).sum().backward()
        mine = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in ((x, placements), (w, [Replicate()]))]
        checkpoint(block, *mine, use_reentrant=False, **how).sum().backward()
        for m, p in zip(mine, plain, strict=True):
            torch.testing.assert_close(m.grad.full_tensor(), p.grad)


_KEPT = (torch.ops.aten.mm.default, torch.ops.aten._softmax.default, torch.ops.aten.sum.dim_IntList)


@pytest.mark.parametrize("keeps", [False, True], ids=["all", "selective"])
def test_a_first_call_in_activation_checkpointing(keeps):
    run_ranks(4, recomputed, keeps)


def infinities() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = torch.randn(6, 5, dtype=torch.float64)
    x[3, 0], x[4, 1], x[:, 2], x[2] = torch.inf, -torch.inf, -torch.inf, -torch.inf
    x[1, 4] = torch.nan
    for placements in ([Shard(0)], [Shard(1)]):
        mine = distribute_tensor(x, mesh, placements)
        for name in ("softmax", "log_softmax", "logsumexp"):
            for dim in (0, 1):
                expected, found = (getattr(t, name)(dim) for t in (x, mine))
                torch.testing.assert_close(
                    found.full_tensor(), expected, equal_nan=True, msg=lambda m, n=(name, dim, placements): f"{n}: {m}"
                )


def test_exponentials_of_infinities():
    run_ranks(4, infinities)
