"""The modules with which PyTorch wraps a model.

DDP, `torch.compile`, activation checkpointing and FSDP1 each wrap a model in a module of their own. In some of them the
wrapper is a part of the keys of `state_dict()`. The table below lists them; the rest of the package uses names without
wrappers. Classes are looked up in imported modules only: without an import of FSDP1 there are no instances, and
importing it here would take every user a second.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from terrazzo.checkpoint.state_dict.options import StateDictOptions


@dataclass(frozen=True)
class Wrapper:
    """A module class that wraps one other module."""

    source: str
    class_name: str
    inner: str
    shown: bool  # whether `inner` appears in the keys of state_dict()

    def matches(self, module: nn.Module) -> bool:
        source = sys.modules.get(self.source)
        return source is not None and isinstance(module, getattr(source, self.class_name))


_FSDP1 = Wrapper(
    "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module", False
)
_WRAPPERS = (
    Wrapper("torch.nn.parallel.distributed", "DistributedDataParallel", "module", True),
    Wrapper("torch.nn.parallel.data_parallel", "DataParallel", "module", True),
    Wrapper("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", True),
    Wrapper(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        False,
    ),
    _FSDP1,
)


def wrapper_of(module: nn.Module) -> Wrapper | None:
    """The kind of wrapper of `module`, or None."""
    for wrapper in _WRAPPERS:
        if wrapper.matches(module):
            return wrapper
    return None


def reshard_all(model: nn.Module) -> None:
    """Reshard all fully-sharded modules, so that the optimizer's parameters are registered.

    After a forward without backward, the root's unsharded parameters stay registered.
    """
    for module in model.modules():
        if _FSDP1.matches(module):
            continue
        reshard = getattr(type(module), "reshard", None)
        if callable(reshard) and hasattr(type(module), "unshard"):
            reshard(module)


# ------------------------------------------------------------------ FSDP1


def fsdp1_modules(model: nn.Module) -> list[Any]:
    """The FSDP1 modules in `model`, the root first; usually none."""
    return [module for module in model.modules() if _FSDP1.matches(module)]


@contextlib.contextmanager
def fsdp1_state(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    """While the context lasts, FSDP1 modules of `model` return and load state dicts in the form of `options`."""
    modules = fsdp1_modules(model)
    if not modules:
        yield
        return
    from torch.distributed import fsdp

    # FSDP1 reads freed memory if it offloads tensors that are on the CPU already.
    offload = options.cpu_offload and modules[0].compute_device.type != "cpu"
    if options.full_state_dict:
        kind = fsdp.StateDictType.FULL_STATE_DICT
        only_rank0 = options.cpu_offload
        model_config: Any = fsdp.FullStateDictConfig(offload_to_cpu=offload, rank0_only=only_rank0)
        optim_config: Any = fsdp.FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=only_rank0)
    else:
        kind = fsdp.StateDictType.SHARDED_STATE_DICT
        model_config = fsdp.ShardedStateDictConfig(offload_to_cpu=offload)
        optim_config = fsdp.ShardedOptimStateDictConfig(offload_to_cpu=offload)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        with fsdp.FullyShardedDataParallel.state_dict_type(model, kind, model_config, optim_config):
            yield


def fsdp1_optim_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, by_index: dict[str, Any], options: StateDictOptions
) -> dict[str, Any]:
    """FSDP1's name-keyed form of an index-keyed optimizer state dict (empty on ranks that should not get it)."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with fsdp1_state(model, options):
        return FullyShardedDataParallel.optim_state_dict(
            model, optimizer, by_index, group=_fsdp1_group(fsdp1_modules(model)[0])
        )


def fsdp1_optim_to_load(
    model: nn.Module, optimizer: torch.optim.Optimizer, by_name: dict[str, Any], options: StateDictOptions
) -> dict[str, Any]:
    """The inverse of `fsdp1_optim_state`: a state dict for `optimizer.load_state_dict`."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    everywhere = StateDictOptions(full_state_dict=options.full_state_dict)
    with fsdp1_state(model, everywhere):
        return FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, by_name, group=_fsdp1_group(fsdp1_modules(model)[0])
        )


def _fsdp1_group(module: Any) -> Any:
    """The process group over which FSDP1 gathers; None for a hybrid-sharded module, which has two."""
    if module.sharding_strategy.name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        return None
    return module.process_group
