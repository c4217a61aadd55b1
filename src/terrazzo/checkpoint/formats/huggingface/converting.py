"""The part of a checkpoint that safetensors files can hold: tensors, under the names that a model has for them."""

from __future__ import annotations

import io
from dataclasses import replace

import torch

from terrazzo.checkpoint.formats.huggingface.layout import About
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.errors import CheckpointMismatchError, UnsupportedValueError
from terrazzo.layout.box import Box

_NAMED = 5


class WeightsSource(Source):
    """The tensors of a checkpoint.

    Args:
        only: Those whose names begin with this and a dot, called by what follows; None: all there is.
    """

    def __init__(self, reader: StorageReader, only: str | None = None) -> None:
        super().__init__(reader)
        self._prefix = f"{only.rstrip('.')}." if only else ""
        entries = self.metadata.state_dict_metadata
        chosen = {name: entry for name, entry in entries.items() if name.startswith(self._prefix)}
        if not chosen:
            raise CheckpointMismatchError(f"no name of the checkpoint begins with {self._prefix!r}")
        others = [name for name, entry in chosen.items() if not isinstance(entry, TensorStorageMetadata)]
        if others:
            tops = sorted({name.partition(".")[0] for name in entries} - {name.partition(".")[0] for name in others})
            raise UnsupportedValueError(
                f"safetensors files hold tensors only, and the checkpoint has other values: "
                f"{', '.join(others[:_NAMED])}"
                f"{' and more' if others[_NAMED:] else ''}. Say where the weights are: "
                f"only={(tops or ['model'])[0]!r} (--only)"
            )
        self.metadata = replace(
            self.metadata,
            state_dict_metadata={name.removeprefix(self._prefix): entry for name, entry in chosen.items()},
        )
        self.paths = {}

    def about(self) -> dict[str, About]:
        """What the places of the tensors in files depend on."""
        entries = self.metadata.state_dict_metadata.items()
        return {
            name: About(entry.properties.dtype, tuple(entry.size))
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        super().read(self._prefix + name, box, target)  # the reader knows the whole name

    def value(self, name: str) -> io.BytesIO:
        return super().value(self._prefix + name)
