"""Writing torch DCP checkpoints: what `torch.distributed.checkpoint.load` reads.

PyTorch names data files after ranks, so saving twice to one folder overwrites the first checkpoint while it is
still the valid one.  Nothing in the format asks for that: here every save has file names of its own, the table of
contents replaces the old one by a rename at the end, and the old data files go after that.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.futures import Future

from terrazzo.checkpoint.formats import dcp_metadata
from terrazzo.checkpoint.formats.dcp_metadata import METADATA, Location
from terrazzo.checkpoint.formats.torch_writing import write_archive
from terrazzo.checkpoint.metadata import Metadata, StorageMeta
from terrazzo.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from terrazzo.checkpoint.storage import StorageWriter, WriteResult
from terrazzo.checkpoint.stores import LocalStore, Store, Upload
from terrazzo.errors import CheckpointError, CheckpointExistsError

_SUFFIX: Final = ".distcp"


class DCPWriter(StorageWriter):
    """Writes checkpoints for `torch.distributed.checkpoint.load`.

    Args:
        path: The folder; `save(checkpoint_id=...)` names another.
        sync_files: Wait until everything is on the disk.
        overwrite: Whether a checkpoint that is there may be replaced.
    """

    def __init__(self, path: str | os.PathLike[str], sync_files: bool = True, overwrite: bool = True) -> None:
        self.path = Path(path)
        self.sync_files = sync_files
        self.overwrite = overwrite
        self._name = ""

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the next checkpoint goes."""
        return self.path

    @property
    def _store(self) -> Store:
        return LocalStore(self.path, durable=self.sync_files)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._name = ""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        store = self._store
        store.prepare()
        if is_coordinator and not self.overwrite and store.exists(METADATA):
            raise CheckpointExistsError(f"{self.path} holds a checkpoint; save elsewhere, or with overwrite=True")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        save_id = uuid.uuid4().hex[:12]
        return [replace(plan, storage_data=f"__{rank}_{save_id}{_SUFFIX}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not isinstance(plan.storage_data, str):
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            raise CheckpointError(f"rank {rank}: the plan has not passed through this writer's prepare_global_plan")
        self._name = plan.storage_data
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan.items, planner) if plan.items else [])
        return done

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        store = self._store
        results: list[WriteResult] = []
        try:
            file = store.upload(self._name, 0)
            try:
                position = 0
                for item in items:
                    end = self._write_item(file, position, item, planner)
                    place = Location(self._name, position, end - position)
                    results.append(WriteResult(item.index, end - position, place))
                    position = end
            except BaseException:
                file.abort()
                raise
            file.finish()
        except BaseException:
            store.delete([self._name])
            raise
        return results

    def _write_item(self, file: Upload, position: int, item: WriteItem, planner: SavePlanner) -> int:
        data = planner.resolve_data(item)
        if item.tensor_data is None:
            if isinstance(data, torch.Tensor):
                raise CheckpointError(f"{item.index.fqn}: the plan promised bytes, but resolve_data gave a tensor")
            content = data.getbuffer()
            file.write(position, [content])
            return position + len(content)
        if not isinstance(data, torch.Tensor) or data.shape != item.tensor_data.chunk.sizes:
            got = tuple(data.shape) if isinstance(data, torch.Tensor) else type(data).__name__
            raise CheckpointError(
                f"{item.index.fqn}: the plan promised a tensor of shape {tuple(item.tensor_data.chunk.sizes)}, "
                f"but resolve_data gave {got}"
            )
        return write_archive(file, position, data.detach())

    def finish(self, metadata: Metadata, results: list[Sequence[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        metadata.version = dcp_metadata.VERSION
        store = self._store
        store.put(METADATA, dcp_metadata.encode(metadata))
        used = {location.file for location in metadata.storage_data.values()}
        old = [entry.key for entry in store.list("__") if entry.key.endswith(_SUFFIX) and entry.key not in used]
        store.delete(old)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(str(self.path), self._name)
