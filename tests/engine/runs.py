"""What the tests of the engine share: a small model, its data, and a run of it without any engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrazzo.engine import Engine, initialize

M = TypeVar("M", bound=nn.Module)

WIDTH, INPUTS, OUTPUTS, TOTAL = 7, 6, 3, 8  # 7 and 3 do not divide evenly


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """With a frozen layer, a shared weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.mix.weight
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.blocks[1].up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.embed(x))
        x = x + self.shift.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x))


def make_model(seed: int = 0) -> Model:
    return drawn(Model, seed)


def drawn(make: Callable[..., M], seed: int = 0) -> M:
    """A model on the default device, whose values are the same on all."""
    torch.manual_seed(seed)
    if torch.get_default_device().type == "cpu":
        return make()
    with torch.device("cpu"):
        values = make().state_dict()
    model = make()
    model.load_state_dict(values)
    return model


def config(stage: int, **options: Any) -> dict[str, Any]:
    return {
        "train_batch_size": TOTAL,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}},
        **options,
    }


def batches(steps: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps + start):
        x = torch.randn(TOTAL, INPUTS, generator=generator)
        y = torch.randn(TOTAL, OUTPUTS, generator=generator)
        if step >= start:
            yield x, y


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return ((model(x).float() - y) ** 2).mean()


def averaged(value: Tensor) -> float:
    """Over the ranks."""
    total = value.detach().float().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def train(engine: Engine, steps: int, start: int = 0) -> list[float]:
    """The losses of some steps, each the mean over the whole batch."""
    losses = []
    rank, size = dist.get_rank(), engine.train_micro_batch_size_per_gpu()
    world = dist.get_world_size()
    for x, y in batches(steps, start):
        total = torch.zeros(())
        for micro in range(engine.gradient_accumulation_steps()):
            first = (micro * world + rank) * size
            loss = loss_of(engine, x[first : first + size], y[first : first + size])
            total += engine.backward(loss)
            engine.step()
        losses.append(averaged(total))
    return losses


def train_plainly(
    steps: int, dtype: torch.dtype = torch.float32, make: Callable[[], nn.Module] = make_model
) -> tuple[list[float], nn.Module]:
    """The same run in one process with PyTorch alone."""
    master = make().to(dtype).float()
    model = copy.deepcopy(master).to(dtype)
    pairs = [(m, p) for m, p in zip(master.parameters(), model.parameters(), strict=True) if m.requires_grad]
    optimizer = torch.optim.AdamW([m for m, _ in pairs], lr=0.01, weight_decay=0.1)
    rates = [0.0] + [
        0.02 * torch.log(torch.tensor(k + 1.0)).item() / torch.log(torch.tensor(5.0)).item() for k in range(5)
    ]
    losses = []
    for step, (x, y) in enumerate(batches(steps)):
        optimizer.param_groups[0]["lr"] = rates[step] if step < len(rates) else 0.02
        loss = loss_of(model, x.to(dtype), y)
        loss.backward()
        losses.append(loss.item())
        for m, p in pairs:
            m.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_([m for m, _ in pairs], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for m, p in pairs:
                p.copy_(m)
    return losses, master


def engine_of(stage: int, model: nn.Module | None = None, **options: Any) -> Engine:
    return initialize(model if model is not None else make_model(), config=config(stage, **options))


def weights(engine: Engine) -> dict[str, Tensor]:
    """Whole, on every rank."""
    return {name: p.detach().full_tensor() for name, p in engine.module.named_parameters()}


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two of them: only matrices decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
