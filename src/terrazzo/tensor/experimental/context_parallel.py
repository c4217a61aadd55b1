"""`context_parallel`: attention over sequences that are sharded over ranks, for models that are written for one device.

In the block, `torch.nn.functional.scaled_dot_product_attention` is ring attention (see `ring_attention`). Its calls are
caught in two ways: by a function mode, whatever name the caller has for it, and by replacing the name in
`torch.nn.functional`, for PyTorch's own Python functions, inside which modes are disabled. Both ask for the context of
the thread, which autograd's threads inherit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from terrazzo._torch.checkpointing import carry
from terrazzo._torch.dispatching import get_in_thread, set_in_thread
from terrazzo.comm.axis import Axis, axis_of
from terrazzo.comm.collectives import all_gather
from terrazzo.errors import DTensorArgumentError, DTensorError, UnsupportedCallError
from terrazzo.layout import Layout, Partial, Placement, Replicate
from terrazzo.tensor.convert import current_mesh
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.experimental.ring_attention import Ring, Segments, head_tail, ring_attention
from terrazzo.tensor.redistribute import redistribute_local

_plain_attention = F.scaled_dot_product_attention
_THREAD_STATE = "terrazzo.tensor.experimental.context_parallel"  # torch passes it on to autograd's threads


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Run attention on sequences that are sharded over the ranks of a mesh, and shard `buffers` likewise.

    In the block `scaled_dot_product_attention` accepts

    - plain tensors: this rank's part of the sequence, cut as `buffers` are. The sequence is cut into two chunks per
      rank, and rank i holds the i-th chunk from the start and the i-th from the end, so that causal attention is the
      same amount of work for all;
    - DTensors that are sharded on the sequence (dim -2), also unevenly; other DTensors work as outside the block.

    Its backward may run in the block or after it; recomputation by activation checkpointing must run in the block.
    Attention masks and dropout within attention raise an error.

    Args:
        mesh: A mesh of one dim: the ranks that share a sequence.
        buffers: Plain tensors, the same on every rank, that have a sequence dim: inputs, labels, positions. In the
            block they hold this rank's part, in place; afterwards they are restored. They cannot be parameters. Read
            the gradient of a buffer inside the block.
        buffer_seq_dims: The sequence dim of each buffer; its length must be divisible by twice the number of ranks.
        no_restore_buffers: Buffers that stay sharded after the block; no memory is kept for their whole.
    """
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
        stack.enter_context(_attention_over(axis))
        yield


def context_parallel_unshard(mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> list[Tensor]:
    """The whole sequences, from tensors that hold this rank's part under `context_parallel`; without gradients."""
    axis = axis_of(current_mesh(mesh), 0)
    result = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        dim %= buffer.dim()
        length = buffer.shape[dim] * axis.size
        whole = all_gather(buffer.detach(), axis, dim, (buffer.shape[dim],) * axis.size)
        order = [run for rank in range(axis.size) for run in head_tail(rank, axis.size, length)]
        chunks = whole.split([count for _, count in order], dim)
        in_place = sorted(range(len(order)), key=lambda i: order[i][0])
        result.append(torch.cat([chunks[i] for i in in_place], dim) if axis.size > 1 else buffer.detach().clone())
    return result


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
def _attention_over(axis: Axis | None) -> Iterator[None]:
    global _replaced
    outer = _axis_of_thread()
    with _lock:
        _replaced += 1
        F.scaled_dot_product_attention = _attention
    set_in_thread(_THREAD_STATE, axis)
    try:
        with _AttentionMode():
            yield
    finally:
        set_in_thread(_THREAD_STATE, outer)
        with _lock:
            _replaced -= 1
            if _replaced == 0:
                F.scaled_dot_product_attention = _plain_attention


def _axis_of_thread() -> Axis | None:
    axis: Axis | None = get_in_thread(_THREAD_STATE)
    return axis


carry(_axis_of_thread, _attention_over)


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
    axis = _axis_of_thread()
    tensors = (query, key, value)
    attend: Callable[..., Tensor] | None = None
    if axis is not None and any(isinstance(t, DTensor) for t in tensors):
        spread = isinstance(query, DTensor) and query._layout.shard_order(query.dim() - 2)
        attend = _attend_distributed if spread else None
    elif axis is not None and axis.size > 1:
        attend = _attend_plain
    if attend is None:
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None or dropout_p:
        raise UnsupportedCallError(
            "attention on a sequence that is sharded over ranks supports neither attn_mask nor dropout_p: use "
            "is_causal, and dropout outside attention"
        )
    _check_shapes(query, key, value, enable_gqa)
    return attend(query, key, value, is_causal, 1 / sqrt(query.shape[-1]) if scale is None else scale)


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


def _attend_plain(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor:
    axis = _axis_of_thread()
    assert axis is not None
    n = axis.size
    if is_causal and (query.shape[-2] % 2 or key.shape[-2] % 2):
        raise DTensorError(
            f"causal attention under context_parallel: {query.shape[-2]} queries and {key.shape[-2]} keys on this "
            "rank, expected two chunks of equal length, as context_parallel cuts its buffers"
        )
    if is_causal:
        queries = head_tail(axis.index, n, query.shape[-2] * n)
        keys = tuple(head_tail(rank, n, key.shape[-2] * n) for rank in range(n))
    else:
        queries, keys = ((0, query.shape[-2]),), (((0, key.shape[-2]),),) * n
    return ring_attention(query, key, value, Ring(axis, queries, keys), is_causal, scale)


# ------------------------------------------------------------------ DTensors


def _attend_distributed(query: Any, key: Any, value: Any, is_causal: bool, scale: float) -> Tensor:
    tensors = (query, key, value)
    if not all(isinstance(t, DTensor) and t.device_mesh == query.device_mesh for t in tensors):
        raise DTensorError("attention on DTensors: query, key and value must all be DTensors on one mesh")
    mesh, sequence = query._layout.mesh, query.dim() - 2
    placements = [_placement(m, p, query, key) for m, p in enumerate(query._layout.placements)]
    layouts = [Layout.of(mesh, placements, tuple(t.shape), query._layout.order) for t in tensors]
    local_q, local_k, local_v = (
        redistribute_local(t._local, t._layout, layout) for t, layout in zip(tensors, layouts, strict=True)
    )
    dims = layouts[0].shard_order(sequence)
    axis = axis_of(mesh, dims)
    keys = tuple(_segments(layouts[1], dims, i, sequence) for i in range(axis.size))
    ring = Ring(axis, _segments(layouts[0], dims, axis.index, sequence), keys)
    out = ring_attention(local_q, local_k, local_v, ring, is_causal, scale)
    return wrap(out, layouts[0].with_shape((*query.shape[:-1], value.shape[-1])))


def _placement(m: int, p: Placement, query: DTensor, key: DTensor) -> Placement:
    """The placement that this mesh dim may keep: shards of the sequence, of the batch, or of whole groups of heads."""
    if isinstance(p, Partial) or p.is_shard(query.dim() - 1):
        return Replicate()
    if p.is_shard(query.dim() - 3) and key.shape[-3] != query.shape[-3]:
        ranks = 1
        for k in query._layout.shard_order(query.dim() - 3):
            ranks *= query._layout.mesh_shape[k]
        return p if key.shape[-3] % ranks == 0 else Replicate()
    return p


def _segments(layout: Layout, dims: Sequence[int], position: int, sequence: int) -> Segments:
    """The run of positions that the rank at `position` on the axis holds."""
    assert layout.coord is not None
    coordinate = list(layout.coord)
    for m in reversed(dims):
        coordinate[m] = position % layout.mesh_shape[m]
        position //= layout.mesh_shape[m]
    box = layout.box(coordinate)
    return ((box.offsets[sequence], box.lengths[sequence]),)
