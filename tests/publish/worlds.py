"""A trainer and a receiver of one model in other layouts, for the tests of publishing.

Ranks keep what they made between calls, so that tests can let both sides take turns.
"""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ranks import device_type
from terrazzo.fsdp import fully_shard
from terrazzo.publish import Publisher, Receiver
from terrazzo.tensor import DTensor, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LIMIT = timedelta(seconds=60)
KEPT: dict[str, Any] = {}


class Net(nn.Module):
    """Sizes that do not divide, a tied weight, a buffer, something without dims, and something empty."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.up = nn.Linear(10, 70)
        self.down = nn.Linear(70, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 3))


def trainer(seed: int = 0) -> nn.Module:
    """The model under fully_shard."""
    torch.manual_seed(seed)
    model = Net()
    fully_shard(model.up)
    fully_shard(model.down)
    fully_shard(model)
    return model


def tensor_parallel(dtype: torch.dtype, *, tied: bool = True) -> nn.Module:
    """The model with tensor parallelism, and other numbers."""
    torch.manual_seed(1000)
    model = Net(tied=tied).to(dtype)
    mesh = init_device_mesh(device_type(), (torch.distributed.get_world_size(),))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


@torch.no_grad()
def change(model: nn.Module, step: int, share: float) -> None:
    """Change about this share of the elements, to numbers that depend on the step."""
    for number, param in enumerate(model.parameters()):
        local = param.to_local() if isinstance(param, DTensor) else param
        generator = torch.Generator().manual_seed(step * 100 + number)
        mask = torch.rand(local.shape, generator=generator) < share
        local.copy_(torch.where(mask, local + 1 + torch.rand(local.shape, generator=generator), local))
    model.seen.fill_(step)


@torch.no_grad()
def numbers(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The full tensors, as they should be published; all ranks of the model together."""
    found = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = (whole.to(dtype) if whole.is_floating_point() else whole).clone()
    return found


def digest(state: dict[str, torch.Tensor]) -> str:
    """What stands for all bits of these tensors."""
    seen = hashlib.sha256()
    for name, value in sorted(state.items()):
        seen.update(name.encode() + value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def begin_trainer(to: Any, *, limit: timedelta = LIMIT, **settings: Any) -> None:
    model = trainer()
    KEPT["trainer"] = model, Publisher(to, model, timeout=limit, **settings), settings.get("dtype", torch.float32)


def publish(step: int, share: float, wait: bool = True) -> tuple[dict[str, torch.Tensor], Any]:
    """Change the model and publish it; what should arrive, and what was published."""
    model, publisher, dtype = KEPT["trainer"]
    change(model, step, share)
    publisher.publish(step)
    expected = numbers(model, dtype)
    return expected, publisher.wait() if wait else None


def end_trainer() -> None:
    _, publisher, _ = KEPT.pop("trainer")
    publisher.close()


def begin_receiver(
    source: Any, dtype: torch.dtype, *, tied: bool = True, limit: timedelta = LIMIT, **settings: Any
) -> None:
    model = tensor_parallel(dtype, tied=tied)
    KEPT["receiver"] = model, Receiver(source, model, timeout=limit, **settings)


def receive() -> tuple[int | None, dict[str, torch.Tensor], int]:
    """Take what is there; the version, what the model has then, and how many bytes this rank has read in all."""
    model, receiver = KEPT["receiver"]
    version = receiver.poll()
    if version is not None:
        assert receiver.apply() == version == receiver.version
    return version, numbers(model, next(model.parameters()).dtype), receiver.bytes_read


def end_receiver() -> None:
    _, receiver = KEPT.pop("receiver")
    receiver.close()


def train_many(to: Any, count: int, share: float, **settings: Any) -> dict[int, str]:
    """Publish many versions as fast as it goes; the digest of each."""
    model = trainer()
    expected = {}
    with Publisher(to, model, timeout=LIMIT, **settings) as publisher:
        for step in range(count):
            change(model, step, share)
            publisher.publish(step)
            expected[step] = digest(numbers(model, settings.get("dtype", torch.float32)))
    return expected


def receive_until(source: Any, last: int, dtype: torch.dtype, *, wait: bool) -> dict[int, str]:
    """Take versions as they come until the last; the digest of what the model had of each."""
    model = tensor_parallel(dtype)
    seen = {}
    deadline = time.monotonic() + 100
    with Receiver(source, model, timeout=LIMIT) as receiver:
        while receiver.version != last:
            assert time.monotonic() < deadline, f"only {sorted(seen)} have come"
            if receiver.poll(wait=wait) is None:
                time.sleep(0.01)
                continue
            receiver.apply()
            assert receiver.version is not None
            seen[receiver.version] = digest(numbers(model, dtype))
    return seen
