"""Typical scripts for DeepSpeed, run by the real one and by `terrazzo.deepspeed`: each returns what it has seen.

`torchrun scripts.py OUT real|ours NAME...` writes that to OUT as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

WORDS, WIDTH, LENGTH, SAMPLES = 23, 16, 12, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.feed = feed or nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """Returns the loss, as models of scripts often do; embedding and head share a weight."""

    def __init__(self, feeds: list[nn.Module] | None = None, checkpoint=None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(feed) for feed in feeds or [None, None]])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.checkpoint = checkpoint

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x) if self.checkpoint is None else self.checkpoint(layer, x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


class Adapted(nn.Module):
    """A linear layer that is left alone, and two small matrices that are trained (LoRA)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(3, linear.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(linear.out_features, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.down), self.up) * 2


class Experts(nn.Module):
    """Each token goes to two of four experts, all of which every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 20), nn.ReLU(), nn.Linear(20, WIDTH)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        share = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter(-1, chosen, weights)
        return torch.stack([expert(x) * share[..., i, None] for i, expert in enumerate(self.experts)]).sum(0)


def text() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    tokens[:, 1::2] = tokens[:, 0:-1:2]  # something to learn
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def mine(tokens: Tensor) -> Tensor:
    """This rank's part."""
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def mean(value: Tensor | float) -> float:
    """Over the ranks."""
    total = torch.as_tensor(value).detach().float().clone().reshape(1)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def settings(stage: int, **more: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5e6},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.01, "torch_adam": True}},
        **more,
    }


def gpt(deepspeed: ModuleType, folder: Path) -> list[float]:
    """A language model, accumulated gradients, the loader of `initialize`, the config in a file."""
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 3, "total_num_steps": 9}}
    path = folder / f"{deepspeed.__name__}-{dist.get_rank()}.json"
    path.write_text(json.dumps(settings(3, gradient_accumulation_steps=2, scheduler=schedule, steps_per_print=100)))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    model = GPT()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=text()
    )
    seen = []
    for _ in range(2):
        for tokens, labels in loader:
            loss = engine(tokens.to(engine.device), labels=labels.to(engine.device))
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                seen.append(scheduler.get_last_lr()[0])
            engine.step()
            seen.append(mean(loss))
    return [*seen, float(engine.global_steps), float(engine.get_global_grad_norm())]


def lora(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Small matrices are trained beside a model that is left alone; two param groups; the trained part is saved."""
    model = GPT().requires_grad_(False)
    for layer in model.layers:
        layer.attention.qkv, layer.attention.out = Adapted(layer.attention.qkv), Adapted(layer.attention.out)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[::2], "lr": 1e-2}, {"params": trained[1::2], "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings(2))
    seen = []
    tokens, labels = text().tensors
    for step in range(6):
        loss = engine(mine(tokens[step * 4 : step * 4 + 8]), mine(labels[step * 4 : step * 4 + 8]))
        engine.backward(loss)
        engine.step()
        seen.append(mean(loss))
    path = folder / f"lora-{deepspeed.__name__}"
    engine.save_16bit_model(str(path), "adapters.bin", exclude_frozen_parameters=True)
    dist.barrier()
    stored = torch.load(path / "adapters.bin", weights_only=True)
    return [
        *seen,
        float(len([n for n in stored if "up" in n or "down" in n])),
        stored["layers.0.attention.qkv.up"].sum().item(),
    ]


def half(deepspeed: ModuleType, folder: Path) -> list[float]:
    """float16: the scale falls until gradients fit; steps before that are skipped."""
    precision = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 4}
    model = GPT()
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings(1, fp16=precision)
    )
    seen = []
    tokens, labels = text().tensors
    for step in range(14):
        loss = engine(mine(tokens[step : step + 8]), mine(labels[step : step + 8]))
        engine.backward(loss)
        engine.step()
        seen += [mean(loss), float(engine.was_step_applied()), float(optimizer.cur_scale)]
    return [*seen, float(engine.skipped_steps)]


def offload(deepspeed: ModuleType, folder: Path) -> list[float]:
    """The optimizer's state on the CPU; the boundary of accumulation is set by hand."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    engine, *_ = deepspeed.initialize(
        model=GPT(),
        config=settings(2, zero_optimization=zero, gradient_accumulation_steps=2, zero_force_ds_cpu_optimizer=False),
    )
    seen = []
    tokens, labels = text().tensors
    for step in range(5):
        for micro in range(2):
            part = slice(step * 4 + micro * 8, step * 4 + micro * 8 + 8)
            engine.set_gradient_accumulation_boundary(micro == 1)
            loss = engine(mine(tokens[part]), mine(labels[part]))
            engine.backward(loss)
            seen.append(mean(loss))
        engine.step()
    return seen


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5


def pipeline(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Two stages, the first and the last layer tied."""
    torch.manual_seed(1)
    build = [nn.Linear(6, 6) for _ in range(5)]
    spec = deepspeed.pipe.TiedLayerSpec

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            state = torch.get_rng_state()
            torch.manual_seed(7)
            self.weight = nn.Parameter(torch.randn(6, 6) / 3)
            torch.set_rng_state(state)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    def turned(ends: nn.Module, x: Tensor) -> Tensor:
        return x @ ends.weight.t()

    layers = [spec("ends", Ends), *build[:3], Shift(), torch.relu, *build[3:], spec("ends", Ends, forward_fn=turned)]
    model = deepspeed.PipelineModule(
        layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="parameters", activation_checkpoint_interval=0
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=settings(1, gradient_accumulation_steps=4),
    )
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)) for _ in range(16)]
    losses = [engine.train_batch(iter(batches[step % 4 * 4 :])) for step in range(8)]
    return [float(loss) for loss in losses] + [float(engine.eval_batch(iter(batches)))]


def neighbours(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Stage 3 with a second copy of the parameters' shards within pairs of ranks (hpZ)."""
    model = GPT()
    zero = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=settings(3, zero_optimization=zero, gradient_accumulation_steps=2),
    )
    seen = []
    tokens, labels = text().tensors
    for step in range(8):
        loss = engine(mine(tokens[step * 2 : step * 2 + 16]), mine(labels[step * 2 : step * 2 + 16]))
        engine.backward(loss)
        engine.step()
        seen.append(mean(loss))
    return [*seen, float(engine.get_global_grad_norm())]


def moe(deepspeed: ModuleType, folder: Path) -> list[float]:
    """A mixture of experts, every rank with all of them."""
    model = GPT(feeds=[Experts(), Experts()])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(2))
    seen = []
    tokens, labels = text().tensors
    for step in range(8):
        loss = engine(mine(tokens[step * 2 : step * 2 + 8]), mine(labels[step * 2 : step * 2 + 8]))
        engine.backward(loss)
        engine.step()
        seen.append(mean(loss))
    return seen


class Routed(nn.Module):
    """Two layers whose experts are divided among the ranks."""

    def __init__(self, kind: type, ep_size: int) -> None:
        super().__init__()

        def expert() -> nn.Module:
            return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

        self.into = nn.Linear(6, WIDTH)
        common = {"num_experts": 4, "ep_size": ep_size, "min_capacity": 1}
        self.first = kind(WIDTH, expert(), k=1, capacity_factor=0.8, noisy_gate_policy="RSample", **common)
        self.second = kind(WIDTH, expert(), k=2, use_residual=True, noisy_gate_policy="Jitter", **common)
        self.third = kind(WIDTH, expert(), k=3, drop_tokens=False, **common)
        self.out = nn.Linear(WIDTH, 3)
        for layer in (self.first, self.second, self.third):
            inner = layer.deepspeed_moe.experts.deepspeed_experts
            with torch.no_grad():  # copies are equal at first
                if isinstance(inner, nn.ModuleList):  # this rank's
                    first = dist.get_rank() % ep_size * (4 // ep_size)
                    for number, own in enumerate(inner):
                        for p in own.parameters():
                            p.mul_(1 + 0.3 * (first + number))
                else:
                    for p in inner.parameters():
                        p.mul_(1 + 0.3 * torch.arange(4.0).view(-1, *[1] * (p.ndim - 1)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        x, total, counts = torch.tanh(self.into(x)), torch.zeros(()), []
        for layer in (self.first, self.second, self.third):
            y, balance, count = layer(x)
            x, total = x + y, total + balance
            counts.append(count)
        return self.out(x), total, counts


def with_experts(deepspeed: ModuleType, stage: int, ep_size: int):
    layer = importlib.import_module(f"{deepspeed.__name__}.moe.layer")
    utils = importlib.import_module(f"{deepspeed.__name__}.moe.utils")
    torch.manual_seed(0)
    model = Routed(layer.MoE, ep_size)
    parameters = utils.configure_moe_param_groups(list(model.parameters()))
    assert [utils.is_moe_param_group(group) for group in parameters] == [False, True]
    config = settings(stage, gradient_accumulation_steps=2, gradient_clipping=0.3)
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def train_experts(engine, start: int, stop: int) -> list[float]:
    seen = []
    for step in range(start, stop):
        x = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(step))
        y = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(step + 100))
        torch.manual_seed(100 * step + dist.get_rank())
        out, balance, counts = engine(mine(x))
        loss = F.mse_loss(out, mine(y)) + 0.05 * balance
        engine.backward(loss)
        engine.step()
        seen += [mean(loss), mean(balance.detach()), *(float(c) for c in torch.stack(counts).flatten())]
        if step % 2:
            seen.append(float(engine.get_global_grad_norm()))
    return seen


def experts(deepspeed: ModuleType, folder: Path, stage: int = 2, ep_size: int = 2) -> list[float]:
    """Experts that the ranks divide among them, by `deepspeed.moe.layer.MoE`, saved and resumed."""
    engine = with_experts(deepspeed, stage, ep_size)
    seen = train_experts(engine, 0, 8)
    group = deepspeed.utils.groups
    name = f"ep_size_{ep_size}"
    seen.extend([group._get_expert_parallel_rank(name), group._get_expert_data_parallel_world_size(name)])
    engine.save_checkpoint(str(folder / f"{deepspeed.__name__}-experts-{ep_size}"))
    seen += train_experts(engine, 8, 10)
    engine = with_experts(deepspeed, stage, ep_size)
    engine.load_checkpoint(str(folder / f"{deepspeed.__name__}-experts-{ep_size}"))
    last = train_experts(engine, 8, 12)
    theirs = folder / f"deepspeed-experts-{ep_size}"
    if deepspeed.__name__ != "deepspeed" and theirs.exists():  # with any degree ours goes on from theirs
        for other in (1, 2):
            engine = with_experts(deepspeed, stage, other)
            engine.load_checkpoint(str(theirs))
            found = train_experts(engine, 8, 12)
            torch.testing.assert_close(torch.tensor(found), torch.tensor(last), rtol=1e-5, atol=1e-5)
    return seen + last


def experts_on_each(deepspeed: ModuleType, folder: Path) -> list[float]:
    """The same, with all experts on each rank."""
    return experts(deepspeed, folder, stage=1, ep_size=1)


def experts_of_ours(deepspeed: ModuleType, folder: Path) -> list[float]:
    """What comes after a checkpoint that `terrazzo.deepspeed` has written in DeepSpeed's layout, so it runs first."""
    seen = []
    for stage, ep_size in ((2, 2), (1, 1)):
        engine = with_experts(deepspeed, stage, ep_size)
        out = str(folder / f"ours-{ep_size}")
        if deepspeed.__name__ == "deepspeed":
            engine.load_checkpoint(out)
        else:
            train_experts(engine, 0, 8)
            engine.core.save_checkpoint(out, layout="deepspeed").result()
        seen += train_experts(engine, 8, 12)
    return seen


class Mixture(nn.Module):
    """Experts of which each rank uses only some, chosen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return x + sum(self.experts[number](x) for number in chosen)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, WIDTH)
        self.mixture = Mixture()
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return self.out(torch.tanh(self.mixture(torch.tanh(self.into(x)), chosen)))


def chosen_experts(step: int, rank: int) -> list[int]:
    """Together the two ranks use all four, but never the same; one of them uses more."""
    return [[step % 4], [number for number in range(4) if number != step % 4]][(step // 2 + rank) % 2]


def experts_by_rank(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Stage 3, each rank with experts of its own: the mixture is a leaf."""
    utils, model = deepspeed.utils, Mixed()
    mixture, experts = model.mixture, list(model.mixture.experts)
    assert utils.set_z3_leaf_modules(model, [f"{Mixture.__module__}.Mixture", "Mixed"]) == [mixture, model]
    assert utils.unset_z3_leaf_modules(model, [Mixture, Mixed]) == [mixture, model]
    assert utils.set_z3_leaf_modules_by_suffix(model, [".0", "s.1", "-"], True, False) == (experts[:2], ["-"])
    assert utils.set_z3_leaf_modules_by_name(model, ["mixture", "-"], raise_if_not_found=False) == ([mixture], ["-"])
    assert utils.get_z3_leaf_modules(model) == [mixture, *experts[:2]] and utils.z3_leaf_module(experts[0])
    assert utils.unset_z3_leaf_modules(model, ["Linear"]) == [model.into, *experts, model.out]
    assert utils.get_z3_leaf_modules(model) == [mixture]
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = settings(3, zero_optimization=zero, gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert deepspeed.utils.z3_leaf_parameter(engine.module.mixture.experts[0].weight)
    assert not deepspeed.utils.z3_leaf_parameter(engine.module.out.weight)
    seen = []
    generator = torch.Generator().manual_seed(5)
    for step in range(12):
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
        loss = F.mse_loss(engine(mine(x), chosen_experts(step, dist.get_rank())), mine(y))
        engine.backward(loss)
        engine.step()
        seen.append(mean(loss))
    full = [deepspeed.utils.safe_get_full_fp32_param(p).norm().item() for p in engine.module.parameters()]
    return [*seen, *full]


def _smallest(deepspeed: ModuleType, **more: object) -> list[float]:
    """Losses, relative to the first, of a config that says nothing but what it has to; gradients are large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, **more}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = torch.bfloat16 if "bf16" in more else torch.float16 if "fp16" in more else torch.float32
    seen = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        x, y = torch.randn(8, 6, generator=generator), 2 * torch.ones(8, 3) + torch.randn(8, 3, generator=generator)
        loss = F.mse_loss(engine(mine(x).to(dtype)).float(), mine(y))
        engine.backward(loss)
        engine.step()
        seen.append(mean(loss))
    return [*(loss / seen[0] for loss in seen), *engine.get_lr(), float(engine.skipped_steps)]


def _stages() -> list[dict[str, object]]:
    return [{}] + [{"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)]


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.3}}}


def smallest(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Defaults in float32: of the config in every stage, of an optimizer, of a schedule."""
    adam = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    decay = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}}
    configs = [*({**SGD, **stage} for stage in _stages()), adam, {**SGD, **decay}]
    return [value for config in configs for value in _smallest(deepspeed, **config)]


def smallest_half(deepspeed: ModuleType, folder: Path) -> list[float]:
    """The same in 16 bits. In float16 two steps overflow, which DeepSpeed's optimizer of stage 0 does not notice."""
    bf16 = [{**SGD, **stage, "bf16": {"enabled": True}} for stage in _stages()]
    configs = [*bf16, *({**SGD, **stage, "fp16": {"enabled": True}} for stage in _stages()[1:])]
    return [value for config in configs for value in _smallest(deepspeed, **config)]


def growing(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Sequences that grow longer, with accumulation that the script divides itself."""
    engine, *_ = deepspeed.initialize(model=GPT(), config=settings(1, gradient_accumulation_steps=2))
    seen = []
    tokens, labels = text().tensors
    for step in range(8):
        length = min(4 + 2 * engine.global_steps, LENGTH)
        for micro in range(2):
            part = slice(step * 2 + micro * 8, step * 2 + micro * 8 + 8)
            loss = engine(mine(tokens[part, :length]), mine(labels[part, :length]))
            engine.backward(loss / 2, scale_wrt_gas=False)
            engine.step()
            seen.append(mean(loss))
        seen.append(float(length))
    return seen


def own_optimizer(deepspeed: ModuleType, folder: Path) -> list[float]:
    """The script's own optimizer and PyTorch's scheduler; bfloat16."""
    model = GPT()
    named = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    config = settings(2, bf16={"enabled": True}, zero_allow_untested_optimizer=True)
    del config["optimizer"]
    engine, wrapped, _, returned = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    seen = []
    tokens, labels = text().tensors
    for step in range(8):
        loss = engine(mine(tokens[step * 2 : step * 2 + 8]), mine(labels[step * 2 : step * 2 + 8]))
        engine.backward(loss)
        engine.step()
        seen += [mean(loss), wrapped.param_groups[0]["lr"]]
    return [*seen, float(returned is scheduler)]


def resume(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Replicas, momentum, evaluation in between; saved, and gone on with by another engine."""
    out = folder / f"resume-{deepspeed.__name__}"
    plain = settings(
        1, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, zero_allow_untested_optimizer=True
    )
    seen = []
    tokens, labels = text().tensors
    for part in range(2):
        torch.manual_seed(part)
        model = GPT()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)
        if part == 1:
            path, state = engine.load_checkpoint(str(out))
            seen += [float(state["epoch"]), float(path is not None)]
        for step in range(engine.global_steps, engine.global_steps + 3):
            engine.train()
            loss = engine(mine(tokens[step * 2 : step * 2 + 8]), mine(labels[step * 2 : step * 2 + 8]))
            engine.backward(loss)
            engine.step()
            engine.eval()
            with torch.no_grad():
                seen += [mean(loss), mean(engine(mine(tokens[-8:]), mine(labels[-8:])))]
        if part == 0:
            engine.save_checkpoint(str(out), tag="half", client_state={"epoch": 7})
    return seen


def by_hand(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Made for sharding, initialised while gathered, activations checkpointed, backward called on the loss itself."""
    config = settings(3, gradient_accumulation_steps=2)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = GPT(checkpoint=deepspeed.checkpointing.checkpoint)
    generator = torch.Generator().manual_seed(11)
    for p in model.parameters():
        with deepspeed.zero.GatheredParameters(p, modifier_rank=0):
            if dist.get_rank() == 0:
                p.data.copy_(torch.randn(p.shape, generator=generator) / 5)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    utils = deepspeed.utils
    seen = []
    tokens, labels = text().tensors
    for step in range(8):
        loss = engine(mine(tokens[step * 2 : step * 2 + 8]), mine(labels[step * 2 : step * 2 + 8]))
        loss.backward()
        engine.step()
        seen.append(mean(loss))
    weight = engine.module.layers[0].attention.out.weight
    with deepspeed.zero.GatheredParameters([weight]):
        seen.append(weight.detach().norm().item())
    full = utils.safe_get_full_fp32_param(weight)
    moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    return [*seen, full.norm().item(), moment.norm().item() * 100]


SCRIPTS = {
    function.__name__: function
    # After a pipeline the real one takes every model for one: it comes last.
    for function in (
        *(
            gpt,
            neighbours,
            lora,
            half,
            offload,
            moe,
            experts,
            experts_on_each,
            experts_by_rank,
            smallest,
            smallest_half,
            growing,
        ),
        *(own_optimizer, resume, by_hand, pipeline),
    )
}


def run(which: ModuleType, names: list[str], folder: Path) -> dict[str, list[float]]:
    results = {}
    for name in names:
        torch.manual_seed(0)
        results[name] = globals()[name](which, folder)
    return results


def real() -> ModuleType:
    """DeepSpeed, on the CPU; in a process that imported nothing of it yet."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it looks for ninja
    import deepspeed.comm.torch
    from deepspeed.accelerator import get_accelerator

    import deepspeed

    # An optional speed-up, which takes a minute to compile; and what PyTorch computes on any CPU.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    get_accelerator().is_fp16_supported = lambda: True
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    return deepspeed


def main() -> None:
    out, which, *names = sys.argv[1:]
    deepspeed = real() if which == "real" else importlib.import_module("terrazzo.deepspeed")
    deepspeed.init_distributed("gloo")
    results = run(deepspeed, names or list(SCRIPTS), Path(out).parent)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # what DeepSpeed leaves behind can abort an interpreter that ends


if __name__ == "__main__":
    main()
