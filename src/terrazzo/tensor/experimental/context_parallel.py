"""`context_parallel`: attention over sequences that are sharded over ranks, for models that are written for one device.

In the block, `torch.nn.functional.scaled_dot_product_attention` is ring attention (see `ring_attention`), or Ulysses:
heads are exchanged for positions, each rank computes some heads of the whole sequence, and the result goes back. Its
calls are caught in two ways: by a function mode, whatever name the caller has for it, and by replacing the name in
`torch.nn.functional`, for PyTorch's own Python functions, inside which modes are disabled. Both ask for the context of
the thread, which autograd's threads inherit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from terrazzo._torch.checkpointing import carry
from terrazzo._torch.dispatching import get_in_thread, set_within
from terrazzo._torch.flex import checks, plain_flex, replace_flex, restore_flex
from terrazzo.comm import differentiable as typed
from terrazzo.comm.axis import Axis, axis_of
from terrazzo.comm.collectives import all_gather
from terrazzo.errors import DTensorArgumentError, DTensorError, UnsupportedCallError, UnsupportedValueError
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.tensor.convert import current_mesh
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.experimental.flex import moved_functions, rows_of
from terrazzo.tensor.experimental.ring_attention import Ring, Rotate, Segments, head_tail, ring_attention
from terrazzo.tensor.redistribute import redistribute_local

_plain_attention = F.scaled_dot_product_attention
Method: TypeAlias = Literal["ring", "ulysses"]


@dataclass
class AttentionOver:
    """What attention does in a block, on this thread.

    Attributes:
        axis: the ranks that share a sequence.
        method: as in `context_parallel`.
        balanced: a rank's part is a chunk from the start and one from the end; else, one chunk.
        calls: how many calls of attention it has seen.
    """

    axis: Axis
    method: Method = "ring"
    balanced: bool = True
    calls: int = 0


_rotate: Rotate = "alltoall"
_THREAD_STATE = "terrazzo.tensor.experimental.context_parallel"  # torch passes it on to autograd's threads


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    method: Method = "ring",
) -> Iterator[None]:
    """Run attention on sequences that are sharded over the ranks of a mesh, and shard `buffers` likewise.

    In the block `scaled_dot_product_attention` accepts

    - plain tensors: this rank's part of the sequence, cut as `buffers` are. The sequence is cut into two chunks per
      rank, and rank i holds the i-th chunk from the start and the i-th from the end, so that causal attention is the
      same amount of work for all;
    - DTensors that are sharded on the sequence (dim -2), also unevenly; other DTensors work as outside the block.

    Its backward may run in the block or after it; recomputation by activation checkpointing must run in the block.

    A mask has the keys of the whole sequence in its last dim, in their order, and before it this rank's queries, as
    `buffers` are cut, or 1. With "ring" queries that a mask hides from all keys get zeros, also where it adds the
    dtype's lowest number, and dropout within attention raises an error; with "ulysses" both are as on one device, and
    each rank gathers the whole mask.

    Args:
        mesh: A mesh of one dim: the ranks that share a sequence.
        buffers: Plain tensors, the same on every rank, that have a sequence dim: inputs, labels, positions. In the
            block they hold this rank's part, in place; afterwards they are restored. They cannot be parameters. Read
            the gradient of a buffer inside the block.
        buffer_seq_dims: The sequence dim of each buffer; its length must be divisible by twice the number of ranks.
        no_restore_buffers: Buffers that stay sharded after the block; no memory is kept for their whole.
        method: "ring" passes keys and values around (`set_rotate_method`), in memory that falls with the ranks.
            "ulysses" sends each position once to another rank and back, which is less where there are many ranks; the
            number of heads must be a multiple of the ranks, or keys and values are repeated until they are.
    """
    if method not in ("ring", "ulysses"):
        raise DTensorArgumentError(f"context_parallel: method is 'ring' or 'ulysses', not {method!r}")
    if mesh.ndim != 1:
        raise DTensorArgumentError(
            f"context_parallel takes a mesh of one dim, this one has shape {tuple(mesh.shape)}: pass one of its dims, "
            "such as mesh['cp']"
        )
    axis = axis_of(current_mesh(mesh), 0)
    wanted, dims = list(buffers or ()), list(buffer_seq_dims or ())
    _check_buffers(wanted, dims, no_restore_buffers or set(), axis)
    kept = {id(b) for b in no_restore_buffers or ()}
    with ExitStack() as stack:
        for buffer, dim in zip(wanted, dims, strict=True):
            whole = buffer.data
            buffer.data = _own_part(whole, dim, axis)
            if id(buffer) not in kept:
                stack.callback(setattr, buffer, "data", whole)
            del whole
        stack.enter_context(attention_over(AttentionOver(axis, method)))
        yield


def set_rotate_method(rotate_method: str) -> None:
    """How keys and values reach other ranks in `context_parallel(method="ring")`.

    "alltoall", the default here, passes one rank's part to the next while it is used; "allgather" gathers all at once,
    which is fewer messages and more memory (PyTorch's default).

    >>> set_rotate_method("allgather")
    >>> set_rotate_method("alltoall")
    """
    global _rotate
    if rotate_method not in ("alltoall", "allgather"):
        raise UnsupportedCallError(f"set_rotate_method takes 'alltoall' or 'allgather', not {rotate_method!r}")
    _rotate = rotate_method  # type: ignore[assignment]  # one of the two


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: Any = None
) -> list[Tensor]:
    """The whole sequences, from tensors that hold this rank's part under `context_parallel`; without gradients.

    `load_balancer` must be None: parts are always those of `context_parallel`.

    >>> from terrazzo.tensor import init_device_mesh
    >>> mesh, x = init_device_mesh("cpu", (1,)), torch.arange(4.0)
    >>> with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
    ...     whole = context_parallel_unshard(mesh, [x * 2], [0])
    >>> whole
    [tensor([0., 2., 4., 6.])]
    """
    if load_balancer is not None:
        raise UnsupportedValueError(
            f"context_parallel_unshard knows the parts that context_parallel makes, not those of "
            f"{type(load_balancer).__name__}: leave load_balancer out"
        )
    axis = axis_of(current_mesh(mesh), 0)
    result = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        dim %= buffer.dim()
        whole = all_gather(buffer.detach(), axis, dim, (buffer.shape[dim],) * axis.size)
        result.append(_in_sequence(whole, axis.size, dim) if axis.size > 1 else buffer.detach().clone())
    return result


def _in_sequence(parts: Tensor, ranks: int, dim: int) -> Tensor:
    """The whole, of all ranks' parts one after the other."""
    chunks = parts.chunk(2 * ranks, dim)
    return torch.cat([*chunks[::2], *reversed(chunks[1::2])], dim)


def _in_parts(whole: Tensor, ranks: int, dim: int) -> Tensor:
    """All ranks' parts one after the other, of the whole."""
    chunks = whole.chunk(2 * ranks, dim)
    return torch.cat([chunks[i] for rank in range(ranks) for i in (rank, 2 * ranks - 1 - rank)], dim)


def _check_buffers(buffers: Sequence[Tensor], dims: Sequence[int], no_restore: set[Tensor], axis: Axis) -> None:
    if len(buffers) != len(dims):
        raise DTensorArgumentError(f"context_parallel: {len(buffers)} buffers, but {len(dims)} buffer_seq_dims")
    if not {id(b) for b in no_restore} <= {id(b) for b in buffers}:
        raise DTensorArgumentError("context_parallel: no_restore_buffers holds a tensor that is not among the buffers")
    for i, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        problem = None
        if isinstance(buffer, (nn.Parameter, DTensor)):
            problem = f"is a {type(buffer).__name__}; buffers must be plain tensors that are not parameters"
        elif not buffer.is_leaf:
            problem = "has a graph: shard it before differentiating through it, or detach it"
        elif buffer.grad is not None:
            problem = "has a gradient, which would not fit its part: clear it first"
        elif not -buffer.dim() <= dim < buffer.dim():
            problem = f"has no dim {dim}, its shape is {tuple(buffer.shape)}"
        elif buffer.shape[dim] % (2 * axis.size):
            problem = (
                f"has {buffer.shape[dim]} positions on dim {dim}, which {axis.size} ranks cannot share evenly: pad "
                f"it to a multiple of {2 * axis.size}, or use DTensors sharded on the sequence, which may be uneven"
            )
        if problem is not None:
            raise DTensorArgumentError(f"context_parallel: buffer {i} {problem}")


def _own_part(whole: Tensor, dim: int, axis: Axis) -> Tensor:
    if axis.size == 1:
        return whole
    return torch.cat([whole.narrow(dim, *run) for run in head_tail(axis.index, axis.size, whole.shape[dim])], dim)


# ------------------------------------------------------------------ in place of attention


_replaced = 0
_lock = threading.Lock()


@contextmanager
def attention_over(context: AttentionOver | None) -> Iterator[None]:
    """A block in which attention is over sequences that are sharded like this; None: as outside of blocks."""
    global _replaced
    with _lock:
        _replaced += 1
        F.scaled_dot_product_attention = _attention
        if _replaced == 1:
            replace_flex(_flex_attention)
            checks.append(_refuse_flex)
    try:
        with set_within(_THREAD_STATE, context), _AttentionMode():
            yield
    finally:
        with _lock:
            _replaced -= 1
            if _replaced == 0:
                F.scaled_dot_product_attention = _plain_attention
                restore_flex()
                checks.remove(_refuse_flex)


def _context_of_thread() -> AttentionOver | None:
    return get_in_thread(_THREAD_STATE)


carry(_context_of_thread, attention_over)


class _AttentionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_attention if func is _plain_attention else func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    context = _context_of_thread()
    spread = isinstance(query, DTensor) and query._layout.shard_order(query.dim() - 2)
    any_distributed = any(isinstance(t, DTensor) for t in (query, key, value))
    if context is not None:
        context.calls += 1
    if context is None or (not spread if any_distributed else context.axis.size == 1):
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and (is_causal or attn_mask.requires_grad):
        raise UnsupportedCallError(
            "attention on a sequence that is sharded over ranks takes attn_mask or is_causal, and gives a mask no "
            "gradient: pass one of the two, detached"
        )
    _check_shapes(query, key, value, enable_gqa)
    if context.method == "ulysses":
        attend = _exchange_of_dtensors if any_distributed else _exchange_heads
        return attend(context, query, key, value, attn_mask, dropout_p, is_causal, scale)
    if dropout_p:
        raise UnsupportedCallError(
            "attention on a sequence that is sharded over ranks does not support dropout_p with method='ring': use "
            "dropout outside attention, or context_parallel(method='ulysses')"
        )
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    if any_distributed:
        return _attend_distributed(query, key, value, attn_mask, is_causal, scale)
    return _attend_plain(context, query, key, value, attn_mask, is_causal, scale)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    groups = query.dim() >= 3 and key.dim() >= 3 and enable_gqa and query.shape[-3] % max(key.shape[-3], 1) == 0
    fits = (
        query.dim() == key.dim() == value.dim() >= 2
        and query.shape[-1] == key.shape[-1]
        and key.shape[:-1] == value.shape[:-1]
        and (query.shape[:-3] == key.shape[:-3] if groups else query.shape[:-2] == key.shape[:-2])
    )
    if not fits:
        raise DTensorArgumentError(
            f"attention on a sequence that is sharded over ranks: query {tuple(query.shape)}, key {tuple(key.shape)} "
            f"and value {tuple(value.shape)} do not fit together{'' if enable_gqa else ' (enable_gqa is False)'}"
        )


def _attend_plain(
    context: AttentionOver, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    axis, n = context.axis, context.axis.size
    balanced = context.balanced and (is_causal or mask is not None)
    _check_halves(query, key, balanced)
    if balanced:
        queries = head_tail(axis.index, n, query.shape[-2] * n)
        keys = tuple(head_tail(rank, n, key.shape[-2] * n) for rank in range(n))
    else:
        queries = ((query.shape[-2] * axis.index, query.shape[-2]),)
        keys = tuple(((key.shape[-2] * rank, key.shape[-2]),) for rank in range(n))
    _check_mask(mask, query.shape[-2], key.shape[-2] * n)
    return ring_attention(query, key, value, Ring(axis, queries, keys, _rotate), is_causal, scale, mask)


def _check_halves(query: Tensor, key: Tensor, ordered: bool) -> None:
    if ordered and (query.shape[-2] % 2 or key.shape[-2] % 2):
        raise DTensorError(
            f"causal or masked attention under context_parallel: {query.shape[-2]} queries and {key.shape[-2]} keys on "
            "this rank, expected two chunks of equal length, as context_parallel cuts its buffers"
        )


def _check_mask(mask: Tensor | None, queries: int, keys: int) -> None:
    if mask is not None and (mask.dim() < 2 or mask.shape[-2] not in (1, queries) or mask.shape[-1] not in (1, keys)):
        raise DTensorArgumentError(
            f"attention on a sequence that is sharded over ranks: the mask has shape {tuple(mask.shape)}; expected "
            f"{queries}, this rank's queries, or 1 before the last dim, and {keys}, the keys of the whole sequence, or "
            "1 there: pass the whole mask as one of context_parallel's buffers, with -2 as its sequence dim"
        )


# ------------------------------------------------------------------ heads for positions


def _exchange_heads(
    context: AttentionOver, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> Tensor:  # fmt: skip
    """Attention of some heads with the whole sequence on each rank."""
    axis, n = context.axis, context.axis.size
    ordered = context.balanced and (is_causal or mask is not None)
    _check_halves(query, key, ordered)
    _check_mask(mask, query.shape[-2], key.shape[-2] * n)
    q, k, v = _whole_sequences(query, key, value, axis, ordered)
    if mask is not None:
        if mask.shape[-2] > 1:
            mask = all_gather(mask, axis, mask.dim() - 2, (mask.shape[-2],) * n)
            mask = _in_sequence(mask, n, mask.dim() - 2) if ordered else mask
        if mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask.chunk(n, -3)[axis.index]
    grouped = q.shape[-3] != k.shape[-3]
    out = _alone(_plain_attention, q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
    return _to_positions(out, context, query.shape[-2], ordered)


def _to_positions(out: Tensor, context: AttentionOver, length: int, ordered: bool) -> Tensor:
    """This rank's positions of all heads, of all positions of its heads."""
    axis, n, heads, rows = context.axis, context.axis.size, out.dim() - 3, out.dim() - 2
    out = _in_parts(out, n, rows) if ordered else out
    return typed.all_to_all(out, axis, rows, (length,) * n, heads, (out.shape[heads],) * n)


def _alone(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call attention as outside of blocks: this block's function mode sees the call, too."""
    with set_within(_THREAD_STATE, None):
        return function(*args, **kwargs)


def _whole_sequences(query: Tensor, key: Tensor, value: Tensor, axis: Axis, ordered: bool) -> list[Tensor]:
    """The three with all positions and this rank's heads; keys and values for each head if they have too few."""
    n, heads, rows = axis.size, query.dim() - 3, query.dim() - 2
    if heads < 0 or query.shape[heads] % n:
        raise UnsupportedCallError(
            f"context_parallel(method='ulysses'): a query of shape {tuple(query.shape)} has no dim of heads that "
            f"{n} ranks can share evenly: use method='ring'"
        )
    if key.shape[heads] % n:
        key, value = (t.repeat_interleave(query.shape[heads] // key.shape[heads], heads) for t in (key, value))
    wholes = []
    for x in (query, key, value):
        whole = typed.all_to_all(x, axis, heads, (x.shape[heads] // n,) * n, rows, (x.shape[rows],) * n)
        wholes.append(_in_sequence(whole, n, rows) if ordered else whole)
    return wholes


def _exchange_of_dtensors(
    context: AttentionOver, query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """The same for DTensors, whose operations do it: the sequence's shards become shards of heads, and back."""
    heads, sequence = query.dim() - 3, query.dim() - 2
    before = query.placements
    wanted = [Shard(heads) if p.is_shard(sequence) else p for p in before]
    q, k, v = (t.redistribute(placements=wanted) for t in (query, key, value))
    grouped = query.shape[heads] != key.shape[heads]
    out = _alone(_plain_attention, q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
    return out.redistribute(placements=before)


# ------------------------------------------------------------------ flex_attention


def _refuse_flex(query: Tensor) -> None:
    context = _context_of_thread()
    if context is not None and context.axis.size > 1:
        raise UnsupportedCallError(
            "flex_attention in context_parallel is called by a name that was imported before, or is compiled: it would "
            "see a part of the sequence. Call torch.nn.attention.flex_attention.flex_attention by its module's name"
        )


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, **more: Any,
) -> Any:  # fmt: skip
    context = _context_of_thread()
    if context is None or context.axis.size == 1:
        return plain_flex(query, key, value, score_mod, block_mask, scale, enable_gqa, **more)
    if any(isinstance(t, DTensor) for t in (query, key, value)) or more.get("return_lse") or more.get("return_aux"):
        raise UnsupportedCallError(
            "flex_attention in context_parallel takes plain tensors, and returns the result alone"
        )
    context.calls += 1
    axis, n = context.axis, context.axis.size
    _check_shapes(query, key, value, enable_gqa)
    _check_halves(query, key, context.balanced)
    heads, rows = query.dim() - 3, query.dim() - 2
    if context.method == "ring":
        runs = head_tail(axis.index, n, query.shape[rows] * n) if context.balanced else None
        at = rows_of(runs or ((query.shape[rows] * axis.index, query.shape[rows]),), query.device)
        k, v = (typed.gather_varying(t, axis, rows, (t.shape[rows],) * n) for t in (key, value))
        k, v = (_in_sequence(t, n, rows) if context.balanced else t for t in (k, v))
        moved = moved_functions(score_mod, block_mask, at, (0, query.shape[heads]), (axis, context.balanced))
        return _alone(plain_flex, query, k, v, *moved, scale, enable_gqa, **more)
    q, k, v = _whole_sequences(query, key, value, axis, context.balanced)
    count = q.shape[heads]
    moved = moved_functions(score_mod, block_mask, None, (axis.index * count, count), axis)
    out = _alone(plain_flex, q, k, v, *moved, scale, count != k.shape[heads], **more)
    return _to_positions(out, context, query.shape[rows], context.balanced)


# ------------------------------------------------------------------ DTensors


def _attend_distributed(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: float) -> Tensor:
    tensors = (query, key, value)
    if not all(
        isinstance(t, DTensor) and t.device_mesh == query.device_mesh for t in (*tensors, mask) if t is not None
    ):
        raise DTensorError("attention on DTensors: query, key, value and the mask must all be DTensors on one mesh")
    mesh, sequence = query._layout.mesh, query.dim() - 2
    placements = [_placement(m, p, query, key) for m, p in enumerate(query._layout.placements)]
    layouts = [Layout.of(mesh, placements, tuple(t.shape), query._layout.order) for t in tensors]
    local_q, local_k, local_v = (
        redistribute_local(t._local, t._layout, layout) for t, layout in zip(tensors, layouts, strict=True)
    )
    dims = layouts[0].shard_order(sequence)
    axis = axis_of(mesh, dims)
    keys = tuple(_segments(layouts[1], dims, i, sequence) for i in range(axis.size))
    ring = Ring(axis, _segments(layouts[0], dims, axis.index, sequence), keys, _rotate)
    if mask is not None:
        _check_mask(mask, query.shape[sequence], key.shape[sequence])
        mask = redistribute_local(mask._local, mask._layout, _layout_of_mask(mask, layouts[0]))
    out = ring_attention(local_q, local_k, local_v, ring, is_causal, scale, mask)
    return wrap(out, layouts[0].with_shape((*query.shape[:-1], value.shape[-1])))


def _placement(m: int, p: Placement, query: DTensor, key: DTensor) -> Placement:
    """The placement that this mesh dim may keep: shards of the sequence, of the batch, or of whole groups of heads."""
    if isinstance(p, Partial) or p.is_shard(query.dim() - 1):
        return Replicate()
    if p.is_shard(query.dim() - 3) and key.shape[-3] != query.shape[-3]:
        ranks = prod(query._layout.mesh_shape[k] for k in query._layout.shard_order(query.dim() - 3))
        return p if key.shape[-3] % ranks == 0 else Replicate()
    return p


def _layout_of_mask(mask: DTensor, query: Layout) -> Layout:
    """Cut where the queries are, as far as the mask has their dims; keys stay whole."""
    shift = query.ndim - mask.dim()
    placements = [
        Shard(p.dim - shift)
        if isinstance(p, Shard) and shift <= p.dim < query.ndim - 1 and mask.shape[p.dim - shift] > 1
        else Replicate()
        for p in query.placements
    ]
    return Layout.of(query.mesh, placements, tuple(mask.shape), query.order)


def _segments(layout: Layout, dims: Sequence[int], position: int, sequence: int) -> Segments:
    """The run of positions that the rank at `position` on the axis holds."""
    assert layout.coord is not None
    coordinate = list(layout.coord)
    for m in reversed(dims):
        coordinate[m] = position % layout.mesh_shape[m]
        position //= layout.mesh_shape[m]
    box = layout.box(coordinate)
    return ((box.offsets[sequence], box.lengths[sequence]),)
