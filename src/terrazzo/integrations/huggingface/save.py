"""`save_model`: save a model of any layout as safetensors files; each rank writes its part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from terrazzo.checkpoint import save
from terrazzo.checkpoint.formats.huggingface import HuggingFaceWriter, lay_out
from terrazzo.checkpoint.formats.huggingface.layout import STEM, About
from terrazzo.checkpoint.plan.sharded import check_storable, is_sharded
from terrazzo.checkpoint.state_dict.names import state_of
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import UnsupportedValueError
from terrazzo.integrations.huggingface.families import family_of
from terrazzo.integrations.huggingface.rename import Rename, Rule, file_shape
from terrazzo.integrations.huggingface.views import views_of
from terrazzo.layout.box import Link


def save_model(
    model: nn.Module,
    path: str | os.PathLike[str] | Store | Place,
    *,
    rename: Rename | Iterable[Rule] | Mapping[str, str | Sequence[str]] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    process_group: Any = None,
) -> None:
    """Save a model's weights as `from_pretrained` reads them: `model.safetensors`, or several files and their index.

    All ranks call it together. Each writes its own shards to their places in the files; in an object store one rank
    uploads each file, and gets the others' parts a few MB at a time. So no rank ever holds more of the model than it
    did before. An existing checkpoint stays whole until the new one is.

    Tied parameters are written once, under the name that transformers expects. `config.json` and the tokenizer are
    not weights: write them on rank 0 with `model.config.save_pretrained(path)`.

    Args:
        model: The model; not one under PyTorch's `FullyShardedDataParallel`.
        path: A folder, a URL or a store.
        rename: How names in the model correspond to names in the files: see `load_model`.
        dtype: The dtype of floating-point tensors in the files; None: as they are.
        max_shard_size: The most bytes of tensors in one file; a single larger tensor gets its own file.
        metadata: Texts for the header of each file.
        process_group: The ranks that have the model; default: all.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> folder = tempfile.mkdtemp()
    >>> save_model(torch.nn.Linear(2, 1), folder, dtype=torch.bfloat16)
    >>> load_file(f"{folder}/model.safetensors")["weight"].dtype
    torch.bfloat16
    """
    state = state_of(model)
    rules = Rename.of(rename) if rename is not None else family_of(model)
    links = rules.links({name: tuple(tensor.shape) for name, tensor in state.tensors.items()})
    save_links(links, state.tensors, path, dtype, max_shard_size, metadata, process_group)


def save_links(
    links: Sequence[Link],
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str] | Store | Place,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    metadata: Mapping[str, str] | None,
    process_group: Any,
    stem: str = STEM,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write the tensors of these links."""
    by_file: dict[str, list[Link]] = {}
    for link in links:
        by_file.setdefault(link.file, []).append(link)
    abouts = {}
    for file, found in by_file.items():
        kinds = {tensors[link.model].dtype for link in found}
        if len(kinds) > 1:
            names = ", ".join(dict.fromkeys(link.model for link in found))
            raise UnsupportedValueError(f"{file} is joined from {names}, which have different dtypes: {kinds}")
        (kind,) = kinds
        abouts[file] = About(dtype if dtype is not None and kind.is_floating_point else kind, file_shape(found))
    for name in dict.fromkeys(link.model for link in links):
        _check_storable(name, tensors[name])
    layout = lay_out(abouts, max_shard_size, metadata)
    writer = HuggingFaceWriter(path, layout, stem=stem, beside=beside, process_group=process_group)
    save(dict(views_of(links, tensors)), storage_writer=writer, process_group=process_group)


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor that has no memory of its own, or none on this rank."""
    local = tensor.to_local() if is_sharded(tensor) and hasattr(tensor, "to_local") else tensor
    try:
        check_storable(local)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{name}: {error}") from error
