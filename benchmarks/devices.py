"""Ranks that have an accelerator each, or the device that imitates one."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from terrazzo.testing import late

LATE = "late"
# A process that has asked CUDA itself for devices cannot fork others that use them, and ranks are forks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_IMITATED = 2
_joined: set[str] = set()


def count(kind: str) -> int:
    """How many devices of this kind there are."""
    return _IMITATED if kind == LATE else torch.accelerator.device_count()


def join(kind: str) -> torch.device:
    """On a rank of `terrazzo.testing`: its device, after making the default group one for the CPU and the devices."""
    if kind == LATE:
        late.init()
    device = torch.device(kind, dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]))
    torch.accelerator.set_device_index(device.index)
    if kind in _joined and dist.is_initialized():
        return device
    if kind == LATE:
        late.init_process_group()
    else:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        dist.init_process_group(
            f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}",
            store=dist.PrefixStore("devices", store),
            rank=device.index,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    _joined.add(kind)
    return device
