"""The contents of a run's checkpoint.

    module                      the model's tensors, parameters mostly in float32, by their names in the unwrapped model
    buffer_names                which of them are buffers
    optimizer                   its state, by parameter name
    param_shapes                [[name, shape], ...] of the trainable parameters, for each param group
    frozen_param_shapes         the same for frozen ones; None if they were left out
    frozen_param_fragments      [[name, dim, lengths], ...]: how the data-parallel ranks had cut them
    shared_params               further names of parameters -> first name
    lr_scheduler, data_sampler, loss_scaler                  their states, or None
    training_dataloader         the state of a loader that knows its place, each rank's own, or None
    global_steps, skipped_steps, global_samples              counters
    dp_world_size, mp_world_size                             ranks that held shards or replicas; ranks per model
    ds_config, version          the configuration; terrazzo's version
    rng                         random states, each rank's own

and beside these, under their own names, what the user adds as client state; of that, values with names that are in this
list are in `client_state_under_other_names`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Final

import msgspec
from torch import nn

import terrazzo
from terrazzo._torch.modules import buffers_of, is_persistent
from terrazzo.checkpoint import PerRank
from terrazzo.checkpoint.manager.records import VALUE
from terrazzo.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from terrazzo.engine.loaders import position_of
from terrazzo.engine.placing import reshard
from terrazzo.engine.rng import random_state
from terrazzo.engine.stages import of_all_stages, without_copies
from terrazzo.engine.trained import Trained
from terrazzo.errors import StateNameError
from terrazzo.layout import Shard
from terrazzo.layout.chunking import chunk_sizes
from terrazzo.tensor import DTensor

LOGGER = logging.getLogger("terrazzo.engine")

APART: Final = "client_state_under_other_names"
# Names that the client state may have, too: DeepSpeed takes the first three, and does not know the others.
_SHARED_WITH_DEEPSPEED: Final = frozenset({"module", "optimizer", "lr_scheduler"})
SHARED_NAMES: Final = _SHARED_WITH_DEEPSPEED | {"training_dataloader", "loss_scaler", "version", "rng", APART}
_TAKEN_NAMES: Final = frozenset(
    {
        "buffer_names",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "data_sampler",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        VALUE,  # what a manager says of the checkpoint
        # DeepSpeed's checkpoints have these too, and a run may be saved in its layout.
        "ds_version",
        "random_ltd",
        "sparse_tensor_module_names",
        "checkpoint_parallel_dimensions",
    }
)


def content(engine: Trained, client_state: Mapping[str, Any], *, exclude_frozen: bool) -> dict[str, Any]:
    """Everything that a checkpoint of the engine holds."""
    check_client_names(client_state)
    if engine.pages is not None:
        engine.pages.check()
    reshard(engine.module)
    frozen = None if exclude_frozen else frozen_parameters(engine)
    state = {
        "module": own_tensors(engine, exclude_frozen=exclude_frozen),
        "buffer_names": buffer_names(engine.module),
        "optimizer": without_copies(optimizer_state(engine), engine.shared_params),
        "param_shapes": param_shapes(engine),
        "frozen_param_shapes": None if frozen is None else [[name, list(p.shape)] for name, p in frozen.items()],
        "frozen_param_fragments": None if frozen is None else _fragments(frozen, engine.ranks.mesh.ndim),
        "shared_params": dict(engine.shared_params),
        "lr_scheduler": _state_of(engine.lr_scheduler),
        "data_sampler": _state_of(engine.data_sampler),
        "training_dataloader": position_of(engine.stateful_loader, engine.ranks.samples),
        "loss_scaler": engine.loss_scale.state_dict(),
        "skipped_steps": engine.skipped_steps,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "dp_world_size": engine.ranks.data.size,
        "mp_world_size": engine.mp_world_size,
        "ds_config": msgspec.to_builtins(engine.config),
        "version": terrazzo.__version__,
        "rng": PerRank(random_state()),
    }
    if engine.pipeline is not None:
        state = of_all_stages(state, engine.pipeline.axis)
    apart = {name: value for name, value in client_state.items() if name in SHARED_NAMES}
    return {**client_state, **state, **({APART: apart} if apart else {})}


def client_state_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The client state among the values of a checkpoint."""
    by_deepspeed = "ds_version" in values
    own = _TAKEN_NAMES | ({*_SHARED_WITH_DEEPSPEED, "loss_scaler"} if by_deepspeed else SHARED_NAMES)
    return {name: value for name, value in values.items() if name not in own} | values.get(APART, {})


def optimizer_state(engine: Trained) -> dict[str, Any]:
    """The optimizer's state and groups; that of parameters without any yet is where the others' is."""
    with nullcontext() if engine.pages is None else engine.pages.complete():
        return get_optimizer_state_dict(engine.module, engine.optimizer)


def check_client_names(client_state: Mapping[str, Any]) -> None:
    """Raise if the client state uses a name under which the engine stores something that DeepSpeed would then lose."""
    taken = sorted(set(client_state) & _TAKEN_NAMES)
    if taken:
        raise StateNameError(f"client_state uses names that the engine uses itself: {', '.join(taken)}; rename them")


def own_tensors(engine: Trained, *, exclude_frozen: bool = False) -> dict[str, Any]:
    """The model's state, with each shared parameter once."""
    state = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen)
    return {name: value for name, value in state.items() if name not in engine.shared_params}


def module_state_dict(model: nn.Module, *, exclude_frozen: bool) -> dict[str, Any]:
    """The model's state under all of its names."""
    reshard(model)
    state = get_model_state_dict(model)
    if exclude_frozen:
        frozen = {id(p) for p in model.parameters() if not p.requires_grad}
        names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in frozen}
        state = {name: value for name, value in state.items() if name not in names}
    return state


def buffer_names(model: nn.Module) -> list[str]:
    """The names of the buffers that are part of the state dict."""
    found = (
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in buffers_of(module).items()
        if buffer is not None and is_persistent(module, name)
    )
    return list(dict.fromkeys(found))


def param_shapes(engine: Trained) -> list[list[list[Any]]]:
    """Names and shapes of the trainable parameters, by param group of the optimizer."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    return [
        [
            [names[id(p)], list(p.shape)]
            for p in group["params"]
            if p.requires_grad and names[id(p)] not in engine.shared_params
        ]
        for group in engine.optimizer.param_groups
    ]


def frozen_parameters(engine: Trained) -> dict[str, nn.Parameter]:
    """The parameters that do not require gradients, by name."""
    named = engine.module.named_parameters()
    return {name: p for name, p in named if not p.requires_grad and name not in engine.shared_params}


def _fragments(frozen: Mapping[str, nn.Parameter], dims: int) -> list[list[Any]]:
    on_cpu = sum(p.device.type == "cpu" for p in frozen.values())
    if frozen:
        LOGGER.info("frozen parameters: %d on the CPU, %d on accelerators", on_cpu, len(frozen) - on_cpu)
    return list(_cuts(frozen, dims))


def _cuts(frozen: Mapping[str, nn.Parameter], dims: int) -> Iterator[list[Any]]:
    """Along which dim each is cut, and the lengths of all parts; of a tensor-parallel one all its parts, too."""
    for name, p in frozen.items():
        if isinstance(p, DTensor):
            by_data = dims - 1  # the mesh dim along which fully_shard cuts: its last
            cut = p._layout.placements[by_data]
            dim = cut.dim if isinstance(cut, Shard) else 0
            lengths = [p.shape[dim] if p.ndim else 1]
            for mesh_dim in (*range(by_data + 1, p.device_mesh.ndim), by_data):  # tensor parallelism has cut first
                placement = p._layout.placements[mesh_dim]
                if isinstance(placement, Shard) and placement.dim == dim:
                    lengths = [n for whole in lengths for n in chunk_sizes(whole, p.device_mesh.size(mesh_dim))]
            yield [name, dim, lengths]


def _state_of(part: Any) -> Any:
    return None if part is None else part.state_dict()
