"""Lightning: a strategy that shards with `fully_shard`, and checkpoints that any number of ranks resumes.

    from pytorch_lightning import Trainer
    from terrazzo.integrations.lightning import FullyShardStrategy

    trainer = Trainer(strategy=FullyShardStrategy(), devices=8, gradient_clip_val=1.0)
    trainer.fit(module, loader, ckpt_path="last")

Checkpoints are folders in terrazzo's format: `state_dict` and `optimizer_states` by name, each rank its own part, and
everything else that Lightning stores as one value, that of the first rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from lightning_fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning_fabric.utilities.init import _materialize_distributed_module
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.constants import default_pg_timeout

from terrazzo.checkpoint import Checkpoint, DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter, load, save
from terrazzo.checkpoint.plan.flatten import as_pattern
from terrazzo.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from terrazzo.comm import axis_of
from terrazzo.engine.placing import gathered_together, same_everywhere
from terrazzo.engine.saved_keys import keyed_like
from terrazzo.errors import CheckpointMismatchError, FSDPValueError, UnsupportedValueError
from terrazzo.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from terrazzo.tensor import DTensor

_MODEL: Final = "state_dict"
_OPTIMIZERS: Final = "optimizer_states"
_REST: Final = "lightning"  # the name under which everything else is stored, as one value


class TerrazzoCheckpointIO(TorchCheckpointIO):
    """Reads and writes Lightning's checkpoints in terrazzo's format; it also reads files of `torch.save`.

    For any strategy: `Trainer(plugins=[TerrazzoCheckpointIO()])`. `FullyShardStrategy` has one already.

    Args:
        allow_pickle: pickle values that cannot be stored as typed data, such as instances of classes among the
            hyperparameters, and unpickle them when loading; only for checkpoints that you trust.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self.allow_pickle = allow_pickle

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save from this process only: Lightning's own strategies call it on their first rank."""
        self.write(checkpoint, path, storage_options, alone=True)

    def write(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None, *, alone: bool
    ) -> None:
        """Save from this process only, or from all ranks together, each with its part of the DTensors."""
        if storage_options is not None:
            raise UnsupportedValueError("storage_options are not supported: pass a URL as the path")
        parts = {key: value for key, value in checkpoint.items() if key in (_MODEL, _OPTIMIZERS) or _is_spread(value)}
        # A tuple is stored as one value, in which numbers as dict keys stay numbers.
        rest = tuple((key, _plain(value)) for key, value in checkpoint.items() if key not in parts)
        # Buffers, such as running statistics of the data, may differ between ranks.
        whole = [name for name, value in parts.get(_MODEL, {}).items() if not isinstance(value, DTensor)]
        planner = DefaultSavePlanner(
            lowest_rank_wins=[_REST, *(as_pattern(f"{_MODEL}.{name}") for name in whole)],
            allow_pickle=self.allow_pickle,
        )
        save({**parts, _REST: rest}, storage_writer=FileSystemWriter(path), planner=planner, no_dist=alone)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The whole checkpoint, with whole tensors on the CPU; each process reads it by itself."""
        if os.path.isfile(path):
            loaded: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=weights_only)
            return loaded
        stored = Checkpoint(path, allow_pickle=self.allow_pickle).state_dict()
        stored |= dict(stored.pop(_REST, ()))
        for state in stored.get(_OPTIMIZERS, []):  # other formats have parameters' numbers as text; names stay text
            state["state"] = {int(key) if str(key).isdigit() else key: item for key, item in state["state"].items()}
        return stored


class FullyShardStrategy(ModelParallelStrategy):
    """Shards the modules of a `LightningModule` over all ranks, and saves and resumes with `terrazzo.checkpoint`.

    A module that calls `terrazzo.fsdp.fully_shard` itself, in `configure_model` on `self.device_mesh["data_parallel"]`,
    is left as it is. All ranks start with the first one's values.

    With `tensor_parallel_size`, that many neighbouring ranks see the same data, and the module divides its computation
    among them: call `terrazzo.tensor.parallel.parallelize_module` in `configure_model`, on
    `self.device_mesh["tensor_parallel"]`.

    Args:
        tensor_parallel_size: The number of tensor-parallel ranks; it must divide the number of ranks.
        wrap: Class names of the modules that are gathered together; empty: the items of `nn.ModuleList`s.
        reshard_after_forward, mp_policy, offload_policy: As for `fully_shard`.
        process_group_backend: The backend of `torch.distributed`; None: the one for the devices.
        timeout: The time limit of the process group.
    """

    def __init__(
        self,
        *,
        tensor_parallel_size: int = 1,
        wrap: Sequence[str] = (),
        reshard_after_forward: bool | int | None = None,
        mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (immutable)
        offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=tensor_parallel_size, process_group_backend=process_group_backend, timeout=timeout
        )
        self._neighbours = tensor_parallel_size
        self._wrap = tuple(wrap)
        self._options: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
        }

    # ------------------------------------------------------------------ the model

    def setup_environment(self) -> None:
        """Make the mesh: ranks that are not tensor-parallel to each other shard."""
        ranks = self.num_nodes * self.num_processes
        if self._neighbours < 1 or ranks % self._neighbours:
            raise FSDPValueError(
                f"tensor_parallel_size {self._neighbours} does not divide the number of ranks, {ranks}"
            )
        self._data_parallel_size = ranks // self._neighbours
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, unless `configure_model` has sharded it, then create the optimizers."""
        assert self.lightning_module is not None
        self._expect_parallel(self.lightning_module)
        if not any(isinstance(module, FSDPModule) for module in self.lightning_module.modules()):
            self._shard(self.lightning_module)
        _materialize_distributed_module(self.lightning_module, self.root_device)
        # Without the setup of ModelParallelStrategy, which is for modules that shard themselves.
        super(ModelParallelStrategy, self).setup(trainer)

    def _shard(self, module: LightningModule) -> None:
        mesh = self.device_mesh["data_parallel"]
        if not any(p.is_meta for p in module.parameters()):
            tensors = (*module.parameters(), *module.buffers())
            # parallelize_module has taken its tensors from one rank; the plain ones still differ between ranks.
            same_everywhere((t for t in tensors if not isinstance(t, DTensor)), axis_of(self.device_mesh, 1))
            same_everywhere(tensors, axis_of(mesh, 0))
        chosen = gathered_together(module, self._wrap, all_classes=False)
        absent = set(self._wrap) - {type(inner).__name__ for inner in chosen}
        if absent:
            raise FSDPValueError(
                f"wrap names {', '.join(sorted(absent))}, but the module contains no module of that class"
            )
        # `training_step` calls the child modules and not the LightningModule, so each child must gather by itself.
        called = [child for child in module.children() if type(child).forward is not nn.Module.forward]
        for inner in (*chosen, *called):
            if not isinstance(inner, FSDPModule) and any(True for _ in inner.parameters()):
                fully_shard(inner, mesh=mesh, **self._options)
        left = [name for name, p in module.named_parameters() if "data_parallel" not in _dims_of(p)]
        if left:
            raise FSDPValueError(
                f"{', '.join(left[:4])} of {type(module).__name__} would never be gathered, because training_step "
                "calls the child modules only: move the parameters into these, or call terrazzo.fsdp.fully_shard in "
                "configure_model"
            )

    def _expect_parallel(self, module: LightningModule) -> None:
        """Raise if ranks that see the same data would all compute the same."""
        if self._neighbours > 1 and not any("tensor_parallel" in _dims_of(p) for p in module.parameters()):
            raise FSDPValueError(
                f"tensor_parallel_size is {self._neighbours}, but no parameter of {type(module).__name__} is "
                "tensor-parallel: call terrazzo.tensor.parallel.parallelize_module in configure_model, on "
                'self.device_mesh["tensor_parallel"]'
            )

    # ------------------------------------------------------------------ checkpoints

    @property
    def checkpoint_io(self) -> TerrazzoCheckpointIO:
        """The plugin that writes and reads checkpoints."""
        if self._checkpoint_io is None:
            self._checkpoint_io = TerrazzoCheckpointIO()
        assert isinstance(self._checkpoint_io, TerrazzoCheckpointIO)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if not isinstance(io, TerrazzoCheckpointIO):
            raise UnsupportedValueError(
                f"{type(io).__name__} cannot save a sharded model: leave the plugin out, or pass a TerrazzoCheckpointIO"
            )
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; parameters are DTensors."""
        return get_model_state_dict(self._sharded)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An optimizer's state by the names of its parameters, with DTensors placed as these."""
        return get_optimizer_state_dict(self._sharded, _behind(optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save, called by all ranks together."""
        self.checkpoint_io.write(checkpoint, self.broadcast(filepath), storage_options, alone=False)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the module's and the optimizers' state in place, and return everything else.

        The checkpoint may have been saved on any number of ranks, or by another strategy of Lightning, in terrazzo's
        format or in a file.
        """
        path = self.broadcast(checkpoint_path)
        assert self.lightning_module is not None
        strict = bool(self.lightning_module.strict_loading)
        whole = os.path.isfile(path) or self._is_numbered(path)
        if whole:
            rest = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            model, optimizers = rest.pop(_MODEL), rest.pop(_OPTIMIZERS, [])
        else:
            rest, model, optimizers = self._read(path, strict)
        options = StateDictOptions(strict=strict, full_state_dict=whole)
        set_model_state_dict(self._sharded, model, options=options)
        for optimizer, state in zip(self.optimizers, optimizers, strict=False):
            set_optimizer_state_dict(self._sharded, _behind(optimizer), state, options=options)
        if "lr_schedulers" in rest:
            live = [config.scheduler.state_dict() for config in self.lr_scheduler_configs]
            rest["lr_schedulers"] = keyed_like(rest["lr_schedulers"], live)
        return rest

    def _is_numbered(self, path: str | os.PathLike[str]) -> bool:
        """Whether optimizer states are keyed by number, because another strategy, with whole parameters, wrote them."""
        names = (name.split(".") for name in Checkpoint(path) if name.startswith(f"{_OPTIMIZERS}."))
        return any(parts[2] == "state" and parts[3].isdigit() for parts in names if len(parts) > 3)

    def _read(
        self, path: str | os.PathLike[str], strict: bool
    ) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
        """The contents of a checkpoint; tensors are read into existing ones, by each rank its part."""
        checkpoint = Checkpoint(path, allow_pickle=self.checkpoint_io.allow_pickle)
        optimizers = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        state = {_MODEL: self.lightning_module_state_dict()}
        stored = {name.removeprefix(f"{_MODEL}.") for name in checkpoint if name.startswith(f"{_MODEL}.")}
        unexpected = sorted(stored - state[_MODEL].keys())
        if strict and unexpected:
            raise CheckpointMismatchError(
                f"{path} has tensors that the module does not have: {', '.join(unexpected[:4])}"
            )
        wanted: dict[str, Any] = dict(state)
        saved = [name for name in checkpoint if name.startswith(f"{_OPTIMIZERS}.")]
        if saved:
            wanted[_OPTIMIZERS] = [{"state": each["state"]} for each in optimizers]
        load(wanted, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=not strict))
        groups = checkpoint.state_dict(lambda name: ".param_groups" in name and name in saved).get(_OPTIMIZERS, [])
        filled = [{**state, **group} for state, group in zip(wanted.get(_OPTIMIZERS, []), groups, strict=False)]
        rest = checkpoint.state_dict(lambda name: name not in saved and not name.startswith(f"{_MODEL}."))
        return {**rest, **dict(rest.pop(_REST, ()))}, state[_MODEL], filled

    @property
    def _sharded(self) -> nn.Module:
        assert self.model is not None
        return self.model


def _behind(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _dims_of(parameter: nn.Parameter) -> tuple[str, ...]:
    """The names of the mesh dims that a parameter is distributed over."""
    return parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()


def _is_spread(value: Any) -> bool:
    """Whether a value contains DTensors."""
    if isinstance(value, Mapping):
        return any(map(_is_spread, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_spread, value))
    return isinstance(value, DTensor)


def _plain(value: Any) -> Any:
    """The value with plain dicts in place of dict subclasses such as counters."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if type(value) is list else value


__all__ = ["FullyShardStrategy", "TerrazzoCheckpointIO"]
