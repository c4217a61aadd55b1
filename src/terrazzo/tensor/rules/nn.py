"""The layers of neural networks: embeddings, normalisation, convolution, losses."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import all_reduce
from terrazzo.tensor.rules.registry import decomposition, rule
from terrazzo.tensor.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec


@rule("embedding")
def embedding(call: Call, *args: Any, **kwargs: Any) -> Spec | None:
    """Vocabulary shards look up their own rows and give zeros for the others': the results are terms.

    `F.embedding(input, weight, ...)` and `aten.embedding(weight, indices, ...)` differ in the order of the two.
    """
    plain = isinstance(call.func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    names = ("weight", "indices") if plain else ("input", "weight")
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    weight, indices = given.get("weight"), given.get("indices", given.get("input"))
    if not isinstance(weight, Operand) or not isinstance(indices, Operand) or weight.ndim != 2:
        return None
    extra = args[2:]
    if not plain and (kwargs.get("max_norm") is not None or (len(extra) > 1 and extra[1] is not None)):
        return None  # renormalises the weight in place
    ids = tuple(range(indices.ndim))
    row, column = indices.ndim, indices.ndim + 1
    by_operand = {id(weight): (row, column), id(indices): ids}
    w_at, i_at = weight.path[0], indices.path[0]

    def localize(chosen: Chosen) -> LocalFunction | None:
        if row not in chosen.sharded:
            return None
        box = chosen.ins[call.operands.index(weight)].box()
        first, count = box.offsets[0], box.lengths[0]

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            table = loc[w_at] if isinstance(w_at, int) else kw[w_at]
            wanted = loc[i_at] if isinstance(i_at, int) else kw[i_at]
            mine = wanted - first
            here = (mine >= 0) & (mine < count)
            if count == 0:
                zeros = table.new_zeros((*wanted.shape, table.shape[1]))
                return zeros + table.sum() if table.requires_grad else zeros
            rows = torch.nn.functional.embedding(mine.masked_fill(~here, 0), table)
            return rows.masked_fill(~here.unsqueeze(-1), 0)

        return run

    pad = kwargs.get("padding_idx", extra[0] if extra else None)
    closed = frozenset((row,)) if pad is not None and pad != -1 else frozenset[int]()
    return Spec(
        [by_operand[id(o)] for o in call.operands],
        [(*ids, column)],
        [(*indices.shape, weight.shape[1])],
        reduce={row: "sum"},
        whole=closed,
        localize=localize,
    )


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call, input: Operand, normalized_shape: Sequence[int], *rest: Any, **kwargs: Any) -> Spec | None:
    if not isinstance(input, Operand) or isinstance(normalized_shape, int):
        return None
    k = input.ndim - len(normalized_shape)
    if k < 0:
        return None
    factors = tuple(range(input.ndim))
    inner = factors[k:]
    ins: list[Dims] = [factors] + [inner[-o.ndim :] if o.ndim else () for o in call.operands[1:]]
    if any(o.shape != tuple(normalized_shape) for o in call.operands[1:]) or call.operands[0] is not input:
        return None
    outs: list[Dims] = [factors]
    shapes = [tuple(input.shape)]
    if call.name in ("native_layer_norm", "_fused_rms_norm"):
        stats = (*factors[:k], *(None for _ in inner))
        count = 2 if call.name == "native_layer_norm" else 1
        outs += [stats] * count
        shapes += [(*input.shape[:k], *(1 for _ in inner))] * count
    return Spec(ins, outs, shapes, whole=frozenset(inner))


@rule("group_norm")
def group_norm(
    call: Call, input: Operand, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any
) -> Spec | None:
    if not isinstance(input, Operand) or input.ndim < 2:
        return None
    factors = tuple(range(input.ndim))
    ins: list[Dims] = [factors if o is input else (1,) for o in call.operands]
    return Spec(ins, [factors], [input.shape], whole=frozenset(factors[1:]))


@rule("instance_norm")
def instance_norm(call: Call, input: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    if len(call.operands) != 1 or input.ndim < 2:
        return None
    factors = tuple(range(input.ndim))
    return Spec([factors], [factors], [input.shape], whole=frozenset(factors[2:]))


_CONV_DIMS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}


@rule("conv1d", "conv2d", "conv3d")
def conv(
    call: Call, input: Operand, weight: Operand, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Spec | None:
    n = _CONV_DIMS[call.name]
    if not isinstance(input, Operand) or not isinstance(weight, Operand) or input.ndim != n + 2 or weight.ndim != n + 2:
        return None
    per_dim = [(v,) * n if isinstance(v, int) else tuple(v) for v in (stride, dilation)]
    per_dim = [v * n if len(v) == 1 else v for v in per_dim]
    steps, holes = per_dim
    spatial = _conv_output(input.shape[2:], weight.shape[2:], steps, padding, holes)
    if spatial is None or input.shape[1] != weight.shape[1] * groups:
        return None
    batch, out_channel, in_channel = 0, 1, 2
    closed = (None,) * n
    ins: dict[int, Dims] = {id(input): (batch, in_channel, *closed), id(weight): (out_channel, in_channel, *closed)}
    if isinstance(bias, Operand):
        ins[id(bias)] = (out_channel,)
    elif bias is not None:
        return None
    grouped = groups != 1
    if grouped:
        ins[id(weight)] = (out_channel, None, *closed)
    return Spec(
        [ins[id(o)] for o in call.operands],
        [(batch, out_channel, *closed)],
        [(input.shape[0], weight.shape[0], *spatial)],
        reduce={} if grouped else {in_channel: "sum"},
        whole=frozenset((out_channel, in_channel)) if grouped else frozenset(),
        addends=frozenset(i for i, o in enumerate(call.operands) if o is bias),
    )


def _conv_output(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Any, dilation: Sequence[int]
) -> tuple[int, ...] | None:
    if padding == "same":
        return tuple(size)
    if padding == "valid":
        padding = 0
    pads = (padding,) * len(size) if isinstance(padding, int) else tuple(padding)
    pads = pads * len(size) if len(pads) == 1 else pads
    out = tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, stride, pads, dilation, strict=True)
    )
    return out if min(out, default=0) >= 0 else None


@rule("nll_loss", "nll_loss_nd", "nll_loss2d")
def nll_loss(
    call: Call, input: Operand, target: Operand, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: Any = "mean",
) -> Spec | None:
    """Sharded over the samples; a mean is a sum of terms divided by the global weight of the samples that count."""
    if isinstance(call.func, torch._ops.OpOverload | torch._ops.OpOverloadPacket) or not isinstance(input, Operand):
        return None
    if size_average is not None or reduce is not None or not isinstance(target, Operand) or input.ndim < 2:
        return None
    if reduction not in ("mean", "sum", "none") or target.ndim != input.ndim - 1:
        return None
    samples = (0, *range(2, input.ndim))
    ins = {id(input): (0, 1, *samples[1:]), id(target): samples}
    if isinstance(weight, Operand):
        ins[id(weight)] = (1,)

    def localize(chosen: Chosen) -> LocalFunction | None:
        mesh_dims = tuple(m for f in samples for m in chosen.sharded.get(f, ()))
        if reduction != "mean" or not mesh_dims:
            return None
        axis = axis_of(chosen.outs[0].mesh, mesh_dims)

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            named = dict(zip(("input", "target", "weight"), loc, strict=False)) | kw
            x, wanted, w = named["input"], named["target"], named.get("weight")
            total = torch.nn.functional.nll_loss(x, wanted, w, ignore_index=ignore_index, reduction="sum")
            counts = wanted != ignore_index
            share = counts.sum().to(x.dtype) if w is None else (w.detach()[wanted.clamp(min=0)] * counts).sum()
            return total / all_reduce(share.detach(), axis)

        return run

    scalar = reduction != "none"
    return Spec(
        [ins[id(o)] for o in call.operands],
        [() if scalar else samples],
        [() if scalar else tuple(target.shape)],
        reduce={f: "sum" for f in samples} if scalar else {},
        whole=frozenset((1,)),
        localize=localize,
    )


@decomposition("cross_entropy_loss", "cross_entropy")
def cross_entropy_by_parts(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: Any = "mean", label_smoothing: float = 0.0,
) -> Any:
    """Class indices without smoothing become log_softmax and nll_loss, both of which have rules."""
    functional = torch.nn.functional
    if (
        size_average is not None or reduce is not None or label_smoothing or not isinstance(reduction, str)
        or not isinstance(input, torch.Tensor) or not isinstance(target, torch.Tensor)
        or target.is_floating_point() or input.ndim < 2
    ):
        return NotImplemented
    logs = functional.log_softmax(input, 1)
    return functional.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy",
      "soft_margin_loss")
def elementwise_loss(call: Call, input: Operand, target: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """Sharded over anything; a mean is a sum of terms divided by the global count."""
    if not isinstance(input, Operand) or not isinstance(target, Operand) or tuple(input.shape) != tuple(target.shape):
        return None
    if args or len(call.operands) != 2 or kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return None
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("mean", "sum", "none"):
        return None
    factors = tuple(range(input.ndim))
    count = prod(input.shape)

    def localize(chosen: Chosen) -> LocalFunction | None:
        if reduction != "mean" or not chosen.sharded:
            return None

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            result: torch.Tensor = func(*loc, **(kw | {"reduction": "sum"})) / count
            return result

        return run

    scalar = reduction != "none"
    return Spec(
        [factors, factors],
        [() if scalar else factors],
        [() if scalar else tuple(input.shape)],
        reduce={f: "sum" for f in factors} if scalar else {},
        localize=localize,
    )

