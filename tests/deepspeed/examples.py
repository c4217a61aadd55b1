"""Ten kinds of programs that people write for DeepSpeed, each with the smallest config: `run` by either library.

Each is written as such programs are: its own parser, loader, loop, evaluation and checkpoints. It returns what it has
seen: losses, and what was saved.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}


def mean(value: Tensor | float) -> float:
    """Over the ranks."""
    total = torch.as_tensor(value).detach().float().clone().reshape(1)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def pictures(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 4
    return TensorDataset(torch.randn(count, 3, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1), labels)


def texts(count: int = 32, length: int = 8, words: int = 12) -> Tensor:
    return torch.randint(0, words, (count, length), generator=torch.Generator().manual_seed(1))


class Pictures(nn.Module):
    """A small convolutional network; `feed` is a layer before the last, which may return a balance loss, too."""

    def __init__(self, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.pool, self.norm, self.feed = nn.MaxPool2d(2), nn.BatchNorm2d(6), feed
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.first(x))))
        x = self.pool(F.relu(self.second(x))).flatten(1)
        if self.feed is not None:
            x, self.balance, _ = self.feed(x)
        return self.last(x)


class Words(nn.Module):
    """A language model: an embedding, means of words in place of attention, and a head; returns logits."""

    def __init__(self, words: int = 12, width: int = 16, causal: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        self.causal = causal

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        around = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).view(1, -1, 1)
        for layer in self.layers:
            x = self.step(layer, x, around)
        return self.head(self.norm(x))

    def step(self, layer: nn.Module, x: Tensor, around: Tensor) -> Tensor:
        context = (x.cumsum(1) / around) if self.causal else x.mean(1, keepdim=True)
        return x + torch.tanh(layer(context.to(x.dtype)))


def next_word(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def classification(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Pictures, with the loader of `initialize`, options on the command line, accuracy at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args(["--deepspeed"])
    config = {
        "train_batch_size": 8,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4}},
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": 1, "allgather_partitions": True, "overlap_comm": True},
    }
    net = Pictures()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=pictures(), config=config
    )
    criterion, seen = nn.CrossEntropyLoss(), []
    for _ in range(args.epochs):
        for inputs, labels in loader:
            loss = criterion(engine(inputs.to(engine.device)), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            seen.append(mean(loss))
    net.eval()
    with torch.no_grad():
        inputs, labels = pictures().tensors
        right = (engine(inputs.to(engine.device)).argmax(1).cpu() == labels).float().mean()
    return [*seen, mean(right)]


def pictures_with_experts(deepspeed: ModuleType, folder: Path) -> list[float]:
    """The same with a layer of experts, whose parameters are in groups of their own."""
    layer = importlib.import_module(f"{deepspeed.__name__}.moe.layer")
    utils = importlib.import_module(f"{deepspeed.__name__}.moe.utils")
    moe = layer.MoE(
        hidden_size=32, expert=nn.Linear(32, 32), num_experts=2, ep_size=2, use_residual=True, k=1, min_capacity=0
    )
    net = Pictures(moe)
    everything = {"params": [p for p in net.parameters() if p.requires_grad], "name": "parameters"}
    parameters = utils.split_params_into_different_moe_groups_for_optimizer(everything)
    config = {"train_batch_size": 8, "optimizer": ADAM, "zero_optimization": {"stage": 2}}
    engine, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=parameters, training_data=pictures(), config=config
    )
    seen = []
    torch.manual_seed(dist.get_rank())  # the gate draws which tokens it keeps
    for inputs, labels in loader:
        loss = F.cross_entropy(engine(inputs.to(engine.device)), labels.to(engine.device)) + 0.01 * net.balance
        engine.backward(loss)
        engine.step()
        seen.append(mean(loss))
    return seen


def adversarial(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Two engines: one makes pictures, the other tells them from real ones."""
    makes = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    tells = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "zero_optimization": {"stage": 0}}
    maker, *_ = deepspeed.initialize(model=makes, model_parameters=makes.parameters(), config=config)
    teller, *_ = deepspeed.initialize(model=tells, model_parameters=tells.parameters(), config=copy.deepcopy(config))
    criterion, seen = nn.BCEWithLogitsLoss(), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        real = torch.randn(4, 6, generator=generator) + 2
        noise = torch.randn(4, 4, generator=generator)
        fake = maker(noise)
        loss_of_teller = criterion(teller(real), torch.ones(4, 1)) + criterion(teller(fake.detach()), torch.zeros(4, 1))
        teller.backward(loss_of_teller)
        teller.step()
        for p in tells.parameters():
            p.requires_grad_(False)
        loss_of_maker = criterion(teller.module(fake), torch.ones(4, 1))
        maker.backward(loss_of_maker)
        maker.step()
        for p in tells.parameters():
            p.requires_grad_(True)
        seen += [mean(loss_of_teller), mean(loss_of_maker)]
    return seen


def stages(deepspeed: ModuleType, folder: Path) -> list[float]:
    """A network of pictures as the stages of a pipeline, with the loader of `initialize`; saved, and gone on with."""
    seen = []
    for part in range(2):
        torch.manual_seed(3)
        layers = [
            *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(lambda x: x.flatten(1), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)),
        ]
        net = deepspeed.PipelineModule(
            layers=layers,
            loss_fn=nn.CrossEntropyLoss(),
            num_stages=2,
            partition_method="parameters",
            activation_checkpoint_interval=0,
        )
        engine, *_ = deepspeed.initialize(
            model=net,
            model_parameters=[p for p in net.parameters() if p.requires_grad],
            training_data=pictures(),
            config={
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 2,
                "steps_per_print": 2000,
                "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
                "zero_allow_untested_optimizer": True,
            },
        )
        if part:
            path, _ = engine.load_checkpoint(str(folder / f"stages-{deepspeed.__name__}"))
            assert path is not None
        seen += [float(engine.train_batch()) for _ in range(3)]
        engine.save_checkpoint(str(folder / f"stages-{deepspeed.__name__}"))
    return seen


def masked_words(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Pretraining on masked words in float16, the state on the CPU; ends, and goes on from its checkpoint."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "fp16": {"enabled": True, "initial_scale_power": 10},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    }
    out, seen = folder / f"masked-{deepspeed.__name__}", []
    for part in range(2):
        torch.manual_seed(part)
        model = Words(causal=False)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        start = 0
        if part:
            _, client_state = engine.load_checkpoint(load_dir=str(out))
            start = client_state["checkpoint_step"]
        tokens = texts().chunk(dist.get_world_size())[dist.get_rank()]
        for step in range(start, start + 4):
            whole = tokens[step % 4 * 4 : step % 4 * 4 + 4]
            masked = whole.masked_fill(torch.rand(whole.shape, generator=torch.Generator().manual_seed(step)) < 0.3, 0)
            loss = F.cross_entropy(engine(masked).float().flatten(0, 1), whole.flatten())
            engine.backward(loss)
            engine.step()
            seen.append(mean(loss))
        engine.save_checkpoint(save_dir=str(out), client_state={"checkpoint_step": step + 1})
    return seen


def finetuning(deepspeed: ModuleType, folder: Path) -> list[float]:
    """As Hugging Face's trainers do it: groups without decay, accumulation, evaluation, weights saved whole."""
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0,
            "contiguous_gradients": True,
        },
        "bf16": {"enabled": True},
    }
    model = Words()
    no_decay = ["bias", "norm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(part in n for part in no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in named if any(part in n for part in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, dist_init_required=False
    )
    data = TensorDataset(texts())
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    seen = []
    for _ in range(2):
        engine.train()
        for (tokens,) in loader:
            loss = next_word(engine(tokens.to(engine.device)), tokens.to(engine.device))
            engine.backward(loss)
            engine.step()
            seen += [mean(loss), optimizer.param_groups[0]["lr"]]
        engine.eval()
        with torch.no_grad():
            seen.append(mean(next_word(engine(texts()[:4]), texts()[:4])))
    out = folder / f"tuned-{deepspeed.__name__}"
    engine.save_16bit_model(str(out), "pytorch_model.bin")
    dist.barrier()
    state = torch.load(out / "pytorch_model.bin", weights_only=True)
    whole = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        assert state.keys() == whole.keys() == dict(named).keys()
        assert all(torch.equal(state[name], whole[name]) and state[name].dtype is torch.bfloat16 for name in state)
    return [*seen, state["head.weight"].float().norm().item()]


def chat(deepspeed: ModuleType, folder: Path) -> list[float]:
    """An actor that generates, a reference that is only asked, a critic, and the actor's moving average."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": ADAM,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    asked = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": config["zero_optimization"]}
    actor_model, critic_model = Words(), Words()
    reference_model, average = copy.deepcopy(actor_model), copy.deepcopy(actor_model)
    actor, *_ = deepspeed.initialize(model=actor_model, model_parameters=actor_model.parameters(), config=config)
    critic, *_ = deepspeed.initialize(
        model=critic_model, model_parameters=critic_model.parameters(), config=copy.deepcopy(config)
    )
    reference, *_ = deepspeed.initialize(model=reference_model, config=asked)
    reference.eval()

    def scores(engine, tokens: Tensor) -> Tensor:
        return engine(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    seen, prompts = [], texts().chunk(dist.get_world_size())[dist.get_rank()]
    for step in range(3):
        actor.eval()
        tokens = prompts[step * 4 : step * 4 + 4, :4]
        with torch.no_grad():
            for _ in range(4):
                tokens = torch.cat([tokens, actor(tokens)[:, -1:].argmax(-1)], 1)
            old, expected = scores(actor, tokens), scores(reference, tokens)
            reward = critic(tokens)[:, 1:, 0] - 0.1 * (old - expected)
        actor.train()
        loss = -(torch.exp(scores(actor, tokens) - old) * (reward - reward.mean())).mean()
        actor.backward(loss)
        actor.step()
        value = (critic(tokens)[:, 1:, 0] - reward.detach() - 1).square().mean()
        critic.backward(value)
        critic.step()
        with torch.no_grad():
            for p, kept in zip(actor_model.parameters(), average.parameters(), strict=True):
                stage_3 = [q for q in [p] if hasattr(q, "ds_id")]
                with deepspeed.zero.GatheredParameters(stage_3, enabled=len(stage_3) > 0):
                    kept.data.copy_(torch.lerp(p.data.cpu().float(), kept.data, 0.9))
        seen += [mean(loss), mean(value), mean(tokens.sum().float())]
    return [*seen, mean(torch.stack([p.norm() for p in average.parameters()]).sum())]


def distillation(deepspeed: ModuleType, folder: Path) -> list[float]:
    """A small model learns what a large one says, which is not trained and belongs to no engine; a part is frozen."""
    torch.manual_seed(5)
    teacher, student = Words(width=24).eval().requires_grad_(False), Words()
    student.words.requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(
        model=student, model_parameters=[p for p in student.parameters() if p.requires_grad], config=config
    )
    seen = []
    for tokens in texts().chunk(dist.get_world_size())[dist.get_rank()].split(4):
        with torch.no_grad():
            target = teacher(tokens).softmax(-1)
        loss = F.kl_div(engine(tokens).log_softmax(-1), target, reduction="batchmean")
        engine.backward(loss)
        engine.step()
        seen.append(mean(loss))
    path = folder / f"student-{deepspeed.__name__}.pt"
    if dist.get_rank() == 0:
        torch.save(engine.module.state_dict(), path)
    dist.barrier()
    return [*seen, sum(value.norm().item() for value in torch.load(path).values())]


def with_a_file(deepspeed: ModuleType, folder: Path) -> list[float]:
    """The config in a file, the optimizer by DeepSpeed's name, activations checkpointed, float32 weights at the end."""
    path = folder / f"config-{deepspeed.__name__}-{dist.get_rank()}.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01, "torch_adam": True}},
                "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 12, "warmup_num_steps": 2}},
                "zero_optimization": {"stage": 2},
                "bf16": {"enabled": True},
            }
        )
    )

    class Checkpointed(Words):
        def step(self, layer: nn.Module, x: Tensor, around: Tensor) -> Tensor:
            return deepspeed.checkpointing.checkpoint(super().step, layer, x, around)

    model = Checkpointed()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=str(path))
    seen = []
    for tokens in texts().chunk(dist.get_world_size())[dist.get_rank()].split(4):
        loss = next_word(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        seen += [mean(loss), *engine.get_lr()]
    out = folder / f"file-{deepspeed.__name__}"
    engine.save_checkpoint(str(out), tag="end")
    dist.barrier()
    convert = importlib.import_module(f"{deepspeed.__name__}.utils.zero_to_fp32")
    weights = convert.get_fp32_state_dict_from_zero_checkpoint(str(out), "end")
    return [*seen, sum(value.float().norm().item() for value in weights.values())]


def epochs(deepspeed: ModuleType, folder: Path) -> list[float]:
    """Pictures by epochs, with momentum, a schedule of PyTorch's by epoch, and the best epoch saved."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    net = Pictures()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    engine, optimizer, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    data = pictures()
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader, seen, best = DataLoader(data, batch_size=4, sampler=sampler), [], float("inf")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * 0.5**epoch
        engine.train()
        for inputs, labels in loader:
            loss = F.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            seen.append(mean(loss))
        engine.eval()
        with torch.no_grad():
            inputs, labels = data.tensors
            now = mean(F.cross_entropy(engine(inputs), labels))
        seen.append(now)
        if now < best:
            best = now
            engine.save_checkpoint(str(folder / f"epochs-{deepspeed.__name__}"), "best", {"epoch": epoch})
    _, state = engine.load_checkpoint(str(folder / f"epochs-{deepspeed.__name__}"), "best")
    engine.eval()
    with torch.no_grad():
        again = mean(F.cross_entropy(engine(data.tensors[0]), data.tensors[1]))
    return [*seen, best, again, float(state["epoch"])]


KINDS = (
    *(classification, pictures_with_experts, adversarial, masked_words, finetuning, chat, distillation),
    # After a pipeline the real one takes every model for one: it comes last.
    *(with_a_file, epochs, stages),
)


def run(which: ModuleType, folder: Path) -> dict[str, list[float]]:
    found = {}
    for kind in KINDS:
        torch.manual_seed(0)
        found[kind.__name__] = kind(which, folder)
    return found
