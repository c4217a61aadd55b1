"""Saving a run, and resuming it: on the same ranks or others, in the same ZeRO stage or another.

A checkpoint is a folder `<dir>/<tag>`, in a file system or behind a URL; the file `<dir>/latest` contains the tag of
the last one. A folder is a checkpoint once its manifest is in it, and `latest` is changed after that, so whenever a
run dies there is a whole checkpoint.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

import msgspec
import torch
import torch.distributed as dist

from terrazzo.checkpoint import (
    Checkpoint,
    CheckpointManager,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LazyTensor,
    LoadPlan,
    ReadItem,
    WriteItem,
    load,
)
from terrazzo.checkpoint.manager.committing import Teams, save_named
from terrazzo.checkpoint.manager.job import JobLease
from terrazzo.checkpoint.manager.tiers import Which
from terrazzo.checkpoint.native.containers import restored
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import LATEST as LATEST_NAMES
from terrazzo.checkpoint.native.names import check_holds_checkpoints, name_as_latest, name_of_step, named_by_latest
from terrazzo.checkpoint.plan.flatten import as_pattern, set_element
from terrazzo.checkpoint.run.locate import reader_for
from terrazzo.checkpoint.state_dict import set_optimizer_state_dict
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.comm import ControlPlane
from terrazzo.engine import loaders
from terrazzo.engine.content import (
    check_client_names,
    client_state_of,
    content,
    frozen_parameters,
    optimizer_state,
    own_tensors,
)
from terrazzo.engine.deepspeed_layout import save_in_deepspeed_layout
from terrazzo.engine.gathering import gather_over
from terrazzo.engine.marks import mark
from terrazzo.engine.paging import PagedState
from terrazzo.engine.placing import reshard
from terrazzo.engine.rng import derive_random_state, set_random_state
from terrazzo.engine.saved_keys import keyed_like
from terrazzo.engine.trained import Trained
from terrazzo.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DivergentValueError,
    EngineError,
    EngineValueError,
    UnfinishedError,
)

Result = TypeVar("Result")

LOGGER = logging.getLogger("terrazzo.engine")

LATEST: Final = LATEST_NAMES[0]
_TENSORS: Final = ("module.", "optimizer.state.")  # entries that are loaded in place


# ------------------------------------------------------------------ saving


def save_engine(
    engine: Trained,
    save_dir: str | os.PathLike[str],
    tag: str | None,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen: bool,
    async_op: bool,
    layout: str,
    timeout: timedelta | None = None,
) -> Future[None]:
    """Save everything; the future is done once the checkpoint is committed and `latest` names it."""
    if not save_dir:
        raise EngineValueError(f"save_checkpoint needs a folder, but save_dir is {save_dir!r}; '.' is the current one")
    if engine.pages is not None:
        engine.pages.check()  # if a step failed, all ranks know
    if not engine.between_steps:
        warnings.warn(
            f"save_checkpoint after micro-batch {engine.micro_steps % engine.batch.accumulation} of "
            f"{engine.batch.accumulation}: the checkpoint does not have the gradients accumulated so far, so a "
            "run that resumes from it begins this step anew",
            stacklevel=3,
        )
    plane = ControlPlane.for_group(timeout=timeout)
    tag = checked_tag(name_of_step(engine.global_steps) if tag is None else tag, plane)
    folder = Place(save_dir)
    ranks = Teams(timeout=timeout)

    def look() -> None:
        refuse_unfinished(engine, "save_checkpoint")
        _check_no_link(folder, tag)
        _warn_of_earlier_run(engine, folder, tag)

    ranks.team(f"looking at {folder / tag}").together(look)
    job = JobLease(folder.store)
    while not ranks.team(f"looking at {folder}").first(lambda: b"free" if job.is_free() else b""):
        pass  # a manager's job had it, which may be dead; it waits for a moment
    if layout == "deepspeed":
        if async_op:
            raise EngineError("layout='deepspeed' cannot be written in the background: leave out async_op")
        save_in_deepspeed_layout(engine, folder, tag, client_state, exclude_frozen=exclude_frozen)
        plane.run_together(lambda: _point(folder, tag, save_latest), f"moving {LATEST} to {tag}")
        finished: Future[None] = Future()
        finished.set_result(None)
        return finished
    if async_op and engine.pages is not None:
        raise EngineError(
            "save_checkpoint(async_op=True) copies the state to memory, but that of the optimizer is in files "
            "(offload_optimizer.device 'nvme') because it is too large for that: leave out async_op"
        )
    state = content(engine, client_state, exclude_frozen=exclude_frozen)
    return save_named(folder, tag, state, planner=_planner(engine), latest=save_latest, async_op=async_op, ranks=ranks)


def save_step(
    engine: Trained,
    manager: CheckpointManager,
    metrics: Mapping[str, Any] | None,
    client_state: Mapping[str, Any],
    *,
    force: bool,
    exclude_frozen: bool,
) -> bool:
    """Save the run if a manager selects its step; returns whether it does."""
    refuse_unfinished(engine, "save_step")
    if not engine.between_steps:
        return False
    check_client_names(client_state)
    engine._has_checkpoint = True
    make = partial(content, engine, client_state, exclude_frozen=exclude_frozen)
    return manager.save(
        engine.global_steps, make, metrics, force=force, planner=_planner(engine), in_background=engine.pages is None
    )


def _warn_of_earlier_run(engine: Trained, folder: Place, tag: str) -> None:
    """Warn if the first save of a run that has loaded nothing replaces a checkpoint: probably loading was forgotten."""
    if dist.get_rank() == 0 and not engine._has_checkpoint and (folder / tag / MANIFEST).is_file():
        LOGGER.warning(
            "save_checkpoint replaces %s, which another run has saved, and this run has loaded no checkpoint: to go on "
            "with that run, call load_checkpoint before training; to keep its checkpoints, use another folder",
            folder / tag,
        )
    engine._has_checkpoint = True


def refuse_unfinished(engine: Trained, what: str) -> None:
    """Raise if the parameters, the optimizer's state and the counters are not those of one step."""
    if engine.unfinished is not None:
        raise UnfinishedError(
            f"{what}: {engine.unfinished} failed on rank {dist.get_rank()} when it had begun to change the run, so "
            "parameters and counters are not those of one step: load a checkpoint with the optimizer's states, or "
            "start the run again"
        )


class _RunPlanner(DefaultSavePlanner):
    """Running statistics of the data differ between ranks; those of the first rank are saved."""

    def set_up_planner(
        self, state_dict: Mapping[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.lowest_rank_wins = tuple(as_pattern(f"module.{name}") for name in state_dict["buffer_names"])
        super().set_up_planner(dict(state_dict), storage_meta, is_coordinator)


class _PagedPlanner(_RunPlanner):
    """Of state in files, only what is being written is in memory."""

    def __init__(self, pages: PagedState) -> None:
        super().__init__()
        self._pages = pages

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            self._pages.look_at(data)
        return data


def _planner(engine: Trained) -> _RunPlanner:
    return _RunPlanner() if engine.pages is None else _PagedPlanner(engine.pages)


def _check_no_link(folder: Place, tag: str) -> None:
    """Raise if the tag's folder is a link, because saving there would replace what it leads to."""
    if dist.get_rank() == 0 and folder.store.is_link(tag):
        raise CheckpointExistsError(
            f"{folder / tag} is a link or a mount point, and what it leads to is not replaced: remove the link, or use "
            "another tag"
        )


def _point(folder: Place, tag: str, save_latest: bool) -> None:
    """Make `latest` name a committed checkpoint."""
    if save_latest and dist.get_rank() == 0:
        name_as_latest(folder, tag)


def checked_tag(tag: Any, plane: ControlPlane | None = None) -> str:
    """The tag as text; it must be the same on every rank, and valid as the name of a folder."""
    text = str(tag)
    if not text or text in (".", "..", LATEST) or "/" in text or "\0" in text:
        raise EngineError(f"the tag {text!r} cannot be used as the name of a checkpoint's folder")
    tags = [data.decode() for data in (plane or ControlPlane.for_group()).all_gather(text.encode())]
    if len(set(tags)) > 1:
        said = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(tags))
        raise DivergentValueError(f"ranks passed different tags ({said}); pass the same tag on every rank")
    return text


# ------------------------------------------------------------------ loading


def find_checkpoint(load_dir: str | os.PathLike[str], tag: str | None) -> Place | None:
    """The folder of a tag, or of the latest checkpoint; None if there is none yet."""
    found = _latest_tag(load_dir) if tag is None else str(tag)
    return None if found is None else _folder_of(load_dir, found)


def find_to_load(load_dir: str | os.PathLike[str], tag: str | None) -> Place | None:
    """Like `find_checkpoint`, and the same on all ranks: the first one says which is the latest, and an error on one
    rank is raised on all."""
    doing = f"looking for a checkpoint in {load_dir}"

    def ask() -> bytes:
        return msgspec.json.encode(None if tag is None else str(tag))

    def choose(asked: list[bytes]) -> bytes:
        if len(set(asked)) > 1:
            tags = ", ".join(f"rank {rank} for {msgspec.json.decode(each)!r}" for rank, each in enumerate(asked))
            raise DivergentValueError(f"the ranks asked for different checkpoints in {load_dir}: {tags}")
        return asked[0] if tag is not None else msgspec.json.encode(_latest_tag(load_dir))

    chosen = msgspec.json.decode(Teams().team(doing).reduce(ask, choose), type=str | None)
    return None if chosen is None else _on_all_ranks(doing, lambda: _folder_of(load_dir, chosen))


def _latest_tag(load_dir: str | os.PathLike[str]) -> str | None:
    folder = Place(load_dir)
    named = named_by_latest(folder)
    if not named:
        check_holds_checkpoints(folder)
    return named[0].name if named else None


def _folder_of(load_dir: str | os.PathLike[str], tag: str) -> Place:
    folder = Place(load_dir)
    path = folder / tag
    if not path.is_dir():
        here = (
            sorted(name for name in folder.names() if (folder / name / MANIFEST).is_file()) if folder.is_dir() else []
        )
        raise CheckpointNotFoundError(
            f"there is no checkpoint {path}; " + (f"{folder} has {', '.join(here)}" if here else f"{folder} has none")
        )
    return path


def _on_all_ranks(doing: str, work: Callable[[], Result]) -> Result:
    """The result of `work`. An error on one rank is raised on all, because they wait for each other."""
    return Teams().team(doing).together(work)


def load_step(engine: Trained, manager: CheckpointManager, which: Which, **options: bool) -> tuple[int, dict[str, Any]]:
    """Load a manager's checkpoint of a step; returns the step and the client state."""
    client_state: dict[str, Any] = {}

    def read(store: Store) -> None:
        client_state.update(load_engine(engine, Place(store), **options))

    return manager.restore(which, read), client_state


def load_engine(
    engine: Trained, path: Place, *, strict: bool, optimizer: bool, lr_scheduler: bool, module_only: bool
) -> dict[str, Any]:
    """Load the requested parts of a checkpoint into the engine; returns the client state."""

    def look() -> tuple[Any, ...]:
        reader = reader_for(path)
        checkpoint = Checkpoint(reader)
        values = _values(checkpoint)
        parts = engine.stateful_loader, engine.ranks.samples
        position = None if module_only else loaders.stored_position(checkpoint, *parts)
        reshard(engine.module)
        return reader, checkpoint, values, position, *_module_targets(engine, checkpoint, values, strict=strict)

    reader, checkpoint, values, position, state, copies = _on_all_ranks(f"loading {path}", look)
    engine._has_checkpoint = True

    before = engine.unfinished

    def restore() -> None:
        wanted: dict[str, Any] = {"module": state}
        live = optimizer_state(engine) if optimizer and not module_only else None
        if live is not None:
            wanted["optimizer"] = {"state": _renamed(live["state"], _tied(engine))}
        load(
            wanted,
            storage_reader=reader,
            planner=_LoadPlanner(engine, path) if engine.pages is None else _PagedLoadPlanner(engine, path),
        )
        _finish_module(engine, state, copies)
        engine.drop_gradients()  # they are those of other parameters
        if live is not None:
            here = {first: name for name, first in _tied(engine).items()}
            groups = _param_groups(engine, values.get("optimizer", {}).get("param_groups", []), live["param_groups"])
            loaded = {"state": _renamed(wanted["optimizer"]["state"], here), "param_groups": groups}
            set_optimizer_state_dict(engine.module, engine.optimizer, loaded)
            if engine.pages is not None:
                engine.pages.mend()

    if engine.pipeline is None:
        restore()
    else:  # a mismatch on one stage only must be an error on all stages
        ControlPlane.for_group().run_together(restore, f"loading {path}")
    if not module_only:
        if optimizer and values.get("loss_scaler") is not None and engine.loss_scale.dynamic:
            engine.loss_scale.load_state_dict(values["loss_scaler"])
        _restore_parts(engine, values, position, lr_scheduler=lr_scheduler)
        _restore_random(checkpoint)
    engine.unfinished = before if module_only or not optimizer else None
    mark("read")
    return client_state_of(values)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, engine: Trained, path: Place) -> None:
        super().__init__()
        self._engine, self._path = engine, path

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        mark("planned")
        self._engine.unfinished = f"loading {self._path}"  # from here on it changes the run
        return super().finish_plan(new_plan)


class _PagedLoadPlanner(_LoadPlanner):
    """Of state in files, only what is being read is in memory."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = super().resolve_tensor(read_item)
        assert self._engine.pages is not None
        self._engine.pages.look_at(tensor, for_writing=True)
        return tensor


def _values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything but the state of the model, the optimizer and the random generators, nested as it was saved."""
    paths = checkpoint.metadata.planner_data if isinstance(checkpoint.metadata.planner_data, dict) else {}
    nested: dict[str, Any] = {}
    for name in checkpoint:
        if name.startswith((*_TENSORS, "rng@", f"{loaders.NAME}@")):
            continue
        *outer, last = paths.get(name, (name,))
        base, _, rank = name.rpartition("@")
        if f"{base}@0" in checkpoint:  # saved by each rank separately
            if rank != str(dist.get_rank()):
                continue
            last = last.rpartition("@")[0]
        value = checkpoint[name]
        set_element(nested, (*outer, last), value[...] if isinstance(value, LazyTensor) else value)
    return restored(nested, paths)


def _module_targets(
    engine: Trained, checkpoint: Checkpoint, values: Mapping[str, Any], *, strict: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """The model's tensors to load in place, and those to copy from others, with which they shared memory when saved."""
    state = own_tensors(engine)
    if tied := _tied(engine):
        whole = engine.module_state_dict()
        state |= {first: whole[name] for name, first in tied.items()}
    elsewhere: frozenset[str] = frozenset() if engine.pipeline is None else engine.pipeline.elsewhere
    stored = {name.removeprefix("module.") for name in checkpoint if name.startswith("module.")}
    shared = values.get("shared_params") or {}
    missing = [name for name in state if name not in stored]
    copies = {name: shared[name] for name in missing if shared.get(name) in state}
    # A checkpoint without frozen parameters leaves them as they are.
    left_out = frozen_parameters(engine) if values.get("frozen_param_shapes") is None else {}
    lacking = [name for name in missing if name not in copies and name not in left_out]
    known = (state, engine.shared_params, elsewhere)
    unexpected = sorted(name for name in stored if not any(name in names for names in known))
    if engine.pipeline is not None:  # a name that one stage lacks is an error on all: the others would wait for it
        faults = gather_over(engine.pipeline.axis, [lacking, unexpected])
        lacking, unexpected = (list(dict.fromkeys(chain.from_iterable(found))) for found in zip(*faults, strict=True))
    if strict and (lacking or unexpected):
        lines = [f"{name}: not in the checkpoint" for name in lacking]
        lines += [f"{name}: not in the model" for name in unexpected]
        raise CheckpointMismatchError(
            "the checkpoint does not fit the model (load_module_strict=False loads what does):\n  "
            + "\n  ".join(lines),
            missing=tuple(lacking),
        )
    return {name: value for name, value in state.items() if name in stored}, copies


def _param_groups(engine: Trained, stored: list[dict[str, Any]], live: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stored param groups, without parameters of other stages and without options that are not known here.

    Their number may differ from this run's: each parameter gets its options by its name.
    """
    elsewhere: frozenset[str] = frozenset() if engine.pipeline is None else engine.pipeline.elsewhere
    here = {first: name for name, first in _tied(engine).items()}
    own = {name for group in live for name in group["params"]}
    options = {key for group in live for key in group}
    kept = []
    for group in stored:
        names = (here.get(name, name) for name in group["params"])
        known = {key: value for key, value in group.items() if key in options}
        kept.append({**known, "params": [name for name in names if name in own or name not in elsewhere]})
    return kept


def _renamed(entries: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): entry for name, entry in entries.items()}


def _tied(engine: Trained) -> dict[str, str]:
    """Parameters of this rank's stages that another stage saves, under its own name for them."""
    return {} if engine.pipeline is None else engine.pipeline.tied.first


@torch.no_grad()
def _finish_module(engine: Trained, loaded: Mapping[str, Any], copies: Mapping[str, str]) -> None:
    """Tensors have been loaded in place; set the remaining entries."""
    state = own_tensors(engine)
    for name, source in copies.items():
        state[name].copy_(state[source])
    extra = {name: value for name, value in loaded.items() if not isinstance(value, torch.Tensor)}
    if extra:
        engine.module.load_state_dict(extra, strict=False)


def _restore_parts(
    engine: Trained, values: Mapping[str, Any], position: dict[str, Any] | None, *, lr_scheduler: bool
) -> None:
    parts: dict[str, Any] = {"data_sampler": engine.data_sampler}
    if lr_scheduler:
        parts["lr_scheduler"] = engine.lr_scheduler
    parts[loaders.NAME] = engine.stateful_loader
    for name, part in parts.items():
        stored = position if name == loaders.NAME else values.get(name)
        if part is not None and stored is not None:
            # Numbers as dict keys of a scheduler's state are text in a checkpoint.
            part.load_state_dict(keyed_like(stored, part.state_dict()) if name == "lr_scheduler" else stored)
        elif part is not None or stored is not None:
            LOGGER.warning(
                "%s is not restored: only %s has one", name, "this run" if stored is None else "the checkpoint"
            )
    if values.get("random_ltd") is not None:
        LOGGER.warning("random_ltd is not restored: terrazzo does not have it, so all layers process all tokens")
    engine.global_steps = int(values["global_steps"])
    engine.global_samples = int(values["global_samples"])
    engine.skipped_steps = int(values["skipped_steps"])
    engine.micro_steps = engine.global_steps * engine.batch.accumulation


def _restore_random(checkpoint: Checkpoint) -> None:
    rank = dist.get_rank()
    if f"rng@{rank}" in checkpoint:
        set_random_state(checkpoint[f"rng@{rank}"])
    elif "rng@0" in checkpoint:
        derive_random_state(checkpoint["rng@0"], rank)
