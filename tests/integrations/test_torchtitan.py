"""torchtitan's llama3 debug model under install(): sharded, recomputed in backward and compiled.

What of torchtitan cannot run on a CPU is replaced: its attention, whose kernels are for GPUs (by its own module around
PyTorch's attention), and the kernels of its expert parallelism, which need triton to be imported.  Its `Trainer` asks
for an accelerator; the test has the trainer's parts, and a loop.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo
from ranks import run_fresh

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)

STEPS, BATCH, LENGTH, WORDS = 3, 4, 16, 2048


def settings() -> Any:
    """The model's config, with attention for the CPU; torchtitan is imported by it."""
    if importlib.util.find_spec("triton") is None:
        name = "torchtitan.distributed.minimal_async_ep.kernels"
        kernels = types.ModuleType(name)
        kernels.__getattr__ = lambda attribute: None  # type: ignore[method-assign]
        sys.modules[name] = kernels
    import torchtitan.distributed.parallel_dims as parallel_dims
    import torchtitan.models.llama3 as llama3
    from torch.nn.attention import SDPBackend
    from torchtitan.models.common.attention import ScaledDotProductAttention

    parallel_dims.device_type = "cpu"
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.MATH]
    spec = llama3.model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, optimizer: Any, schedule: Any, rank: int = 0, of: int = 1) -> list[float]:
    """The losses of some steps.  torchtitan divides by all tokens itself, and has fully_shard sum the gradients."""
    losses = []
    for tokens in batches():
        mine = tokens.chunk(of)[rank]
        logits = model(mine)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        loss = (
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), mine.flatten(), reduction="sum") / tokens.numel()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def optimizers_for(model: nn.Module) -> tuple[Any, Any]:
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    chosen = default_adamw(lr=1e-3)
    chosen.implementation = "foreach"
    optimizers = chosen.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2, total_steps=10)
    return optimizers, schedule.build(optimizers=optimizers, training_steps=10)


def check(folder: str) -> list[float]:
    warnings.simplefilter("ignore")
    terrazzo.install()
    spec = settings()
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC

    parallelism = ParallelismConfig(
        data_parallel_shard_degree=2,
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=LENGTH, mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=True, backend="aot_eager"),
        ac_config=FullAC.Config(),
        dump_folder=folder,
    )
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    assert all(type(p).__module__ == "terrazzo.tensor.dtensor" for p in model.parameters())
    optimizers, schedule = optimizers_for(model)
    mesh = dims.get_mesh("fsdp")
    place = {"rank": mesh.get_local_rank(), "of": 2}
    whole = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/whole.pt")
    return summed(train(model, optimizers, schedule, **place), mesh)


def summed(losses: list[float], mesh: Any) -> list[float]:
    total = torch.tensor(losses)
    dist.all_reduce(total, group=mesh.get_group())
    return total.tolist()


def check_alone(folder: str) -> list[float]:
    """The same model on one device, without anything of terrazzo's."""
    spec = settings()
    model = spec.model.build()
    with torch.no_grad():
        model.init_states(buffer_device=None)
    whole = torch.load(f"{folder}/whole.pt")
    # Wrapped modules have other names.
    plain = {name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): p for name, p in whole.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(plain.pop(name))
    assert not plain
    return train(model, *optimizers_for(model))


def values(world: int, function: Any, *args: Any) -> list[Any]:
    outcomes = run_fresh(world, function, *args, timeout=600)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    return [outcome.value for outcome in outcomes]


def test_the_debug_model(tmp_path: Path):
    folder = str(tmp_path)
    losses = values(2, check, folder)
    [expected] = values(1, check_alone, folder)
    assert expected[0] != expected[-1]
    for found in losses:
        assert found == pytest.approx(expected, rel=2e-5)
