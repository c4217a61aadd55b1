"""The models that tests train: a GPT of two blocks and a small convolutional net, and ways to distribute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from terrazzo.tensor import DeviceMesh, Placement, Replicate, Shard, distribute_module, distribute_tensor


class Attention(nn.Module):
    """Causal self-attention. The number of heads follows from the width that comes, so that a rank may hold some of
    them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(mixed.reshape(mixed.shape[0], mixed.shape[1], -1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Gives logits, or with targets the loss. `recompute` checkpoints the blocks: "reentrant", "non-reentrant" or
    None."""

    def __init__(
        self,
        vocabulary: int = 64,
        width: int = 32,
        heads: int = 4,
        blocks: int = 2,
        length: int = 16,
        tied: bool = False,
        recompute: str | None = None,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("positions", torch.arange(length))
        self.recompute = recompute
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(words) + self.places(self.positions)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ConvNet(nn.Module):
    """Convolution, batch normalisation, pooling and a linear layer."""

    def __init__(self, channels: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, stride=2)
        self.norm2 = nn.BatchNorm2d(2 * channels)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return F.cross_entropy(self.head(x), targets)


# ------------------------------------------------------------------ where parameters go

PlacementOf = Callable[[str, nn.Parameter], Sequence[Placement]]


def tensor_parallel(name: str, parameter: nn.Parameter) -> Placement:
    """The usual cut of a GPT along one mesh dim: columns, then rows; heads; words."""
    parts = name.split(".")
    if parts[-2] in ("q", "k", "v", "up", "words", "head"):
        return Shard(0)
    if parts[-2] in ("out", "down") and parts[-1] == "weight":
        return Shard(1)
    return Replicate()


def distribute(module: nn.Module, mesh: DeviceMesh, placement_of: PlacementOf) -> nn.Module:
    """Make the module's parameters DTensors placed as `placement_of(name, parameter)` says; tied ones stay tied."""
    done: dict[int, nn.Parameter] = {}

    def partition(path: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in submodule._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in done:
                placements = placement_of(f"{path}.{name}", parameter)
                done[id(parameter)] = nn.Parameter(
                    distribute_tensor(parameter.detach(), mesh, placements), parameter.requires_grad
                )
            submodule.register_parameter(name, done[id(parameter)])

    keep = list(module.parameters())  # their ids must not be used anew meanwhile
    result = distribute_module(module, mesh, partition)
    del keep
    return result


# ------------------------------------------------------------------ data and comparison


def batch_of_words(
    step: int, batch: int = 8, length: int = 16, vocabulary: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and targets of one step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def whole(value: Any) -> Any:
    """The full value of a DTensor; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def worst_difference(mine: nn.Module, reference: nn.Module, *, grads: bool) -> tuple[float, str]:
    """The largest difference of a parameter or gradient, relative to that tensor's largest value (at least 1), and its
    name."""
    worst = (0.0, "")
    for (name, p), q in zip(mine.named_parameters(), reference.parameters(), strict=True):
        a, b = (p.grad, q.grad) if grads else (p, q)
        assert (a is None) == (b is None), f"{name}: gradient {'missing' if a is None else 'unexpected'}"
        if a is not None:
            b = b.detach()
            difference = (whole(a).detach().to(b.dtype) - b).abs().max() / b.abs().max().clamp(min=1)
            worst = max(worst, (difference.item(), name))
    return worst
