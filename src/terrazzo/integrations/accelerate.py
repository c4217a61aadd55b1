"""Hugging Face's Accelerate, and Transformers' `Trainer` on top of it.

Both import PyTorch's names, so `terrazzo.install()` is enough to use them. They accept FSDP settings on accelerators
only; with `fsdp_on_cpu` a test of a training script can use these settings on CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """A block in which an `Accelerator` or a `Trainer` on CPU ranks accepts FSDP settings as on GPUs.

    Accelerate chooses FSDP only on several GPUs, so here CPU ranks are reported to it as such.

        with fsdp_on_cpu():
            accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, ...))
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    first: Any = PartialState.__init__

    def counted_as_gpus(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        first(self, cpu=True, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    environment = dict(os.environ)  # to be restored, because plugins and the Trainer write their settings there
    PartialState.__init__ = counted_as_gpus
    try:
        yield
    finally:
        PartialState.__init__ = first
        for name in set(os.environ) - set(environment):
            if name.startswith(("ACCELERATE_", "FSDP_")):
                del os.environ[name]
        forget()


__all__ = ["fsdp_on_cpu"]
