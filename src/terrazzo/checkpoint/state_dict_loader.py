"""`load`: fill a state dict from a checkpoint, in place.

A new object's state dict may lack values that it creates later: an optimizer has no state before its first step. The
saved state of an optimizer is loaded all the same. A warning lists saved values of other objects that their state dicts
do not have.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial, reduce
from operator import getitem
from typing import Any, Final, Literal

import torch

from terrazzo.checkpoint.formats.torch_storage import usable_reader
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from terrazzo.checkpoint.plan.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.planner import LoadPlanner
from terrazzo.checkpoint.run.coordination import find_team
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.run.load_session import LoadSession
from terrazzo.checkpoint.run.locate import find_reader, storage_may_be_second
from terrazzo.checkpoint.state_dict.lazy_state import complete_state, keyed_by_index
from terrazzo.checkpoint.stateful import Stateful, give_back_state, resolve_stateful
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
    planner = planner if planner is not None else _ObjectsPlanner(state_dict)
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
        lambda: resolve_stateful(state_dict),
        partial(give_back_state, state_dict),
        wanted_together=together,
        once_per_node=read == "once_per_node",
    )
    session.run()


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


def _load_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_reader: StorageReader,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """`load`, as libraries call it that use PyTorch's private function of this name."""
    load(state_dict, storage_reader=storage_reader, process_group=process_group, no_dist=no_dist, planner=planner)


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
    _load_state_dict(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


_TOLD: Final = 5  # names in a warning


class _ObjectsPlanner(DefaultLoadPlanner):
    """Plans the load of a state whose objects may be new."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self._given = given

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        objects = list(_objects(self._given, ()))
        if metadata is None or not objects:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        stored = metadata.state_dict_metadata
        for path, found in objects:
            if isinstance(found, torch.optim.Optimizer):
                _complete(found, reduce(getitem, path, state_dict), ".".join(map(str, path)), stored)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        beneath = tuple(".".join(map(str, path)) + "." for path, _ in objects)
        # The names of values that each rank has for itself end in the rank.
        left = [name for name in stored if name.startswith(beneath) and name not in self.state_dict and "@" not in name]
        if left:
            names = ", ".join(left[:_TOLD]) + (f" and {len(left) - _TOLD} more" if left[_TOLD:] else "")
            LOGGER.warning("not loaded, because the state dicts of the objects do not have it: %s", names)


def _objects(state: Mapping[Any, Any], path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Stateful]]:
    """The stateful objects in a state, and their paths."""
    for key, value in state.items():
        here = (*path, key)
        if type(value) is dict:
            yield from _objects(value, here)
        elif not isinstance(value, (torch.Tensor, type)) and isinstance(value, Stateful):
            yield here, value


def _complete(
    optimizer: torch.optim.Optimizer, target: dict[str, Any], name: str, stored: Mapping[str, object]
) -> None:
    """Add saved state of parameters that the optimizer has not stepped to its state dict."""
    prefix = f"{name}.state."
    there = {each for each in stored if each.startswith(prefix)}
    if not there or not keyed_by_index(target):  # an optimizer with another form of state dict names all its values
        return
    try:
        whole = complete_state(optimizer, target)["state"]
    except CheckpointError as error:  # a warning will list what is not loaded
        LOGGER.warning("%s: %s", name, error)
        return
    for number, entry in whole.items():
        wanted = {key: value for key, value in entry.items() if f"{prefix}{number}.{key}" in there}
        if wanted and not target["state"].get(number):
            target["state"][number] = wanted
