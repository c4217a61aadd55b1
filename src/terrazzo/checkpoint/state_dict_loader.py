"""`load`: fill a state dict from a checkpoint, in place."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any, Literal

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.plan.objects_planner import ObjectsPlanner
from terrazzo.checkpoint.planner import LoadPlanner
from terrazzo.checkpoint.run.argument_order import storage_may_be_second
from terrazzo.checkpoint.run.coordination import find_place
from terrazzo.checkpoint.run.load_session import LoadSession
from terrazzo.checkpoint.run.locate import find_reader
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

    Tensors are filled where they are, whatever their device, placements and world size; each rank reads only
    the bytes that it needs.  Other values are replaced in the state dict.
    A `Stateful` object gives its state dict, which is filled, and gets it back through `load_state_dict`; objects are
    asked in the order of their keys, so they may communicate.  An optimizer that has not stepped yet gets the state
    that it had, where PyTorch's `load` leaves it without; what else a checkpoint has of an object that does not name it
    is said in a warning.

    Ranks do not wait for each other, and an error, a `CheckpointException`, stays on the rank that has it.  If a job
    replaces the checkpoint meanwhile, ranks may load different ones, each whole; `together` rules that out.  A
    planner with a global step of its own (`create_global_plan`) or a storage reader that is not terrazzo's (one
    without `plans_alone`) brings the ranks together: then `load` is collective, and an error of one rank is the same
    `CheckpointException` on all.

    Unlike PyTorch's, ranks may pass different keys; a key that the checkpoint lacks is an error on the rank
    that asked; and all keys, shapes and dtypes that do not fit are listed in one `CheckpointMismatchError`
    before anything is changed.

    Args:
        state_dict: What to load, nested dicts and lists allowed; its tensors must be allocated.
        checkpoint_id: Where the checkpoint is.  It may be of any format that terrazzo reads.
        storage_reader: How to read it, if the path does not tell.
        planner: What goes where, if not one to one; `DefaultLoadPlanner(allow_partial_load=True)` and the like.
        process_group: The ranks that load together, if planner or storage bring ranks together; default: all.
        no_dist: Load in this process alone.
        timeout: How long to wait for other ranks, where they are waited for; default: as long as the process group's
            own collectives do.
        together: Load as one: the coordinator reads the checkpoint's root for all, so all load the same checkpoint even
            if it is replaced meanwhile, or all get the same `CheckpointException`.  `load` is collective then.
        store: Where the checkpoint is, instead of `checkpoint_id`: a store with settings of its own.
        read: With "once_per_node" parts of tensors that several ranks of a machine want (replicas) are read by one of
            them, which sends them to the others: for stores that are slower than that.  `load` is collective then, as
            with `together`.  It needs gloo.

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
        raise CheckpointError(f"read={read!r} is neither 'each' nor 'once_per_node'")
    planner = planner if planner is not None else ObjectsPlanner(state_dict)
    reader = find_reader(storage_reader, checkpoint_id, store)
    place_id = checkpoint_id if checkpoint_id is not None else getattr(reader, "checkpoint_id", None)
    place = find_place(process_group, doing=f"loading {place_id}", no_dist=no_dist, alone=True)
    session = LoadSession(planner, reader, place, place_id, together, read == "once_per_node")
    if session.together:
        session.place = find_place(process_group, doing=place.doing, no_dist=no_dist, timeout=timeout)
    session.run(lambda: resolve_stateful(state_dict), lambda values: give_back_state(state_dict, values))


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: Any = None,
) -> dict[str, Any]:
    """What a checkpoint holds under these keys, and under names that begin with them; None: all of it, nested.

    Each rank that calls this loads it for itself.

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
    """Deprecated: use `load`.  `coordinator_rank` is accepted and the first rank of the group coordinates."""
    warnings.warn("load_state_dict is deprecated; use terrazzo.checkpoint.load", FutureWarning, stacklevel=2)
    load(
        state_dict,
        storage_reader=storage_reader,
        process_group=process_group,
        no_dist=no_dist,
        planner=planner,
    )
