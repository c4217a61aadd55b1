"""Convert between checkpoints and files of `torch.save`: functions, a reader and planner, and a command.

python -m terrazzo.checkpoint.format_utils torch_to_dcp model.pt checkpoint/
python -m terrazzo.checkpoint.format_utils dcp_to_torch checkpoint/ model.pt
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.formats.table import tensor_entry
from terrazzo.checkpoint.formats.torch_save import TorchSaveReader
from terrazzo.checkpoint.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from terrazzo.checkpoint.native.objects import ObjectBytes
from terrazzo.checkpoint.native.rows import Target
from terrazzo.checkpoint.plan.flatten import flatten_state_dict
from terrazzo.checkpoint.plan.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.plan.sharded import is_sharded
from terrazzo.checkpoint.state_dict.tensors import from_rank, wire_device
from terrazzo.checkpoint.stores import Place
from terrazzo.checkpoint.torch_api.storages import TargetReader
from terrazzo.errors import CheckpointError, CheckpointMismatchError, TerrazzoError
from terrazzo.layout.box import row_major_windows

_PIECE: Final = 64 << 20  # bytes that are broadcast at once


class BroadcastingTorchSaveReader(TargetReader):
    """Reads a file of `torch.save` on one rank, which sends the other ranks what they need.

    Use it if only one rank can access the file, or if the file system is too slow for all ranks at once; otherwise
    `TorchSaveReader`, which needs no communication, is faster. Unlike PyTorch's, it sends tensors in pieces, never has
    the whole file in memory, also loads values that are not tensors, and ranks may pass different keys.

    Args:
        checkpoint_id: The file. `load(checkpoint_id=...)` replaces it.
        coordinator_rank: The rank that reads.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import load
    >>> file = tempfile.NamedTemporaryFile(suffix=".pt")
    >>> torch.save({"w": torch.arange(3.0)}, file.name)
    >>> state = {"w": torch.zeros(3)}
    >>> reader, planner = BroadcastingTorchSaveReader(), DynamicMetaLoadPlanner()
    >>> load(state, storage_reader=reader, planner=planner, checkpoint_id=file.name)
    >>> state["w"]
    tensor([0., 1., 2.])
    """

    plans_alone = False
    _at_once = math.inf  # all ranks take part in each reading

    def __init__(self, checkpoint_id: str | os.PathLike[str] | None = None, coordinator_rank: int = 0) -> None:
        self.checkpoint_id = checkpoint_id
        self.coordinator_rank = coordinator_rank
        self._file: TorchSaveReader | None = None
        self._metadata = Metadata({})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._file = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata = from_rank(self.coordinator_rank, lambda: self._open().read_metadata())
        return self._metadata

    def fill(self, targets: Sequence[Target]) -> None:
        own: dict[str, list[Target]] = {}
        for target in targets:
            own.setdefault(target.source, []).append(target)
        for name in self._wanted_anywhere(list(own)):
            entry = self._entry(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointMismatchError(f"{self.checkpoint_id}: {name} is not a tensor", mismatched=(name,))
            self._send_tensor(name, entry, own.get(name, []))

    def values(self, names: Sequence[str], allow_pickle: bool) -> Iterator[io.BytesIO]:
        found = {}
        for name in self._wanted_anywhere(list(names)):
            self._entry(name)
            found[name] = from_rank(self.coordinator_rank, lambda name: self._open().value(name), name)
        return (ObjectBytes(found[name]) for name in names)

    def _entry(self, name: str) -> STORAGE_TYPES:
        entry = self._metadata.state_dict_metadata.get(name)
        if entry is None:
            raise CheckpointMismatchError(f"{self.checkpoint_id} does not have {name}", missing=(name,))
        return entry

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).is_file()

    # -------------------------------------------------------------- on the coordinator

    def _open(self) -> TorchSaveReader:
        if self.checkpoint_id is None:
            raise CheckpointError("the reader needs a file: pass checkpoint_id to the reader or to load")
        if self._file is None:
            self._file = TorchSaveReader(self.checkpoint_id)
        return self._file

    # -------------------------------------------------------------- on every rank

    def _send_tensor(self, name: str, entry: TensorStorageMetadata, targets: Sequence[Target]) -> None:
        dtype, source = entry.properties.dtype, self.coordinator_rank
        device = wire_device() if _together() else torch.device("cpu")
        for window in row_major_windows(entry.size, max(_PIECE // dtype.itemsize, 1)):
            piece = torch.empty(window.lengths, dtype=dtype, device=device)
            from_rank(source, lambda *box: self._open().read_box(name, *box), window, piece)
            if _together() and piece.numel():
                dist.broadcast(piece.reshape(-1).view(torch.uint8), src=source)
            for target in targets:
                common = target.box.intersect(window)
                if common is not None:
                    part = piece[common.relative_to(window).slices()]
                    target.tensor[common.relative_to(target.box).slices()].copy_(part)

    def _wanted_anywhere(self, names: list[str]) -> list[str]:
        """The names that any rank needs, in the same order on all ranks."""
        if not _together():
            return names
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, names)
        return list(dict.fromkeys(name for part in every for name in part))


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Plans loads from storage without metadata: everything in the state dict is assumed to exist.

    If the storage has metadata (`BroadcastingTorchSaveReader` sends the file's), they are used, so that missing names,
    different shapes and lossy dtypes are found as usual.
    """

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is None or not metadata.state_dict_metadata:
            values = flatten_state_dict(state_dict)[0] if self.flatten_state_dict else state_dict
            metadata = Metadata({name: _asked_for(value) for name, value in values.items()})
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _asked_for(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, torch.Tensor) and not is_sharded(value):
        return BytesStorageMetadata()
    return tensor_entry(value.dtype, value.size())


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()


__all__ = ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"]


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """Convert a checkpoint, in torch DCP's or terrazzo's format, into one file of `torch.save`.

    Tensors are copied in small pieces, so the checkpoint may be larger than memory. No code in it is run.

    >>> import torch
    >>> from terrazzo.checkpoint import save
    >>> _ = save({"w": torch.ones(2)}, checkpoint_id="run/step-1")
    >>> dcp_to_torch_save("run/step-1", "step-1.pt")
    >>> torch.load("step-1.pt")
    {'w': tensor([1., 1.])}
    """
    convert(dcp_checkpoint_dir, torch_save_path, "torch_save", overwrite=True)


def torch_save_to_dcp(torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]) -> None:
    """Convert a state dict in a file of `torch.save` into a torch DCP checkpoint, which PyTorch and terrazzo load.

    Tensors are copied one part at a time. No code in the file is run.

    >>> import torch
    >>> torch.save({"w": torch.ones(2)}, "one.pt")
    >>> torch_save_to_dcp("one.pt", "for-pytorch")
    """
    convert(TorchSaveReader(torch_save_path), dcp_checkpoint_dir, "dcp", overwrite=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m terrazzo.checkpoint.format_utils", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("mode", choices=("torch_to_dcp", "dcp_to_torch"))
    parser.add_argument("src", help="the checkpoint to convert")
    parser.add_argument("dst", help="the path of the converted checkpoint; an existing one is replaced")
    chosen = parser.parse_args(arguments)
    action = torch_save_to_dcp if chosen.mode == "torch_to_dcp" else dcp_to_torch_save
    try:
        action(chosen.src, chosen.dst)
    except (TerrazzoError, OSError) as error:
        print(f"{chosen.src} was not converted: {error}", file=sys.stderr)
        return 1
    print(f"{chosen.src} -> {chosen.dst}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
