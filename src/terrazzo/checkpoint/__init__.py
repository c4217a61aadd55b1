"""Distributed checkpoints: saved by any number of ranks, loaded by any other, safe against crashes and damage.

`save`, `async_save` and `load` are the way in; planners say what is saved and loaded, storage says where and
how. Names are those of `torch.distributed.checkpoint`.
"""

from typing import TYPE_CHECKING

from terrazzo._late import late
from terrazzo.errors import CheckpointException

if TYPE_CHECKING:
    from terrazzo.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
    from terrazzo.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from terrazzo.checkpoint.hf_storage import (
        HuggingFaceStorageReader,
        HuggingFaceStorageWriter,
        QuantizedHuggingFaceStorageReader,
    )
    from terrazzo.checkpoint.manager import CheckpointManager
    from terrazzo.checkpoint.metadata import (
        BytesStorageMetadata,
        CheckpointableTensor,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )
    from terrazzo.checkpoint.native.storage import NativeReader, NativeWriter
    from terrazzo.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from terrazzo.checkpoint.plan.flatten import PerRank
    from terrazzo.checkpoint.planner import (
        LoadItemType,
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        WriteItem,
        WriteItemType,
    )
    from terrazzo.checkpoint.run.background import AsyncSaveResponse
    from terrazzo.checkpoint.run.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
    from terrazzo.checkpoint.state_dict_loader import load, load_state_dict
    from terrazzo.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save, save_state_dict
    from terrazzo.checkpoint.stateful import Stateful
    from terrazzo.checkpoint.storage import StorageReader, StorageWriter, WriteResult
    from terrazzo.checkpoint.tools.lazy import Checkpoint, LazyTensor
    from terrazzo.checkpoint.tools.verify import seal, verify

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "AsyncStager",
    "BlockingAsyncStager",
    "BytesStorageMetadata",
    "Checkpoint",
    "CheckpointException",
    "CheckpointManager",
    "CheckpointableTensor",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "DefaultStager",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LazyTensor",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "NativeReader",
    "NativeWriter",
    "PerRank",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StagingOptions",
    "Stateful",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "TensorProperties",
    "TensorStorageMetadata",
    "WriteItem",
    "WriteItemType",
    "WriteResult",
    "async_save",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "save",
    "save_state_dict",
    "seal",
    "verify",
]

__getattr__, __dir__ = late(__name__, ["state_dict", "stores"])
