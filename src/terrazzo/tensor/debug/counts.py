"""Numbers by collective, looked up by our names or by torch's operators."""

from __future__ import annotations

from typing import Any

from terrazzo._torch.dispatching import qualified_name

_OPERATOR_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": "send",
}
"""The operators of `torch.ops.c10d` and of functional collectives, without a trailing underscore, by kind."""

COLLECTIVE_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")


def kind_of_operator(operator: Any) -> str | None:
    """The kind of collective that one of torch's operators is; None for anything else.

    >>> import torch.distributed._functional_collectives
    >>> kind_of_operator(torch.ops._c10d_functional.all_gather_into_tensor)
    'all_gather'
    """
    packet = getattr(operator, "overloadpacket", operator)
    qualified = qualified_name(packet)
    namespace, _, name = qualified.partition("::")
    if namespace not in COLLECTIVE_NAMESPACES:
        return None
    return _OPERATOR_KINDS.get(name.rstrip("_"))


class ByCollective(dict[str, int]):
    """A number for each kind of collective that happened, 0 for the others.

    Keys are the kinds of `terrazzo.comm.CommEvent`: all_reduce, all_gather, reduce_scatter, all_to_all, exchange,
    broadcast and scatter; what user code sends by itself may add gather, reduce and send. A lookup takes a kind, or
    torch's operator for it, such as `torch.ops.c10d_functional.all_reduce`.

    >>> counts = ByCollective(all_reduce=2)
    >>> counts["all_reduce"], counts["all_gather"], "all_gather" in counts
    (2, 0, False)
    """

    def __missing__(self, key: Any) -> int:
        kind = None if isinstance(key, str) else kind_of_operator(key)
        return 0 if kind is None else self[kind]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key if isinstance(key, str) else kind_of_operator(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    def add(self, kind: str, amount: int) -> None:
        self[kind] = self[kind] + amount
