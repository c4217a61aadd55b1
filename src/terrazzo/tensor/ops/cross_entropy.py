"""Cross entropy, sharded over samples and over classes, without gathering the logits.

The loss of a row depends on three numbers over all its classes: the largest logit, the sum of the exponentials relative
to it, and the logit of the target. Where ranks have different classes, each computes its part of these, and they are
reduced: three reductions of one number per row instead of an all-gather of all classes. All parts are differentiable,
so gradients of any order work without further code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo._torch.checkpointing import carry
from terrazzo._torch.dispatching import get_in_thread, set_within
from terrazzo.comm.axis import Axis, axis_of
from terrazzo.comm.collectives import all_reduce
from terrazzo.comm.differentiable import reduce_replicate
from terrazzo.errors import DTensorArgumentError, MixedTensorError, PlacementMismatchError
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.tensor.dispatch.spec import HALF, Call, Chosen, Dims, LocalFunction, Operand, Spec
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.links import counts_as_replicated
from terrazzo.tensor.ops.accumulate import axis_of_shards, sums_in_single, working_type
from terrazzo.tensor.ops.losses import REDUCTIONS, indices, total_weight
from terrazzo.tensor.ops.questions import check_bounds, in_boxes, is_sharded_along, without_dims
from terrazzo.tensor.ops.table import decomposition, rule

F = torch.nn.functional


class ParallelLoss:
    """Whether a thread is inside `loss_parallel`, where targets and weights may be plain tensors."""

    _STATE = "terrazzo.tensor.loss_parallel"

    def is_entered(self) -> bool:
        """Whether this thread is inside."""
        return bool(get_in_thread(self._STATE))

    def entered(self, value: bool) -> AbstractContextManager[None]:
        """A block in which this thread is inside, or outside."""
        return set_within(self._STATE, value)

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The loss of logits that stay sharded over the classes; plain targets are the same on every rank."""
        return _inside(*args, **kwargs) if func is F.cross_entropy else NotImplemented


def _inside(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, DTensor):
        return NotImplemented
    classes = 1 if input.ndim > 1 else 0
    if Shard(classes) not in input._layout.placements:
        if isinstance(target, DTensor) or counts_as_replicated():
            return NotImplemented  # not sharded over the classes: the usual way works for any placements
        raise PlacementMismatchError(
            f"loss_parallel needs logits sharded over the classes, dim {classes}; these are placed "
            f"{list(input.placements)}. Make target a DTensor too, or call cross_entropy outside loss_parallel"
        )
    return cross_entropy(input, target, *args, **kwargs)


parallel_loss = ParallelLoss()
carry(parallel_loss.is_entered, parallel_loss.entered)


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside this block, `cross_entropy` of logits sharded over the classes runs without gathering them.

    >>> import torch
    >>> from terrazzo.tensor import Shard, init_device_mesh, randn
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> logits = randn(2, 8, device_mesh=mesh, placements=[Shard(1)], requires_grad=True)  # a rank has some classes
    >>> with loss_parallel():
    ...     loss = torch.nn.functional.cross_entropy(logits, torch.tensor([3, 5]))
    >>> loss.backward()
    >>> logits.grad.placements
    (Shard(dim=1),)

    All of `cross_entropy` works: class indices or probabilities, weights, `ignore_index`, label smoothing, every
    reduction, further dims, logits that other mesh dimensions shard over the batch. `target` and `weight` may be plain
    tensors that are the same on every rank. Backward may run inside or outside the block, and so may what activation
    checkpointing recomputes.
    """
    with parallel_loss.entered(True):
        yield


@rule("cross_entropy", "cross_entropy_loss", context=parallel_loss)
def of_whole_rows(
    call: Call, input: Operand, target: Operand, weight: Operand | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: Any = "mean", label_smoothing: float = 0.0,
) -> Spec | None:  # fmt: skip
    """Class indices, with all classes of a sample on one rank: each rank computes the losses of its own samples."""
    if input.ndim < 2 or size_average is not None or reduce is not None or reduction not in REDUCTIONS or call.kwargs:
        return None
    if is_sharded_along(input, (1,)) or not input.numel or not 0.0 <= label_smoothing <= 1.0:
        return None
    if tuple(target.shape) != (input.shape[0], *input.shape[2:]):
        return None
    samples = (0, *range(2, input.ndim))
    ins: list[Dims] = [tuple(range(input.ndim)), samples]
    if weight is not None:
        ins.append((1,))
    scalar = reduction != "none"

    def losses(loc: list[Any], wanted: str) -> Any:
        x, targets, weights = _three(loc)
        return F.cross_entropy(
            x, targets, weights, ignore_index=ignore_index, reduction=wanted, label_smoothing=label_smoothing
        )

    def mean_of(total: Any, loc: list[Any], across: Axis | None) -> Any:
        """Divides by the total weight of the targets on all ranks."""
        x, targets, weights = _three(loc)
        share = total_weight(targets, targets != ignore_index, weights, working_type(x.dtype))
        return total / (share if across is None else all_reduce(share, across))

    def localize(chosen: Chosen) -> LocalFunction | None:
        across = axis_of_shards(chosen)
        if reduction != "mean" or across is None:
            return lambda func, loc, kw: func(*loc)
        return lambda func, loc, kw: mean_of(losses(loc, "sum"), loc, across)

    def in_single(chosen: Chosen) -> LocalFunction:
        across = axis_of_shards(chosen)

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> Any:
            total = losses(loc, "none").sum(dtype=torch.float32)
            return mean_of(total, loc, across) if reduction == "mean" else total

        return run

    return Spec(
        ins,
        [() if scalar else samples],
        [() if scalar else tuple(target.shape)],
        reduce=dict.fromkeys(samples, "sum") if scalar else {},
        whole=frozenset((1,)),
        localize=localize,
        joined=(lambda chosen: sums_in_single(in_single(chosen))(chosen)) if scalar else None,
    )


def _three(loc: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Input, target and weight."""
    return loc[0], indices(loc[1]), loc[2] if len(loc) > 2 else None


@decomposition("cross_entropy", "cross_entropy_loss")
def cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: Any = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Each rank computes with its own samples and classes."""
    if not isinstance(input, DTensor) or not isinstance(target, torch.Tensor) or not input.is_floating_point():
        return NotImplemented
    if size_average is not None or reduce is not None or not input.ndim or not input.shape[min(input.ndim - 1, 1)]:
        return NotImplemented
    if reduction not in REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not 0.0 <= label_smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    if input._layout.coord is None:
        return NotImplemented
    logits = in_boxes(input)
    where = _Where.of(logits._layout)
    is_probability = tuple(target.shape) == tuple(input.shape)
    _check_dtype(target, is_probability, ignore_index)
    wanted = _brought(target, where.layout if is_probability else where.samples, "target")
    weights = None
    if weight is not None:
        everywhere = Layout.of(where.layout.mesh, [Replicate()] * len(logits.placements), weight.shape)
        weights = _brought(weight, everywhere, "weight").detach()
    rows = _Rows.of(logits._local, where)
    if is_probability:
        losses, total = _of_probabilities(rows, wanted, weights, label_smoothing)
    else:
        losses, total = _of_indices(rows, wanted.long(), weights, ignore_index, label_smoothing)
    # Autocast runs cross_entropy in float32.
    dtype = losses.dtype if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    return _reduced(losses, total, where, reduction, dtype)


@dataclass(frozen=True, slots=True)
class _Where:
    """How the logits are placed: which dim has the classes, and which ranks have different classes and samples."""

    layout: Layout
    classes: int
    class_axis: Axis | None
    sample_mesh: tuple[int, ...]
    first: int
    """This rank's first class."""
    samples: Layout
    """The layout of a tensor with one number per sample."""

    @staticmethod
    def of(layout: Layout) -> _Where:
        dim = 1 if layout.ndim > 1 else 0
        cut = layout.shard_order(dim)
        others = tuple(m for m, p in enumerate(layout.placements) if isinstance(p, Shard) and m not in cut)
        axis = axis_of(layout.mesh, cut) if cut else None
        return _Where(layout, dim, axis, others, layout.box().offsets[dim], without_dims(layout, (dim,)))

    def joined(self, terms: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that have different classes."""
        return terms if self.class_axis is None else reduce_replicate(terms, self.class_axis)


def _check_dtype(target: Any, is_probability: bool, ignore_index: int) -> None:
    """Raise for what `cross_entropy` refuses, too."""
    if is_probability and (not target.is_floating_point() or ignore_index >= 0):
        raise DTensorArgumentError(
            "cross_entropy: a target of the logits' shape has probabilities, which must be floating point numbers "
            f"without ignore_index, not {target.dtype} with ignore_index={ignore_index}"
        )
    if not is_probability and target.dtype not in (torch.int64, torch.uint8):
        raise DTensorArgumentError(
            f"cross_entropy: a target of one class per sample must be torch.int64 or torch.uint8, not {target.dtype}"
        )


def _brought(value: Any, layout: Layout, name: str) -> torch.Tensor:
    """This rank's part of `value` under `layout`; a plain tensor is the whole value, the same on every rank."""
    if tuple(value.shape) != tuple(layout.shape):
        raise DTensorArgumentError(
            f"cross_entropy: {name} has shape {tuple(value.shape)}, expected {tuple(layout.shape)}"
        )
    if isinstance(value, DTensor):
        if value._layout is layout:
            return value._local
        return value.redistribute(layout.mesh, layout.shown)._local
    if not layout.is_replicated:
        raise MixedTensorError(
            f"cross_entropy: the logits are sharded over the samples, too, so {name} must be a DTensor, best placed "
            f"{list(layout.shown)}, but it is a plain tensor"
        )
    return value


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of logits minus each row's maximum, and the logarithm of the sum of their exponentials."""

    where: _Where
    shifted: torch.Tensor
    log_total: torch.Tensor

    @staticmethod
    def of(local: torch.Tensor, where: _Where) -> _Rows:
        dim = where.classes
        # In half precision, a sum of exponentials would lose the small ones.
        x = local.float() if local.dtype in HALF else local
        if x.shape[dim]:
            top = x.detach().amax(dim, keepdim=True)
        else:
            top = x.detach().new_full([1 if d == dim else n for d, n in enumerate(x.shape)], float("-inf"))
        shifted = x - (top if where.class_axis is None else all_reduce(top, where.class_axis, "max"))
        return _Rows(where, shifted, where.joined(shifted.exp().sum(dim)).log())

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Each row's sum of `values` over all classes."""
        return self.where.joined(values.sum(self.where.classes))

    def own(self, per_class: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor with one number per class, shaped to broadcast with the rows."""
        dim, x = self.where.classes, self.shifted
        part = per_class.narrow(0, self.where.first, x.shape[dim]).to(x.dtype)
        return part.view([-1 if d == dim else 1 for d in range(x.ndim)])


def _of_indices(
    rows: _Rows, target: torch.Tensor, weights: torch.Tensor | None, ignore_index: int, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One loss per sample, and the total weight for a mean; both of this rank's samples."""
    where, x = rows.where, rows.shifted
    dim, count = where.classes, where.layout.shape[where.classes]
    counts = target != ignore_index
    safe = target.masked_fill(~counts, 0)
    check_bounds(safe, count, "target")
    mine = safe - where.first
    here = (mine >= 0) & (mine < x.shape[dim])
    if x.shape[dim]:
        picked = x.gather(dim, mine.masked_fill(~here, 0).unsqueeze(dim)).squeeze(dim)
    else:
        picked = x.sum(dim)
    # masked_fill instead of a multiplication by 0: a logit of another class may be infinite.
    logit = where.joined(torch.where(here, picked, torch.zeros_like(picked)))
    losses = rows.log_total - logit
    weight = counts.to(x.dtype)
    if weights is not None:
        weight = weight * weights[safe].to(x.dtype)
        losses = losses * weights[safe].to(x.dtype)
    if smoothing:
        smooth = rows.log_total * count - rows.summed(x)
        if weights is not None:
            smooth = rows.log_total * weights.sum().to(x.dtype) - rows.summed(x * rows.own(weights))
        losses = (1 - smoothing) * losses + smoothing / count * smooth
    return losses.masked_fill(~counts, 0), weight.sum()


def _of_probabilities(
    rows: _Rows, target: torch.Tensor, weights: torch.Tensor | None, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, count = rows.shifted, rows.where.layout.shape[rows.where.classes]
    share = target.to(x.dtype)
    if smoothing:
        share = share * (1 - smoothing) + smoothing / count
    if weights is not None:
        share = share * rows.own(weights)
    losses = rows.summed(share) * rows.log_total - rows.summed(share * x)
    return losses, losses.new_tensor(float(losses.numel()))


def _reduced(losses: torch.Tensor, total: torch.Tensor, where: _Where, reduction: str, dtype: torch.dtype) -> DTensor:
    if reduction == "none":
        return wrap(losses.to(dtype), where.samples)
    mesh, count = where.layout.mesh, len(where.layout.placements)
    axis = axis_of(mesh, where.sample_mesh) if where.sample_mesh else None
    result = losses.sum()
    if reduction == "mean":
        result = result / (total if axis is None else all_reduce(total.detach(), axis))
    if axis is not None and dtype in HALF:  # rounded once: no term is
        return wrap(reduce_replicate(result, axis).to(dtype), Layout.of(mesh, [Replicate()] * count, ()))
    placements: list[Placement] = [Partial("sum") if m in where.sample_mesh else Replicate() for m in range(count)]
    return wrap(result.to(dtype), Layout.of(mesh, placements, ()))
