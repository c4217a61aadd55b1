"""Save a checkpoint under a name in a run's folder, then write the name to `latest`.

`CheckpointManager` and `Engine.save_checkpoint` use this.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.native.names import name_as_latest
from terrazzo.checkpoint.planner import SavePlanner
from terrazzo.checkpoint.run.coordination import StepFailed, find_team
from terrazzo.checkpoint.state_dict_saver import async_save, save
from terrazzo.checkpoint.stores import Place


class Unmade:
    """An object that a state has instead of a value that raised: the save calls it and fails on all ranks."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        """Raise the error."""
        raise self._error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


def save_named(
    root: Place,
    name: str,
    state: STATE_DICT_TYPE,
    *,
    planner: SavePlanner | None = None,
    base: Place | None = None,
    latest: bool = True,
    async_op: bool = False,
    process_group: Any = None,
    timeout: timedelta | None = None,
) -> Future[None]:
    """Save from all ranks together. The future is done when the checkpoint is committed and `latest` names it.

    Args:
        root: The folder of the run.
        name: The checkpoint's name in that folder.
        state, planner, process_group, timeout: As for `terrazzo.checkpoint.save`.
        base: A checkpoint whose unchanged tensors are shared, not written again.
        latest: Whether to write the name to `latest`.
        async_op: Return as soon as the state has been copied.
    """
    place = root / name
    arguments: dict[str, Any] = {"checkpoint_id": place.path} if place.is_named else {"store": place.store}
    arguments |= {"planner": planner, "process_group": process_group, "timeout": timeout}
    arguments["base"] = None if base is None else base.store

    def move() -> None:
        if latest and find_team(process_group, alone=True).is_coordinator:
            name_as_latest(root, name)

    finished: Future[None] = Future()
    if async_op:
        saving = async_save(state, **arguments)

        def committed(done: Future[Any]) -> None:
            try:
                done.result()
                move()
            except BaseException as error:  # the future raises it
                finished.set_exception(error)
            else:
                finished.set_result(None)

        saving.add_done_callback(committed)
        return finished
    save(state, **arguments)
    do_together(f"moving latest of {root}", move, process_group, timeout)
    finished.set_result(None)
    return finished


def do_together(
    doing: str, work: Callable[[], object], process_group: Any = None, timeout: timedelta | None = None
) -> None:
    """Call `work` on every rank. Returns when all are done; raises the same error on all ranks if one fails."""

    def run() -> bytes:
        work()
        return b""

    reduce_over(doing, run, lambda _: b"", process_group, timeout)


def reduce_over(
    doing: str,
    step: Callable[[], bytes],
    combine: Callable[[list[bytes]], bytes],
    process_group: Any = None,
    timeout: timedelta | None = None,
) -> bytes:
    """Call `step` on every rank, then `combine` on the first with all results; all ranks get its result or error."""
    team = find_team(process_group, doing=doing, timeout=timeout)
    try:
        return team.reduce(step, combine)
    except StepFailed as failed:
        raise failed.error from failed.error.__cause__
