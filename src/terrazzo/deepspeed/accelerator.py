"""`get_accelerator()`: the device by DeepSpeed's names, on `torch.accelerator`."""

from __future__ import annotations

import functools
from typing import Any

import torch


class Accelerator:
    """The accelerator that PyTorch has found, or the CPU.

    >>> Accelerator().is_available()
    True
    """

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        self._kind = "cpu" if found is None else found.type
        # torch.cuda, torch.cpu, ...: what this class does not have is asked for there.
        self._torch: Any = torch.get_device_module(self._kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._torch, name)

    def device_name(self, device_index: int | None = None) -> str:
        """As `torch.device` takes it."""
        return self._kind if device_index is None or self._kind == "cpu" else f"{self._kind}:{device_index}"

    def current_device_name(self) -> str:
        """Of the device that is current."""
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        """Its number."""
        return 0 if self._kind == "cpu" else torch.accelerator.current_device_index()

    def set_device(self, device_index: int) -> None:
        """Make a device the current one."""
        if self._kind != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """How many devices this machine has."""
        return 1 if self._kind == "cpu" else torch.accelerator.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for what was queued."""
        if self._kind != "cpu":
            torch.accelerator.synchronize(device_index)

    def is_available(self) -> bool:
        """Whether it can be used."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether operations have ended when their calls return."""
        return self._kind == "cpu"

    def communication_backend_name(self) -> str:
        """The backend of `torch.distributed` for it."""
        return {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}.get(self._kind, "gloo")

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bfloat16."""
        return bool(self._torch.is_bf16_supported()) if hasattr(self._torch, "is_bf16_supported") else True

    def is_fp16_supported(self) -> bool:
        """Whether it computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """What it computes in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is there."""
        return tensor.device.type == self._kind

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in memory from which copies to the accelerator need not be waited for."""
        return tensor if self._kind == "cpu" else tensor.pin_memory()

    def manual_seed(self, seed: int) -> None:
        """Of its random numbers."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Of all devices' random numbers."""
        torch.manual_seed(seed)

    def empty_cache(self) -> None:
        """Give memory that is not used back."""
        if self._kind != "cpu":
            self._torch.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors; 0 on the CPU, which does not count them."""
        return 0 if self._kind == "cpu" else int(self._torch.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that there have been."""
        return 0 if self._kind == "cpu" else int(self._torch.max_memory_allocated(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Count anew."""
        if self._kind != "cpu":
            self._torch.reset_peak_memory_stats(device_index)


@functools.cache
def get_accelerator() -> Accelerator:
    """This process's.

    >>> get_accelerator().device_name() == str(torch.empty(0, device=get_accelerator().device_name()).device.type)
    True
    """
    return Accelerator()
