"""The stagers, which copy a state for `async_save`, in the module where PyTorch has them."""

from terrazzo.checkpoint.run.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions

__all__ = ["AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions"]
