"""How `async_save` copies a state, under the name of PyTorch's module."""

from terrazzo.checkpoint.run.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions

__all__ = ["AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions"]
