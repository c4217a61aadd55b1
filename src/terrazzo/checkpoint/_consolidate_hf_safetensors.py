"""Safetensors files with parts of tensors, which PyTorch's writer makes, become complete ones; under PyTorch's names.

Complete files, which terrazzo's writer makes, are copied: into the number of files that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrazzo.checkpoint.formats.format import Writing
from terrazzo.checkpoint.formats.huggingface import HuggingFaceReader
from terrazzo.checkpoint.formats.huggingface.format import WeightsSource
from terrazzo.checkpoint.formats.huggingface.layout import read_index, shard_name
from terrazzo.checkpoint.formats.source import copy_checkpoint
from terrazzo.checkpoint.hf_storage import HuggingFaceStorageWriter
from terrazzo.checkpoint.run.coordination import find_team
from terrazzo.checkpoint.stores import Place
from terrazzo.checkpoint.stores.places import doing
from terrazzo.errors import CheckpointMismatchError

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]


def consolidate_safetensors_files(
    input_dir: str, output_dir: str, fqn_to_index_mapping: Mapping[str, int], num_threads: int = 1
) -> None:
    """Write the tensors that are named into complete files, with an index; the folders may be the same.

    Args:
        input_dir: The folder with files, or its URL.
        output_dir: The folder of the complete files, or its URL. A checkpoint that is there is replaced.
        fqn_to_index_mapping: The number of each tensor's file, from 1 on; other tensors are left out.
        num_threads: Ignored; for compatibility.
    """
    reader = HuggingFaceReader(input_dir)
    source = WeightsSource(reader)
    there = source.metadata.state_dict_metadata
    lacking = sorted(set(fqn_to_index_mapping).difference(there))
    if lacking:
        raise CheckpointMismatchError(f"{input_dir} has no {lacking[0]!r}, nor {len(lacking) - 1} more that are named")
    count = max(fqn_to_index_mapping.values())
    files = {name: shard_name(number - 1, count) for name, number in fqn_to_index_mapping.items()}
    writer = HuggingFaceStorageWriter(output_dir, dict(fqn_to_index_mapping))
    place, index = Place(output_dir), writer.metadata_path
    if str(reader.place) == str(place) and (place / index).is_file() and read_index(place.store, index) == files:
        return
    chosen = {name: entry for name, entry in there.items() if name in fqn_to_index_mapping}
    source.metadata = replace(source.metadata, state_dict_metadata=chosen)
    with doing("consolidating into", place):
        copy_checkpoint(source, writer, Writing(overwrite=True))


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: Mapping[str, int],
    num_threads: int = 1,
    process_group: Any = None,
) -> None:
    """The same on the first rank, while the others wait; its error is raised on all."""

    def consolidate() -> bytes:
        consolidate_safetensors_files(input_dir, output_dir, fqn_to_index_mapping, num_threads)
        return b""

    find_team(process_group, doing=f"consolidating {input_dir}").first(consolidate)
