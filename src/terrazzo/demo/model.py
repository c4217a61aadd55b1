"""The demo's model: a small GPT, written as for one device, and how tensor parallelism cuts it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.tensor import DeviceMesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    vocabulary: int = 128
    width: int = 128
    heads: int = 4
    blocks: int = 3
    length: int = 64


class Attention(nn.Module):
    """Causal self-attention. The projections' width says how many heads there are: a rank may have some of them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.query, self.key, self.value, self.out = (nn.Linear(sizes.width, sizes.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        out: Tensor = self.out(mixed.reshape(*x.shape[:2], -1))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        mixed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + mixed


class GPT(nn.Module):
    """Guesses the next character.

    >>> model = GPT(Sizes(width=8, heads=2, blocks=1))
    >>> model(torch.zeros(2, 5, dtype=torch.int64)).shape
    torch.Size([2, 5, 128])
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.length = sizes.length
        self.characters = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: Tensor, passages: Tensor) -> Tensor:
    """How badly the model guesses each passage's next characters."""
    return F.cross_entropy(logits.flatten(0, 1), passages[:, 1:].flatten())


def tensor_parallel(model: GPT, mesh: DeviceMesh) -> GPT:
    """Cut the blocks among the ranks of a mesh: by heads, and by the columns and rows of the feed-forward network."""
    cuts = {
        **{f"blocks.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, cuts)
    return model


@torch.no_grad()
def write_on(model: GPT, beginning: Tensor, count: int, seed: int = 0) -> Tensor:
    """Let the model write `count` characters after a beginning."""
    generator = torch.Generator().manual_seed(seed)
    written = beginning
    for _ in range(count):
        logits = model(written[None, -model.length :])[0, -1]
        chances = (logits / 0.5).softmax(-1)  # a little bolder than it is
        written = torch.cat([written, torch.multinomial(chances, 1, generator=generator)])
    return written[len(beginning) :]
