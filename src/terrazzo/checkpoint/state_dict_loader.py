"""`load`: fill a state dict from a checkpoint, in place."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.plan.objects_planner import ObjectsPlanner
from terrazzo.checkpoint.planner import LoadPlanner
from terrazzo.checkpoint.run.argument_order import storage_may_be_second
from terrazzo.checkpoint.run.coordination import find_team
from terrazzo.checkpoint.run.load_session import LoadSession
from terrazzo.checkpoint.run.locate import find_reader, usable_reader
from terrazzo.checkpoint.stateful import give_back_state, resolve_stateful
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Store
from terrazzo.checkpoint.tools.lazy import Checkpoint
from terrazzo.errors import CheckpointError


@storage_may_be_second("storage_reader")
def load(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    timeout: timedelta | None = None,
    store: Store | None = None,
    together: bool = False,
    read: Literal["each", "once_per_node"] = "each",
) -> None:
    """Load a checkpoint into a state dict, in place.

    Tensors are filled in place, whatever their devices and placements and the number of ranks. Each rank reads only the
    bytes that it needs. Other values are replaced in the state dict.

    For a `Stateful` object, `state_dict()` is called, and its result is filled and passed to `load_state_dict`. Objects
    are called in the order of their keys, on all ranks the same, so they may communicate. An optimizer that has not
    stepped yet gets its saved state (PyTorch's `load` leaves it without). A warning lists other saved values of an
    object that its `state_dict()` does not have.

    By default ranks do not wait for each other, and a rank's error, a `CheckpointException`, is raised on that rank
    only. If a job replaces the checkpoint at the same time, ranks may load different checkpoints, each complete; with
    `together` they load the same one. If the planner has a `create_global_plan` of its own, or the storage reader is
    not terrazzo's (it has no `plans_alone`), `load` is collective, and an error of one rank is raised on all ranks as
    the same `CheckpointException`.

    Unlike in PyTorch, ranks may pass different keys. A key that the checkpoint lacks is an error on the rank that
    passed it. All keys, shapes and dtypes that do not fit are listed in one `CheckpointMismatchError`, before anything
    is changed.

    Args:
        state_dict: The state to fill: nested dicts and lists; its tensors must be allocated.
        checkpoint_id: The checkpoint's folder or URL. It may have any format that terrazzo reads.
        storage_reader: The reader, if the format cannot be recognised.
        planner: Which values to load, if not all: for instance `DefaultLoadPlanner(allow_partial_load=True)`.
        process_group: The ranks of a collective load; default: all.
        no_dist: Load in this process alone.
        timeout: How long a rank waits for the others in a collective load; default: the process group's time limit.
        together: Load collectively: the coordinator reads the checkpoint's root for all ranks, so all load the same
            checkpoint even if it is replaced at the same time, or all raise the same `CheckpointException`.
        store: The checkpoint's store, instead of `checkpoint_id`.
        read: "once_per_node" lets one rank of a machine read what several of its ranks need (replicas), and send it to
            the others: faster if the store is slower than the network inside the machine. `load` is then collective, as
            with `together`. It needs gloo.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.arange(3.0), "step": 7}, checkpoint_id=path)
    >>> state = {"w": torch.zeros(3), "step": 0}
    >>> load(state, checkpoint_id=path)
    >>> state
    {'w': tensor([0., 1., 2.]), 'step': 7}
    """
    if read not in ("each", "once_per_node"):
        raise CheckpointError(f"`read` must be 'each' or 'once_per_node', not {read!r}")
    planner = planner if planner is not None else ObjectsPlanner(state_dict)
    place_id = checkpoint_id if checkpoint_id is not None else getattr(storage_reader, "checkpoint_id", None)
    place_id = place_id if place_id is not None else getattr(store, "location", None)
    doing = "loading" if place_id is None else f"loading {place_id}"
    given = None if storage_reader is None else usable_reader(storage_reader)
    session = LoadSession(
        planner,
        given,
        partial(find_reader, given, checkpoint_id, store),
        find_team(process_group, doing=doing, no_dist=no_dist, alone=True),
        partial(find_team, process_group, doing=doing, no_dist=no_dist, timeout=timeout),
        place_id,
        wanted_together=together,
        once_per_node=read == "once_per_node",
    )
    session.run(lambda: resolve_stateful(state_dict), lambda values: give_back_state(state_dict, values))


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: Any = None,
) -> dict[str, Any]:
    """A checkpoint's values under these keys, and under names that begin with them, nested; None: all values.

    Each rank that calls this loads by itself.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"model": {"w": torch.ones(2), "b": torch.zeros(1)}, "step": 7}, checkpoint_id=path)
    >>> _load_state_dict_from_keys({"model.w", "step"}, checkpoint_id=path)
    {'model': {'w': tensor([1., 1.])}, 'step': 7}
    """
    wanted = {keys} if isinstance(keys, str) else keys
    opened = Checkpoint(find_reader(storage_reader, checkpoint_id))

    def is_wanted(name: str) -> bool:
        parts = name.split(".")
        return wanted is None or any(".".join(parts[:count]) in wanted for count in range(1, len(parts) + 1))

    return opened.state_dict(is_wanted)


def load_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_reader: StorageReader,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Deprecated: use `load`. `coordinator_rank` is ignored: the first rank of the group is the coordinator."""
    warnings.warn("load_state_dict is deprecated: use terrazzo.checkpoint.load", FutureWarning, stacklevel=2)
    load(
        state_dict,
        storage_reader=storage_reader,
        process_group=process_group,
        no_dist=no_dist,
        planner=planner,
    )
