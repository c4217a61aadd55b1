"""What each rank of the demo does, and what the first one tells the terminal."""

from __future__ import annotations

import copy
import datetime
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from terrazzo.tensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from terrazzo.tensor.debug import CommDebugMode, sharding_picture

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 64, 32, 4, 16, 8


@dataclass(frozen=True)
class Study:
    """What there is before training."""

    parameters: int
    held: int
    pictures: list[str]


@dataclass(frozen=True)
class Step:
    number: int
    single: float
    sharded: float


@dataclass(frozen=True)
class Finished:
    parameter_error: float
    traffic: list[tuple[str, int, int, int]]
    """(collective, calls in forward, calls in backward, bytes)"""


class Block(nn.Module):
    """Attention and a feed-forward network, with projections that can be cut by heads and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norms[0](x)
        query, key, value = (
            f(y).view(batch, length, HEADS, width // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        mixed = (
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A language model small enough to watch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def run_rank(rank: int, world: int, steps: int, store: str, connection: Connection | None) -> None:
    """One rank: build both models, train them side by side, report if there is someone to report to."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        _train(steps, connection)
    finally:
        dist.destroy_process_group()


def _train(steps: int, connection: Connection | None) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    single = Model()
    sharded = _sharded(copy.deepcopy(single), mesh)
    # A large eps: where a gradient is zero but for rounding, Adam would make steps of the rounding.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-5) for m in (single, sharded)]
    if connection is not None:
        connection.send(_study(sharded))
    mode = CommDebugMode()
    for number in range(1, steps + 1):
        # Sequences that count up from a random token: there is something to learn.
        first = torch.randint(0, VOCABULARY, (BATCH, 1))
        tokens = (first + torch.arange(LENGTH + 1)) % VOCABULARY
        batch = distribute_tensor(tokens, mesh, [Shard(0), Replicate()])
        with mode:
            loss = _loss(sharded, batch)
            loss.backward()
        plain_loss = _loss(single, tokens)
        plain_loss.backward()
        value = loss.item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if connection is not None:
            connection.send(Step(number, plain_loss.item(), value))
    error = _difference(single, sharded)
    if connection is not None:
        connection.send(Finished(error, _traffic(mode)))


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


# How weights are cut over the second mesh dim: rows of what spreads out, columns of what brings together again. What is
# not named here, biases of the latter among it, is replicated.
_CUTS = {
    **{f"{name}.{part}": 0 for name in ("query", "key", "value", "up") for part in ("weight", "bias")},
    **{f"{name}.weight": 1 for name in ("out", "down")},
    "embedding.weight": 0,
}


def _sharded(model: Model, mesh: DeviceMesh) -> Model:
    def place(prefix: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = _CUTS.get(f"{prefix}.{name}".removeprefix("blocks.0.").removeprefix("blocks.1."))
            placement = Replicate() if cut is None else Shard(cut)
            placed = distribute_tensor(parameter.detach(), mesh, [Replicate(), placement])
            module.register_parameter(name, nn.Parameter(placed))

    distribute_module(model, mesh, place)
    return model


def _study(model: nn.Module) -> Study:
    parameters = list(model.named_parameters())
    pictures = [
        str(sharding_picture(p, name))
        for name, p in parameters
        if isinstance(p, DTensor) and name in ("blocks.0.up.weight", "blocks.0.down.weight")
    ]
    return Study(
        sum(p.numel() for _, p in parameters),
        sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for _, p in parameters),
        pictures,
    )


def _difference(single: nn.Module, sharded: nn.Module) -> float:
    worst = 0.0
    for p, q in zip(single.parameters(), sharded.parameters(), strict=True):
        full = q.full_tensor() if isinstance(q, DTensor) else q
        worst = max(worst, (full - p).abs().max().item())
    return worst


def _traffic(mode: CommDebugMode) -> list[tuple[str, int, int, int]]:
    forward, backward, moved = mode.get_comm_counts("forward"), mode.get_comm_counts("backward"), mode.get_comm_bytes()
    return [(kind, forward[kind], backward[kind], nbytes) for kind, nbytes in moved.items()]
