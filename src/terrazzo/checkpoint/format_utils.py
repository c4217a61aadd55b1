"""Convert between checkpoints and files of `torch.save`: functions, a reader and planner, and a command.

python -m terrazzo.checkpoint.format_utils torch_to_dcp model.pt checkpoint/
python -m terrazzo.checkpoint.format_utils dcp_to_torch checkpoint/ model.pt
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from terrazzo.checkpoint.formats.broadcasting import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.formats.torch_save import TorchSaveReader
from terrazzo.errors import TerrazzoError

__all__ = ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"]


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """Convert a checkpoint, in torch DCP's or terrazzo's format, into one file of `torch.save`.

    Tensors are copied in small pieces, so the checkpoint may be larger than memory. No code in it is run.
    """
    convert(dcp_checkpoint_dir, torch_save_path, "torch_save", overwrite=True)


def torch_save_to_dcp(torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]) -> None:
    """Convert a state dict in a file of `torch.save` into a torch DCP checkpoint, which PyTorch and terrazzo load.

    Tensors are copied one part at a time. No code in the file is run.
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
