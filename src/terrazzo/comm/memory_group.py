"""Process groups of ranks that are threads: collectives, messages and bytes through memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from terrazzo._meant import named
from terrazzo._torch.groups import group_name
from terrazzo.comm.in_process import BACKEND, Meeting, Rank, rank_here
from terrazzo.errors import CommError, DivergedRanksError


class _Started(Work):
    """A collective that this rank has started."""

    def __init__(
        self,
        rank: Rank,
        can_go_on: Callable[[], bool],
        where: Callable[[], str],
        at_end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._rank, self._can_go_on, self._where, self._at_end = rank, can_go_on, where, at_end

    def wait(self, timeout: Any = None) -> bool:
        self._rank.wait_until(self._can_go_on, self._where)
        if self._at_end is not None:
            at_end, self._at_end = self._at_end, None
            at_end()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._can_go_on():
            self._rank.let_others_run()
        return self._can_go_on() and self.wait()

    def is_success(self) -> bool:
        return self._can_go_on()


def _without(kind: str, ranks: Sequence[int], meeting: Meeting) -> str:
    missing = [rank for position, rank in enumerate(ranks) if position not in meeting.given]
    return f"in {kind}, without {named(missing)}" if missing else f"in {kind}, which failed on another rank"


def _given_by(ranks: Sequence[int], meeting: Meeting) -> str:
    return named(sorted(ranks[position] for position in meeting.given))


def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    return _Group(rank, size)


Give = Callable[[list[Any]], None]


_Base: Any = ProcessGroup  # whose stubs differ between versions


class _Group(_Base):
    """A group of these ranks, seen from one of them."""

    supports_coalescing = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._here = rank_here("a new group")
        self._begun = Counter[Any]()

    @property
    def group_name(self) -> str:
        return group_name(self)

    @property
    def _device_types(self) -> list[torch.device]:
        found = torch.accelerator.current_accelerator(check_available=True)
        return [torch.device("cpu"), *([] if found is None else [torch.device(found.type)])]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def name(self) -> str:
        return BACKEND

    getBackendName = name

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _start(self, kind: str, given: Any, finish: Give) -> Work:
        """Give something to the group's next collective; the last rank to do so runs `finish` with what all gave."""
        name = self.group_name
        here = rank_here(name)
        era = here.ranks.era
        key = (era, name, self._begun[era])
        self._begun[era] += 1
        meeting = here.ranks.meetings.setdefault(key, Meeting(kind))
        if meeting.kind != kind:
            others = _given_by(dist.get_process_group_ranks(self), meeting)
            raise DivergedRanksError(
                f"rank {here.number} calls {kind}, where {others} called {meeting.kind}, as collective {key[-1]} of "
                f"group {name!r}: all ranks of a group must call the same collectives, in the same order, with tensors "
                "that fit"
            )
        meeting.given[self.rank()] = given
        if len(meeting.given) == self.size():
            del here.ranks.meetings[key]
            with torch.no_grad():
                finish([meeting.given[position] for position in range(self.size())])
            meeting.is_over = True

        ranks = dist.get_process_group_ranks(self)
        return _Started(here, lambda: meeting.is_over, lambda: _without(kind, ranks, meeting))

    # -------------------------------------------------------------- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = ReduceOp.SUM if opts is None else opts.reduceOp

        def finish(given: list[list[Tensor]]) -> None:
            for parts in zip(*given, strict=True):
                result = _reduced(parts, op)
                for part in parts:
                    _write(part, result)

        return self._start(f"all_reduce({_op_name(op)}) of {_shown(tensors)}", tensors, finish)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        def finish(given: list[list[Tensor]]) -> None:
            for parts in zip(*given, strict=True):
                _write(parts[opts.rootRank], _reduced(parts, opts.reduceOp))

        kind = f"reduce({_op_name(opts.reduceOp)}) of {_shown(tensors)} to position {opts.rootRank}"
        return self._start(kind, tensors, finish)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        def finish(given: list[list[Tensor]]) -> None:
            for parts in zip(*given, strict=True):
                for part in parts:
                    if part is not parts[opts.rootRank]:
                        _write(part, parts[opts.rootRank])

        return self._start(f"broadcast of {_shown(tensors)} from position {opts.rootRank}", tensors, finish)

    def all_gather_single(self, out: Tensor, part: Tensor, opts: Any = None) -> Work:
        def finish(given: list[tuple[Tensor, Tensor]]) -> None:
            whole = torch.cat([part.detach().reshape(-1) for _, part in given])
            for out, _ in given:
                _write(out, whole)

        return self._start(f"all_gather of {_shown([part])}", (out, part), finish)

    _allgather_base = all_gather_single

    def allgather(self, outs: list[list[Tensor]], parts: list[Tensor], opts: Any = None) -> Work:
        def finish(given: list[tuple[list[Tensor], Tensor]]) -> None:
            for outs, _ in given:
                for out, (_, part) in zip(outs, given, strict=True):
                    _write(out, part)

        return self._start("all_gather of a list", (outs[0], parts[0]), finish)

    def all_gather_single_coalesced(self, outs: list[Tensor], parts: list[Tensor], opts: Any = None) -> Work:
        return [self.all_gather_single(out, part) for out, part in zip(outs, parts, strict=True)][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, out: Tensor, buffer: Tensor, opts: Any) -> Work:
        def finish(given: list[tuple[Tensor, Tensor]]) -> None:
            result = _reduced([buffer for _, buffer in given], opts.reduceOp).reshape(-1)
            for (out, _), part in zip(given, result.chunk(len(given)), strict=True):
                _write(out, part)

        return self._start(f"reduce_scatter({_op_name(opts.reduceOp)}) of {_shown([buffer])}", (out, buffer), finish)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any) -> Work:
        def finish(given: list[tuple[Tensor, list[Tensor]]]) -> None:
            for position, (out, _) in enumerate(given):
                _write(out, _reduced([parts[position] for _, parts in given], opts.reduceOp))

        return self._start(f"reduce_scatter({_op_name(opts.reduceOp)}) of a list", (outs[0], parts[0]), finish)

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], buffers: list[Tensor], opts: Any) -> Work:
        return [self.reduce_scatter_single(out, buffer, opts) for out, buffer in zip(outs, buffers, strict=True)][-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, out: Tensor, buffer: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> Work:
        n = self.size()

        def finish(given: list[tuple[Tensor, Tensor, list[int], list[int]]]) -> None:
            sent = [list(buffer.detach().split(sizes)) for _, buffer, _, sizes in given]
            for position, (out, _, out_sizes, _) in enumerate(given):
                for source, part in enumerate(out.detach().split(out_sizes)):
                    _write(part, sent[source][position])

        given = (out, buffer, out_sizes or [out.shape[0] // n] * n, sizes or [buffer.shape[0] // n] * n)
        return self._start(f"all_to_all of {str(buffer.dtype).removeprefix('torch.')}", given, finish)

    alltoall_base = all_to_all_single

    def alltoall(self, outs: list[Tensor], parts: list[Tensor], opts: Any = None) -> Work:
        def finish(given: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for position, (outs, _) in enumerate(given):
                for out, (_, parts) in zip(outs, given, strict=True):
                    _write(out, parts[position])

        return self._start("all_to_all of a list", (outs, parts), finish)

    def scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any) -> Work:
        def finish(given: list[tuple[Tensor, list[list[Tensor]]]]) -> None:
            for (out, _), part in zip(given, given[opts.rootRank][1][0], strict=True):
                _write(out, part)

        return self._start(f"scatter from position {opts.rootRank}", (outs[0], parts), finish)

    def gather(self, outs: list[list[Tensor]], parts: list[Tensor], opts: Any) -> Work:
        def finish(given: list[tuple[list[list[Tensor]], Tensor]]) -> None:
            for out, (_, part) in zip(given[opts.rootRank][0][0], given, strict=True):
                _write(out, part)

        return self._start(f"gather to position {opts.rootRank}", (outs, parts[0]), finish)

    def barrier(self, opts: Any = None) -> Work:
        return self._start("barrier", None, lambda given: None)

    # -------------------------------------------------------------- messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        here = rank_here(self.group_name)
        key = self._next("send", self.rank(), to, tag)
        here.ranks.messages[key] = tensors[0].detach().clone()
        return _Started(here, lambda: True, str)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        here = rank_here(self.group_name)
        key = self._next("receive", source, self.rank(), tag)
        messages = here.ranks.messages

        def take() -> None:
            _write(tensors[0], messages.pop(key))

        where = f"in receive of {_shown(tensors)} from rank {dist.get_process_group_ranks(self)[source]}"
        return _Started(here, lambda: key in messages, lambda: where, take)

    def _next(self, side: str, source: int, to: int, tag: int) -> tuple[Any, ...]:
        """The key of the next message on its way: the first one received is the first one sent."""
        key = (rank_here().ranks.era, self.group_name, source, to, tag)
        self._begun[side, *key] += 1
        return (*key, self._begun[side, *key])


def is_in_process(group: ProcessGroup) -> bool:
    """Whether the ranks of the group are threads of this process."""
    return isinstance(group, _Group)


def _write(out: Tensor, value: Tensor) -> None:
    """Overwrite a tensor, without a trace in autograd's graph."""
    if out.numel() != value.numel():
        raise CommError(
            f"a rank expects {out.numel()} elements where another sends {value.numel()}: the tensors of the ranks do "
            "not have the sizes that this collective needs. Print their shapes on each rank; distribute_tensor takes "
            "the same shape on all ranks, and from_local of uneven parts needs shape="
        )
    out.detach().copy_(value.detach().reshape(out.shape))


_REDUCTIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "SUM": lambda stack: stack.sum(0, dtype=stack.dtype),
    "AVG": lambda stack: stack.mean(0),
    "PRODUCT": lambda stack: stack.prod(0, dtype=stack.dtype),
    "MIN": lambda stack: stack.amin(0),
    "MAX": lambda stack: stack.amax(0),
    "BAND": lambda stack: reduce(torch.bitwise_and, stack.unbind()),
    "BOR": lambda stack: reduce(torch.bitwise_or, stack.unbind()),
    "BXOR": lambda stack: reduce(torch.bitwise_xor, stack.unbind()),
}


def _op_name(op: Any) -> str:
    return next((name for name in _REDUCTIONS if op == getattr(ReduceOp, name)), str(op))


def _reduced(parts: Sequence[Tensor], op: Any) -> Tensor:
    found = _REDUCTIONS.get(_op_name(op))
    if found is None:
        raise CommError(f"ranks in one process reduce with {', '.join(_REDUCTIONS)}, not with {op}")
    return found(torch.stack([part.detach().reshape(parts[0].shape) for part in parts]))


def _shown(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}" for x in tensors)


class MemoryLink:
    """Takes the place of a `Link` between these ranks: bytes through memory."""

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], name: str, generation: int = 0) -> None:
        self._group, self._ranks, self._name, self._generation = group, ranks, name, generation
        self._group_name, self._index, self._all = group.group_name, group.rank(), rank_here(name).ranks
        self._begun = Counter[int]()
        self.broken: str | None = None

    def close(self) -> None:
        """Nothing to close."""

    def connected(self, timeout: timedelta) -> MemoryLink:
        """This object, or a new one if a rank gave this one up."""
        if self._why_abandoned() is None:
            return self
        return MemoryLink(self._group, self._ranks, self._name, self._generation + 1).connected(timeout)

    living = connected

    def abandon(self, why: str) -> None:
        """Have the ranks that wait raise an error that says why."""
        meeting = self._all.meetings.setdefault(self._key("abandoned"), Meeting("abandoned"))
        meeting.given.setdefault(self._index, why)

    def _key(self, number: int | str) -> tuple[Any, ...]:
        return (self._all.era, self._group_name, self._name, self._generation, number)

    def _why_abandoned(self) -> str | None:
        meeting = self._all.meetings.get(self._key("abandoned"))
        if meeting is None:
            return None
        reasons = [f"rank {self._ranks[index]} gave up ({why})" for index, why in meeting.given.items()]
        return f"ranks {list(self._ranks)} do not go on together: {'; '.join(reasons)}"

    def _meet(self, kind: str, given: Any, wait_for: Sequence[int]) -> Mapping[int, Any]:
        """What ranks gave to this operation; it waits for that of the positions `wait_for`."""
        here = rank_here()
        key = self._key(self._begun[here.ranks.era])
        self._begun[here.ranks.era] += 1
        meeting = here.ranks.meetings.setdefault(key, Meeting(kind))
        if meeting.kind != kind:
            raise DivergedRanksError(
                f"rank {here.number} calls {kind} of bytes, where {_given_by(self._ranks, meeting)} called "
                f"{meeting.kind}"
            )
        meeting.given[self._index] = given
        if len(meeting.given) == len(self._ranks):
            here.ranks.meetings.pop(key, None)

        def can_go_on() -> bool:
            return all(index in meeting.given for index in wait_for) or self._why_abandoned() is not None

        here.wait_until(can_go_on, lambda: _without(f"{kind} of bytes", self._ranks, meeting))
        if not all(index in meeting.given for index in wait_for):
            raise CommError(str(self._why_abandoned()))
        return meeting.given

    def all_gather(self, data: bytes, timeout: timedelta) -> list[bytes]:
        """The data of every rank."""
        everyone = range(len(self._ranks))
        found = self._meet("all_gather", data, everyone)
        return [found[index] for index in everyone]

    def broadcast(self, data: bytes | None, src: int, timeout: timedelta) -> bytes:
        """The data of `src`."""
        found: bytes = self._meet("broadcast", data, [src])[src]
        return found

    def gather(self, data: bytes, dst: int, timeout: timedelta) -> list[bytes] | None:
        """The data of every rank on `dst`."""
        everyone = range(len(self._ranks)) if self._index == dst else ()
        found = self._meet("gather", data, everyone)
        return [found[index] for index in everyone] if everyone else None

    def scatter(self, parts: Sequence[bytes] | None, src: int, timeout: timedelta) -> bytes:
        """The part that `src` has for this rank."""
        found: bytes = self._meet("scatter", parts, [src])[src][self._index]
        return found
