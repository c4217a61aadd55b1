"""`CheckpointManager`: saves the steps that a policy wants, keeps the checkpoints that another wants, finds them again.

A save, on all ranks:
    1. the policy is asked; all ranks have the same answer (`saving`)
    2. ranks agree on the step, and hear whether the save before has failed anywhere
    3. the checkpoint is saved and committed, in the background
and then on the first rank alone, still in the background:
    4. `latest` moves to it
    5. what is to be copied is copied, and what no policy keeps is removed, unless somebody reads it (`housekeeping`)

With a local folder there are two places (`tiers`): steps are saved in the folders of the hosts (`hosts`), and some are
copied to the root (`copying`).

At every moment the newest whole checkpoint is there, and `latest` names a whole one.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final, Self

import msgspec
import torch.distributed as dist

from terrazzo.checkpoint.manager.committing import Unmade, do_together, reduce_over, save_named
from terrazzo.checkpoint.manager.housekeeping import Housekeeping
from terrazzo.checkpoint.manager.keeping import Best, KeepPolicy
from terrazzo.checkpoint.manager.records import VALUE, Record, checked_metrics, checked_step
from terrazzo.checkpoint.manager.removing import is_held, take_to_read
from terrazzo.checkpoint.manager.restoring import Loading
from terrazzo.checkpoint.manager.saving import Moment, SaveEvery, SavePolicy, save_policies
from terrazzo.checkpoint.manager.tiers import Which, choose, in_order_of_merit, open_tiers
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.native.names import name_of_step
from terrazzo.checkpoint.planner import LoadPlanner, SavePlanner
from terrazzo.checkpoint.run.coordination import find_place
from terrazzo.checkpoint.state_dict_loader import load
from terrazzo.checkpoint.stores import Lease, LocalStore, Place, Store
from terrazzo.comm.control import time_limit_of
from terrazzo.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointManagerError,
    DivergentValueError,
)

LOGGER: Final = logging.getLogger("terrazzo.checkpoint")

_PATIENCE: Final = 5.0  # seconds after which the first rank, when it is busy, lets the others hear of it


class CheckpointManager:
    """The checkpoints of a run, in a folder, behind a URL or in a store: which are made, which are kept.

    All ranks make one with the same arguments, and call its methods together, but for `steps`, `records`,
    `latest_step`, `best_step` and `hold`.  Step 100 is saved as `global_step100`, and `latest` names the last one, as
    the engine does it.

    Args:
        root: The folder, URL or store.
        save: Which steps to save: a policy, or n for `SaveEvery(n)`; None: each for which `save` is called.
        keep: Which checkpoints to keep: a policy, or n for `KeepLast(n)`; None: all.
        best: Which is best: a metric whose smallest value is best, or a `Best`.  That one is kept.
        async_op: Save in the background.
        reuse: Do not write again what has not changed since the last checkpoint: see `base` of `save`.
        local: A folder of each host, where steps are saved first; `root` gets copies, in the background.
        copy_every: Of the checkpoints saved locally every so many is copied, and at the end the newest.
        keep_local: Which local checkpoints to keep, besides those that are still to be copied: as `keep`.
        replicas: On how many other hosts each local file is as well: that many may be lost.
        process_group: The ranks that save together; default: all.
        timeout: How long a rank waits for the slowest one; default: as long as the process group's collectives do.

    >>> import tempfile, torch
    >>> with CheckpointManager(tempfile.mkdtemp(), save=10, keep=2, best="loss") as manager:
    ...     for step in range(1, 51):
    ...         saved = manager.save(step, {"w": torch.full((2,), float(step))}, {"loss": abs(step - 20)})
    >>> manager.steps(), manager.latest_step(), manager.best_step()
    ([20, 40, 50], 50, 20)
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        save: SavePolicy | int | None = None,
        keep: KeepPolicy | int | None = None,
        best: Best | str | None = None,
        async_op: bool = True,
        reuse: bool = False,
        local: str | os.PathLike[str] | LocalStore | None = None,
        copy_every: int = 1,
        keep_local: KeepPolicy | int | None = 2,
        replicas: int = 1,
        process_group: Any = None,
        timeout: timedelta | None = None,
    ) -> None:
        policy = SaveEvery(save) if isinstance(save, int) else save
        self._save_policies = () if policy is None else save_policies(policy)
        self._best = Best(best) if isinstance(best, str) else best
        self._async = async_op
        self._reuse = reuse
        self._copy_every = int(copy_every)
        if self._copy_every < 1:
            raise CheckpointManagerError(f"copy_every={copy_every}: pass one or more; each so many-th is copied")
        self._group = process_group
        self._timeout = timeout
        self._since = time.monotonic()
        self._went_back = False  # steps that are there may be saved again
        self._trains = False  # who only looks or holds copies nothing
        self._records: list[Record] = []
        self._pending: Future[None] | None = None  # the save under way
        self._tiers = open_tiers(
            Place(root), local, keep, keep_local, self._best, replicas, process_group=process_group, timeout=timeout
        )
        self._house: Housekeeping | None = Housekeeping(self._tiers)
        self.reload()
        self._last = self._settled = self._records[-1].step if self._records else None

    @property
    def root(self) -> str:
        """Where the checkpoints are."""
        return str(self._tiers.root.root)

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        state: STATE_DICT_TYPE | Callable[[], STATE_DICT_TYPE],
        metrics: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
        planner: SavePlanner | None = None,
    ) -> bool:
        """Save a step, if the policy wants it or with `force`; returns whether it does, the same on all ranks.

        To be called at every step.  In the background, an error comes out of the next call that saves, or of `wait`.
        The metrics are those of the first rank.  A step that has just been saved is not saved again.  One that is there
        from another time is replaced by a run that went back, with `restore`; else `CheckpointExistsError`.

        Args:
            step: Its number.
            state: What to save, as for `terrazzo.checkpoint.save`; or a function that makes it, which is called if the
                step is saved.
            metrics: Numbers by name, kept with the checkpoint.
            force: Save it whatever the policy says.
            planner: As for `terrazzo.checkpoint.save`.
        """
        self._check_open()
        step = checked_step(step)
        wanted = self._wants(step)
        if not (wanted or force) or step == self._last:
            return False
        record, base = self._begin(step, metrics, state)
        self._since = time.monotonic()
        self._last = step
        place = self._tiers.fast.root
        try:
            saving = save_named(
                place,
                name_of_step(step),
                self._made(state, record),
                planner=planner,
                base=None if base is None else place / name_of_step(base),
                async_op=self._async,
                process_group=self._group,
                timeout=self._timeout,
            )
        except BaseException:
            self._last = self._settled
            raise
        self._pending, self._trains = saving, True
        if self._is_first and self._house is not None:
            self._house.after(step, saving)
        return True

    def _made(self, state: STATE_DICT_TYPE | Callable[[], STATE_DICT_TYPE], record: Record) -> STATE_DICT_TYPE:
        """What to save; what could not be made fails the save, on all ranks."""
        try:
            values = state() if callable(state) else state
            _check_names(values)
            return {**values, VALUE: record.value()}
        except BaseException as error:  # noqa: B036  # the save raises it
            return {"state": Unmade(error)}

    def _wants(self, step: int) -> bool:
        """Whether the policy wants the step: the same on all ranks."""
        if not self._save_policies:
            return True
        moment = Moment(step, self._last, time.monotonic() - self._since)
        # Each is asked, whatever the others say: a stop signal expects that.
        alike = [policy.wants(moment) for policy in self._save_policies if policy.same_everywhere]
        others = [policy for policy in self._save_policies if not policy.same_everywhere]
        if any(alike) or not others:
            return any(alike)

        def ask(_: list[bytes]) -> bytes:
            return b"yes" if any(policy.wants(moment) for policy in others) else b""

        return self._reduce(f"asking whether to save step {step}", lambda: b"", ask) == b"yes"

    def _begin(self, step: int, metrics: Mapping[str, Any] | None, state: object) -> tuple[Record, int | None]:
        """Agree on a save: what to say of it, and on which checkpoint it builds."""

        def ready() -> bytes:
            self._join()
            if not callable(state):
                _check_names(state)
            checked_metrics(metrics)
            return msgspec.msgpack.encode(step)

        def decide(parts: list[bytes]) -> bytes:
            steps = [msgspec.msgpack.decode(part, type=int) for part in parts]
            if len(set(steps)) > 1:
                said = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(steps))
                raise DivergentValueError(
                    f"ranks save different steps ({said}); call save with the same step everywhere"
                )
            records = [record for record, _ in self._tiers.read()]
            fast = self._tiers.fast
            if any(step in tier.catalog.steps() for tier in self._tiers.all) and not self._idle():
                return b""  # it may be being removed, or copied
            if any(record.step == step for record in records):
                self._check_replacing(step)
            fast.being_saved.add(step)
            now = time.time()
            if records and now <= records[-1].saved:  # clocks differ, and the newest has to be the newest
                now = math.nextafter(records[-1].saved, math.inf)
            copied = 0 if self._tiers.local is None else (records[-1].uncopied if records else 0) + 1
            record = Record(step, now, checked_metrics(metrics), copied % self._copy_every)
            bases = fast.catalog.read() if self._reuse else []
            return msgspec.msgpack.encode((record, bases[-1].step if bases else None))

        try:
            told = self._patiently(f"saving step {step} to {self.root}", ready, decide)
        except CheckpointError:
            self._last = self._settled
            raise
        self._settled = self._last
        return msgspec.msgpack.decode(told, type=tuple[Record, int | None])

    def _check_replacing(self, step: int) -> None:
        for tier in self._tiers.all:
            store = tier.catalog.store_of(step)
            if not self._went_back:
                raise CheckpointExistsError(
                    f"{store.location} is there already, and this run has not restored a checkpoint: restore one first "
                    f"to go on from it, or use another folder"
                )
            if is_held(store):
                raise CheckpointExistsError(
                    f"{store.location} would be replaced, but somebody is reading it; save later"
                )

    def _join(self) -> None:
        """Wait for the save under way, and raise what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _idle(self) -> bool:
        """On the first rank: whether nothing follows a save any more; waits less long than the others would."""
        limit, group = self._timeout, self._group
        if limit is None and len(find_place(group, alone=True).ranks) > 1:
            world: Any = dist.group.WORLD
            limit = time_limit_of(world if group is None else group)
        seconds = _PATIENCE if limit is None else min(_PATIENCE, limit.total_seconds() / 4)
        return self._house is None or self._house.idle(seconds)

    # ------------------------------------------------------------------ finding

    def steps(self) -> list[int]:
        """The steps whose checkpoints are whole, as all ranks saw them last: at the start, or in `wait` or `reload`."""
        return sorted(record.step for record in self._records)

    def records(self) -> list[Record]:
        """The same, with their times and metrics, the newest last."""
        return list(self._records)

    def latest_step(self) -> int | None:
        """The newest of `steps`: the one that was saved last."""
        return self._records[-1].step if self._records else None

    def best_step(self) -> int | None:
        """The best of `steps`."""
        found = in_order_of_merit(self._best, self._records)
        return found[0].step if found else None

    def reload(self) -> None:
        """See what is there now."""
        told = self._reduce(f"looking at {self.root}", lambda: b"", lambda _: self._encoded_records())
        self._records = msgspec.msgpack.decode(told, type=list[Record])

    def _encoded_records(self) -> bytes:
        return msgspec.msgpack.encode([record for record, _ in self._tiers.read()])

    # ------------------------------------------------------------------ restoring

    def restore(
        self, step: Which, state: STATE_DICT_TYPE | Callable[[Store], object], *, planner: LoadPlanner | None = None
    ) -> int:
        """Load a step, the "latest" or the "best" into a state dict, in place; returns the step.

        The latest is the newest whole one.  What is being read is not removed.  All ranks load the same, or all raise
        the same error.  An optimizer that has not stepped yet gets the state that it had.  Of a local file that is
        damaged another host's copy is read, or else the copy of the checkpoint in the root, with a warning.

        Args:
            step: Which.
            state: As for `terrazzo.checkpoint.load`; or a function that is given the checkpoint's store, and loads; it
                is called again with another store where the first one's files are damaged.
            planner: As for `terrazzo.checkpoint.load`.
        """
        self._check_open()
        leases: list[Lease] = []

        def ready() -> bytes:
            self._join()
            return b""

        def take(_: list[bytes]) -> bytes:
            found = self._tiers.read()
            chosen, tier = choose(step, found, self._best, self.root)
            leases.append(take_to_read(tier.catalog, chosen))
            return msgspec.msgpack.encode((chosen, self._tiers.all.index(tier), [record for record, _ in found]))

        try:
            told = self._reduce(f"restoring {step} from {self.root}", ready, take)
            chosen, number, self._records = msgspec.msgpack.decode(told, type=tuple[int, int, list[Record]])
            (record,) = [each for each in self._records if each.step == chosen]
            loading = Loading(self._tiers, record, partial(self._load, state, planner), self._group, self._timeout)
            damaged = loading.load_from(self._tiers.all[number], leases)
        finally:
            for lease in leases:
                lease.release()
        if damaged:
            loading.discard_local()
        self._last = self._settled = chosen
        self._went_back = self._trains = True
        self._since = time.monotonic()
        return chosen

    def _load(
        self, state: STATE_DICT_TYPE | Callable[[Store], object], planner: LoadPlanner | None, store: Store
    ) -> None:
        if callable(state):
            self._together(f"restoring from {store.location}", partial(state, store))
            return
        load(state, store=store, planner=planner, process_group=self._group, timeout=self._timeout, together=True)

    @contextmanager
    def hold(self, step: Which) -> Iterator[Store]:
        """Keep a checkpoint from being removed while this process reads it: the store, for `load` and `Checkpoint`.

        For programs of their own too, such as evaluations; one process is enough, and it waits for nobody.  Where there
        are no locks (object stores) it is renewed for as long as it lasts, and ends by itself if its process dies.

        >>> import tempfile, torch
        >>> from terrazzo.checkpoint import Checkpoint
        >>> with CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     _ = manager.save(1, {"w": torch.ones(2)})
        ...     manager.wait()
        ...     with manager.hold("latest") as store:
        ...         Checkpoint(store)["w"][...]
        tensor([1., 1.])
        """
        chosen, tier = choose(step, self._tiers.read(), self._best, self.root)
        lease = take_to_read(tier.catalog, chosen)
        try:
            yield tier.catalog.store_of(chosen)
        finally:
            lease.release()

    # ------------------------------------------------------------------ the end, and all ranks together

    def wait(self) -> None:
        """Wait until the last save is whole, `latest` names it, what is to be copied is copied, and what is not kept is
        removed; raise its error.  The others wait for the first rank however long that takes."""
        self._finish(newest=False)

    def _finish(self, newest: bool) -> None:
        copying: list[Future[None]] = []

        def ready() -> bytes:
            self._join()
            return b""

        def look(_: list[bytes]) -> bytes:
            if not copying and self._house is not None and self._trains:
                copying.append(self._house.finish(newest))
            if not self._idle():
                return b""
            for future in copying:
                future.result()
            return self._encoded_records()

        try:
            told = self._patiently(f"waiting for the last save to {self.root}", ready, look)
        except CheckpointError:
            self._last = self._settled
            raise
        self._records = msgspec.msgpack.decode(told, type=list[Record])
        self._settled = self._last

    def close(self) -> None:
        """`wait`, copy the newest local checkpoint, and use the manager no more, but for what it knows of them."""
        if self._house is None:
            return
        try:
            self._finish(newest=True)
        finally:
            self._stop()

    def _stop(self) -> None:
        house, self._house = self._house, None
        if house is not None:
            house.close()
        self._tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
            return
        try:  # the others may never answer; what is under way here ends
            self._join()
        except Exception as failed:
            LOGGER.warning("%s: the last save failed too: %s", self.root, failed)
        finally:
            self._stop()

    def _check_open(self) -> None:
        if self._house is None:
            raise CheckpointManagerError(f"the manager of {self.root} is closed; make another")

    @property
    def _is_first(self) -> bool:
        return find_place(self._group, alone=True).is_coordinator

    def _together(self, doing: str, work: Callable[[], object]) -> None:
        do_together(doing, work, self._group, self._timeout)

    def _patiently(self, doing: str, step: Callable[[], bytes], combine: Callable[[list[bytes]], bytes]) -> bytes:
        """As `_reduce`, as often as `combine` returns nothing because the first rank is busy."""
        while True:
            told = self._reduce(doing, step, combine)
            if told:
                return told

    def _reduce(self, doing: str, step: Callable[[], bytes], combine: Callable[[list[bytes]], bytes]) -> bytes:
        return reduce_over(doing, step, combine, self._group, self._timeout)


def _check_names(state: object) -> None:
    if isinstance(state, Mapping) and VALUE in state:
        raise CheckpointManagerError(f"the state has a value {VALUE!r}, which is the manager's own: rename it")
