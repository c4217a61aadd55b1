"""`get_accelerator()`: DeepSpeed's functions for the device, based on `torch.accelerator`."""

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
        # torch.cuda, torch.cpu, ...: attributes that this class does not have are looked up there.
        self._torch: Any = torch.get_device_module(self._kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._torch, name)

    def device_name(self, device_index: int | None = None) -> str:
        """The device's name, as `torch.device` takes it."""
        return self._kind if device_index is None or self._kind == "cpu" else f"{self._kind}:{device_index}"

    def current_device_name(self) -> str:
        """The name of the current device."""
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        """The index of the current device."""
        return 0 if self._kind == "cpu" else torch.accelerator.current_device_index()

    def set_device(self, device_index: int) -> None:
        """Make a device the current one."""
        if self._kind != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """The number of devices of this host."""
        return 1 if self._kind == "cpu" else torch.accelerator.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all queued operations."""
        if self._kind != "cpu":
            torch.accelerator.synchronize(device_index)

    def is_available(self) -> bool:
        """Whether it can be used."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether operations are synchronous, as on the CPU."""
        return self._kind == "cpu"

    def communication_backend_name(self) -> str:
        """The backend of `torch.distributed` for this device."""
        return {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}.get(self._kind, "gloo")

    def is_bf16_supported(self) -> bool:
        """Whether it supports bfloat16."""
        return bool(self._torch.is_bf16_supported()) if hasattr(self._torch, "is_bf16_supported") else True

    def is_fp16_supported(self) -> bool:
        """Whether it supports float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that it supports."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the accelerator."""
        return tensor.device.type == self._kind

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in pinned memory."""
        return tensor if self._kind == "cpu" else tensor.pin_memory()

    def manual_seed(self, seed: int) -> None:
        """Seed the random generator of the current device."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random generators of all devices."""
        torch.manual_seed(seed)

    def empty_cache(self) -> None:
        """Release memory that is cached and not used."""
        if self._kind != "cpu":
            self._torch.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that tensors occupy; 0 on the CPU, where they are not counted."""
        return 0 if self._kind == "cpu" else int(self._torch.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The maximum of `memory_allocated` so far."""
        return 0 if self._kind == "cpu" else int(self._torch.max_memory_allocated(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset that maximum."""
        if self._kind != "cpu":
            self._torch.reset_peak_memory_stats(device_index)


@functools.cache
def get_accelerator() -> Accelerator:
    """The accelerator of this process.

    >>> get_accelerator().device_name() == str(torch.empty(0, device=get_accelerator().device_name()).device.type)
    True
    """
    return Accelerator()
