"""Save a checkpoint under a name in a run's folder, then write the name to `latest`.

`CheckpointManager` and `Engine.save_checkpoint` use this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from terrazzo._threads import settle
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from terrazzo.checkpoint.native.names import name_as_latest
from terrazzo.checkpoint.native.storage import NativeWriter
from terrazzo.checkpoint.planner import SavePlanner
from terrazzo.checkpoint.run.coordination import Team, find_team
from terrazzo.checkpoint.state_dict_saver import async_save, save
from terrazzo.checkpoint.storage import WriteResult
from terrazzo.checkpoint.stores import Place, Store


@dataclass(frozen=True, slots=True)
class Teams:
    """The ranks of a process group (None: all), for steps that they take together.

    If a step fails on one rank, all raise the same error. No rank waits for another one longer than `timeout`.
    """

    group: Any = None
    timeout: timedelta | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return find_team(self.group, alone=True).is_coordinator

    def team(self, doing: str) -> Team:
        """This rank among them, for steps of what they are `doing`. Collective."""
        return find_team(self.group, doing=doing, timeout=self.timeout)


class Unmade:
    """An object that a state has instead of a value that raised: the save calls it and fails on all ranks."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        """Raise the error."""
        raise self._error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


class _CheckedWriter(NativeWriter):
    """Commits only if `check` does not raise.

    It is called after the save has begun: if another job commits the same step later, this commit conflicts with that.
    """

    def __init__(self, store: Store, check: Callable[[], None]) -> None:
        super().__init__(store)
        self._check = check

    def finish(self, metadata: Metadata, results: list[Sequence[WriteResult]]) -> None:
        self._check()
        super().finish(metadata, results)


def save_named(
    root: Place,
    name: str,
    state: STATE_DICT_TYPE,
    *,
    planner: SavePlanner | None = None,
    base: Place | None = None,
    latest: bool = True,
    async_op: bool = False,
    ranks: Teams = Teams(),  # it does not change
    check: Callable[[], None] | None = None,
) -> Future[None]:
    """Save from all ranks together. The future is done when the checkpoint is committed and `latest` names it.

    Args:
        root: The folder of the run.
        name: The checkpoint's name in that folder.
        state, planner: As for `terrazzo.checkpoint.save`.
        base: A checkpoint whose unchanged tensors are shared, not written again.
        latest: Whether to write the name to `latest`.
        async_op: Return as soon as the state has been copied.
        ranks: Those that save.
        check: Raises on the first rank if another job has the folder: then nothing is committed, nor `latest` moved.
    """
    place = root / name
    arguments: dict[str, Any] = {"store": place.store}  # terrazzo's format, under install(), too
    if check is not None:
        arguments = {"checkpoint_id": place.store.location, "storage_writer": _CheckedWriter(place.store, check)}
    arguments |= {"planner": planner, "process_group": ranks.group, "timeout": ranks.timeout}
    arguments["base"] = None if base is None else base.store

    def move() -> None:
        if latest and ranks.is_first:
            name_as_latest(root, name, check)

    finished: Future[None] = Future()
    if async_op:
        saving = async_save(state, **arguments)

        def follow(saved: Future[Any]) -> None:
            saved.result()
            move()

        saving.add_done_callback(lambda saved: settle(finished, partial(follow, saved)))
        return finished
    save(state, **arguments)
    ranks.team(f"moving latest of {root}").together(move)
    finished.set_result(None)
    return finished
