"""Adapters of `peft` (LoRA and others that leave the model's own tensors unchanged), saved and loaded in any layout.

`peft` itself is asked, with tensors on the meta device, which tensors belong to an adapter and their names in its file.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from terrazzo.checkpoint.formats.huggingface import HuggingFaceReader
from terrazzo.checkpoint.state_dict.interop import wrapper_of
from terrazzo.checkpoint.state_dict.names import ModelState, state_of
from terrazzo.checkpoint.stores import SMALL, Place, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedValueError
from terrazzo.integrations.huggingface.load import fill
from terrazzo.integrations.huggingface.save import save_links
from terrazzo.layout.box import Box, Link

_STEM: Final = "adapter_model"
_CONFIG: Final = "adapter_config.json"
_PREFIX: Final = "base_model.model."
# Settings on which the meaning of an adapter's weights depends.
_MEANING: Final = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")


def save_adapter(
    model: nn.Module,
    path: str | os.PathLike[str] | Store | Place,
    *,
    adapter_name: str = "default",
    dtype: torch.dtype | None = None,
    save_embedding_layers: bool | Literal["auto"] = "auto",
    process_group: Any = None,
) -> None:
    """Save an adapter as `PeftModel.from_pretrained` reads it: `adapter_model.safetensors` and `adapter_config.json`.

    All ranks call it together, and each writes its part. A trained parameter that would not be saved is an error.

    Args:
        model: A `PeftModel`, or a model of transformers that has adapters; sharded or not.
        path: A folder, a URL or a store.
        adapter_name: The adapter to save.
        dtype: The dtype of floating-point tensors in the file; None: as they are.
        save_embedding_layers: As in `PeftModel.save_pretrained`.
        process_group: The ranks that have the model; default: all.
    """
    state = state_of(model)
    links = _links(model, state, adapter_name, save_embedding_layers)
    saved = {link.model for link in links}
    lost = [name for name, tensor in state.tensors.items() if tensor.requires_grad and name not in saved]
    if lost:
        raise UnsupportedValueError(
            f"{', '.join(lost[:5])}{' and more' if lost[5:] else ''}: trained, but not part of the adapter "
            f"{adapter_name!r}; name the modules in modules_to_save, or save the whole model with save_model"
        )
    beside = {_CONFIG: _config_bytes(_bare(model).peft_config[adapter_name])}
    save_links(links, state.tensors, path, dtype, "1TB", None, process_group, _STEM, beside)


def load_adapter(
    model: nn.Module,
    path: str | os.PathLike[str] | Store | Place,
    *,
    adapter_name: str = "default",
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> Any:
    """Load an adapter into a model that has one of the same kind, sharded or not.

    Create that adapter with `get_peft_model(model, PeftConfig.from_pretrained(path))`; if its config gives the weights
    another meaning, that is an error. Arguments and result are those of `load_model`.
    """
    place = path if isinstance(path, Place) else Place(path)
    state = state_of(model)
    _check_config(place, _bare(model).peft_config[adapter_name])
    reader = HuggingFaceReader(place / f"{_STEM}.safetensors")
    stored = reader.read_metadata().state_dict_metadata
    # Embeddings belong to the adapter if its file has them.
    links = _links(model, state, adapter_name, False)
    if not {link.file for link in links} >= stored.keys():
        links = _links(model, state, adapter_name, True)
        links = [link for link in links if link.file in stored or ".lora_" in link.file]
    missing = [link.model for link in links if link.file not in stored]
    unexpected = sorted(stored.keys() - {link.file for link in links})
    return fill(
        model, state, reader, [link for link in links if link.file in stored], missing, unexpected, dtype, strict
    )


def _links(model: nn.Module, state: ModelState, adapter_name: str, embeddings: bool | Literal["auto"]) -> list[Link]:
    """The tensors of an adapter, under the names of its file."""
    try:
        from peft import PeftModel
        from peft.utils import get_peft_model_state_dict
    except ImportError as error:
        raise UnsupportedValueError("adapters need peft, which is not installed: pip install peft") from error
    bare = _bare(model)
    if adapter_name not in getattr(bare, "peft_config", {}):
        raise UnsupportedValueError(f"this {type(bare).__name__} has no adapter named {adapter_name!r}")
    stand_ins = {
        alias: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in state.tensors.items()
        for alias in (name, *state.aliases[name])
    }
    owners = {id(stand_ins[alias]): name for name in state.tensors for alias in (name, *state.aliases[name])}
    found = get_peft_model_state_dict(
        bare, state_dict=stand_ins, adapter_name=adapter_name, save_embedding_layers=embeddings
    )
    links = []
    for key, value in found.items():
        name = owners.get(id(value))
        if name is None:
            raise UnsupportedValueError(
                f"{key}: peft computes it from whole tensors of the model, which is not possible with shards"
            )
        whole = Box.whole(tuple(value.shape))
        links.append(Link(name, whole, key if isinstance(bare, PeftModel) else _PREFIX + key, whole))
    return links


def _bare(model: nn.Module) -> Any:
    """The model without the wrappers around it."""
    while (wrapper := wrapper_of(model)) is not None:
        model = getattr(model, wrapper.inner)
    return model


def _config_bytes(config: Any) -> bytes:
    config = copy.deepcopy(config)
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return (Path(folder) / _CONFIG).read_bytes()


def _check_config(place: Place, config: Any) -> None:
    """Raise unless the stored config gives the weights the same meaning as the model's."""
    try:
        stored = json.loads(place.store.get(_CONFIG, SMALL)[0])
    except FileNotFoundError:
        return
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{place / _CONFIG} is not valid JSON: {error}") from error
    if not isinstance(stored, dict):
        raise CheckpointCorruptError(f"{place / _CONFIG} must be an object, not a {type(stored).__name__}")
    ours = json.loads(_config_bytes(config))
    wrong = [key for key in _MEANING if key in stored and stored[key] != ours.get(key)]
    if wrong:
        raise CheckpointMismatchError(
            f"{place}: "
            + ", ".join(f"{key} is {stored[key]!r}, but {ours.get(key)!r} in the model" for key in wrong)
            + "; create the adapter with get_peft_model(model, PeftConfig.from_pretrained(path))",
            mismatched=tuple(wrong),
        )
