"""Saving a run in DeepSpeed's layout, in ZeRO stages 1, 2 and 3, for DeepSpeed to resume on as many ranks.

Each rank writes its flat partitions, and in stage 3 its part of the model's states; in stages 1 and 2 the first rank
writes the model. Tensors are gathered one at a time, so a rank holds its partitions, which it writes, and one whole
tensor; the first rank of stages 1 and 2 also holds the model, in the precision of forward. Of experts that ranks have
divided among them, a rank writes its own, each to a file. The folder becomes a checkpoint when every file in it is
complete.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from terrazzo.checkpoint import PerRank
from terrazzo.checkpoint.formats.deepspeed.new_folder import NewFolder, new_save
from terrazzo.checkpoint.formats.deepspeed.partitions import STACK, Placed, layer_of
from terrazzo.checkpoint.formats.deepspeed.writing import (
    RunLayout,
    apart,
    expert_files,
    loss_scaler,
    model_states,
    optim_states,
    param_group,
    write_file,
)
from terrazzo.checkpoint.stores import Place
from terrazzo.comm import ControlPlane
from terrazzo.engine.content import SHARED_NAMES, content
from terrazzo.engine.trained import Trained
from terrazzo.errors import EngineError, StateNameError
from terrazzo.tensor import DTensor

# The parts of a run's content that DeepSpeed's files have under the same names.
_TAKEN_OVER = ("buffer_names", "lr_scheduler", "skipped_steps", "global_steps", "global_samples")


def save_in_deepspeed_layout(
    engine: Trained, folder: Place, tag: str, client_state: Mapping[str, Any], *, exclude_frozen: bool
) -> None:
    """Write `<folder>/<tag>`, called by all ranks together; if it exists that is an error."""
    if engine.stage == 0 or engine.mp_world_size > 1:
        raise EngineError(
            "layout='deepspeed' supports ZeRO stages 1, 2 and 3 without model parallelism, but this run is in stage "
            f"{engine.stage} with {engine.mp_world_size} ranks per model: save it without layout="
        )
    layers = _layers(engine)
    if layers and (engine.stage == 3 or engine.config.zero_optimization.round_robin_gradients):
        raise EngineError(
            "layout='deepspeed' has experts of deepspeed.moe.layer.MoE only in stages 1 and 2 without "
            "round_robin_gradients, as DeepSpeed: save the run without layout="
        )
    own = SHARED_NAMES | ({"num_experts"} if layers else set())
    if taken := sorted(own & set(client_state)):
        raise StateNameError(
            f"client_state uses {', '.join(taken)}, and DeepSpeed's files have the engine's own there: rename them, or "
            "save without layout='deepspeed'"
        )
    plane = ControlPlane.for_group()
    rank = engine.ranks.data.index
    new = NewFolder(folder / tag, plane.broadcast(new_save().encode() if plane.index == 0 else None).decode())
    if b"1" in plane.all_gather(b"1" if new.is_taken() else b"0"):
        raise new.refusal()

    def prepare() -> None:
        if rank == 0:
            new.prepare()

    plane.run_together(prepare, f"preparing {folder / tag}")
    try:
        _write(engine, new, client_state, plane, layers, exclude_frozen=exclude_frozen)
    except BaseException:
        if rank == 0:
            new.discard()
        raise


def _write(
    engine: Trained,
    new: NewFolder,
    client_state: Mapping[str, Any],
    plane: ControlPlane,
    layers: Mapping[str, tuple[int, int]],
    *,
    exclude_frozen: bool,
) -> None:
    """Write all files, and commit."""
    rank = engine.ranks.data.index
    state = content(engine, client_state, exclude_frozen=exclude_frozen)
    layout = _layout(engine, state, layers)
    # Every rank gathers the same tensors in the same order.
    tensors = _Gathered(engine, state["optimizer"]["state"], keeps_model=layout.model_file(rank) is not None)
    config = _config(engine)
    scaler = loss_scaler(state["loss_scaler"], config["fp16"])
    optimizer = optim_states(layout, tensors, rank, scaler, engine.config.gradient_clipping, config)
    rest = {name: state[name] for name in _TAKEN_OVER}
    rest["sparse_tensor_module_names"] = set()
    model = model_states(layout, tensors, rank, {**rest, "ds_config": config, **_each_ranks(client_state, plane)})

    experts = expert_files(layout, tensors.experts, rank)

    def write() -> None:
        files = {layout.optim_file(rank): optimizer, **experts}
        name = layout.model_file(rank)
        for file, contents in (files if name is None else {**files, name: model}).items():
            new.check()
            write_file(new.store, file, contents)

    plane.run_together(write, f"writing {new.target}")

    def commit() -> None:
        if rank == 0:
            new.commit(layout.files())

    plane.run_together(commit, f"committing {new.target}")


def _layers(engine: Trained) -> dict[str, tuple[int, int]]:
    """The layers of experts: among how many ranks each is divided, and the number of its experts."""
    model: nn.Module = engine.module
    found = {}
    for name, module in model.named_modules():
        stack = f"{name}.deepspeed_experts."
        if stack.endswith(STACK):
            found[layer_of(stack)] = (int(vars(module)["expert_parallel_size"]), int(vars(module)["num_experts"]))
    return found


def _layout(engine: Trained, state: Mapping[str, Any], layers: Mapping[str, tuple[int, int]]) -> RunLayout:
    shapes = [dict(pairs) for pairs in state["param_shapes"]]
    kept = state["optimizer"]["state"]
    groups = apart(
        list(zip(shapes, state["optimizer"]["param_groups"], strict=True)),
        {layer: parts for layer, (parts, _) in layers.items()},
    )
    frozen = state["frozen_param_shapes"]
    return RunLayout(
        stage=engine.stage,
        ranks=engine.ranks.data.size,
        dtype=engine.dtype,
        groups=tuple(param_group(named, options, kept, parts) for named, options, parts in groups),
        frozen=None if frozen is None else {name: shape for name, shape in frozen if STACK not in name},
        shared=state["shared_params"],
        model=list(engine.module_state_dict(exclude_frozen_parameters=state["frozen_param_shapes"] is None)),
        settings=msgspec.to_builtins(engine.config.zero_optimization),
        layers=layers,
        data_first=engine.config.use_data_before_expert_parallelism,
    )


def _each_ranks(client_state: Mapping[str, Any], plane: ControlPlane) -> dict[str, Any]:
    """The client state; for values that differ between ranks it has all of them, named as in a native checkpoint."""
    shown: dict[str, Any] = {}
    for name, value in client_state.items():
        if isinstance(value, PerRank):
            # Sent by this run's own ranks, so it may be unpickled.
            parts = [pickle.loads(data) for data in plane.all_gather(pickle.dumps(value.value))]
            shown |= {f"{name}@{rank}": part for rank, part in enumerate(parts)}
        else:
            shown[name] = value
    return shown


def _config(engine: Trained) -> dict[str, Any]:
    """The config, with the values that DeepSpeed would have computed."""
    config = msgspec.to_builtins(engine.config)
    return {
        **config,
        "train_batch_size": engine.batch.total,
        "train_micro_batch_size_per_gpu": engine.batch.micro,
        "gradient_accumulation_steps": engine.batch.accumulation,
    }


class _Gathered:
    """The tensors of a run, gathered from all of its ranks."""

    def __init__(self, engine: Trained, kept: Mapping[str, Mapping[str, Any]], *, keeps_model: bool) -> None:
        self._model = engine.module_state_dict()
        self._kept = kept
        self._keeps_model = keeps_model
        self._dtype = engine.dtype

    def flat(self, kind: str, placed: Sequence[Placed], rank: int, length: int, dtype: torch.dtype) -> Tensor:
        """A rank's flat tensor."""
        flat = torch.zeros(length, dtype=dtype, device="cpu")
        for where in placed:
            tensor = self._model[where.name] if kind == "module" else self._kept[where.name][kind]
            whole = _whole(tensor).reshape(-1)
            start = 0
            for run in where.runs:
                if run.rank == rank:
                    flat[run.start : run.start + run.length] = whole[start : start + run.length]
                start += run.length
        return flat

    def whole(self, name: str, dtype: torch.dtype | None) -> Any:
        """A part of the model's state, whole; None on a rank that does not write it."""
        value = self._model[name]
        if isinstance(value, Tensor):
            value = _whole(value)
            value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        return value if self._keeps_model else None

    def experts(self, name: str, numbers: range) -> list[Tensor]:
        """The rows of a stacked parameter for some experts, in the precision of forward."""
        whole = _whole(self._model[name])
        return [whole[number].to(self._dtype, copy=True) for number in numbers]


def _whole(value: Tensor) -> Tensor:
    whole: Tensor = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    return whole.cpu()
