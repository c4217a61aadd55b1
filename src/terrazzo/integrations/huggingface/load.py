"""`load_model`: load safetensors files into a model of any layout; each rank reads the bytes of its own shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from terrazzo.checkpoint import DefaultLoadPlanner, load
from terrazzo.checkpoint.formats.huggingface import HuggingFaceReader
from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.native.tensors import can_convert, is_lossless
from terrazzo.checkpoint.run.locate import opening
from terrazzo.checkpoint.state_dict.names import ModelState, state_of
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import CheckpointMismatchError
from terrazzo.integrations.huggingface.families import family_of
from terrazzo.integrations.huggingface.meta import initialise_buffers, materialised, put_in_place
from terrazzo.integrations.huggingface.rename import Rename, Rule, file_shape
from terrazzo.integrations.huggingface.views import views_of
from terrazzo.layout.box import Link

_NAMED: Final = 50


def load_model(
    model: nn.Module,
    path: str | os.PathLike[str] | Store | Place,
    *,
    rename: Rename | Iterable[Rule] | Mapping[str, str | Sequence[str]] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> Any:
    """Load `model.safetensors`, or the files that `model.safetensors.index.json` names, into a model.

    The model may be plain, tensor-parallel, under `fully_shard` or any of these together; each rank reads the bytes of
    its own shards, and no rank waits for another. Parameters and buffers on the meta device are allocated; others are
    filled in place. Buffers that are not persistent are not in the files: those with memory are left alone, and those
    on the meta device are created by the model's own `_init_weights`, if it has one (transformers' models do), or else
    stay on the meta device.

    Float8 weights with a `weight_scale_inv` per block are converted to the model's dtype.

    Args:
        model: The model; not one under PyTorch's `FullyShardedDataParallel`.
        path: A folder, a URL, a store, or a single file.
        rename: How names in the model correspond to names in the files, if they differ or layers are fused. None: the
            rules of the model's family (`config.model_type`), or the same names.
        dtype: Floating-point tensors on the meta device get this dtype, and loading into tensors of this dtype may
            round. None: dtypes are kept, and a value that would be rounded is an error.
        strict: Raise if a name of the model is not in the files, or a name in the files not in the model.

    Returns:
        What `load_state_dict` returns: `missing_keys`, names in the model, and `unexpected_keys`, names in the files.

    >>> import tempfile
    >>> from terrazzo.integrations.huggingface import save_model
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
    >>> save_model(model, folder)
    >>> load_model(torch.nn.Linear(2, 1, device="meta"), folder)
    <All keys matched successfully>
    """
    state = state_of(model)
    reader = HuggingFaceReader(path, dequantise=torch.float32)
    with opening(path):
        tensors = _tensors(reader)
    links, missing, unexpected = _matched(model, state, tensors, rename)
    return fill(model, state, reader, links, missing, unexpected, dtype, strict)


def fill(
    model: nn.Module,
    state: ModelState,
    reader: HuggingFaceReader,
    links: Sequence[Link],
    missing: Sequence[str],
    unexpected: Sequence[str],
    dtype: torch.dtype | None,
    strict: bool,
) -> Any:
    """Read the tensors of these links, unless something does not fit."""
    targets = {name: state.tensors[name] for name in dict.fromkeys(link.model for link in links)}
    lacking = (missing, unexpected) if strict else ((), ())
    _check(model, links, targets, _tensors(reader), reader.quantised, dtype, lacking)
    filled = {name: materialised(tensor, dtype) for name, tensor in targets.items()}
    views = views_of(links, filled)
    load(dict(views), storage_reader=reader, planner=DefaultLoadPlanner(allow_lossy_dtype=True))
    put_in_place(model, state, filled)
    initialise_buffers(model)
    report: Any = nn.Module().load_state_dict({})
    return type(report)(list(missing), list(unexpected))


def _tensors(reader: HuggingFaceReader) -> dict[str, TensorStorageMetadata]:
    entries = reader.read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _matched(
    model: nn.Module, state: ModelState, stored: Mapping[str, TensorStorageMetadata], rename: Any
) -> tuple[list[Link], tuple[str, ...], tuple[str, ...]]:
    """The links between the model's tensors and the files, the names missing in files, and those left over there."""
    rules = [Rename.of(rename)] if rename is not None else [family_of(model), Rename()]
    tried = [_found(state, stored, each) for each in rules]
    return min(tried, key=lambda found: len(found[1]))


def _found(
    state: ModelState, stored: Mapping[str, TensorStorageMetadata], rename: Rename
) -> tuple[list[Link], tuple[str, ...], tuple[str, ...]]:
    shapes = {
        alias: tuple(tensor.shape) for name, tensor in state.tensors.items() for alias in (name, *state.aliases[name])
    }
    by_model: dict[str, list[Link]] = {name: [] for name in shapes}
    for link in rename.links(shapes):
        by_model[link.model].append(link)
    links: list[Link] = []
    missing: list[str] = []
    wanted: set[str] = set()
    for name in state.tensors:
        chosen = None
        for alias in (name, *state.aliases[name]):  # a tied tensor may be stored under any of its names
            files = {link.file for link in by_model[alias]}
            wanted |= files
            if chosen is None and files <= stored.keys():
                chosen = [Link(name, *link[1:]) for link in by_model[alias]]
        if chosen is None:
            missing.append(name)
        else:
            links += chosen
    return links, tuple(missing), tuple(name for name in stored if name not in wanted)


def _check(
    model: nn.Module,
    links: Sequence[Link],
    targets: Mapping[str, torch.Tensor],
    stored: Mapping[str, TensorStorageMetadata],
    quantised: frozenset[str],
    dtype: torch.dtype | None,
    lacking: tuple[Sequence[str], Sequence[str]],
) -> None:
    """Raise one error for all mismatches, worded as in `load_state_dict`, before anything is changed."""
    missing, unexpected = lacking
    lines = []
    if missing:
        lines.append("Missing key(s) in state_dict: " + _listed(missing))
    if unexpected:
        lines.append("Unexpected key(s) in state_dict: " + _listed(unexpected))
    by_file: dict[str, list[Link]] = {}
    for link in links:
        by_file.setdefault(link.file, []).append(link)
    mismatched = []
    for file, found in by_file.items():
        shape, entry = file_shape(found), stored[file]
        names = ", ".join(dict.fromkeys(link.model for link in found))
        if shape != tuple(entry.size):
            lines.append(
                f"size mismatch for {names}: copying a param with shape {entry.size} from checkpoint ({file}), the "
                f"shape in current model is {torch.Size(shape)}."
            )
            mismatched.append(file)
            continue
        for name in dict.fromkeys(link.model for link in found):
            fault = _dtype_fault(targets[name], entry.properties.dtype, dtype, is_quantised=file in quantised)
            if fault is not None:
                lines.append(f"dtype mismatch for {name}: {fault}")
                mismatched.append(name)
    if lines:
        raise CheckpointMismatchError(
            f"Error(s) in loading state_dict for {type(model).__name__}:\n\t" + "\n\t".join(lines[:_NAMED]),
            missing=tuple(missing),
            mismatched=tuple(mismatched),
        )


def _dtype_fault(
    target: torch.Tensor, source: torch.dtype, asked: torch.dtype | None, *, is_quantised: bool
) -> str | None:
    """Why values of one dtype cannot be converted to the target's dtype; None if they can."""
    if target.is_meta and asked is not None and target.is_floating_point():
        final = asked
    else:
        final = target.dtype
    both_float = source.is_floating_point and final.is_floating_point and can_convert(source, final)
    if is_lossless(source, final) or (both_float and (final == asked or is_quantised)):
        return None
    return f"{final} cannot represent every value of the checkpoint's {source}" + (
        f"; pass dtype={final} to round them" if both_float else ""
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f'"{name}"' for name in names[:_NAMED]) + more + ". "
