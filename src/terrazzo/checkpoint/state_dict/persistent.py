"""The tensors of a model that belong into files: parameters and persistent buffers, each once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from terrazzo.checkpoint.plan.sharded import is_sharded
from terrazzo.checkpoint.state_dict import interop
from terrazzo.checkpoint.state_dict.names import Names
from terrazzo.errors import UnsupportedValueError


@dataclass(frozen=True)
class ModelState:
    """The persistent tensors of a model.

    Attributes:
        tensors: by canonical name, one name for each.
        aliases: the other names of tied ones, by the name that counts.
        names: translates names.
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, tuple[str, ...]]
    names: Names


def state_of(model: nn.Module) -> ModelState:
    """The persistent tensors of a model, which go by the names that it has without wrappers."""
    if interop.fsdp1_modules(model):
        raise UnsupportedValueError(
            "FullyShardedDataParallel has flattened the parameters of this model; use fully_shard, or gather its "
            "state dict with terrazzo.checkpoint.state_dict"
        )
    interop.reshard_all(model)
    names = Names(model)
    known = names.aliases()
    by_tensor: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        name = names.canonical(key)
        if not isinstance(value, torch.Tensor) and not is_sharded(value):
            raise UnsupportedValueError(f"{name} is a {type(value).__name__}, and safetensors files hold tensors only")
        tensor = known.get(name)
        if tensor is None:
            raise UnsupportedValueError(f"{name} is made by a hook of state_dict(), and is no tensor of the model")
        by_tensor.setdefault(id(tensor), []).append(name)
        values[id(tensor)] = tensor
    tied = tuple(_tied(model))
    tensors, aliases = {}, {}
    for number, called in by_tensor.items():
        first = next((name for name in called if not any(re.search(each, name) for each in tied)), called[0])
        tensors[first] = values[number]
        aliases[first] = tuple(name for name in called if name != first)
    return ModelState(tensors, aliases, names)


def _tied(model: nn.Module) -> Iterator[str]:
    """Of models of transformers: patterns of names that are tied to others, and not in files."""
    for module in model.modules():
        declared: Any = getattr(module, "_tied_weights_keys", None)
        if isinstance(declared, (dict, list, tuple, set)):
            yield from (f"(^|\\.){each}$" for each in declared)
