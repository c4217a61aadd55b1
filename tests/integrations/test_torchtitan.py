"""torchtitan's llama3 debug model under install(): sharded, tensor-parallel, recomputed, compiled, and saved.

What of torchtitan cannot run on a CPU is replaced: its attention, whose kernels are for GPUs (by its own module around
PyTorch's attention), and the kernels of its expert parallelism, which need triton to be imported.  Its `Trainer` asks
for an accelerator; the test has the trainer's parts, and a loop.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import terrazzo
from ranks import fresh_values
from terrazzo.checkpoint import Checkpoint

for needed in ("torchtitan", "spmd_types", "tyro"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed (make torchtitan)", allow_module_level=True)

STEPS, BEFORE, BATCH, LENGTH, WORDS = 3, 2, 4, 16, 2048


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


class Batches(torch.utils.data.IterableDataset):
    """A rank's part of each batch; knows its place, as torchtitan's datasets do."""

    def __init__(self, rank: int, of: int) -> None:
        self.rank, self.of, self.given = rank, of, 0

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(3)
        drawn = [torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]
        while self.given < STEPS:
            self.given += 1
            yield drawn[self.given - 1].chunk(self.of)[self.rank]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Progress:
    """What torchtitan's trainer saves of itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Tensor]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.step = int(state["step"].item())


class Training:
    """A model, its optimizers, data and checkpoints, as torchtitan's trainer has them, on a mesh or on one device."""

    def __init__(self, folder: str, dp: int = 1, tp: int = 1, *, compiled: bool = False) -> None:
        spec = settings()
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        self.mesh, place = None, (0, 1)
        if dp * tp > 1:
            self.model, self.mesh, place = sharded(spec, folder, dp, tp, compiled)
        else:
            self.model = spec.model.build()
        torch.manual_seed(7)
        with torch.no_grad():
            self.model.init_states(buffer_device=None)
        chosen = default_adamw(lr=1e-3)
        chosen.implementation = "foreach"
        self.optimizers = chosen.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2, total_steps=10)
        self.schedule = schedule.build(optimizers=self.optimizers, training_steps=10)
        self.data = ParallelAwareDataloader(Batches(*place), *place, batch_size=None)
        self.progress = Progress()
        self.checkpoints = CheckpointManager(
            CheckpointManager.Config(enable=True, interval=BEFORE, async_mode="async", last_save_in_hf=True),
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedule,
            states={"train_state": self.progress},
            sd_adapter=spec.state_dict_adapter(spec.model, None),
            base_folder=folder,
        )

    def run(self, *, save: bool = True) -> list[float]:
        """The losses of the steps that are left.

        torchtitan divides by all tokens itself, and has fully_shard sum the gradients.
        """
        losses = []
        for tokens in self.data:
            logits = self.model(tokens)
            logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            flat = logits.flatten(0, 1).float(), tokens.flatten()
            loss = nn.functional.cross_entropy(*flat, reduction="sum") / (BATCH * LENGTH)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizers.step()
            self.schedule.step()
            self.optimizers.zero_grad()
            losses.append(loss.item())
            self.progress.step += 1
            if save:
                self.checkpoints.save(self.progress.step, last_step=self.progress.step == STEPS)
        self.checkpoints.maybe_wait_for_saving()
        return losses if self.mesh is None else summed(losses, self.mesh)


def sharded(spec: Any, folder: str, dp: int, tp: int, compiled: bool) -> tuple[nn.Module, Any, tuple[int, int]]:
    """The model as torchtitan shards it, its mesh of ranks with different data, and this rank's place there."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    parallelism = ParallelismConfig(
        data_parallel_shard_degree=dp, tensor_parallel_degree=tp, spmd_backend="partial_dtensor"
    )
    set_spmd_backend("partial_dtensor")
    if tp > 1:
        set_llama3_sharding_config(spec.model, enable_sp=True)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=LENGTH, mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=compiled, backend="aot_eager"),
        ac_config=FullAC.Config(),
        dump_folder=folder,
    )
    model.to_empty(device="cpu")
    mesh = dims.get_mesh("batch")
    return model, mesh, (mesh.get_local_rank(), mesh.size())


def summed(losses: list[float], mesh: Any) -> list[float]:
    total = torch.tensor(losses)
    dist.all_reduce(total, group=mesh.get_group())
    return total.tolist()


def plain(name: str) -> str:
    """A parameter's name without what wraps modules."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def check(folder: str) -> list[float]:
    warnings.simplefilter("ignore")
    terrazzo.install()
    training = Training(folder, dp=2, tp=2, compiled=True)
    parameters = dict(training.model.named_parameters())
    assert all(type(p).__module__ == "terrazzo.tensor.dtensor" for p in parameters.values())
    assert {p.device_mesh.mesh_dim_names for p in parameters.values()} == {("fsdp", "tp")}
    whole = {plain(name): p.detach().full_tensor() for name, p in parameters.items()}
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/whole.pt")
    losses = training.run()
    for block in training.model.layers.values():
        assert [graph.calls for graph in terrazzo.compile_report(block).graphs] == [STEPS]
    return losses


def check_resumed(folder: str) -> list[float]:
    """On another mesh, compiled by torchtitan; its data loader wants as many ranks with different data."""
    warnings.simplefilter("ignore")
    terrazzo.install()
    training = Training(folder, dp=2, compiled=True)
    assert training.checkpoints.load(step=BEFORE)
    assert training.progress.step == BEFORE and training.schedule.state_dict() == {"last_epoch": BEFORE}
    return training.run(save=False)


def check_alone(folder: str) -> list[float]:
    """The same model on one device, without anything of terrazzo's."""
    training = Training(folder)
    whole = torch.load(f"{folder}/whole.pt")
    with torch.no_grad():
        for name, parameter in training.model.named_parameters():
            parameter.copy_(whole.pop(name))
    assert not whole
    losses = training.run(save=False)
    # What the others exported after the last step, for Hugging Face.
    [file] = Path(f"{folder}/checkpoint/step-{STEPS}").glob("*.safetensors")
    exported = load_file(file)
    own = training.checkpoints.sd_adapter.to_hf(training.model.state_dict())
    assert exported.keys() == own.keys()
    for name, value in own.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-4, atol=2e-5)
    return losses


def values(world: int, function: Any, *args: Any) -> list[Any]:
    return fresh_values(world, function, *args, timeout=600)


@pytest.mark.long
def test_the_debug_model(tmp_path: Path):
    folder = str(tmp_path)
    losses = values(4, check, folder)
    saved = Checkpoint(f"{folder}/checkpoint/step-{BEFORE}")
    assert saved["tok_embeddings.weight"].parts == 4 and saved["train_state.step"][...].item() == BEFORE
    resumed = values(2, check_resumed, folder)
    [expected] = values(1, check_alone, folder)
    assert expected[0] != expected[-1]
    for found in losses:
        assert found == pytest.approx(expected, rel=2e-5)
    for found in resumed:
        assert found == pytest.approx(expected[BEFORE:], rel=2e-5)
