"""A limit on implicit communication: what operations do by themselves so that their operands fit together.

Communication that the program asks for is never limited: `redistribute`, `full_tensor`, `from_local`,
`distribute_tensor`, values (`item`), the layouts that parallel styles declare, and the gradients of all these.

Each collective is checked just before it starts. In forward the operation is known from `running`. In backward it is
known from the autograd node, which keeps the cause under which it was made (`terrazzo.comm.observe.origin`), and with
it the policy.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from terrazzo._torch.autograd import current_node
from terrazzo._torch.checkpointing import carry
from terrazzo._torch.dispatching import get_in_thread, set_within
from terrazzo.comm import CommEvent, add_observer, observe, remove_observer
from terrazzo.comm.collectives import all_reduce
from terrazzo.comm.observe import origin
from terrazzo.errors import CommPolicyError
from terrazzo.layout.drawing import ShownAsCall
from terrazzo.tensor.running import Running, is_inside, noting, now

Action: TypeAlias = Literal["allow", "warn", "error"]

_THREAD_STATE = "terrazzo.tensor.policy"  # torch passes this from the thread that calls backward to autograd's threads


class CommPolicyWarning(UserWarning):
    """An operation communicates more than `communication_policy` allows."""


def communication_policy(action: Action, *, above: int = 0) -> AbstractContextManager[None]:
    """Limit what operations on DTensors communicate implicitly.

    A policy covers the operations that this thread calls in the block, the backward and the recomputation of these
    operations wherever and whenever they run, and every backward pass that this thread starts in the block. Other
    threads are not affected.
    Of nested policies only the innermost counts, so `"allow"` lifts an outer limit.

    The ranks of a collective must have the same policy, so that either all of them raise or none does.

    Args:
        action: What happens on a collective of more than `above` bytes: `"allow"` it, `"warn"` with a
            `CommPolicyWarning` (once per line of the program in a block), or raise a `CommPolicyError` (`"error"`).
        above: Bytes that one collective may move, counted as in `terrazzo.comm.observe`.

    >>> with communication_policy("error", above=1 << 20):
    ...     pass  # a training step in which no operation may move more than a megabyte by itself
    """
    if action not in ("allow", "warn", "error"):
        raise ValueError(f"action must be 'allow', 'warn' or 'error', not {action!r}")
    if not isinstance(above, int) or above < 0:
        raise ValueError(f"above must be a number of bytes, not {above!r}")
    return _in_force(Policy(action, above))


@contextmanager
def _in_force(policy: Policy | None) -> Iterator[None]:
    """A block with this policy; None: with that of the thread, because a policy covers the backwards that it starts."""
    if policy is None:
        yield
        return
    outer_describe = origin.describe
    origin.describe = policy.cause_of_node
    observe.era += 1
    try:
        with set_within(_THREAD_STATE, policy), noting():
            yield
    finally:
        origin.describe = outer_describe
        observe.era += 1


class describing:
    """A block inside which `describe` says why communication happens."""

    __slots__ = ("_describe", "_outer")

    def __init__(self, describe: Callable[[], Any] | None) -> None:
        self._describe = describe

    def __enter__(self) -> None:
        self._outer = origin.describe
        origin.describe = self._describe

    def __exit__(self, *exc: Any) -> None:
        origin.describe = self._outer


def asked_for() -> describing:
    """A block of communication that the program asked for; inside an operation it has no effect."""
    outer = origin.describe
    inside = outer is not None and now() is not None
    return describing(outer if inside else _describe_asked)


def _describe_asked() -> str:
    return "asked for"

    # ------------------------------------------------------------------ the operation that communicates


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation on DTensors: its name, and where the program calls it."""

    operation: str
    file: str = "<unknown>"
    line: int = 0
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        inside = f" in {' > '.join(self.modules)}" if self.modules else ""
        return f"{self.operation}, called at {self.file}:{self.line}{inside}" if self.line else self.operation


_UNKNOWN_CALL = _Call("an operation called before this policy was in force")


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why a node communicates in its backward."""

    policy: Policy
    call: _Call


class Policy(ShownAsCall):
    """One active policy. Nodes made under it keep it alive, and it observes collectives as long as it lives."""

    __slots__ = ("__weakref__", "above", "action", "warned")

    def __init__(self, action: Action, above: int) -> None:
        self.action = action
        self.above = above
        self.warned: dict[Any, Any] = {}
        _listen_for(self)

    def cause_of_node(self) -> Any:
        """The cause for a node that is made now."""
        operation = now()
        if operation is not None:
            return _Cause(self, _call_of(operation))
        node = current_node()  # the gradient of a gradient has the same cause as the gradient
        return None if node is None else getattr(node, "origin", None)

    def judge(self, event: CommEvent, call: _Call, backward: bool) -> None:
        if self.action == "allow":
            return
        moved = event.bytes
        if event.kind == "exchange" and self.action == "error":
            moved = _largest(moved, event)
        if moved <= self.above:
            return
        what = f"the backward of {call}" if backward else str(call)
        message = (
            f"{event.kind} of {moved} bytes over {event.axis} for {what}, more than the {self.above} bytes that "
            f"communication_policy({self.action!r}, above={self.above}) allows. Redistribute the operands to "
            "placements that fit together with x.redistribute(...), which is never limited, or call it under "
            "communication_policy('allow')"
        )
        if self.action == "error":
            raise CommPolicyError(message, kind=event.kind, bytes=moved, operation=call.operation)
        warnings.warn_explicit(message, CommPolicyWarning, call.file, call.line, registry=self.warned)


def _largest(nbytes: int, event: CommEvent) -> int:
    """The largest count of any rank: in an exchange they differ, but all ranks must agree on whether to raise."""
    mine = torch.tensor([nbytes], device=event.axis.device_type)
    _judging.busy = True
    try:
        return int(all_reduce(mine, event.axis, "max"))
    finally:
        _judging.busy = False


# ------------------------------------------------------------------ listening


class _Judging(threading.local):
    busy = False


_judging = _Judging()
_alive: weakref.WeakSet[Policy] = weakref.WeakSet()
_listening = False
_lock = threading.Lock()


def _listen_for(policy: Policy) -> None:
    global _listening
    with _lock:
        _alive.add(policy)
        if not _listening:
            add_observer(_observe)
            _listening = True


def _stop_listening() -> None:
    # Called by the first event after the last policy is gone. Its finalizer must not: a lock may be held where it runs.
    global _listening
    with _lock:
        if _listening and not _alive:
            remove_observer(_observe)
            _listening = False


def _policy_of_thread() -> Policy | None:
    return get_in_thread(_THREAD_STATE)


carry(_policy_of_thread, _in_force)


def _observe(event: CommEvent) -> None:
    if not _alive:
        _stop_listening()
        return
    if _judging.busy or origin.describe is _describe_asked:
        return
    operation = now()
    if operation is not None:
        policy = _policy_of_thread()
        if policy is not None:
            policy.judge(event, _call_of(operation), backward=False)
        return
    node = current_node()
    if node is None or not hasattr(node, "origin"):
        return  # not an operation on DTensors, but for example fully_shard
    cause = node.origin
    if isinstance(cause, _Cause):
        cause.policy.judge(event, cause.call, backward=True)
    elif cause is None:
        policy = _policy_of_thread()
        if policy is not None:
            policy.judge(event, _UNKNOWN_CALL, backward=True)


# ------------------------------------------------------------------ who called


def _call_of(operation: Running) -> _Call:
    """The operation, with the first line of the call stack that is not in torch or terrazzo."""
    file, line, modules = "<unknown>", 0, []
    frame = operation.caller
    while frame is not None:
        if not line and not is_inside(frame):
            file, line = frame.f_code.co_filename, frame.f_lineno
        module = _runs_forward_of(frame)
        if module is not None:
            modules.append(type(module).__name__)
        frame = frame.f_back
    return _Call(operation.name, file, line, tuple(reversed(modules)))


def _runs_forward_of(frame: FrameType) -> nn.Module | None:
    code = frame.f_code
    if not code.co_argcount:
        return None
    module = frame.f_locals.get(code.co_varnames[0])
    if isinstance(module, nn.Module) and getattr(inspect.unwrap(module.forward), "__code__", None) is code:
        return module
    return None


__all__ = ["Action", "CommPolicyWarning", "Policy", "asked_for", "communication_policy", "describing"]
