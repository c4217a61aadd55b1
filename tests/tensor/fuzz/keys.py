"""Random indices, as text, of every kind that a tensor takes: valid ones nearly always."""

from __future__ import annotations

from typing import Any

import torch


def key(draw: Any, shape: tuple[int, ...], mesh: tuple[int, ...], names: dict[str, torch.Tensor]) -> str:
    """What stands between the brackets. `draw` has `pick`, `number` and `chance`; `names` are the live tensors."""
    ndim = len(shape)
    whole = draw.number(0, 19)
    if whole == 0:
        return draw.pick(
            ("()", "...", "None", "True", "False", "(None, ...)", "(..., None)", "[True]", "torch.tensor(True)")
        )
    if whole == 1 and ndim:
        return _list(draw, shape[0])
    if whole == 2 and ndim:
        return f"torch.Size([{', '.join(str(_int(draw, n)) for n in shape[: draw.number(1, ndim)])}])"
    if whole in (3, 4) and ndim:
        return mask(draw, shape[: draw.number(1, ndim)], mesh)
    if whole == 5:
        alike = [
            n for n, t in names.items() if tuple(t.shape) == shape[: t.dim()] and t.dim() and t.dtype != torch.bool
        ]
        if alike:
            return f"{draw.pick(alike)} {draw.pick(('> 0', '== 3', '!= 3', '< 100'))}"
    if whole == 6 and ndim:
        return draw.pick(
            (f"{_int(draw, shape[0])}.0", "'a'", f"{shape[0]}", f"{-shape[0] - 1}", "slice(0, 2, 0)", "::-1")
        )
    items: list[str] = []
    d = 0
    advanced = draw.number(0, 2) == 0
    ellipsis_at = draw.number(0, 6)
    wanted = draw.number(0, ndim) if draw.chance(2) else min(1, ndim)
    while d < wanted:
        if len(items) == ellipsis_at and "..." not in items and ndim:
            items.append("...")
            d += draw.number(0, wanted - d)
            # What follows counts from the end.
            d = max(d, 0)
            if d >= wanted:
                break
        if draw.number(0, 9) == 0:
            items.append(draw.pick(("None", "None", "None", "True")))
        items.append(_item(draw, shape[d], mesh, advanced))
        d += 1
    if draw.number(0, 9) == 0:
        items.append("None")
    if not items:
        return "..."
    if len(items) == 1 and draw.chance(2):
        return items[0]
    return ", ".join(items) + ("," if len(items) == 1 else "")


def twins(n: int) -> tuple[tuple[str, str], ...]:
    """Pairs of indices of a dim of n elements that are easily taken for each other."""
    last = max(n - 1, 0)
    return (
        (f"slice(0, {last}, 1)", f"torch.Size([0, {last}, 1])"),
        (f"0:{last}:1", f"(0, {last}, 1)"),
        (f"0:{last}:1", f"[0, {last}, 1]"),
        ("True", "1"),
        ("False", "0"),
        ("1", "1.0"),
        ("(True,)", "(1,)"),
        ("[1]", "1"),
        ("[1]", "[True]"),
        ("(0, 1)", "[0, 1]"),
        ("(1, 0)", "(True, False)"),
        ("torch.Size([1, 0])", "(1, 0)"),
        ("torch.Size([1, 0])", "[1, 0]"),
        ("None", "()"),
        ("...", "None"),
        ("(...,)", "(None,)"),
        ("0:1", "0"),
        ("0:1", "(0, 1)"),
        ("slice(None, 1)", "slice(1, None)"),
        ("slice(1)", "(None, 1, None)"),
        ("torch.tensor(1)", "torch.tensor([1])"),
        ("torch.tensor(True)", "torch.tensor(1)"),
        ("np.int64(1)", "np.array([1])"),
        ("slice(0, 1)", "slice(False, True)"),
        ("-1", f"{last}"),
    )


def mask(draw: Any, shape: tuple[int, ...], mesh: tuple[int, ...], lists: bool = True) -> str:
    """A boolean mask of this shape, plain or distributed, or a list."""
    count = 1
    for n in shape:
        count *= n
    every = draw.number(1, 3)
    data = (torch.arange(count) % (every + 1) == 0).reshape(shape).tolist()
    if lists and len(shape) == 1 and draw.chance(4):
        return repr(data)
    return f"index({data!r}{_placements(draw, len(shape), mesh)})"


def _item(draw: Any, n: int, mesh: tuple[int, ...], advanced: bool) -> str:
    kind = draw.number(0, 9)
    everywhere = ", Replicate()" * len(mesh)
    if kind <= 2 and n:
        return str(_int(draw, n))
    if kind == 3 and n:
        return draw.pick(
            (f"np.int64({_int(draw, n)})", f"torch.tensor({_int(draw, n)})", f"index({_int(draw, n)}{everywhere})")
        )
    if kind <= 7 or not advanced or not n:
        return _slice(draw, n)
    if kind == 8:
        return _list(draw, n)
    if draw.chance(2):
        count = draw.pick((1, 2, 2, 3))
        return f"index({[_int(draw, n) for _ in range(count)]}{_placements(draw, 1, mesh)})"
    return f"index({[[_int(draw, n)], [_int(draw, n)]]}{_placements(draw, 2, mesh)})"


def _int(draw: Any, n: int) -> int:
    return draw.number(-n, n - 1) if n else 0


def _slice(draw: Any, n: int) -> str:
    start = draw.pick(("", "", "0", "1", str(-n), "-1", str(draw.number(0, n))))
    stop = draw.pick(("", "", str(n), str(n + 3), "-1", str(draw.number(0, n))))
    step = draw.pick(("", "", "", ":1", ":2", ":3"))
    return f"{start}:{stop}{step}"


def _list(draw: Any, n: int) -> str:
    kind = draw.number(0, 4)
    if not n or kind == 0:
        return repr([bool(draw.number(0, 1)) for _ in range(n)])
    entries = [_int(draw, n) for _ in range(draw.number(1, 3))]
    if kind == 1:
        return f"np.array({entries})"
    return repr(entries)


def _placements(draw: Any, ndim: int, mesh: tuple[int, ...]) -> str:
    """None for a plain tensor."""
    kind = draw.number(0, 3)
    if kind == 0:
        return ""
    if kind == 1 or not ndim:
        return ", Replicate()" * len(mesh)
    return "".join(f", {draw.pick((f'Shard({draw.number(0, ndim - 1)})', 'Replicate()'))}" for _ in mesh)
