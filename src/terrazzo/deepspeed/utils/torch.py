"""`deepspeed.utils.torch`: the version of PyTorch."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether PyTorch's version, without what follows a `+`, lies between two versions.

    >>> required_torch_version(min_version=1.8), required_torch_version(max_version="2.0")
    (True, False)
    """
    here = TorchVersion(torch.__version__.partition("+")[0])
    return not (
        (min_version is not None and here < str(min_version)) or (max_version is not None and here > str(max_version))
    )


__all__ = ["required_torch_version"]
