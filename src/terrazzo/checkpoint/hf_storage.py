"""Safetensors files as Hugging Face libraries have them, under the names that PyTorch has for their storage.

Unlike PyTorch's, what is saved is always complete files with all of each tensor in one place: every rank writes its
share of them, so there is nothing to consolidate, and a checkpoint that was there stays whole until the new one is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from terrazzo.checkpoint.formats.huggingface import HuggingFaceReader, HuggingFaceWriter, Layout, lay_out
from terrazzo.checkpoint.formats.huggingface.layout import About
from terrazzo.checkpoint.run.staging import BlockingAsyncStager

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter", "QuantizedHuggingFaceStorageReader"]


class HuggingFaceStorageWriter(BlockingAsyncStager, HuggingFaceWriter):
    """Writes a flat state dict of tensors: `save(state_dict, storage_writer=HuggingFaceStorageWriter(path))`.

    Args:
        path: The folder, or its URL.
        fqn_to_index_mapping: The number of each tensor's file, from 1 on; None: one file has all.
        thread_count: Accepted for compatibility.
        save_distributed: Accepted for compatibility: every rank always saves its share, and files are complete.
        enable_consolidation: Accepted for compatibility: there is nothing to consolidate.
        thread_count_consolidation: Accepted for compatibility.
        process_group: The ranks that save, behind a URL; default: all.
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

    def _numbered(self, tensors: Mapping[str, About]) -> Layout:
        return lay_out(tensors, numbers=self.fqn_to_index_mapping or dict.fromkeys(tensors, 1))

    @property
    def metadata_path(self) -> str:
        """The name of the index."""
        return self._index


class HuggingFaceStorageReader(HuggingFaceReader):
    """Reads safetensors files; also those of which each has parts of tensors, as PyTorch's writer leaves them."""

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        super().__init__(path)
        self.thread_count = thread_count


class QuantizedHuggingFaceStorageReader(HuggingFaceReader):
    """Reads float8 weights that have a `weight_scale_inv` for each block as the numbers that they stand for.

    Args:
        path: The folder, or its URL.
        thread_count: Accepted for compatibility.
        target_dtype: What the numbers are rounded to, before they are copied to where they are wanted.
        block_size: The length of a block, where `config.json` does not say.
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
