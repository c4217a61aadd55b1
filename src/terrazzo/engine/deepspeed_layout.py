"""Saving a run as DeepSpeed would have, in ZeRO stages 1 and 2: for it to resume, on as many ranks.

Each rank writes its flat partitions; the first also writes the model.  Tensors are gathered one at a time, so a rank
holds its partitions, which it writes, and one whole tensor; the first rank also the model, in the precision of forward.
The folder appears under its name once every file in it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.checkpoint.formats.deepspeed.partitions import Placed, in_one_line
from terrazzo.checkpoint.state_dict import get_optimizer_state_dict
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.comm import ControlPlane
from terrazzo.engine.content import content
from terrazzo.errors import CheckpointExistsError, EngineError
from terrazzo.tensor import DTensor

if TYPE_CHECKING:
    from terrazzo.engine.engine import Engine

# The release whose layout this is; DeepSpeed refuses checkpoints that name none.
_VERSION: Final = "0.19.0"
_ALIGNMENT: Final = 2  # partitions begin at even elements


def save_in_deepspeed_layout(
    engine: Engine, folder: Path, tag: str, client_state: Mapping[str, Any], *, exclude_frozen: bool
) -> None:
    """Write `<folder>/<tag>` from all ranks together; an existing one is an error."""
    if engine.stage not in (1, 2) or engine.mp_world_size > 1:
        raise EngineError(
            "layout='deepspeed' is written in ZeRO stages 1 and 2, of models without tensor parallelism; this run is "
            f"in stage {engine.stage} with {engine.mp_world_size} ranks per model"
        )
    plane = ControlPlane.for_group()
    temporary = folder / f".{tag}.tmp"
    rank, first = dist.get_rank(), dist.get_rank() == 0

    def prepare() -> None:
        if first:
            if (folder / tag).exists():
                raise CheckpointExistsError(
                    f"{folder / tag} exists; DeepSpeed's layout is not written over a checkpoint"
                )
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    plane.run_together(prepare, f"preparing {folder / tag}")
    state = content(engine, client_state, exclude_frozen=exclude_frozen)
    partitions = _optimizer_partitions(engine, rank)
    model = _model_states(engine, state, client_state, first)

    def write() -> None:
        prefix = "bf16_" if engine.bfloat16_enabled() else ""
        _write(temporary, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", partitions)
        if first:
            _write(temporary, "mp_rank_00_model_states.pt", model)

    plane.run_together(write, f"writing {folder / tag}")

    def commit() -> None:
        if first:
            LocalStore(temporary).sync_folder(temporary)
            os.rename(temporary, folder / tag)
            LocalStore(folder).sync_folder(folder)

    plane.run_together(commit, f"committing {folder / tag}")


def _write(folder: Path, name: str, value: Any) -> None:
    with (folder / name).open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _whole(value: Any) -> Tensor:
    whole: Tensor = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    return whole.cpu()


# ------------------------------------------------------------------ the optimizer


def _optimizer_partitions(engine: Engine, rank: int) -> dict[str, Any]:
    named = dict(engine.module.named_parameters())
    optimizer = get_optimizer_state_dict(engine.module, engine.optimizer)
    ranks = engine.dp_world_size
    weights, states, paddings, groups = [], {}, [], []
    for number, group in enumerate(optimizer["param_groups"]):
        names = [name for name in group["params"] if named[name].requires_grad]
        total = sum(prod(named[name].shape) for name in names)
        partition = -(-total // (_ALIGNMENT * ranks)) * _ALIGNMENT
        lean = max(min(total - rank * partition, partition), 0)
        placed = list(in_one_line([(name, tuple(named[name].shape)) for name in names], partition))
        flat = _flat(placed, [named[name] for name in names], partition, rank)
        weights.append(flat[:lean].clone())
        paddings.append(partition - lean)
        states[number] = _group_state(placed, [optimizer["state"][name] for name in names], partition, rank)
        groups.append({**group, "params": [number]})
    return {
        "optimizer_state_dict": {
            "dynamic_loss_scale": engine.loss_scale.dynamic,
            "overflow": False,
            "clip_grad": engine.config.gradient_clipping,
            "base_optimizer_state": {"state": states, "param_groups": groups},
            "single_partition_of_fp32_groups": weights,
            "zero_stage": engine.stage,
            "group_paddings": paddings,
            "partition_count": [ranks] * len(groups),
            "ds_version": _VERSION,
        },
        "ds_config": _config(engine),
        "ds_version": _VERSION,
    }


def _group_state(placed: Sequence[Placed], states: Sequence[Mapping[str, Any]], partition: int, rank: int) -> Any:
    kept: dict[str, Any] = {}
    for key, value in states[0].items() if states else ():
        if isinstance(value, Tensor) and value.ndim == 0:
            kept[key] = value.clone()
        elif isinstance(value, Tensor):
            kept[key] = _flat(placed, [state[key] for state in states], partition, rank)
        else:
            kept[key] = value
    return kept


def _flat(placed: Sequence[Placed], tensors: Sequence[Any], partition: int, rank: int) -> Tensor:
    """This rank's partition of the tensors, one after the other."""
    flat = torch.zeros(partition)
    for where, tensor in zip(placed, tensors, strict=True):
        whole = _whole(tensor).reshape(-1)
        start = 0
        for run in where.runs:
            if run.rank == rank:
                flat[run.start : run.start + run.length] = whole[start : start + run.length]
            start += run.length
    return flat


# ------------------------------------------------------------------ the model


def _model_states(engine: Engine, state: Mapping[str, Any], client: Mapping[str, Any], first: bool) -> dict[str, Any]:
    """Everything else; every rank takes part, and the first keeps it."""
    buffers = set(state["buffer_names"])
    module: OrderedDict[str, Any] = OrderedDict()
    for name, value in engine.module_state_dict(exclude_frozen_parameters=state["frozen_param_shapes"] is None).items():
        whole = _whole(value) if isinstance(value, Tensor) else value
        if first:
            compute = isinstance(whole, Tensor) and whole.is_floating_point() and name not in buffers
            module[name] = whole.to(engine.dtype) if compute else whole
    frozen = state["frozen_param_shapes"] or []
    has_frozen = engine.stage == 2 and bool(frozen)
    return {
        "module": module,
        "buffer_names": state["buffer_names"],
        "optimizer": None,
        "param_shapes": [_shapes(group) for group in state["param_shapes"]],
        "frozen_param_shapes": _shapes(frozen) if has_frozen else None,
        "shared_params": state["shared_params"],
        "frozen_param_fragments": (
            OrderedDict((name, module[name]) for name, _ in frozen) if has_frozen and first else None
        ),
        "lr_scheduler": state["lr_scheduler"],
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(state["sparse_tensor_module_names"]),
        **{name: state[name] for name in ("skipped_steps", "global_steps", "global_samples")},
        **{name: state[name] for name in ("dp_world_size", "mp_world_size")},
        "ds_config": _config(engine),
        "ds_version": _VERSION,
        **client,
    }


def _shapes(pairs: Sequence[Sequence[Any]]) -> OrderedDict[str, torch.Size]:
    return OrderedDict((name, torch.Size(shape)) for name, shape in pairs)


def _config(engine: Engine) -> dict[str, Any]:
    return {
        "train_batch_size": engine.batch.total,
        "train_micro_batch_size_per_gpu": engine.batch.micro,
        "gradient_accumulation_steps": engine.batch.accumulation,
        "gradient_clipping": engine.config.gradient_clipping,
        "zero_optimization": {"stage": engine.stage},
        "bf16": {"enabled": engine.bfloat16_enabled()},
        "fp16": {"enabled": engine.fp16_enabled()},
    }
