"""QLoRA with bitsandbytes: its 4-bit weights are sharded as the bytes that they are, and compute as on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from installed import needs
from ranks import run_ranks
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import init_device_mesh

needs("bitsandbytes")


class Adapted(nn.Module):
    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        from bitsandbytes.nn import Linear4bit

        options = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4", "quant_storage": storage}
        self.base: Any = Linear4bit(64, 128, **options).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def check() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for storage in (torch.uint8, torch.float32):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(nn.Sequential(Adapted(storage), nn.ReLU()).to("cpu"))  # which quantizes
        one, sharded = models
        assert one[0].base.weight.quant_state is not None
        fully_shard(sharded[0], mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        x = torch.randn(8, 64)
        expected, out = one(x), sharded(x)
        assert torch.equal(out, expected)
        expected.sum().backward()
        out.sum().backward()
        assert torch.equal(sharded[0].down.weight.grad.full_tensor(), one[0].down.weight.grad)


def test_four_bits() -> None:
    run_ranks(2, check)
