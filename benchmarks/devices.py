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
RANKS_PER_DEVICE = "RANKS_PER_DEVICE"  # in the environment
_joined: set[str] = set()


def ranks_per_device() -> int:
    """How many ranks share a device: NCCL 2.30 and newer allow several, with `NCCL_MULTI_RANK_GPU_ENABLE=1`."""
    return int(os.environ.get(RANKS_PER_DEVICE, "1"))


def number(kind: str) -> int:
    """How many devices of this kind there are."""
    return _IMITATED if kind == LATE else torch.accelerator.device_count()


def count(kind: str) -> int:
    """How many ranks there are on devices of this kind; on `late` each has a device."""
    return number(kind) * (1 if kind == LATE else ranks_per_device())


def join(kind: str) -> torch.device:
    """On a rank of `terrazzo.testing`: its device, after making the default group one for the CPU and the devices."""
    if kind == LATE:
        late.init()
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    device = torch.device(kind, rank if kind == LATE else rank // ranks_per_device())
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
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    _joined.add(kind)
    return device
