"""`save` and `async_save`: write a state dict as a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, NoReturn

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from terrazzo.checkpoint.plan.save_planner import DefaultSavePlanner
from terrazzo.checkpoint.planner import SavePlanner
from terrazzo.checkpoint.run.background import AsyncSaveResponse, Background, SaveFuture, background_of
from terrazzo.checkpoint.run.coordination import failure_of, find_team, with_plane
from terrazzo.checkpoint.run.events import operation
from terrazzo.checkpoint.run.locate import storage_may_be_second
from terrazzo.checkpoint.run.process_saver import Parcel, ProcessSaver
from terrazzo.checkpoint.run.save_session import SaveSession
from terrazzo.checkpoint.run.staging import AsyncStager, Staging
from terrazzo.checkpoint.stateful import resolve_stateful
from terrazzo.checkpoint.storage import StorageWriter
from terrazzo.checkpoint.stores import Store, is_url, store_at


class AsyncCheckpointerType(Enum):
    """Whether `async_save` works on a thread of this process, or in a process of its own."""

    THREAD = "thread"
    PROCESS = "process"


@storage_may_be_second("storage_writer")
def save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    timeout: timedelta | None = None,
    store: Store | None = None,
    base: str | os.PathLike[str] | Store | None = None,
) -> Metadata:
    """Save a state dict as one checkpoint, from all ranks of a process group together.

    Each rank writes its shards of DTensors; values that several ranks hold are written once. Of `Stateful` objects the
    `state_dict()` is saved. Without a process group, the state of this process is saved.

    The checkpoint is committed by one atomic operation, after everything is durable; an existing checkpoint is valid
    until then. If a rank fails, dies or is late, every rank raises the same `CheckpointException`, which names that
    rank, and an existing checkpoint stays.

    Args:
        state_dict: The state: nested dicts and lists of tensors, DTensors, `Stateful` objects and plain values.
        checkpoint_id: Where to save: a folder, or a URL (`s3://bucket/prefix`, `gs://`, `az://`).
        storage_writer: The writer, for another format than terrazzo's.
        planner: What to save, if not the whole state dict.
        process_group: The ranks that save together; default: all.
        no_dist: Save the state of this process alone.
        use_collectives: If False, ranks do not plan together: each writes its state, which must have no shards, in
            PyTorch's format with metadata of its own (`__0.metadata`), and commits by itself. A rank loads its own.
        timeout: How long a rank waits for the others at each step; default: the process group's time limit.
        store: Where to save, instead of `checkpoint_id`: a store (see docs/stores.md).
        base: Another checkpoint, or the existing one. Tensors that have not changed since are not written again: the
            new checkpoint shares their files. The base may be removed afterwards.

    Returns:
        The checkpoint's metadata, on every rank.

    >>> import tempfile, torch
    >>> metadata = save({"model": {"w": torch.ones(2, 3)}, "step": 7}, checkpoint_id=tempfile.mkdtemp())
    >>> list(metadata.state_dict_metadata)
    ['model.w', 'step']
    """
    team = find_team(
        process_group, doing=_doing(checkpoint_id, storage_writer, store), no_dist=no_dist, timeout=timeout
    )
    earlier = background_of(process_group, no_dist).earlier_error()
    session = SaveSession(
        planner or DefaultSavePlanner(), storage_writer, team, checkpoint_id, store, base, use_collectives
    )
    return session.run((lambda: resolve_stateful(state_dict)) if earlier is None else partial(_raise, earlier))


@storage_may_be_second("storage_writer")
def async_save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    timeout: timedelta | None = None,
    store: Store | None = None,
    base: str | os.PathLike[str] | Store | None = None,
) -> Future[Metadata]:
    """Like `save`, but in the background: returns as soon as the state has been copied to host memory.

    One save runs at a time: a call waits for the one before. An error is raised by the future's `result()`; if that is
    not called, by the next save. The host memory of the copy is kept for the next call.

    Values that `save` cannot store are an error of this call, too.

    Args:
        state_dict, checkpoint_id, storage_writer, planner, process_group: As for `save`.
        no_dist, use_collectives, timeout, store, base: As for `save`, too.
        async_checkpointer_type: A thread needs less memory and starts faster; a process does not compete with training
            for the GIL. For a process, planner and writer must be picklable.
        async_stager: How to copy the state (`AsyncStager`); default: the writer, if it is an `AsyncStager` (a
            `FileSystemWriter` is one), else a `BlockingAsyncStager` that keeps its memory.

    Returns:
        A future with the result of `save`. If the stager copies in the background (its `stage` returns a future), it is
        an `AsyncSaveResponse`, whose `staging_completion` is done when the state may be changed.

    >>> import tempfile, torch
    >>> future = async_save({"w": torch.ones(2)}, checkpoint_id=tempfile.mkdtemp())
    >>> list(future.result().state_dict_metadata)
    ['w']
    """
    doing = _doing(checkpoint_id, storage_writer, store)
    in_process = async_checkpointer_type is AsyncCheckpointerType.PROCESS
    # A thread of this process gets connections of its own here; a saving process makes its own.
    team = find_team(process_group, doing=doing, no_dist=no_dist, alone=not in_process, timeout=timeout)
    session = SaveSession(
        planner or DefaultSavePlanner(), storage_writer, team, checkpoint_id, store, base, use_collectives
    )
    with background_of(process_group, no_dist).turn() as background:
        staging: Staging | None = None
        earlier = background.earlier_error()
        process = background.process(team, timeout) if in_process else None
        if process is None and len(team.ranks) > 1:
            session.team = with_plane(team, lambda: background.plane(process_group, timeout))
        try:
            if earlier is not None:
                raise earlier
            stager = async_stager or _stager_of(storage_writer, background, in_process)
            with operation("stage", checkpoint_id, team.global_rank):
                staging = Staging(stager, resolve_stateful(state_dict))
                parcel = process.stage(staging.result()) if process is not None else None
                if staging.waits:
                    staging.wait()
        except BaseException as error:
            if staging is not None:
                staging.abandon()
            told = background.start(_failing(session, process, error)).exception()  # other ranks wait for this one
            if isinstance(error, Exception) and told is not None:
                raise told from error
            raise
        work = partial(session.run, staging.result)
        if process is not None and parcel is not None:
            work = partial(process.save, session, parcel)
        if isinstance(checkpoint_id, str | os.PathLike) and is_url(checkpoint_id):
            with suppress(Exception):  # the save raises it; here its modules are imported, see `Background.start`
                store_at(checkpoint_id)
        future = SaveFuture() if staging.future is None else AsyncSaveResponse(staging.future)
        staging.in_use_until(future)
        background.start(work, future)
        return future


def _doing(checkpoint_id: Any, writer: StorageWriter | None, store: Store | None) -> str:
    target = checkpoint_id if checkpoint_id is not None else getattr(writer, "checkpoint_id", None)
    target = target if target is not None else getattr(store, "location", None)
    return "saving" if target is None else f"saving {target}"


def _raise(error: BaseException) -> NoReturn:
    raise error


def _stager_of(writer: StorageWriter | None, background: Background, in_process: bool) -> AsyncStager | None:
    """The default stager; None for a saving process, which needs a copy in shared memory anyway."""
    if in_process:
        return None
    if isinstance(writer, AsyncStager):
        return writer
    return background.stager


def _failing(session: SaveSession, process: ProcessSaver | None, error: BaseException) -> Callable[[], Metadata]:
    """The work of a rank that failed before the save: take part in it, and fail on all ranks with this error."""
    if process is not None:
        return partial(process.save, session, Parcel(error=failure_of(error, session.team.global_rank)))

    return partial(session.run, partial(_raise, error))


def save_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_writer: StorageWriter,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Deprecated: use `save`. `coordinator_rank` is ignored: the first rank of the group is the coordinator."""
    warnings.warn("save_state_dict is deprecated: use terrazzo.checkpoint.save", FutureWarning, stacklevel=2)
    return save(
        state_dict,
        storage_writer=storage_writer,
        process_group=process_group,
        no_dist=no_dist,
        planner=planner,
    )
