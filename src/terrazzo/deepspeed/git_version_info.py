"""`deepspeed.git_version_info`: the version whose API this is, and PyTorch's."""

from __future__ import annotations

import torch

from terrazzo.deepspeed.ops.op_builder import COMPATIBLE as compatible_ops

version = "0.19.8"
git_hash = git_branch = "[none]"
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": ".".join((torch.version.cuda or "0.0").split(".")[:2]),
    "nccl_version": "0.0",
    "hip_version": ".".join((torch.version.hip or "0.0").split(".")[:2]),
}
installed_ops = compatible_ops

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]
