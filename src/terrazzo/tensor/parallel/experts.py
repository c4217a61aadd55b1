"""Experts on different ranks: tokens are sent to the ranks that hold their experts, and the results are sent back.

`mixed` sorts tokens by expert and calls the experts with the sorted rows and the number of rows of each expert. With
`ExpertParallel` that call sends the rows first: each rank sends to each other rank how many rows it has for each of its
experts, and then these rows, by an all-to-all of uneven parts. No token is padded or dropped. The way back is the same
all-to-all in the opposite direction, and backward is both once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.modules import parameters_of
from terrazzo.comm import collectives
from terrazzo.comm.axis import Axis, axis_of
from terrazzo.comm.differentiable import cast as cast_varying
from terrazzo.comm.differentiable import exchange_rows, reduce_replicate
from terrazzo.errors import ParallelPlanError
from terrazzo.layout import Placement, Shard
from terrazzo.layout.chunking import chunk_sizes
from terrazzo.tensor.api import distribute_tensor
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.parallel.style import ParallelStyle


class ExpertParallel(ParallelStyle):
    """Each rank of the mesh holds some of the experts, and computes them for the tokens of all ranks.

        parallelize_module(block.moe.experts, mesh["ep"], ExpertParallel())

    For a module that holds all experts: the first dim of each of its parameters counts the experts, and is sharded. It
    is called in one of two ways, each rank with its own tokens, and computes with plain tensors of this rank's experts:

    - `experts(rows, counts)`: the first `counts[0]` rows are for expert 0, the next `counts[1]` for expert 1 and so on;
      it returns a row for each. So are torchtitan's experts called, and those of `MixtureOfExperts`.
    - `experts(tokens, indices, weights)`: the experts of each token, and the weights with which their results are
      summed. So are the experts of Transformers' models called.

    Gradients of the experts are sums over the tokens of all ranks of the mesh. Where every rank's loss is a mean, and
    `fully_shard` averages the other gradients over `n` ranks, call `set_gradient_divide_factor(n)` on the experts; the
    engine does so itself.

    Args:
        tensor: With tensor parallelism inside each expert, the placement of each parameter along the second dim of the
            mesh, `mesh["ep", "tp"]`, such as `{"w1": Shard(1), "w3": Shard(1), "w2": Shard(2)}`. Its ranks have the
            same tokens, and their results are terms of a sum.
    """

    def __init__(self, tensor: Mapping[str, Placement] | None = None) -> None:
        self.tensor = tensor
        self.mesh_dims = 1 if tensor is None else 2

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis, count = axis_of(device_mesh, 0), number_of_experts(module)
        inside = None if self.tensor is None else axis_of(device_mesh, 1)
        if count < axis.size:
            raise ParallelPlanError(
                f"ExpertParallel: {type(module).__name__} has {count} experts, fewer than the mesh has ranks, "
                f"{axis.size}: shard them over a smaller mesh"
            )
        kind = _with_dispatch(type(module))
        found = [
            (submodule, name, parameter, [Shard(0), *self._inside(name)])  # raises before anything is changed
            for submodule in module.modules()
            for name, parameter in parameters_of(submodule).items()
            if parameter is not None
        ]
        for submodule, name, parameter, placements in found:
            sharded = distribute_tensor(parameter, device_mesh, placements, src_data_rank=self.src_data_rank)
            placed = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            vars(placed).update(vars(parameter))  # what users, or libraries, have set on it
            submodule.register_parameter(name, placed)
        module.__class__ = kind
        module._expert_parallel = _Experts(device_mesh, axis, inside, count)  # type: ignore[assignment]
        return module

    def _inside(self, name: str) -> list[Placement]:
        if self.tensor is None:
            return []
        placement = self.tensor.get(name)
        if not isinstance(placement, Shard):
            raise ParallelPlanError(
                f"ExpertParallel: tensor[{name!r}] must be a Shard, not {placement}: results are summed over the "
                "ranks, so a parameter that each of them has as a whole, such as a bias, would count several times"
            )
        return [placement]

    def __repr__(self) -> str:
        return f"ExpertParallel({'' if self.tensor is None else f'tensor={self.tensor}'})"


def expert_mesh(module: nn.Module) -> DeviceMesh | None:
    """The mesh over which `ExpertParallel` has sharded a module; None for other modules."""
    return module._expert_parallel.mesh if isinstance(module, _Dispatch) else None


def number_of_experts(module: nn.Module) -> int:
    """The length of the first dim of all parameters of a module."""
    sizes = {name: p.shape[0] if p.ndim else 0 for name, p in module.named_parameters()}
    if len(set(sizes.values())) != 1:
        raise ParallelPlanError(
            f"ExpertParallel: the first dim of every parameter of {type(module).__name__} must be the experts, but "
            f"the lengths are {sizes or 'of no parameter'}: apply it to the module that has the experts alone"
        )
    return next(iter(sizes.values()))


# ------------------------------------------------------------------ tokens to experts, on one rank


def mixed(
    experts: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, ids: Tensor, weights: Tensor, count: int
) -> Tensor:
    """For each token, the results of its experts, times their weights, summed in the dtype of the weights.

    Args:
        experts: Called with rows that are sorted by expert, and with the number of rows of each expert.
        tokens: One row each.
        ids: The experts of each token, a row each; -1 for none.
        weights: The weight of each of these experts.
        count: The number of experts.
    """
    flat, each = ids.reshape(-1), ids.shape[1]
    flat = torch.where(flat < 0, count, flat)
    counts = flat.new_zeros(count + 1).scatter_add(0, flat, torch.ones_like(flat))
    order = flat.argsort(stable=True)[: flat.numel() - int(counts[count])]
    source = order // each
    rows = experts(tokens[source], counts[:count])
    rows = rows * weights.reshape(-1)[order].unsqueeze(1)
    return rows.new_zeros(len(tokens), *rows.shape[1:]).index_add(0, source, rows).to(tokens.dtype)


def grouped_mm(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The first `counts[0]` rows times `weights[0]`, the next `counts[1]` rows times `weights[1]`, and so on.

    >>> grouped_mm(torch.ones(3, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)]), torch.tensor([1, 2])).tolist()
    [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    """
    # The kernel needs rows of multiples of 16 bytes.
    if rows.is_cuda and rows.dtype is weights.dtype is torch.bfloat16 and not any(n % 8 for n in weights.shape[1:]):
        return F.grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))
    if not len(weights):  # a rank without experts has no rows
        return rows @ weights.sum(0)
    parts = rows.split(counts.tolist())
    # An expert without rows multiplies none, so that its gradient is zero and not absent.
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


@contextmanager
def changed_parameters(module: nn.Module, change: Callable[[Any], Tensor]) -> Iterator[None]:
    """A block in which a module and its submodules have these tensors in place of their parameters."""
    before = [(found := parameters_of(each), dict(found)) for each in module.modules()]
    try:
        for registered, parameters in before:
            for name, parameter in parameters.items():
                if parameter is not None:
                    registered[name] = change(parameter)  # type: ignore[assignment]
        yield
    finally:
        for registered, parameters in before:
            registered.update(parameters)


# ------------------------------------------------------------------ tokens to other ranks


class _Experts:
    """Where the experts of a module are; and the exchange of one call."""

    __slots__ = ("axis", "count", "inside", "mesh", "sizes")

    def __init__(self, mesh: DeviceMesh, axis: Axis, inside: Axis | None, count: int) -> None:
        self.mesh, self.axis, self.inside, self.count = mesh, axis, inside, count
        self.sizes = chunk_sizes(count, axis.size)  # how many experts each rank has

    def __deepcopy__(self, memo: Any) -> _Experts:
        return self  # meshes have process groups, and copies of a module share them

    def through(self, run: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """What `run` returns for rows that are sorted by expert, on the ranks of these experts."""
        if counts.shape != (self.count,):
            raise ParallelPlanError(
                f"ExpertParallel: experts(rows, counts) needs the number of rows of each of the {self.count} experts, "
                f"not counts of shape {tuple(counts.shape)}"
            )
        axis, own = self.axis, self.sizes[self.axis.index]
        counts = counts.long()
        # By sending rank, then by this rank's experts.
        theirs = collectives.exchange_rows(counts, axis, self.sizes, [own] * axis.size).view(axis.size, own)
        send = _sums(counts.tolist(), self.sizes)
        receive = theirs.sum(1).tolist()
        came = exchange_rows(rows, axis, send, receive)
        experts = torch.arange(own, device=rows.device).repeat(axis.size).repeat_interleave(theirs.reshape(-1))
        order = experts.argsort(stable=True)
        if self.inside is None:
            results = run(came[order], theirs.sum(0))
        else:  # each rank has a part of every expert
            results = reduce_replicate(run(cast_varying(came[order], self.inside), theirs.sum(0)), self.inside)
        return exchange_rows(results[order.argsort()], axis, receive, send)


def _sums(counts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The sums of consecutive pieces of these lengths."""
    items = iter(counts)
    return [sum(next(items) for _ in range(size)) for size in sizes]


class _Dispatch:
    """Mixed into the class of a module whose experts are on several ranks."""

    _expert_parallel: _Experts

    def forward(self, tokens: Tensor, *given: Tensor) -> Tensor:
        """Called with rows and counts, or with tokens, indices and weights."""
        module, experts = cast("nn.Module", self), self._expert_parallel
        inner: Callable[..., Tensor] = super().forward  # type: ignore[misc]

        def run(rows: Tensor, counts: Tensor) -> Tensor:
            with changed_parameters(module, _local), _counted(module, len(counts)):
                if len(given) == 1:
                    return _tied(inner(rows, counts), module, rows)
                if not len(counts):  # this rank has no experts, and so no rows
                    return _tied(torch.zeros_like(rows), module, rows)
                ids = torch.arange(len(counts), device=rows.device).repeat_interleave(counts).unsqueeze(1)
                return _tied(inner(rows, ids, rows.new_ones(len(rows), 1)), module, rows)

        if len(given) == 1:
            return experts.through(run, tokens, given[0])
        if len(given) == 2:
            return mixed(partial(experts.through, run), tokens, *given, experts.count)
        raise ParallelPlanError(
            f"ExpertParallel: {type(module).__name__} was called with {1 + len(given)} arguments; it must be called as "
            "experts(rows, counts) or experts(tokens, indices, weights)"
        )


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def _counted(module: Any, own: int) -> Iterator[None]:
    """A block in which the module's `num_experts`, if it has one, is the number of this rank's."""
    count = vars(module).get("num_experts")
    if count is None:
        yield
        return
    module.num_experts = own
    try:
        yield
    finally:
        module.num_experts = count


def _tied(results: Tensor, module: nn.Module, rows: Tensor) -> Tensor:
    """The results, with a gradient also if no expert ran: backward sends them back to ranks that wait for it."""
    if results.requires_grad or not torch.is_grad_enabled():
        return results
    for tensor in (rows, *(p for each in module.modules() for p in parameters_of(each).values() if p is not None)):
        results = results + tensor.reshape(-1)[:0].sum().to(results.dtype)
    return results


_classes: WeakKeyDictionary[type[nn.Module], ref[type[nn.Module]]] = WeakKeyDictionary()


def _with_dispatch(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with `_Dispatch` mixed in, under its own name."""
    if issubclass(kind, _Dispatch):
        raise ParallelPlanError(f"ExpertParallel was applied to the same {kind.__name__} twice")
    known = _classes.get(kind)
    found = None if known is None else known()
    if found is None:
        found = type(kind.__name__, (_Dispatch, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
        _classes[kind] = ref(found)
    return found
