"""`get_accelerator()`: DeepSpeed's functions for the device, based on `torch.accelerator`."""

from __future__ import annotations

import contextlib
import functools
import os
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

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of the random generator of a device."""
        return torch.get_rng_state() if self._kind == "cpu" else self._torch.get_rng_state(*_given(device_index))

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of the random generator of a device."""
        if self._kind == "cpu":
            torch.set_rng_state(new_state)
        else:
            self._torch.set_rng_state(new_state, *_given(device_index))

    def initial_seed(self) -> int:
        """The seed of the random generator."""
        return torch.initial_seed()

    def random(self) -> Any:
        """The module of random functions."""
        return torch.random

    def device(self, device_index: int | None = None) -> Any:
        """A block in which a device is the current one."""
        return contextlib.nullcontext() if self._kind == "cpu" else self._torch.device(device_index)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in pinned memory."""
        return tensor.is_pinned()

    def use_host_timers(self) -> bool:
        """Whether times are taken on the host, as on the CPU."""
        return self._kind == "cpu"

    resolves_data_dependency = handles_memory_backpressure = use_host_timers

    def total_memory(self, device_index: int | None = None) -> int:
        """The bytes of memory of a device, or of the host."""
        if self._kind == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(self._torch.mem_get_info(*_given(device_index))[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """The bytes of it that are not in use."""
        if self._kind == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return int(self._torch.mem_get_info(*_given(device_index))[0])

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator holds; 0 on the CPU."""
        return 0 if self._kind == "cpu" else int(self._torch.memory_reserved(device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The maximum of `memory_reserved` so far."""
        return 0 if self._kind == "cpu" else int(self._torch.max_memory_reserved(device_index))

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Statistics of the allocator; empty on the CPU."""
        return {} if self._kind == "cpu" else dict(self._torch.memory_stats(device_index))

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """The same as `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for it."""
        return self._kind in ("cuda", "xpu")

    def range_push(self, msg: str) -> None:
        """Begin a named range in profiles."""
        if self._kind == "cuda":
            self._torch.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """End it."""
        if self._kind == "cuda":
            self._torch.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> None:
        """Call a function, now."""
        callback()

    def create_op_builder(self, op_name: str) -> Any:
        """The builder of an operator, by the builder's name; None if there is none."""
        found = self.get_op_builder(op_name)
        return None if found is None else found()

    def get_op_builder(self, class_name: str) -> Any:
        """The class of such a builder."""
        from terrazzo.deepspeed.ops import op_builder  # which imports this module

        return getattr(op_builder, class_name, None)


def _given(index: int | None) -> tuple[int, ...]:
    return () if index is None else (index,)


def is_current_accelerator_supported() -> bool:
    """Whether DeepSpeed knows the accelerator."""
    return get_accelerator().device_name() in ("cpu", "cuda", "xpu", "npu", "hpu", "mps", "mlu", "sdaa")


@functools.cache
def get_accelerator() -> Accelerator:
    """The accelerator of this process.

    >>> get_accelerator().device_name() == str(torch.empty(0, device=get_accelerator().device_name()).device.type)
    True
    """
    return Accelerator()
