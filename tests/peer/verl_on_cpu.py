"""A platform of verl's on which the CPU stands for GPUs; verl imports this, by `VERL_USE_EXTERNAL_MODULES`."""

from __future__ import annotations

from types import SimpleNamespace

from on_ranks import CUDA
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class OnCPU(PlatformCUDA):  # type: ignore[misc]  # of a library that is not installed here
    device_name = "cpu"
    device_module: SimpleNamespace = CUDA

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return int(CUDA.device_count())

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def empty_cache(self) -> None: ...

    def communication_backend_name(self) -> str:
        return "gloo"
