"""Convolutions: batch and channels are loops of a product, what the kernel slides over is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec
from terrazzo.tensor.rules.registry import rule

_SPATIAL = {"conv1d": 1, "conv2d": 2, "conv3d": 3, "conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}
_BATCH, _OUT, _IN = 0, 1, 2
_GROUPS = 6  # the position of `groups` in all of them


@rule("conv1d", "conv2d", "conv3d")
def conv(
    call: Call, input: Operand, weight: Operand, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Spec | None:  # fmt: skip
    n = _SPATIAL[call.name]
    if not isinstance(input, Operand) or not isinstance(weight, Operand) or weight.ndim != n + 2:
        return None
    if input.ndim not in (n + 1, n + 2) or input.shape[-n - 1] != weight.shape[1] * groups:
        return None
    steps, holes = _each(stride, n), _each(dilation, n)
    if padding == "same":
        spatial = tuple(input.shape[-n:])
    else:
        pads = (0,) * n if padding == "valid" else _each(padding, n)
        sizes = zip(input.shape[-n:], weight.shape[2:], steps, pads, holes, strict=True)
        spatial = tuple((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
    return _sliding(call, input, weight, bias, groups, spatial, out_at=0)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(
    call: Call, input: Operand, weight: Operand, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding:
    Any = 0, groups: int = 1, dilation: Any = 1,
) -> Spec | None:  # fmt: skip
    n = _SPATIAL[call.name]
    if not isinstance(input, Operand) or not isinstance(weight, Operand) or weight.ndim != n + 2:
        return None
    if input.ndim not in (n + 1, n + 2) or input.shape[-n - 1] != weight.shape[0]:
        return None
    given = [_each(v, n) for v in (stride, padding, output_padding, dilation)]
    sizes = zip(input.shape[-n:], weight.shape[2:], *given, strict=True)
    spatial = tuple((size - 1) * s - 2 * p + d * (k - 1) + extra + 1 for size, k, s, p, extra, d in sizes)
    return _sliding(call, input, weight, bias, groups, spatial, out_at=1)


def _each(value: Any, n: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def _sliding(
    call: Call, input: Operand, weight: Operand, bias: Any, groups: int, spatial: Sequence[int], out_at: int
) -> Spec | None:
    """`out_at` says which of the weight's first two dims makes the output's channels."""
    if min(spatial, default=0) < 0 or not (bias is None or isinstance(bias, Operand)):
        return None
    closed: Dims = (None,) * len(spatial)
    batch: Dims = (_BATCH,) if input.ndim == len(spatial) + 2 else ()
    channels = weight.shape[out_at]
    weight_dims: Dims
    if groups == 1:
        ins_at, weight_dims, even = _IN, ((_OUT, _IN) if out_at == 0 else (_IN, _OUT)), {}
    else:
        # Channels may be cut between groups: the weight's first dim runs through them all, its second within one.
        ins_at, weight_dims, even = _OUT, (_OUT, None), {_OUT: (groups,)}
        channels = channels if out_at == 0 else channels * groups
    ins: dict[int, Dims] = {id(input): (*batch, ins_at, *closed), id(weight): (*weight_dims, *closed)}
    if bias is not None:
        ins[id(bias)] = (_OUT,)

    added = [i for i, o in enumerate(call.operands) if o is bias]

    def localize(chosen: Chosen) -> LocalFunction | None:
        ranks = [chosen.ins[0].mesh_shape[m] for m in chosen.sharded.get(_OUT, ())]
        if not ranks:
            return None
        share = groups
        for n in ranks:
            share //= n

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            result: torch.Tensor
            if "groups" in kw:
                result = func(*loc, **(kw | {"groups": share}))
            else:
                result = func(*loc[:_GROUPS], share, *loc[_GROUPS + 1 :], **kw)
            return result

        return run

    return Spec(
        [ins[id(o)] for o in call.operands],
        [(*batch, _OUT, *closed)],
        [(*input.shape[: len(batch)], channels, *spatial)],
        reduce={_IN: "sum"} if groups == 1 else {},
        even=even,
        addends=frozenset(added),
        linear=[(i, *added) for i in range(2)],
        localize=None if groups == 1 else localize,
    )
