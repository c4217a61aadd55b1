"""Record which modules a rank ran and which collectives it started, to detect ranks that ran different ones.

Ranks that start different collectives either wait for each other until the process group's time limit; or, worse, the
collectives match by accident and mix up parameters, or differ in size, and gloo ends the process.

To detect mixed-up parameters, ranks compare their records: they reduce a checksum after every forward and every
backward, 16 bytes, without waiting.

On CPU these have a process group of their own, and the result is checked before the next backward, optimizer's step or
forward, that is before parameters could be mixed up. (The first forward and backward gather by messages with tags,
which cannot be mixed up.) On accelerators the checksum follows the collectives that it is about, on their stream, and
its result is copied to the host. The host looks whether it has come whenever it looks on CPU, and before a state dict;
it only waits for those of the forward and backward before the last ones. So an error may come after an optimizer's step
with wrong gradients, but before they are saved.

The ranks also ask each other which shards have been written since they were gathered, so that all gather them again or
none does. On accelerators a rank that has not written any does not wait for the answer. So there a write on some ranks
only is found like a difference: nothing is gathered, and all ranks raise.

If a collective fails, each rank writes its position to the default store and reads those of the others. The error
message lists them.
"""

from __future__ import annotations

import uuid
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from threading import Lock
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo._meant import by_text, named
from terrazzo._torch.autograd import functorch_active, outside_transforms
from terrazzo._torch.groups import default_store
from terrazzo.comm import wire
from terrazzo.comm.axis import Axis, axis_beside
from terrazzo.comm.in_process import is_rank_here
from terrazzo.comm.numbering import next_number
from terrazzo.comm.reports import exchange_reports
from terrazzo.comm.simulated import is_simulated
from terrazzo.comm.waits import Waiting, lost
from terrazzo.comm.whereabouts import counted
from terrazzo.errors import CommError, DivergedRanksError

_ANSWER_SECONDS = 5.0  # how long to wait for the other ranks' answers after a failure
_SHOWN = 3  # events of a rank that a message shows
_KEPT = 4096  # events in the record
_MOST_OPEN = 4  # comparisons whose result the host has not seen: those of two forwards and backwards


class Named(Protocol):
    """What an event is about: a unit of `fully_shard`."""

    @property
    def name(self) -> str:
        """The name for messages."""

    @property
    def code(self) -> int:
        """A number that tells it from others and is equal on all ranks."""


class Streams(Protocol):
    """The streams of an accelerator."""

    def mark_of(self, stream: Any = None) -> Any:
        """An event after everything that is queued on a stream; by default on the current one."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue on this stream, which is given, instead of the current one."""


class Written(IntEnum):
    """Whether shards have been written since they were gathered."""

    NO = 0
    HERE = 1  # and perhaps on other ranks
    EVERYWHERE = 2  # on all ranks, as by an optimizer


@dataclass(frozen=True, slots=True)
class _Comparing:
    """A comparison that has been started."""

    work: Any  # what to wait for: a collective, or an event
    both: Tensor  # the largest numbers of all ranks, and the smallest, negated
    names: list[str]  # the events of this rank's checksum, or the units that it has written
    number: str  # among those of the model; equal on the ranks that compare with each other
    asks: bool = False  # whether the numbers are not a checksum, but what has been written

    def values(self) -> tuple[list[int], list[int]]:
        """The largest numbers, and the smallest."""
        both = self.both.tolist()
        n = len(both) // 2
        return both[:n], [-value for value in both[n:]]


_CODES = {"run": 1, "unshard": 2, "reduce": 3, "all-reduce": 0}


class Watch:
    """The record of one model's modules and collectives on this rank."""

    def __init__(
        self, axis: Axis | None, ranks: Sequence[int], streams: Streams | None, stream: Any, device: torch.device
    ) -> None:
        """The ranks of `axis` compare what they ran; all `ranks` say where they were when a collective fails.

        Args:
            axis: The ranks that must run the same.
            ranks: All ranks of the model.
            streams: Those of an accelerator; None: the host computes, and waits for results.
            stream: That of the collectives, by its name among these.
            device: The device of the collectives.
        """
        others = axis is not None and axis.group is not None and not is_simulated(axis.group)
        self._axis: Axis | None = axis if others else None
        self._ranks = list(ranks)
        self._name = self._failure = ""
        if len(self._ranks) > 1:
            among = f"watch among {named(self._ranks)}"
            self._name = f"{among}/{next_number(among)}"  # equal on all ranks of the model
        self.streams, self._stream, self._device = streams, stream, device
        self._beside = axis_beside(self._axis) if streams is None and self._axis is not None else None
        self._on_device: Tensor | None = None  # memory for the comparisons that follow collectives
        self._log: deque[tuple[str, Named]] = deque(maxlen=_KEPT)
        self._count = 0
        self._in_part = 0  # events since the last comparison
        self._checksum = 0  # of the events since the last comparison
        self._comparing: deque[_Comparing] = deque()
        self._settling = Lock()  # optimizers of other models look at the comparisons, too, perhaps in other threads
        self._compared = 0  # comparisons that have been started
        self._asked = 0  # questions on the device
        self._asks = False  # the other ranks what they have written
        self.forwards = 0  # so far
        counted.add(self)

    @property
    def has_agreed(self) -> bool:
        """Whether there were comparisons before the last one, and none has found a difference.

        This changes at the same event on all ranks, whenever each of them looks at results.
        """
        return self._axis is None or self._compared > 1

    def follow(self, streams: Streams | None) -> None:
        """Compare on these streams from now on."""
        self.streams = streams

    def note(self, unit: Named, what: str) -> None:
        """Record that this rank runs a module, or starts a collective."""
        if len(self._ranks) < 2:
            return
        if self._failure:
            self._go_on()
        self._count += 1
        self._in_part += 1
        self._log.append((what, unit))
        self._checksum = (self._checksum * 1000003 + unit.code * 4 + _CODES[what]) & 0x7FFFFFFFFFFFFFFF

    def compare(self, *, always: bool = True, settings: Sequence[str] = ()) -> None:
        """Start to compare the events since the last comparison, if there are any, or `always`.

        Called at the end of a forward or backward. `settings` are compared too.
        """
        axis = self._axis
        if axis is None or not (always or self._in_part):
            return
        if self.streams is None:
            self.settle()
        checksum, recent = self._checksum, list(self._log)[-self._in_part :] if self._in_part else []
        self._checksum = self._in_part = 0
        names = [f"{what} {unit.name}" for what, unit in recent] + [f"has {each}" for each in settings]
        if settings:
            checksum ^= zlib.crc32("\n".join(settings).encode())
        if self.streams is None:
            assert self._beside is not None
            both = torch.tensor([checksum, -checksum], device="cpu")
            work = wire.all_reduce(self._beside, both, "max")
        else:
            with torch.inference_mode(False), outside_transforms() if functorch_active() else nullcontext():
                work, both = self._reduce_on_device(axis, self.streams, [checksum])
        self._compared += 1
        self._comparing.append(_Comparing(work, both, names, str(self._compared)))
        if self.streams is not None:
            self.settle()  # after that, so that no rank waits on the device for one that raises here

    @torch.no_grad()
    def _reduce_on_device(self, axis: Axis, streams: Streams, values: Sequence[int]) -> tuple[Any, Tensor]:
        """Start to compare after everything that is queued on the stream of the collectives; returns an event, and the
        memory on the host that has the result after it."""
        now = streams.mark_of()
        with streams.on(self._stream) as stream:
            n, memory = len(values), self._on_device
            if memory is None or memory.numel() < 2 * n:
                stream.wait_event(now)  # the memory may be that of gradients that were freed
                memory = self._on_device = torch.empty(2 * n, dtype=torch.int64, device=self._device)
            both = memory[: 2 * n].zero_()
            for i, value in enumerate(values):
                if value:
                    both[i].fill_(value)
            torch.neg(both[:n], out=both[n:])
            work = wire.all_reduce(axis, both, "max")
            if work is not None:
                work.wait()
            found = both.to("cpu", non_blocking=True, copy=True)
            return streams.mark_of(stream), found

    def settle(self, *, wait: bool = False) -> None:
        """Raise if ranks differ, as far as comparisons have results. On CPU, and with `wait`, wait for all of them."""
        with self._settling:
            while self._comparing:
                comparing = self._comparing[0]
                checksums = sum(not each.asks for each in self._comparing)
                may_wait = self.streams is None or wait or checksums > _MOST_OPEN
                if not may_wait and not comparing.work.query():
                    return
                self._comparing.popleft()
                self._check(comparing)

    def _check(self, comparing: _Comparing) -> None:
        """Wait for a comparison, and raise if ranks differ."""
        assert self._axis is not None
        try:
            with Waiting("comparing what ranks ran", self._axis.ranks):
                if self.streams is None:
                    comparing.work.wait()
                else:
                    comparing.work.synchronize()
        except RuntimeError as error:
            raise self.explain(CommError(str(error))) from error
        largest, smallest = comparing.values()
        if comparing.asks:
            differ = any(most and not least for most, least in zip(largest, smallest, strict=True))
        else:
            differ = largest != smallest
        if differ:
            self._comparing.clear()
            ranks = self._axis.ranks
            name = f"{self._name}/{named(ranks)}/{comparing.number}"
            found = _reports(name, ranks, msgspec.json.encode(comparing.names).decode())
            everyone = [None if each is None else msgspec.json.decode(each, type=list[str]) for _, each in found]
            raise DivergedRanksError((_written_by_some if comparing.asks else _first_difference)(everyone, ranks))

    def agree(self, written: Sequence[Written], units: Sequence[Named]) -> list[bool]:
        """Which of these units have been written, as all of the ranks that shard decide together.

        A shard may be written on the rank alone that holds some row.
        """
        if self._beside is None:
            return self._agree_on_device(written, units)
        found = torch.tensor(written, dtype=torch.uint8, device="cpu")
        self._asks = True
        try:
            work = wire.all_reduce(self._beside, found, "max")
            if work is not None:
                with Waiting("beginning a forward, or unshard()", self._beside.ranks):
                    work.wait()
        except RuntimeError as error:
            raise self.explain(CommError(str(error))) from error
        finally:
            self._asks = False
        return [bool(flag) for flag in found.tolist()]

    def _agree_on_device(self, written: Sequence[Written], units: Sequence[Named]) -> list[bool]:
        """The same without waiting, unless this rank has written what the others may not have."""
        if self._axis is None or self.streams is None:
            return [bool(each) for each in written]
        with torch.inference_mode(False), outside_transforms() if functorch_active() else nullcontext():
            work, both = self._reduce_on_device(self._axis, self.streams, written)
        self._asked += 1
        names = [unit.name for unit, each in zip(units, written, strict=True) if each]
        asking = _Comparing(work, both, names, f"question {self._asked}", asks=True)
        self._comparing.append(asking)
        if Written.HERE not in written:
            return [bool(each) for each in written]
        try:
            with Waiting("beginning a forward, or unshard()", self._axis.ranks):
                work.synchronize()
        except RuntimeError as error:
            raise self.explain(CommError(str(error))) from error
        # What some have not written is not gathered again. All go on until they have seen that, and raise.
        _, smallest = asking.values()
        return [each is Written.EVERYWHERE or bool(least) for each, least in zip(written, smallest, strict=True)]

    def forget(self) -> None:
        """Drop the events since the last comparison, after a forward or backward failed on this rank."""
        self._comparing.clear()
        self._checksum = self._in_part = 0

    # ------------------------------------------------------------------ collectives that failed

    def explain(self, error: CommError) -> CommError:
        """The error for a failed collective, with the position of every rank."""
        if len(self._ranks) < 2 or isinstance(error, DivergedRanksError) or is_rank_here():
            return error  # ranks that are threads know where the others are
        here = dist.get_rank()
        lines, gone = self._positions()
        what = (
            "All ranks must run the same modules equally often: give them equally many batches, and look for the first "
            "error among the ranks"
            if gone
            else "All ranks must run the same modules in the same order; a usual cause is control flow that depends on "
            "data or rank"
        )
        return DivergedRanksError(
            f"rank {here}: a collective of fully_shard failed.\n  "
            + "\n  ".join(by_text(lines.items()))
            + f"\n{what}. The first error was: {error.__cause__ or error}"
        )

    def _positions(self) -> tuple[dict[int, str], bool]:
        """Where all ranks are; and whether some have ended, or died."""
        last = [f"{what} {unit.name}" for what, unit in list(self._log)[-_SHOWN:]]
        if self._asks:
            last.append("begin a forward, or unshard()")
        own = f"at event {self._count}, after {self.progress() or 'no forward'}: {', then '.join(last)}"
        try:
            store, failure = default_store(), uuid.uuid4().hex
            # The first rank names the failure. The name is dropped by the first rank that goes on: see `_go_on`.
            key = f"{self._name}/failure"
            known = store.compare_set(key, self._failure, failure) or store.compare_set(key, "", failure)
            self._failure = known.decode()
        except RuntimeError:
            pass  # the rank that hosts the store has ended: `exchange_reports` has only this rank's report
        found = _reports(f"{self._name}/{self._failure}", self._ranks, own)
        gone = lost([rank for rank, text in found if text is None])
        unknown = "not in a collective of this model: died, hangs, or runs other code"
        return {rank: text or gone.get(rank, unknown) for rank, text in found}, bool(gone)

    def progress(self) -> str:
        """What this rank has done, in words; empty: nothing yet."""
        return "" if not self.forwards else f"{self.forwards} forward{'s' if self.forwards > 1 else ''}"

    def _go_on(self) -> None:
        """The positions of the last failure are no longer those of the ranks: the next one has another name."""
        failure, self._failure = self._failure, ""
        with suppress(RuntimeError):
            default_store().compare_set(f"{self._name}/failure", failure, "")


def _reports(name: str, ranks: Sequence[int], report: str) -> list[tuple[int, str | None]]:
    """What each rank reports under this name; None for ranks that do not in time."""
    index = ranks.index(dist.get_rank())

    def are_lost(silent: Collection[int]) -> bool:
        return len(lost([ranks[each] for each in silent])) == len(silent)

    store, among = default_store(), f"terrazzo/{name}"
    found = exchange_reports(store, among, index, len(ranks), report, _ANSWER_SECONDS, are_lost)
    return [(rank, found.get(each)) for each, rank in enumerate(ranks)]


def _first_difference(everyone: list[list[str] | None], ranks: tuple[int, ...]) -> str:
    """The message for the first event at which the ranks differ."""
    for i in range(max(len(names) for names in everyone if names is not None)):
        at = [_event(names, i) for names in everyone]
        if len({each for each in at if each != _NO_ANSWER}) > 1:
            which = ", ".join(f"rank {rank} {what}" for rank, what in zip(ranks, at, strict=True))
            return (
                f"ranks ran different modules: event {i + 1} of a forward or backward was {which}. Parameters and "
                "gradients may be mixed up. All ranks must run the same modules in the same order, with the same "
                "settings (requires_grad, set_requires_gradient_sync, set_reshard_after_forward). If each rank has "
                "data for some modules only, run all of them on every rank, or call fully_shard on the module that "
                "contains them instead of on each"
            )
    return (
        "ranks ran different modules in this step, or called fully_shard on different modules before. All ranks must "
        "run the same modules in the same order, and shard the same ones"
    )


def _written_by_some(everyone: list[list[str] | None], ranks: tuple[int, ...]) -> str:
    """The message for shards that some ranks have written, and others have not."""
    known = {rank: names for rank, names in zip(ranks, everyone, strict=True) if names is not None}
    names = dict.fromkeys(name for each in known.values() for name in each)
    # None if the ranks that have answered have written the same.
    unit = next((name for name in names if any(name not in each for each in known.values())), None)
    wrote = [rank for rank, each in known.items() if unit in each]
    which = "some ranks" if unit is None else f"rank {wrote[0]}" if len(wrote) == 1 else f"the ranks {wrote}"
    what = repr(unit) if unit is not None else f"one of {list(names)}" if names else "a module"
    return (
        f"{which} wrote to the sharded parameters of {what} after they had been gathered, and other ranks did not, "
        "so what was computed since then used the former values. On accelerators ranks do not wait for each other to "
        "find that out: write on all ranks, or call reshard() of the module on all ranks after the write"
    )


_NO_ANSWER = "has not answered"


def _event(names: list[str] | None, i: int) -> str:
    if names is None:
        return _NO_ANSWER
    return names[i] if i < len(names) else "nothing more"
