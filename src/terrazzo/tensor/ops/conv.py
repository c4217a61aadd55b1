"""Convolutions: batch and channels are loops of a product; spatial dims may be sharded, with a halo exchange."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec
from terrazzo.tensor.dispatch.structure import tied_to
from terrazzo.tensor.ops.accumulate import product_type
from terrazzo.tensor.ops.halo import Halo, Window, each, plan_halo
from terrazzo.tensor.ops.questions import is_sharded_along
from terrazzo.tensor.ops.spatial import shapes_of_results
from terrazzo.tensor.ops.table import rule

_SPATIAL = {"conv1d": 1, "conv2d": 2, "conv3d": 3, "conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}
_BATCH, _OUT, _IN = 0, 1, 2
_SPACE = 3  # the first spatial dim's factor; the others follow
_GROUPS = 6  # the position of `groups` in all of them


@rule("conv1d", "conv2d", "conv3d")
def conv(
    call: Call, input: Operand, weight: Operand, bias: Operand | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Spec | None:  # fmt: skip
    n = _SPATIAL[call.name]
    if weight.ndim != n + 2 or input.ndim not in (n + 1, n + 2) or input.shape[-n - 1] != weight.shape[1] * groups:
        return None
    windows = _windows(weight, stride, padding, dilation, n)
    return None if windows is None else _sliding(call, input, weight, bias, groups, n, out_at=0, windows=windows)


def _windows(weight: Operand, stride: Any, padding: Any, dilation: Any, n: int) -> tuple[Window, ...] | None:
    """The window of each spatial dim; None for arguments that PyTorch will refuse."""
    kernel, steps, holes = weight.shape[2:], each(stride, n), each(dilation, n)
    if min((*kernel, *steps, *holes)) < 1:
        return None
    if padding == "same":  # if the total is odd, the end gets one more
        around = [d * (k - 1) for k, d in zip(kernel, holes, strict=True)]
        befores, afters = [total // 2 for total in around], [total - total // 2 for total in around]
        if set(steps) != {1}:
            return None
    else:
        befores = afters = [0] * n if padding == "valid" else list(each(padding, n))
        if min(befores) < 0:
            return None
    return tuple(Window(*w) for w in zip(kernel, steps, befores, afters, holes, strict=True))


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(
    call: Call, input: Operand, weight: Operand, bias: Operand | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Spec | None:  # fmt: skip
    n = _SPATIAL[call.name]
    if weight.ndim != n + 2 or input.ndim not in (n + 1, n + 2) or input.shape[-n - 1] != weight.shape[0]:
        return None
    return _sliding(call, input, weight, bias, groups, n, out_at=1)


def _sliding(
    call: Call,
    input: Operand,
    weight: Operand,
    bias: Operand | None,
    groups: int,
    n: int,
    out_at: int,
    windows: Sequence[Window] = (),
) -> Spec | None:
    """`out_at` says which of the weight's first two dims is the output's channels.

    With `windows`, spatial dims may be sharded.
    """
    shapes = shapes_of_results(call)
    if shapes is None:
        return None
    first = input.ndim - n  # the first spatial dim
    with_halo = bool(windows) and is_sharded_along(input, range(first, input.ndim))
    closed: Dims = (None,) * n
    space: Dims = tuple(range(_SPACE, _SPACE + n)) if with_halo else closed
    batch: Dims = (_BATCH,) if first == 2 else ()
    weight_dims: Dims
    if groups == 1:
        ins_at, weight_dims, even = _IN, ((_OUT, _IN) if out_at == 0 else (_IN, _OUT)), {}
    else:
        # Channels may be cut between groups: the weight's first dim counts all channels, its second those of one group.
        ins_at, weight_dims, even = _OUT, (_OUT, None), {_OUT: (groups,)}
    ins: dict[int, Dims] = {id(input): (*batch, ins_at, *space), id(weight): (*weight_dims, *closed)}
    if bias is not None:
        ins[id(bias)] = (_OUT,)

    added = [i for i, o in enumerate(call.operands) if o is bias]

    def localize(chosen: Chosen) -> LocalFunction | None:
        share, shape = groups, tuple(chosen.outs[0].local_shape)
        for m in chosen.sharded.get(_OUT, ()) if groups > 1 else ():
            share //= chosen.ins[0].mesh_shape[m]
        if with_halo:
            source = chosen.ins[[o is input for o in call.operands].index(True)]
            cut = {first + i: chosen.sharded.get(_SPACE + i, ()) for i in range(n)}
            halo = plan_halo(source, chosen.outs[0], {first + i: w for i, w in enumerate(windows)}, cut)
            return _with_halo(halo, shape, n, share)
        return None if share == groups else _with_groups(share)

    return Spec(
        [ins[id(o)] for o in call.operands],
        [(*batch, _OUT, *space)],
        shapes,
        reduce={_IN: "sum"} if groups == 1 else {},
        even=even,
        addends=frozenset(added),
        linear=[(i, *added) for i in range(2)],
        never_empty=not with_halo,
        localize=localize,
    )


def _with_groups(share: int) -> LocalFunction:
    """The caller's convolution with this rank's number of groups."""

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        if "groups" in kw:
            return func(*loc, **(kw | {"groups": share}))
        return func(*loc[:_GROUPS], share, *loc[_GROUPS + 1 :], **kw)

    return run


def _with_halo(halo: Halo, shape: tuple[int, ...], n: int, share: int) -> LocalFunction:
    """The convolution of this rank's part of an image, of the given local shape."""

    def convolve(
        func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        x = halo.around(input, 0.0)
        if x.numel() and weight.numel() and prod(shape):
            return func(x, weight, bias, stride, 0, dilation, share)
        result = tied_to(x.new_zeros(shape), x, weight)
        result = result if bias is None else result + bias.view(-1, *(1,) * n)
        return result.to(product_type(x.dtype, x.device))

    return lambda func, loc, kw: convolve(func, *loc, **kw)
