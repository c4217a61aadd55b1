"""The collectives on plain tensors, without autograd. They return contiguous tensors and never modify their input.

Any dtype, any device, uneven and empty parts. Each comes in two forms: `all_gather(...)` returns the tensor, and
`all_gather_start(...)` returns a `Pending` whose `wait()` returns it. On an axis of one rank the result is the input
itself.

Where a backend does not reduce exactly (see `wire`), the terms are sent to the rank that needs the result and torch
reduces them there, in the order of the ranks. So max and min propagate NaN, bool and int16 work, and all ranks get
identical bits.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed import Work

from terrazzo.comm import observe, wire
from terrazzo.comm.axis import Axis
from terrazzo.comm.buffers import concatenate, dense, flat_parts, repeat
from terrazzo.comm.pending import Pending
from terrazzo.comm.wrapped import Join, cut, inner_of, is_wrapper, rebuilt
from terrazzo.errors import CommError
from terrazzo.layout.chunking import chunk_sizes
from terrazzo.layout.placement import REDUCE_OPS

# Combinations that torch cannot reduce on one device either.
_IRREDUCIBLE = frozenset(
    [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
    + [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)

# Up to this many bytes over all ranks, all-gather and all-reduce are one all-to-all on CPU: latency matters more than
# bandwidth. On any device, half types up to this size are gathered, too: torch then sums in float32 and rounds once.
_ONE_ROUND_BYTES = 1 << 18


# ------------------------------------------------------------------ all-reduce


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The reduction of `x` over the ranks, on every rank; `op` is sum, avg, product, max or min."""
    return _all_reduce(x, axis, op, False).wait()


def all_reduce_start(x: Tensor, axis: Axis, op: str = "sum", *, in_place: bool = False) -> Pending[Tensor]:
    """`all_reduce`, started. With `in_place` it may be in the memory of `x`, and on accelerators takes no other."""
    return _all_reduce(x, axis, op, True, in_place)


def _all_reduce(x: Tensor, axis: Axis, op: str, async_op: bool, in_place: bool = False) -> Pending[Tensor]:
    n = axis.size
    if n == 1:
        return Pending("all_reduce", axis, None, x)
    _check_reducible(x.dtype, op)
    nbytes = x.nbytes
    if observe.observers:
        observe.report("all_reduce", axis, 2 * (n - 1) * nbytes // n, op, async_op)
    x = dense(x)
    if (x.is_cpu or (x.dtype in wire.HALF and not in_place)) and nbytes * n <= _ONE_ROUND_BYTES:
        stack = x.new_empty((n, *x.shape))
        work = gather_into(axis, stack, x)
        return Pending("all_reduce", axis, work, stack, lambda: _reduce(stack, op))
    native_op = "sum" if op == "avg" and not wire.averages(axis, x) else op
    if wire.reduces(x, native_op):
        result = x if in_place else x.clone()
        work = wire.all_reduce(axis, result, native_op)
        return Pending("all_reduce", axis, work, result, (lambda: result.div_(n)) if op != native_op else None)
    sizes = chunk_sizes(x.numel(), n)
    mine = _start_reduce_scatter(x.view(-1), axis, 0, sizes, op)
    shape = x.shape
    return Pending(
        "all_reduce", axis, None, x, lambda: _start_all_gather(mine.wait(), axis, 0, sizes).wait().view(shape)
    )


# ------------------------------------------------------------------ all-gather


def all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of all ranks concatenated along `dim`; `sizes[i]` is the length of part i there."""
    return _all_gather(x, axis, dim, sizes, False).wait()


def all_gather_start(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Pending[Tensor]:
    """`all_gather`, started."""
    return _all_gather(x, axis, dim, sizes, True)


def _all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], async_op: bool) -> Pending[Tensor]:
    if axis.size == 1:
        return Pending("all_gather", axis, None, x)
    _check_sizes("all_gather", x, axis, dim, sizes, own=True)
    if is_wrapper(x):
        join = Join(x, dim, sizes)
        started = [_all_gather(t, axis, d, lengths, async_op) for t, d, lengths in join.moving()]
        return Pending("all_gather", axis, None, x, lambda: join.finish([each.wait() for each in started]))
    if observe.observers:
        total = prod(x.shape[:dim]) * sum(sizes) * prod(x.shape[dim + 1 :]) * x.element_size()
        observe.report("all_gather", axis, (axis.size - 1) * total // axis.size, None, async_op)
    return _start_all_gather(dense(x), axis, dim, sizes)


def _start_all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Pending[Tensor]:
    n = axis.size
    lead = prod(x.shape[:dim])
    shape = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
    if _all_equal(sizes):
        if lead == 1:
            out = x.new_empty(shape)
            return Pending("all_gather", axis, gather_into(axis, out, x), out)
        stack = x.new_empty((n, *x.shape))
        work = gather_into(axis, stack, x)
        # Parts of length 1 can be stacked without a copy; movedim then puts the dim where it belongs.
        return Pending("all_gather", axis, work, stack, lambda: stack.movedim(0, dim).reshape(shape).contiguous())
    row = lead * prod(x.shape[dim + 1 :])
    numels = [size * row for size in sizes]
    flat = x.new_empty(sum(numels))
    work = wire.all_to_all(axis, flat, repeat(x, n), numels, [x.numel()] * n)
    if lead == 1:
        return Pending("all_gather", axis, work, flat.view(shape))
    return Pending("all_gather", axis, work, flat, lambda: concatenate(flat, x.shape, dim, sizes))


# ------------------------------------------------------------------ reduce-scatter


def reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], op: str = "sum") -> Tensor:
    """This rank's part of the reduction of `x` over the ranks; `sizes[i]` is the length of part i along `dim`."""
    return _reduce_scatter(x, axis, dim, sizes, op, False).wait()


def reduce_scatter_start(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], op: str = "sum") -> Pending[Tensor]:
    """`reduce_scatter`, started."""
    return _reduce_scatter(x, axis, dim, sizes, op, True)


def _reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], op: str, async_op: bool) -> Pending[Tensor]:
    if axis.size == 1:
        return Pending("reduce_scatter", axis, None, x)
    _check_reducible(x.dtype, op)
    _check_sizes("reduce_scatter", x, axis, dim, sizes, own=False)
    if observe.observers:
        observe.report("reduce_scatter", axis, (axis.size - 1) * x.nbytes // axis.size, op, async_op)
    return _start_reduce_scatter(x, axis, dim, sizes, op)


def _start_reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], op: str) -> Pending[Tensor]:
    n = axis.size
    own_shape = (*x.shape[:dim], sizes[axis.index], *x.shape[dim + 1 :])
    flat = flat_parts(x, dim, sizes)
    native_op = "sum" if op == "avg" and not wire.averages(axis, x) else op
    if wire.has_reduce_scatter(x) and wire.reduces(x, native_op) and _all_equal(sizes):
        out = x.new_empty(own_shape)
        work = wire.reduce_scatter(axis, out, flat, native_op)
        return Pending("reduce_scatter", axis, work, out, (lambda: out.div_(n)) if op != native_op else None)
    row = prod(x.shape[:dim]) * prod(x.shape[dim + 1 :])
    own = sizes[axis.index] * row
    received = x.new_empty(n * own)
    if _all_equal(sizes):
        work = wire.all_to_all(axis, received, flat)
    else:
        work = wire.all_to_all(axis, received, flat, [own] * n, [size * row for size in sizes])
    return Pending("reduce_scatter", axis, work, received, lambda: _reduce(received.view(n, *own_shape), op))


# ------------------------------------------------------------------ all-to-all and exchange


def all_to_all(
    x: Tensor,
    axis: Axis,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
) -> Tensor:
    """Part i of `x` along `split_dim` goes to rank i; the received parts are concatenated along another `concat_dim`.

    `concat_sizes[i]` is the length of rank i's tensor along `concat_dim`.
    """
    return _all_to_all(x, axis, split_dim, split_sizes, concat_dim, concat_sizes, False).wait()


def all_to_all_start(
    x: Tensor,
    axis: Axis,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
) -> Pending[Tensor]:
    """`all_to_all`, started."""
    return _all_to_all(x, axis, split_dim, split_sizes, concat_dim, concat_sizes, True)


def _all_to_all(
    x: Tensor,
    axis: Axis,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    async_op: bool,
) -> Pending[Tensor]:
    if axis.size == 1:
        return Pending("all_to_all", axis, None, x)
    n, index = axis.size, axis.index
    _check_sizes("all_to_all", x, axis, split_dim, split_sizes, own=False)
    _check_sizes("all_to_all", x, axis, concat_dim, concat_sizes, own=True)
    if split_dim == concat_dim:
        raise CommError(f"all_to_all on {axis} splits and concatenates dim {split_dim}; the two must differ")
    if is_wrapper(x):
        return _all_to_all_of_wrapper(cut(x, split_dim, split_sizes), axis, concat_dim, concat_sizes, async_op)
    shape = list(x.shape)
    shape[split_dim], shape[concat_dim] = split_sizes[index], 1
    row = prod(shape)  # received elements for each index along concat_dim
    if observe.observers:
        rest = prod([length for dim, length in enumerate(x.shape) if dim not in (split_dim, concat_dim)])
        kept = sum([a * b for a, b in zip(split_sizes, concat_sizes, strict=True)])
        moved = (sum(split_sizes) * sum(concat_sizes) - kept) * rest * x.element_size()
        observe.report("all_to_all", axis, moved // n, None, async_op)
    flat = flat_parts(x, split_dim, split_sizes)
    if _all_equal(split_sizes) and _all_equal(concat_sizes):
        out = torch.empty_like(flat)
        work = wire.all_to_all(axis, out, flat)
    else:
        sent_row = x.numel() // x.shape[split_dim] if x.shape[split_dim] else 0
        out = x.new_empty(sum(concat_sizes) * row)
        work = wire.all_to_all(
            axis, out, flat, [size * row for size in concat_sizes], [size * sent_row for size in split_sizes]
        )
    return Pending("all_to_all", axis, work, out, lambda: concatenate(out, shape, concat_dim, concat_sizes))


def _all_to_all_of_wrapper(
    parts: Sequence[Tensor], axis: Axis, dim: int, sizes: Sequence[int], async_op: bool
) -> Pending[Tensor]:
    join = Join(parts[axis.index], dim, sizes)
    pieces = [[t for t, _, _ in Join(part, dim, sizes).moving()] for part in parts]
    started = []
    for i, (own, d, lengths) in enumerate(join.moving()):
        shapes = [(*own.shape[:d], length, *own.shape[d + 1 :]) for length in lengths]
        started.append((d, _exchange([each[i] for each in pieces], axis, shapes, own, async_op)))
    finish = lambda: join.finish([torch.cat(each.wait(), d) for d, each in started])  # noqa: E731
    return Pending("all_to_all", axis, None, parts[axis.index], finish)


def exchange(
    pieces: Sequence[Tensor | None],
    axis: Axis,
    recv_shapes: Sequence[Sequence[int] | None],
    like: Tensor,
) -> list[Tensor]:
    """Send `pieces[i]` to rank i, and return the tensors received from each rank, of the given shapes (None: nothing).

    All ranks send tensors of the dtype of `like`. Where nothing is received the result has an empty tensor. The piece
    of a rank for itself is returned as it is, not copied.
    """
    return _exchange(pieces, axis, recv_shapes, like, False).wait()


def exchange_start(
    pieces: Sequence[Tensor | None],
    axis: Axis,
    recv_shapes: Sequence[Sequence[int] | None],
    like: Tensor,
) -> Pending[list[Tensor]]:
    """`exchange`, started."""
    return _exchange(pieces, axis, recv_shapes, like, True)


def _exchange(
    pieces: Sequence[Tensor | None],
    axis: Axis,
    recv_shapes: Sequence[Sequence[int] | None],
    like: Tensor,
    async_op: bool,
) -> Pending[list[Tensor]]:
    n, index = axis.size, axis.index
    own_shapes = [_shape_or_none(each[index]) if len(each) == n else None for each in (pieces, recv_shapes)]
    if len(pieces) != n or len(recv_shapes) != n or own_shapes[0] != own_shapes[1]:
        raise CommError(
            f"exchange on {axis} needs one piece and one shape per rank, and the piece that this rank keeps must have "
            f"its shape: {len(pieces)} pieces, {len(recv_shapes)} shapes, piece {own_shapes[0]} for {own_shapes[1]}"
        )
    own = pieces[index]
    like = like.detach()
    nothing = like.new_empty(0)
    if n == 1:
        return Pending("exchange", axis, None, [nothing if own is None else own])
    # An empty piece in its own place: what a rank keeps is not sent.
    sent = [nothing if piece is None or i == index else dense(piece).view(-1) for i, piece in enumerate(pieces)]
    sent_numels = [piece.numel() for piece in sent]
    numels = [0 if shape is None or i == index else prod(shape) for i, shape in enumerate(recv_shapes)]
    if observe.observers:
        observe.report("exchange", axis, sum(sent_numels) * nothing.element_size(), None, async_op)
    out = like.new_empty(sum(numels))
    work = wire.all_to_all(axis, out, torch.cat(sent), numels, sent_numels)

    def finish() -> list[Tensor]:
        received = list(out.split_with_sizes(numels))
        for i, shape in enumerate(recv_shapes):
            if i == index:
                received[i] = nothing if own is None else own
            elif shape is not None:
                received[i] = received[i].view(tuple(shape))
        return received

    return Pending("exchange", axis, work, [], finish)


def exchange_rows(x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send the first `send[0]` rows of `x` to rank 0, the next ones to rank 1 and so on; the rows received, by rank.

    `receive[i]` is the number of rows that rank i sends here.
    """
    if axis.size == 1:
        return x
    if len(send) != axis.size or len(receive) != axis.size or sum(send) != x.shape[0]:
        raise CommError(
            f"exchange_rows on {axis} needs one number of rows per rank to send and to receive, and all {x.shape[0]} "
            f"rows sent: got {tuple(send)} and {tuple(receive)}"
        )
    width = prod(x.shape[1:])
    if observe.observers:
        moved = (x.shape[0] - send[axis.index]) * width * x.element_size()
        observe.report("all_to_all", axis, moved, None, False)
    out = x.new_empty((sum(receive), *x.shape[1:]))
    sizes = [[rows * width for rows in each] for each in (receive, send)]
    work = wire.all_to_all(axis, out.view(-1), dense(x).view(-1), *sizes)
    return Pending("all_to_all", axis, work, out).wait()


# ------------------------------------------------------------------ from one rank to all


def broadcast(x: Tensor, axis: Axis, src: int) -> Tensor:
    """A copy of the `x` of the rank at position `src`, on every rank; all pass a tensor of the same shape and dtype."""
    if axis.size == 1:
        return x
    if is_wrapper(x):
        return rebuilt(x, [broadcast(t, axis, src) for t in inner_of(x)], x.shape)
    if observe.observers:
        observe.report("broadcast", axis, (axis.size - 1) * x.nbytes // axis.size, None, False)
    out = dense(x).clone() if axis.index == src else torch.empty_like(x, memory_format=torch.contiguous_format)
    return Pending("broadcast", axis, wire.broadcast(axis, out, src), out).wait()


def scatter_cut(x: Tensor, axis: Axis, src: int, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part along `dim` of the wrapper `x` of the rank at position `src`; all ranks pass one."""
    parts = cut(x, dim, sizes)
    mine, received = parts[axis.index], []
    for i, like in enumerate(inner_of(mine)):
        sent = [inner_of(part)[i] for part in parts] if axis.index == src else None
        received.append(scatter(sent, axis, src, like.shape, like))
    return rebuilt(mine, received, mine.shape)


def scatter(
    parts: Sequence[Tensor] | None,
    axis: Axis,
    src: int,
    shape: Sequence[int],
    like: Tensor,
) -> Tensor:
    """The part that the rank at position `src` has for this rank, of the given shape and the dtype of `like`.

    Parts may differ in shape.
    """
    if (parts is not None) != (axis.index == src) or (parts is not None and len(parts) != axis.size):
        raise CommError(f"scatter on {axis} takes one part per rank from position {src}, and None from the others")
    if parts is not None and tuple(parts[src].shape) != tuple(shape):
        raise CommError(
            f"scatter on {axis}: position {src} keeps a part of shape {tuple(parts[src].shape)}, expected "
            f"{tuple(shape)}"
        )
    if parts is not None and axis.size == 1:
        return parts[0]
    out = like.detach().new_empty(prod(shape))
    if parts is None:
        sent, sent_numels = out.new_empty(0), [0] * axis.size
    else:
        sent = torch.cat([dense(part).view(-1) for part in parts])
        sent_numels = [part.numel() for part in parts]
    if observe.observers:
        nbytes = (sent.numel() - out.numel()) * out.element_size() if parts is not None else 0
        observe.report("scatter", axis, nbytes, None, False)
    numels = [out.numel() if i == src else 0 for i in range(axis.size)]
    work = wire.all_to_all(axis, out, sent, numels, sent_numels)
    return Pending("scatter", axis, work, out.view(tuple(shape))).wait()


# ------------------------------------------------------------------ moving and reducing


def gather_into(axis: Axis, out: Tensor, x: Tensor) -> Work | None:
    """All parts one after the other in `out`; each is as large as the contiguous `x`."""
    if x.is_cpu and x.nbytes * axis.size <= _ONE_ROUND_BYTES:
        return wire.all_to_all(axis, out.view(-1), repeat(x, axis.size))
    return wire.all_gather(axis, out, x)


def _reduce(stack: Tensor, op: str) -> Tensor:
    """The reduction along dim 0, as torch does it: NaN propagates, half types accumulate in float32."""
    if stack.dtype == torch.complex32 and stack.is_cpu:  # torch cannot reduce it on CPU
        return _reduce(stack.to(torch.complex64), op).to(torch.complex32)
    if op == "sum":
        return stack.sum(0, dtype=stack.dtype)
    if op == "avg":
        return stack.mean(0)
    if op == "product":
        return stack.prod(0, dtype=stack.dtype)
    return stack.amax(0) if op == "max" else stack.amin(0)


def _check_reducible(dtype: torch.dtype, op: str) -> None:
    if op not in REDUCE_OPS:
        raise CommError(f"{op!r} is not a reduction; use one of {', '.join(REDUCE_OPS)}")
    exact = not dtype.is_floating_point and not dtype.is_complex
    if dtype in _IRREDUCIBLE or (op == "avg" and exact) or (op in ("max", "min") and dtype.is_complex):
        raise CommError(f"torch cannot reduce {dtype} with {op}: convert the tensor first")


# ------------------------------------------------------------------ shapes and buffers


def _check_sizes(kind: str, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], own: bool) -> None:
    """Raise for sizes that fit neither this rank's part nor (not `own`) the whole: ranks would wait in vain."""
    if len(sizes) != axis.size or not 0 <= dim < x.ndim or x.shape[dim] != (sizes[axis.index] if own else sum(sizes)):
        raise CommError(
            f"{kind} on {axis}: a tensor of shape {tuple(x.shape)} does not fit sizes {tuple(sizes)} along dim {dim}"
        )


def _all_equal(sizes: Sequence[int]) -> bool:
    return sizes.count(sizes[0]) == len(sizes)


def _shape_or_none(piece: Tensor | Sequence[int] | None) -> tuple[int, ...] | None:
    return None if piece is None else tuple(piece.shape if isinstance(piece, Tensor) else piece)
