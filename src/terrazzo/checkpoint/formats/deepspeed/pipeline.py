"""Models with DeepSpeed's pipeline stages: each layer is in a separate file, `layer_03-model_states.pt`.

In partitions a parameter's name has the layer's number, `3.weight`. A module that several layers share
(`TiedLayerSpec`) has the names `tied_modules.<key>.weight` there, and is in the file of each of these layers. Here it
has the number of the first layer, as in an `nn.Sequential` that has a module more than once. Stages may share only some
parameters of a module, so values are compared to find the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from terrazzo.checkpoint.formats.deepspeed.contents import Contents
from terrazzo.checkpoint.formats.deepspeed.files import OpenFile
from terrazzo.checkpoint.formats.deepspeed.tensors import FileTensor, in_file
from terrazzo.checkpoint.formats.table import Asked, read_rows
from terrazzo.checkpoint.formats.torch_archive import StoredTensor
from terrazzo.checkpoint.native.datafile import row_major_windows

TIED = "tied_modules."
_WINDOW = 1 << 20  # elements that are compared at a time


def tied_names(
    stages: Sequence[Mapping[str, FileTensor]], layers: Mapping[int, OpenFile]
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """New names for parameters of modules that layers share, for each stage; and other names of these parameters.

    Args:
        stages: the tied parameters of each stage, by their names in it.
    """
    known: dict[str, list[tuple[str, FileTensor]]] = {}
    renamed: list[dict[str, str]] = []
    shared: dict[str, str] = {}
    for tied in stages:
        names: dict[str, str] = {}
        for key, module in _by_module(tied).items():
            holding = [number for number, layer in sorted(layers.items()) if _holds(layer, module)]
            if not holding:
                continue
            names |= {f"{TIED}{key}.{inner}": f"{holding[0]}.{inner}" for inner in layers[holding[0]].value}
            for inner, tensor in module.items():
                outer, own = f"{TIED}{key}.{inner}", f"{holding[0]}.{inner}"
                first = next((name for name, other in known.get(outer, ()) if _equal(tensor, other)), own)
                if first == own:
                    known.setdefault(outer, []).append((own, tensor))
                names[outer] = first
                shared |= {f"{n}.{inner}": first for n in holding if f"{n}.{inner}" != first}
        renamed.append(names)
    return renamed, shared


def add_layers(contents: Contents, layers: Mapping[int, OpenFile], shared: Mapping[str, str]) -> None:
    """Add values that only the layers' files have: buffers, and parameters that are not trained."""
    for number, layer in sorted(layers.items()):
        for inner, value in layer.value.items():
            name = f"{number}.{inner}"
            if name in shared or f"module.{name}" in contents.values:
                continue
            contents.add(("module", name), in_file(layer, value))
    contents.add(("shared_params",), {**(contents.values.get("shared_params") or {}), **shared})


def _by_module(tied: Mapping[str, FileTensor]) -> dict[str, dict[str, FileTensor]]:
    found: dict[str, dict[str, FileTensor]] = {}
    for name, tensor in tied.items():
        key, _, inner = name.removeprefix(TIED).partition(".")
        found.setdefault(key, {})[inner] = tensor
    return found


def _holds(layer: OpenFile, module: Mapping[str, FileTensor]) -> bool:
    """Whether a layer is that module: it has the same parameters with the same values."""
    for name, tensor in module.items():
        stored = layer.value.get(name)
        if not isinstance(stored, StoredTensor) or not _equal(tensor, in_file(layer, stored)):
            return False
    return True


def _equal(tensor: FileTensor, other: FileTensor) -> bool:
    """Whether two tensors are equal in the dtype of the second."""
    if tensor.shape != other.shape:
        return False
    for window in row_major_windows(tensor.shape, _WINDOW):
        one, two = (torch.empty(window.lengths, dtype=source.dtype, device="cpu") for source in (tensor, other))
        for source, target in ((tensor, one), (other, two)):
            read_rows([Asked(TIED, window, source.rows())], [target])
        if not torch.equal(one.to(two.dtype), two):
            return False
    return True
