"""`CheckpointManager` saves the steps that `Save` selects, keeps what `Keep` selects, finds and restores checkpoints.

A save, on all ranks:
    1. the first time: take the folder for this job (`job`), unless it has checkpoints and none was restored
    2. decide whether to save, the same on all ranks (`selection`)
    3. agree on the step, and on whether the previous save failed on any rank
    4. save and commit the checkpoint, in the background
then on the first rank alone, in the background, too, while the job has the folder:
    5. write its name to `latest`
    6. copy checkpoints if necessary, and remove those that `Keep` does not select and no reader holds (`housekeeping`)

With a local folder there are two tiers (`tiers`): steps are saved in the folders of the hosts (`hosts`), and some are
copied to the root (`housekeeping`).

The newest complete checkpoint is never removed, and `latest` always names a complete one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final, Self

import msgspec
import torch.distributed as dist

from terrazzo._meant import counted
from terrazzo.checkpoint.manager.committing import Teams, Unmade, save_named
from terrazzo.checkpoint.manager.housekeeping import Housekeeping, Loading
from terrazzo.checkpoint.manager.job import JobLease
from terrazzo.checkpoint.manager.records import VALUE, Record, checked_metrics, checked_step, held
from terrazzo.checkpoint.manager.selection import Agreed, Best, Keep, Save, setting
from terrazzo.checkpoint.manager.tiers import Looked, Which, choose, in_order_of_merit, open_tiers
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.native.commit import is_held
from terrazzo.checkpoint.native.names import check_holds_checkpoints, name_of_step
from terrazzo.checkpoint.planner import LoadPlanner, SavePlanner
from terrazzo.checkpoint.run.coordination import Failure, failure_of, find_team
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.state_dict_loader import load
from terrazzo.checkpoint.stores import LocalStore, Place, Store
from terrazzo.comm.control import time_limit_of
from terrazzo.errors import CheckpointError, CheckpointExistsError, CheckpointManagerError, DivergentValueError
from terrazzo.layout.drawing import Shown

_PATIENCE: Final = 5.0  # seconds after which the first rank, if it is busy, sends the others a message


class CheckpointManager(Shown):
    """The checkpoints of a run, in a folder, at a URL or in a store: saves, keeps, finds and restores them.

    All ranks construct one with the same arguments, and call its methods together, except `steps`, `records`,
    `latest_step`, `best_step` and `hold`. Step 100 is saved as `global_step100`, and `latest` names the last one, as
    the engine does.

    Args:
        root: The folder, URL or store.
        save: Which steps to save: n for `Save(steps=n)`; None: each for which `save` is called.
        stop: A `StopSignal`: the step in which the job is told to end is saved, too. It is asked at every step.
        keep: Which checkpoints to keep: n for `Keep(last=n)`; None: all.
        best: Which checkpoint is best: a metric's name, if its smallest value is best, or a `Best`. It is kept.
        async_op: Save in the background.
        reuse: Do not write tensors again that have not changed since the last checkpoint: see `base` of `save`.
        local: A local folder of each host, where steps are saved first; they are copied to `root` in the background.
        copy_every: One of so many local checkpoints is copied; and at the end the newest.
        keep_local: Which local checkpoints to keep, besides those still to be copied: as `keep`.
        replicas: To how many other hosts each local file is copied: that many hosts may be lost.
        process_group: The ranks that save together; default: all.
        timeout: How long a rank waits for the others; default: the process group's time limit.

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
        save: Save | int | None = None,
        stop: Agreed | None = None,
        keep: Keep | int | None = None,
        best: Best | str | None = None,
        async_op: bool = True,
        reuse: bool = False,
        local: str | os.PathLike[str] | LocalStore | None = None,
        copy_every: int = 1,
        keep_local: Keep | int | None = 2,
        replicas: int = 1,
        process_group: Any = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._selected = setting(Save, "save", save)
        self._stop_signal = stop
        self._best = setting(Best, "best", best)
        self._async = async_op
        self._reuse = reuse
        self._copy_every = int(copy_every)
        if self._copy_every < 1:
            raise CheckpointManagerError(f"copy_every must be 1 or more, not {copy_every}")
        self._ranks = Teams(process_group, timeout)
        self._since = time.monotonic()
        self._restored = False  # whether this run continues from a checkpoint that was there
        self._entered = False  # whether it may save: it has the folder, and no checkpoint there is another run's
        self._trains = False  # a manager that only restores or holds does not copy
        self._told = _Told([])
        self._pending: Future[None] | None = None  # the running save
        self._process = os.getpid()
        self._tiers = open_tiers(
            Place(root),
            local,
            setting(Keep, "keep", keep),
            setting(Keep, "keep_local", keep_local),
            self._best,
            replicas,
            self._ranks,
        )
        self._job = JobLease(self._tiers.root.root.store)  # used on the first rank
        self._house = Housekeeping(self._tiers, self._job)
        self._open = True
        self._look(check_holds_checkpoints)
        self._last = self._settled = self._told.records[-1].step if self._told.records else None

    @property
    def root(self) -> str:
        """Where the checkpoints are."""
        return str(self._tiers.root.root)

    def __str__(self) -> str:
        lines = [f"CheckpointManager({self.root!r}): {counted(len(self._told.records), 'checkpoint')}"]
        for each in self._told.records:
            metrics = [f"{name} {value:.6g}" for name, value in each.metrics.items()]
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.saved))
            lines.append("  ".join([f"  step {each.step}", saved, *metrics]))
        return "\n".join(lines)

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        state: STATE_DICT_TYPE | Callable[[], STATE_DICT_TYPE],
        metrics: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
        planner: SavePlanner | None = None,
        in_background: bool = True,
    ) -> bool:
        """Save a step if `Save` selects it or with `force`; returns whether it is saved, the same on all ranks.

        Call it at every step. An error in the background is raised by the next call that saves, or by `wait`. The first
        rank's metrics are stored. A step that has just been saved is not saved again. An older checkpoint of the step
        is replaced if the run has gone back by `restore`.

        The first call raises a `CheckpointExistsError` if the folder has checkpoints and the run has not called
        `restore`, because they are another run's; and a `ConflictError` if another live job saves there. Whichever
        step it is called for, nothing is saved, removed or replaced then.

        Args:
            step: The number of the step.
            state: The state, as for `terrazzo.checkpoint.save`; or a function that returns it, which is called if the
                step is saved.
            metrics: Numbers by name, stored with the checkpoint.
            force: Save it in any case. All ranks must pass the same.
            planner: As for `terrazzo.checkpoint.save`.
            in_background: Whether it may be saved in the background: False for a state too large to be copied.
        """
        self._check_open()
        step = checked_step(step)
        self._enter()
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
                async_op=self._async and in_background,
                ranks=self._ranks,
                check=self._job.check,
            )
        except BaseException:
            self._last = self._settled
            raise
        self._pending, self._trains = saving, True
        if self._ranks.is_first:
            self._house.after(step, saving)
        return True

    def _made(self, state: STATE_DICT_TYPE | Callable[[], STATE_DICT_TYPE], record: Record) -> STATE_DICT_TYPE:
        """The state to save. If it cannot be made, the save fails on all ranks."""
        try:
            values = state() if callable(state) else state
            _check_names(values)
            return {**values, VALUE: record.value()}
        except BaseException as error:  # noqa: B036  # the save raises it
            return {"state": Unmade(error)}

    def _enter(self) -> None:
        """At the first save: take the folder for this job, unless its checkpoints are another run's."""
        if self._entered:
            return

        def take() -> bytes:
            self._check_continues(self._tiers.look())
            if not self._job.take(again=True):
                return b""  # another job has it, which may be dead
            try:
                self._check_continues(self._tiers.look())  # again: another job may just have ended
            except BaseException:
                self._job.release()
                raise
            return b"taken"

        self._patiently(f"beginning to save to {self.root}", lambda: None, lambda _: take())
        self._entered = True

    def _check_continues(self, looked: Looked) -> None:
        steps = sorted({*looked.steps, *looked.unreadable})
        if self._restored or not steps:
            return
        shown = ", ".join(map(str, steps if len(steps) < 8 else [*steps[:3], "...", *steps[-3:]]))
        raise CheckpointExistsError(
            f"{self.root} has checkpoints of {counted(len(steps), 'step')} ({shown}), and this run has not restored "
            "any of them, so nothing is saved there: they would be replaced or removed. Before the first save, call "
            "restore('latest', state), or load_step of an engine; or use another folder"
        )

    def _wants(self, step: int) -> bool:
        """Whether to save the step; the same on all ranks."""
        told = self._stop_signal is not None and self._stop_signal.agreed()  # it must be asked at every step
        selected = self._selected
        if told or selected is None or selected.selects(step, self._last):
            return True
        if selected.seconds is None:
            return False

        def ask() -> bytes:
            return b"yes" if selected.is_due(time.monotonic() - self._since) else b""

        return self._ranks.team(f"asking whether to save step {step}").first(ask) == b"yes"

    def _begin(self, step: int, metrics: Mapping[str, Any] | None, state: object) -> tuple[Record, int | None]:
        """Agree on a save: its record, and the step of the checkpoint whose files it shares."""

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
                    f"ranks save different steps ({said}): call save with the same step on all ranks"
                )
            self._job.check()
            looked = self._tiers.look()
            records, fast = looked.records, self._tiers.fast
            if any(step in tier.catalog.steps() for tier in self._tiers.all) and not self._idle():
                return b""  # the step may be being removed or copied
            if step in looked.unreadable:
                raise CheckpointExistsError(
                    f"{fast.catalog.store_of(step).location} cannot be replaced, because a checkpoint of this step is "
                    f"there that cannot be read: {looked.unreadable[step].error}; move it away, or use another folder"
                )
            for tier in self._tiers.all:
                if tier.catalog.is_link(step):
                    raise CheckpointExistsError(
                        f"{tier.catalog.store_of(step).location} is a link or a mount point, and what it leads to is "
                        "not replaced: remove the link, or use another folder"
                    )
            if any(record.step == step for record in records):
                self._check_replacing(step)
            fast.being_saved.add(step)
            now = time.time()
            if records and now <= records[-1].saved:  # clocks differ; the new checkpoint must be the newest
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
            if not self._restored:
                raise CheckpointExistsError(
                    f"{store.location} exists, and this run has not restored a checkpoint, so it has not gone back: "
                    "call restore first, or use another folder"
                )
            if is_held(store):
                raise CheckpointExistsError(f"cannot replace {store.location} while it is being read: save later")

    def _join(self) -> None:
        """Wait for the running save, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None and self._process == os.getpid():  # a save of a process that forked is that one's
            pending.result()

    def _idle(self) -> bool:
        """On the first rank: whether housekeeping is done. Waits for it, but less long than the other ranks wait."""
        limit, group = self._ranks.timeout, self._ranks.group
        if limit is None and len(find_team(group, alone=True).ranks) > 1:
            world: Any = dist.group.WORLD
            limit = time_limit_of(world if group is None else group)
        seconds = _PATIENCE if limit is None else min(_PATIENCE, limit.total_seconds() / 4)
        return self._house.idle(seconds)

    # ------------------------------------------------------------------ finding

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, as of the start or the last `wait`, `restore` or `reload`."""
        return sorted(record.step for record in self._told.records)

    def records(self) -> list[Record]:
        """The records of `steps`, with times and metrics, the newest last."""
        return list(self._told.records)

    def latest_step(self) -> int | None:
        """The step that was saved last; None if there is no checkpoint.

        Raises an error if a checkpoint that may be the newest is there and cannot be read: of a newer release, damaged,
        or not accessible; or if the file `latest` names a step that is not there.
        """
        if self._told.why is not None:
            raise self._told.why.exception()
        return self._told.records[-1].step if self._told.records else None

    def best_step(self) -> int | None:
        """The best step, or None."""
        found = in_order_of_merit(self._best, self._told.records)
        return found[0].step if found else None

    def reload(self) -> None:
        """Look again which checkpoints there are."""
        self._look()

    def _look(self, check: Callable[[Place], object] = lambda _: None) -> None:
        def found() -> bytes:
            try:
                looked = self._tiers.look()  # what is wrong with the place is said first
            except NotADirectoryError:
                check(self._tiers.root.root)
                raise
            check(self._tiers.root.root)
            return self._encoded(looked)

        told = self._ranks.team(f"looking at {self.root}").first(found)
        self._told = msgspec.msgpack.decode(told, type=_Told)

    def _encoded(self, looked: Looked) -> bytes:
        """On the first rank: what all ranks are to know."""
        unknown = self._tiers.why_no_latest(looked)
        return msgspec.msgpack.encode(_Told(looked.records, None if unknown is None else failure_of(unknown, 0)))

    # ------------------------------------------------------------------ restoring

    def restore(
        self, step: Which, state: STATE_DICT_TYPE | Callable[[Store], object], *, planner: LoadPlanner | None = None
    ) -> int:
        """Load a step, the "latest" or the "best" into a state dict, in place; returns the step.

        "latest" is the newest complete one. It is not removed while it is read. All ranks load the same checkpoint,
        or all raise the same error. An optimizer that has not stepped yet gets its saved state. If a local file is
        damaged, another host's copy is read, or else the checkpoint's copy in the root, with a warning.

        Args:
            step: A number, "latest" or "best".
            state: As for `terrazzo.checkpoint.load`; or a function that loads from the store that it gets. If files of
                that store are damaged, it is called again with another store.
            planner: As for `terrazzo.checkpoint.load`.
        """
        self._check_open()
        reading = ExitStack()

        def take(_: list[bytes]) -> bytes:
            looked = self._tiers.look()
            chosen, tier = choose(step, looked, self._tiers, self._best)
            reading.enter_context(held(tier.catalog, chosen))
            return msgspec.msgpack.encode((chosen, self._tiers.all.index(tier), msgspec.Raw(self._encoded(looked))))

        with reading:
            told = self._ranks.team(f"restoring {step} from {self.root}").reduce(self._join, take)
            chosen, number, self._told = msgspec.msgpack.decode(told, type=tuple[int, int, _Told])
            (record,) = [each for each in self._told.records if each.step == chosen]
            loading = Loading(self._tiers, record, partial(self._load, state, planner), self._ranks)
            damaged = loading.load_from(self._tiers.all[number], reading)
        if damaged:
            loading.discard_local()
        self._last = self._settled = chosen
        self._restored = self._trains = True
        self._entered = False  # to find out whether the job still has the folder, and take it if not
        self._since = time.monotonic()
        return chosen

    def _load(
        self, state: STATE_DICT_TYPE | Callable[[Store], object], planner: LoadPlanner | None, store: Store
    ) -> None:
        if callable(state):
            self._ranks.team(f"restoring from {store.location}").together(partial(state, store))
            return
        group, timeout = self._ranks.group, self._ranks.timeout
        load(state, store=store, planner=planner, process_group=group, timeout=timeout, together=True)

    @contextmanager
    def hold(self, step: Which) -> Iterator[Store]:
        """Keep a checkpoint from being removed while this process reads it; yields its store for `load`, `Checkpoint`.

        Other programs, such as evaluations, can use it, too; it is not collective. In object stores, which have no
        locks, a thread renews the hold; it expires if the process dies.

        >>> import tempfile, torch
        >>> from terrazzo.checkpoint import Checkpoint
        >>> with CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     _ = manager.save(1, {"w": torch.ones(2)})
        ...     manager.wait()
        ...     with manager.hold("latest") as store:
        ...         Checkpoint(store)["w"][...]
        tensor([1., 1.])
        """
        chosen, tier = choose(step, self._tiers.look(), self._tiers, self._best)
        with held(tier.catalog, chosen):
            yield tier.catalog.store_of(chosen)

    # ------------------------------------------------------------------ closing, and collective steps

    def wait(self) -> None:
        """Wait until the last save is complete, `latest` names it, copies are made and checkpoints that are not kept
        are removed; raise its error. The other ranks wait for the first rank, however long that takes."""
        self._finish(newest=False)

    def _finish(self, newest: bool) -> None:
        copying: list[Future[None]] = []

        def look(_: list[bytes]) -> bytes:
            if not copying and self._open and self._trains:
                begun = self._house.finish(newest)
                if begun is None:
                    return b""
                copying.append(begun)
            if not self._idle():
                return b""
            for future in copying:
                future.result()
            return self._encoded(self._tiers.look())

        try:
            told = self._patiently(f"waiting for the last save to {self.root}", self._join, look)
        except CheckpointError:
            self._last = self._settled
            raise
        self._told = msgspec.msgpack.decode(told, type=_Told)
        self._settled = self._last

    def close(self) -> None:
        """`wait`, and copy the newest local checkpoint. Afterwards only `steps`, `records` and the like can be used."""
        if not self._open:
            return
        try:
            self._finish(newest=True)
        finally:
            self._stop()

    def _stop(self) -> None:
        self._open = False
        self._house.close()
        self._job.release()
        self._tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
            return
        try:  # not collective, because other ranks may not have failed
            self._join()
        except Exception as failed:
            LOGGER.warning("%s: the last save failed too: %s", self.root, failed)
        finally:
            self._stop()

    def _check_open(self) -> None:
        if not self._open:
            raise CheckpointManagerError(f"the manager of {self.root} is closed: construct another one")

    def _patiently(
        self, doing: str, step: Callable[[], bytes | None], combine: Callable[[list[bytes]], bytes]
    ) -> bytes:
        """Like `Teams.reduce`, repeated while `combine` returns nothing because the first rank is busy."""
        while True:
            told = self._ranks.team(doing).reduce(step, combine)
            if told:
                return told


class _Told(msgspec.Struct, array_like=True, frozen=True):
    """What all ranks know of the checkpoints: their records, and the error if it is not known which is the newest."""

    records: list[Record]
    why: Failure | None = None


def _check_names(state: object) -> None:
    if isinstance(state, Mapping) and VALUE in state:
        raise CheckpointManagerError(f"the state has a value {VALUE!r}, a name that the manager uses: rename it")
