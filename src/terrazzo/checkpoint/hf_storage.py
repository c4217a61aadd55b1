"""Safetensors files in the layout of Hugging Face libraries, under PyTorch's names.

Unlike with PyTorch, the files are always complete and have whole tensors: every rank writes its shards into them, so
no consolidation is needed. An existing checkpoint stays complete until the new one is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from terrazzo.checkpoint.formats.huggingface import HuggingFaceReader, HuggingFaceWriter, WeightsLayout, lay_out
from terrazzo.checkpoint.formats.huggingface.layout import About, index_name
from terrazzo.checkpoint.run.staging import BlockingAsyncStager

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter", "QuantizedHuggingFaceStorageReader"]


class HuggingFaceStorageWriter(BlockingAsyncStager, HuggingFaceWriter):
    """Writes a flat state dict of tensors: `save(state_dict, storage_writer=HuggingFaceStorageWriter(path))`.

    Args:
        path: The folder, or its URL.
        fqn_to_index_mapping: The number of each tensor's file, from 1 on. None: one file for all tensors.
        thread_count: Ignored; for compatibility.
        save_distributed: Ignored; for compatibility: every rank writes its shards, and files are complete.
        enable_consolidation: Ignored; for compatibility: there is nothing to consolidate.
        thread_count_consolidation: Ignored; for compatibility.
        process_group: The ranks that save to a URL; default: all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
        *,
        process_group: Any = None,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        self.fqn_to_index_mapping = fqn_to_index_mapping
        self.thread_count = thread_count
        self.save_distributed = save_distributed
        self.enable_consolidation = enable_consolidation
        self.thread_count_consolidation = thread_count_consolidation
        HuggingFaceWriter.__init__(
            self, path, make_layout=self._numbered, always_index=True, process_group=process_group
        )

    def _numbered(self, tensors: Mapping[str, About]) -> WeightsLayout:
        return lay_out(tensors, numbers=self.fqn_to_index_mapping or dict.fromkeys(tensors, 1))

    @property
    def metadata_path(self) -> str:
        """The name of the index file."""
        return index_name(self._stem)


class HuggingFaceStorageReader(HuggingFaceReader):
    """Reads safetensors files, including files with parts of tensors, which PyTorch's writer makes."""

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        super().__init__(path)
        self.thread_count = thread_count


class QuantizedHuggingFaceStorageReader(HuggingFaceReader):
    """Reads quantized weights: float8 tensors with a `weight_scale_inv` for each block are dequantized.

    Args:
        path: The folder, or its URL.
        thread_count: Ignored; for compatibility.
        target_dtype: The dtype to which numbers are rounded before they are copied to the state dict.
        block_size: The length of a block, if `config.json` does not have it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
    ) -> None:
        super().__init__(path, dequantise=target_dtype, block=block_size)
        self.thread_count = thread_count
        self.target_dtype = target_dtype
        self.block_size = block_size
