"""Numbers per kind of collective: keyed by torch's operators, as PyTorch's counts are, with our names as aliases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from terrazzo._torch.dispatching import functional_collectives, qualified_name

functional_collectives()  # defines the operators below

_functional, _plain = torch.ops.c10d_functional, torch.ops.c10d

_OPERATORS: dict[str, Any] = {
    "all_reduce": _functional.all_reduce,
    "all_gather": _functional.all_gather_into_tensor,
    "reduce_scatter": _functional.reduce_scatter_tensor,
    "all_to_all": _functional.all_to_all_single,
    "broadcast": _functional.broadcast,
    "scatter": _plain.scatter_,
    "gather": _plain.gather_,
    "reduce": _plain.reduce_,
    "send": _plain.send,
}
"""The operator under which each kind is counted; torch has no operator for an exchange, which is counted by name.

A kind comes before those whose names are part of its name."""

_KINDS = {operator: kind for kind, operator in _OPERATORS.items()}

COLLECTIVE_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def kind_of_operator(operator: Any) -> str | None:
    """The kind of collective of a torch operator; None for other objects.

    >>> kind_of_operator(torch.ops._c10d_functional.all_gather_into_tensor)
    'all_gather'
    """
    packet = getattr(operator, "overloadpacket", operator)
    qualified = qualified_name(packet)
    namespace, _, name = qualified.partition("::")
    if namespace not in COLLECTIVE_NAMESPACES:
        return None
    letters = name.replace("_", "")  # the namespaces write them in several ways, with more words after them
    return next((kind for kind in _OPERATORS if kind.replace("_", "") in letters), None)


def _key(key: Any) -> Any:
    """The key under which a kind, or any operator of that kind, is counted; other keys are returned unchanged."""
    kind = key if isinstance(key, str) else kind_of_operator(key)
    return key if kind is None else _OPERATORS.get(kind, kind)


class ByCollective(dict[Any, int]):
    """A number for each kind of collective that happened, 0 for the others.

    The kinds are those of `terrazzo.comm.CommEvent`: all_reduce, all_gather, reduce_scatter, all_to_all, exchange,
    broadcast and scatter; collectives of user code may add gather, reduce and send. A lookup takes a kind, or any
    torch operator of that kind, functional or not, and so does a comparison with another dict. The keys are torch's
    functional operators, as in PyTorch's counts (except `"exchange"`, messages between some of the ranks, for which
    torch has no operator); `by_kind` and the printed form have the names.

    >>> counts = ByCollective(all_reduce=2)
    >>> counts["all_reduce"], counts[torch.ops.c10d_functional.all_reduce], counts["all_gather"], "all_gather" in counts
    (2, 2, 0, False)
    >>> list(counts)
    [<OpOverloadPacket(op='c10d_functional.all_reduce')>]
    >>> counts == {torch.ops._c10d_functional.all_reduce: 2} == {torch.ops._c10d_functional.all_reduce: 2}, counts
    (True, {'all_reduce': 2})
    """

    def __init__(self, numbers: Mapping[Any, int] | Iterable[tuple[Any, int]] = (), /, **by_kind: int) -> None:
        super().__init__()
        for key, number in dict(numbers, **by_kind).items():
            self.add(key, number)

    def add(self, key: Any, number: int) -> None:
        """Count `number` more of a kind."""
        self[key] += number

    def by_kind(self) -> dict[str, int]:
        """The numbers by name of the kind."""
        return {_KINDS.get(key, key): number for key, number in self.items()}

    def __missing__(self, key: Any) -> int:
        known = _key(key)
        return 0 if known is key else super().get(known, 0)

    def __setitem__(self, key: Any, number: int) -> None:
        super().__setitem__(_key(key), number)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_key(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_key(key), default)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return dict(self) == dict(other if isinstance(other, ByCollective) else ByCollective(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # like dict

    def __repr__(self) -> str:
        return repr(self.by_kind())

    def __reduce__(self) -> tuple[Any, ...]:
        return ByCollective, (self.by_kind(),)
