"""A program written for PyTorch's own libraries, as users have them: a language model is made without memory, sharded,
trained with accumulation in mixed precision, evaluated, asked for words, saved, and resumed as another object.

`test_import_swap` runs it as it is, and with nothing but its imports changed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, LENGTH = 37, 24, 10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class LanguageModel(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("temperature", torch.tensor(1.0))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.places, std=0.02)

    def forward(self, ids: Tensor, recompute: bool = False) -> Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return self.head(self.norm(x)) / self.temperature

    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


class TrainingState(Stateful):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def build(mesh: Any, offload: OffloadPolicy) -> tuple[LanguageModel, torch.optim.Optimizer, Any]:
    with torch.device("meta"):
        model = LanguageModel()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    for layer in model.layers:
        fully_shard(layer, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None, **options)
    fully_shard(model, **options)
    assert isinstance(model, FSDPModule) and isinstance(model.layers[0], Layer)
    register_fsdp_forward_method(model, "generate")
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    whole = LanguageModel()
    whole.reset_parameters()
    filled = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole.state_dict() if dist.get_rank() == 0 else {}, options=filled)
    for here, following in zip(model.layers, model.layers[1:], strict=False):
        here.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([here])
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, eps=1e-4
    )
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


def train(model: Any, optimizer: Any, schedule: Any, steps: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            last = micro == 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            ids = torch.randint(0, WORDS, (2, LENGTH), generator=generator)
            handle = model.layers[0].unshard(async_op=True)
            logits = model(ids, recompute=last).float()
            assert isinstance(handle, UnshardHandle)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / 2
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
        optimizer.step()
        schedule.step()
    return losses


def main(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer, schedule = build(mesh, OffloadPolicy())
    answers: dict[str, Any] = {"names": [name for name, _ in model.named_parameters()]}
    answers["first"] = train(model, optimizer, schedule, 4, seed=1)
    placements = model.layers[0].up.weight.placements
    assert tuple(placements) == (Replicate(), Shard(1)), placements

    dcp.save({"app": TrainingState(model, optimizer, 4)}, checkpoint_id=folder)
    model.eval()
    with torch.no_grad():
        answers["words"] = model.generate(torch.tensor([[1, 2, 3]]), 4)
    model.train()
    answers["second"] = train(model, optimizer, schedule, 2, seed=2)

    other, other_optimizer, other_schedule = build(mesh["shard"], CPUOffloadPolicy(pin_memory=False))
    state = TrainingState(other, other_optimizer)
    dcp.load({"app": state}, checkpoint_id=folder)
    assert state.step == 4
    other_schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 4})
    for module in [*other.layers, other]:
        module.set_all_reduce_hook(lambda reduced: dist.all_reduce(reduced.div_(2), group=mesh.get_group("replicate")))
    answers["resumed"] = train(other, other_optimizer, other_schedule, 2, seed=2)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    answers["full"] = {name: value.float() for name, value in full.items()}
    return answers
