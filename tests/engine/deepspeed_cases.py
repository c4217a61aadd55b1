"""Which runs of DeepSpeed the tests compare with: ZeRO stage, precision and, of some, an option.

`master` accumulates bf16's gradients in float32, which in stage 1 is done by an optimizer with a layout of its own;
`small` divides stage 3's groups into small ones; `robin` has another order of parameters in the partitions.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from engine.runs import INPUTS, OUTPUTS, WIDTH, Block

CASES = ("1-fp32", "1-fp16", "1-bf16-master", "2-bf16", "2-fp32-robin", "3-fp32-small", "3-fp16", "3-bf16")
UNIVERSAL = ("1-fp32", "2-bf16", "3-fp32-small")  # of these `ds_to_universal` makes universal checkpoints
STEPS, BEFORE = 6, 3  # a checkpoint is saved after BEFORE


def deepspeed_is_installed() -> bool:
    """The package, not a folder of that name."""
    found = importlib.util.find_spec("deepspeed")
    return found is not None and found.origin is not None


def parsed(case: str) -> tuple[int, str, str]:
    """Stage, precision and option of a case."""
    stage, precision, *option = case.split("-")
    return int(stage), precision, "".join(option)


PIPELINE = "pipeline"  # a model in two stages, of which the first has a module that occurs twice


class Shifted(nn.Module):
    """A layer with a buffer and with weights that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.block.up.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.shift


def pipeline_layers() -> tuple[nn.Module, nn.Module, list[nn.Module]]:
    """The first layer, that which occurs twice after it, and the rest."""
    first, twice = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH)
    return first, twice, [Shifted(), Block(), nn.Linear(WIDTH, OUTPUTS)]
