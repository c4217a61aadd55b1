"""`deepspeed.utils.zero_to_fp32`: the float32 weights of a checkpoint, without an engine.

    python -m terrazzo.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR

It reads checkpoints of terrazzo and of DeepSpeed, of any ZeRO stage and number of ranks, in one process.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn

from terrazzo.checkpoint import Checkpoint
from terrazzo.checkpoint.formats.huggingface.layout import About, FileLayout, lay_out
from terrazzo.checkpoint.tools.lazy import LazyTensor
from terrazzo.deepspeed.engines import engine_that_trains, load_whole
from terrazzo.deepspeed.zero.gathered import is_gathered
from terrazzo.engine.saving import find_checkpoint
from terrazzo.errors import CheckpointNotFoundError, UnsupportedValueError

_MODULE: Final = "module."
_TABLES: Final = ("frozen_param_shapes", "shared_params")


class PendingTensor:
    """A tensor that is read when `contiguous()` is called."""

    def __init__(self, stored: LazyTensor) -> None:
        self._stored = stored
        self.shape, self.dtype = stored.shape, stored.dtype

    def contiguous(self) -> Tensor:
        """Its values, on the CPU."""
        return self._stored[...]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The model's state dict, in float32, with all names of shared parameters.

    Args:
        checkpoint_dir: The folder that was passed to `save_checkpoint`.
        tag: The checkpoint's tag; None: the latest.
        exclude_frozen_parameters: Leave out parameters that are not trained; buffers are included.
        lazy_mode: Return `PendingTensor`s, which are read by `contiguous()`.
    """
    place = find_checkpoint(checkpoint_dir, tag)
    if place is None:
        raise CheckpointNotFoundError(f"{checkpoint_dir} has no file `latest`: pass the tag of a checkpoint")
    checkpoint = Checkpoint(place)
    tables = checkpoint.state_dict(lambda name: name.partition(".")[0] in _TABLES)
    frozen = {name for name, _ in tables.get("frozen_param_shapes") or ()} if exclude_frozen_parameters else set()
    found: dict[str, Any] = {}
    for name in checkpoint:
        stored = checkpoint.tensor(name) if name.startswith(_MODULE) else None
        if stored is not None and name.removeprefix(_MODULE) not in frozen:
            found[name.removeprefix(_MODULE)] = PendingTensor(stored)
    shared = tables.get("shared_params") or {}
    if not lazy_mode:
        found = {name: pending.contiguous() for name, pending in found.items()}
    return found | {name: found[first] for name, first in shared.items() if first in found}


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights as `pytorch_model.bin` or `model.safetensors`, or as several such files and an index.

    Shared weights are written once to safetensors files, which have one name per tensor.
    """
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if wanted not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedValueError(f"dtype must be float32, float16 or bfloat16, not {dtype}")
    pending = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True)
    if safe_serialization:
        first = {id(tensor): name for name, tensor in reversed(pending.items())}
        pending = {name: tensor for name, tensor in pending.items() if first[id(tensor)] == name}
    about = {name: About(_stored_as(tensor.dtype, wanted), tuple(tensor.shape)) for name, tensor in pending.items()}
    limit = max_shard_size if max_shard_size is not None else max(sum(each.nbytes for each in about.values()), 1)
    layout = lay_out(about, limit, {"format": "pt"})
    out = Path(output_dir)
    out.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    placed: dict[str, str] = {}
    for number, file in enumerate(layout.files, 1):
        part = f"-{number:05}-of-{len(layout.files):05}" if len(layout.files) > 1 else ""
        path = out / f"{stem}{part}.{suffix}"
        tensors = {name: pending[name].contiguous().to(about[name].dtype) for name in file.names}
        if safe_serialization:
            _write_safetensors(path, file, tensors)
        else:
            torch.save(tensors, path)
        placed |= dict.fromkeys(tensors, path.name)
    if len(layout.files) > 1:
        index = {"metadata": {"total_size": layout.total_size}, "weight_map": placed}
        encoded = msgspec.json.format(msgspec.json.encode(index, order="sorted"))
        (out / f"{stem}.{suffix}.index.json").write_bytes(encoded + b"\n")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` with float32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """The model, on the CPU, with the weights of a checkpoint.

    A model that an engine trains stays where it is, and sharded, and the engine goes on from these weights; all ranks
    call this. Inside `zero.GatheredParameters` the weights are lost at the end of the block, unless it keeps them.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    engine = engine_that_trains(model)
    if engine is None:
        model = model.cpu()
    elif not any(is_gathered(parameter) for parameter in model.parameters()):
        load_whole(engine, state, strict=False)
        return model
    model.load_state_dict(state, strict=False)
    return model


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The paths of the files of DeepSpeed's optimizer states in a folder, in the order of their numbers."""
    found = Path(checkpoint_dir).glob("*_optim_states.pt")
    return [str(path) for path in sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])]


def _stored_as(dtype: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    return wanted if dtype.is_floating_point else dtype


def _write_safetensors(path: Path, file: FileLayout, tensors: Mapping[str, Tensor]) -> None:
    with path.open("wb") as target:
        target.write(file.header)
        for name in file.names:
            target.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m terrazzo.deepspeed.utils.zero_to_fp32", description=__doc__)
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--safe_serialization", action="store_true")
    parser.add_argument("-t", "--tag")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    convert_zero_checkpoint_to_state_dict(**vars(parser.parse_args(arguments)))


__all__ = [
    "PendingTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


if __name__ == "__main__":
    main()
