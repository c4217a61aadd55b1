"""Configs that people have: every key of DeepSpeed's is known, and what becomes of it is said."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo.deepspeed as deepspeed
from engine.deepspeed_cases import deepspeed_is_installed
from engine.runs import averaged, batches, config, loss_of, make_model, train_plainly, weights
from ranks import run_ranks
from terrazzo.comm import add_observer, remove_observer
from terrazzo.engine import initialize
from terrazzo.engine.config import read_config
from terrazzo.engine.deepspeed_keys import KEYS, SECTIONS
from terrazzo.errors import EngineConfigError

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "deepspeed.md"

# As Transformers' documentation has it for the Trainer, which fills "auto".
OF_THE_TRAINER = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": float("inf"),
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "wall_clock_breakdown": False,
}


def test_every_key_of_deepspeeds_is_known_and_the_page_says_so():
    if not deepspeed_is_installed():
        pytest.skip("DeepSpeed is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p and "tests" not in p)}
    run = {"capture_output": True, "text": True, "env": environment, "timeout": 300}
    # In one process: importing DeepSpeed takes seconds.
    script = (
        "import sys, runpy; sys.path.insert(0, sys.argv[1]); import keys, table\n"
        "print('\\n'.join(sorted(keys.keys()))); print('====')\n"
        "print(table.with_tables(open(sys.argv[2]).read()), end='')"
    )
    done = subprocess.run([sys.executable, "-c", script, str(HERE), str(DOCS)], **run)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, page = done.stdout.split("====\n")
    found = [line for line in theirs.splitlines() if line and " " not in line]
    assert len(found) > 200 and "zero_optimization.stage" in found and "fp16.enabled" in found

    def known(key: str) -> bool:
        parents = [key[:i] for i, letter in enumerate(key) if letter == "."]
        return key in KEYS or key in SECTIONS or any(parent in KEYS for parent in parents)

    assert [key for key in found if not known(key)] == []
    assert page == DOCS.read_text(), "run: python tests/deepspeed/table.py --write docs/deepspeed.md"


def test_configs_that_people_have():
    read, ignored = read_config(OF_THE_TRAINER)
    assert read.optimizer.params == {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert read.scheduler.params == {"warmup_min_lr": 0.0, "warmup_max_lr": 5e-5, "warmup_num_steps": 0}
    assert read.gradient_clipping == 1.0 and read.zero_optimization.sub_group_size == 10**9
    assert read.train_batch_size is None and read.train_micro_batch_size_per_gpu == 2 and read.steps_per_print is None
    assert not read.fp16.enabled and "zero_optimization.reduce_bucket_size" in ignored
    base = {"train_batch_size": 4}
    quiet = {
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
        "tensorboard": {"enabled": False, "output_path": "x"},
        "wandb": {"enabled": False},
        "flops_profiler": {"enabled": False, "profile_step": 1, "top_modules": 1, "detailed": True},
        "comms_logger": {"enabled": False, "prof_all": True},
        "checkpoint": {"tag_validation": "Warn", "load_universal": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "aio": {"block_size": 1048576},
        "elasticity": {"enabled": False},
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 1},
        "timers": {"throughput": {"enabled": False}},
        "zero_quantized": None,
        "hybrid_engine": {"enabled": False},
        "sequence_parallel_size": 1,
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "communication_data_type": "bfp16",
        "zero_optimization": {"stage": 2.0, "cpu_offload": True, "ignore_unused_parameters": True},
    }
    del quiet["zero_quantized"]
    read, _ = read_config({**base, **quiet})
    assert read.zero_optimization.offload_optimizer.device == "cpu" and read.communication_data_type == "bf16"
    assert read_config({**base, "bfloat16": {"enabled": True}})[0].bf16.enabled
    assert read_config({**base, "zero_optimization": True})[0].zero_optimization.stage == 1
    metric = {"min_difficulty": 1, "max_difficulty": 4, "schedule_type": "fixed_linear", "difficulty_type": "value"}
    metric["schedule_config"] = {"total_curriculum_step": 5, "difficulty_step": 1}
    sampling = {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"m": metric}}, "num_epochs": 3}
    assert read_config({**base, "data_efficiency": {"data_sampling": sampling}})[0].data_efficiency.enabled


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_quantized_weights is not supported",
        ),
        ({"tensor_parallel": {"autotp_size": 4}}, "parallelize_module"),
        ({"compile": {"deepcompile": True}}, "torch.compile"),
        ({"elasticity": {"enabled": True}}, "any number of ranks"),
        ({"amp": {"enabled": True}}, "has removed it"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "are float32"),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, "needs stage 3"),
        ({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}, "stage 0, 1 or 2"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype"),
        (
            {"scheduler": {"type": "NoSuchLR"}, "optimizer": {"type": "SGD", "params": {"lr": 1}}},
            "nor a scheduler of PyTorch",
        ),
        ({"no_such_key": 1}, "no_such_key"),
        ({}, "train_micro_batch_size_per_gpu"),
    ],
)
def test_what_is_refused_says_why(given, message):
    with pytest.raises(EngineConfigError, match=message):
        initialize(nn.Linear(2, 2), config={"train_batch_size": 4, **given} if given else {"train_batch_size": "auto"})


STEPS = 4


def steps_of(engine, steps=STEPS):
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for x, y in batches(steps):
        size = len(x) // world
        loss = loss_of(engine, x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size])
        engine.backward(loss)
        engine.step()
        losses.append(averaged(loss))
    return torch.tensor(losses)


def check_sharding_within_a_group() -> None:
    """hpZ, MiCS and sums instead of means are the same training."""
    expected = torch.tensor(train_plainly(STEPS)[0])
    for zero in ({"stage": 3, "zero_hpz_partition_size": 2}, {"stage": 3, "mics_shard_size": 2},
                 {"stage": 1, "mics_shard_size": 2}, {"stage": 2, "mics_shard_size": 1}):  # fmt: skip
        engine = initialize(make_model(), config=config(zero["stage"], zero_optimization=zero))
        torch.testing.assert_close(steps_of(engine), expected, rtol=1e-5, atol=1e-5)
        weight = engine.module.head.weight
        if "mics_shard_size" in zero:
            assert weight.device_mesh.shape == (4 // zero["mics_shard_size"], zero["mics_shard_size"])
    for size in (0, 4, 8):  # no groups, or one of all
        engine = initialize(
            make_model(), config=config(3, zero_optimization={"stage": 3, "zero_hpz_partition_size": size})
        )
        torch.testing.assert_close(steps_of(engine), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(EngineConfigError, match="zero_hpz_partition_size 3 does not divide the 4 ranks"):
        initialize(make_model(), config=config(3, zero_optimization={"stage": 3, "zero_hpz_partition_size": 3}))
    with pytest.raises(EngineConfigError, match="does not divide the 4 data-parallel ranks"):
        initialize(make_model(), config=config(3, zero_optimization={"stage": 3, "mics_shard_size": 3}))
    quick = {"type": "SGD", "params": {"lr": 0.1}}
    other = {"type": "StepLR", "params": {"step_size": 2}}
    mean = initialize(make_model(), config=config(1, optimizer=quick, gradient_clipping=0, scheduler=other))
    quarter = {"type": "SGD", "params": {"lr": 0.025}}
    total = initialize(
        make_model(),
        config=config(1, optimizer=quarter, gradient_clipping=0, scheduler=other, gradient_allreduce_op="sum"),
    )
    torch.testing.assert_close(steps_of(mean), steps_of(total), rtol=1e-5, atol=1e-6)
    assert mean.get_lr() == pytest.approx([0.001])


def check_who_gathers() -> None:
    """With hpZ backward gathers among neighbours; forward gathers, and gradients are reduced, among all."""
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    engine = initialize(make_model(), config=config(3, zero_optimization=zero, gradient_accumulation_steps=2))
    x, y = next(batches(1))
    mine = dist.get_rank() * 2
    for _ in range(2):
        for micro in (0, 1):
            with Seen() as forward:
                loss = loss_of(engine, x[mine + micro : mine + micro + 1], y[mine + micro : mine + micro + 1])
            with Seen() as backward:
                engine.backward(loss)
            assert {size for kind, size in forward if kind == "all_gather"} == {4}
            assert {size for kind, size in backward if kind == "all_gather"} == {2}
            assert {size for kind, size in backward if kind == "reduce_scatter"} == {4}
            engine.step()


class Seen:
    """Kinds of collectives, and among how many ranks."""

    def __enter__(self) -> set[tuple[str, int]]:
        self.found: set[tuple[str, int]] = set()
        self.observer = lambda event: self.found.add((event.kind, event.axis.size))
        add_observer(self.observer)
        return self.found

    def __exit__(self, *error: object) -> None:
        remove_observer(self.observer)


def test_hpz_gathers_among_neighbours():
    run_ranks(4, check_who_gathers)


def test_sharding_within_a_group():
    run_ranks(4, check_sharding_within_a_group, timeout=120)


def check_unmanaged() -> None:
    """The caller decides when a step ends; forward under autocast; no waiting for the norm."""
    rank = dist.get_rank()
    expected = torch.tensor(train_plainly(STEPS)[0])
    for stage in (0, 2):
        options = config(stage, gradient_accumulation_steps=2, managed_gradient_accumulation=False)
        engine = initialize(make_model(), config=options)
        losses = []
        for x, y in batches(STEPS):
            total = torch.zeros(())
            for micro in (0, 1):
                first = (micro * 2 + rank) * 2
                total += engine.backward(loss_of(engine, x[first : first + 2], y[first : first + 2]))
                assert not engine.is_gradient_accumulation_boundary()
            engine.step()
            assert engine.step_applied
            losses.append(averaged(total))
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-5, atol=1e-5)
        assert engine.global_samples == STEPS * 8
    cast = initialize(make_model(), config=config(1, torch_autocast={"enabled": True, "dtype": "bfloat16"}))
    assert cast(torch.zeros(2, 6)).dtype is torch.bfloat16
    torch.testing.assert_close(steps_of(cast), expected, rtol=3e-2, atol=3e-2)
    half = initialize(make_model(), config=config(1, bf16={"enabled": True, "check_grad_overflow": True}))
    before = weights(half)
    half.backward(loss_of(half, torch.full((4, 6), 1e30), torch.zeros(4, 3)) * 1e30)
    half.step()
    assert half.skipped_steps == 1 and all(torch.equal(before[n], w) for n, w in weights(half).items())


def test_boundaries_that_the_caller_sets_and_autocast():
    run_ranks(2, check_unmanaged)


def check_meta(folder: str) -> None:
    """A model on the meta device: its parts get the values that one device would draw, on any number of ranks."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    torch.manual_seed(5)
    engine = initialize(model, config=config(3))
    values = {name: value.clone() for name, value in weights(engine).items()}
    assert all(not p.is_meta for p in engine.module.parameters())
    assert values["1.weight"].eq(1).all() and 0.05 < values["0.weight"].std() < 0.5
    losses = steps_of(engine, 6)
    assert losses[-1] < losses[0]
    path = f"{folder}/values.pt"
    if dist.get_world_size() == 1:
        torch.save(values, path)
    else:
        for name, value in torch.load(path).items():
            torch.testing.assert_close(values[name], value)
    with torch.device("meta"):
        model = make_model()
    with pytest.raises(EngineConfigError, match="shift: pass initialize"):
        initialize(model, config=config(3))
    with torch.device("meta"):
        model = make_model()
    source = make_model()

    def fill(sharded: nn.Module) -> None:
        for name, tensor in (*sharded.named_parameters(), *sharded.named_buffers()):
            whole = source.get_parameter(name) if tensor.requires_grad or "up" in name else source.shift
            if name == "shift":
                tensor.copy_(whole)
            else:
                deepspeed.utils.safe_set_full_fp32_param(tensor, whole)

    engine = initialize(model, config=config(3), init_weights=fill)
    torch.testing.assert_close(steps_of(engine), torch.tensor(train_plainly(STEPS)[0]), rtol=1e-5, atol=1e-5)


def test_models_on_the_meta_device(tmp_path):
    for world in (1, 2, 4):
        run_ranks(world, check_meta, str(tmp_path))


def check_reports(folder: str) -> None:
    wandb = types.ModuleType("wandb")
    logged = []
    wandb.init = lambda **options: types.SimpleNamespace(log=lambda events, step: logged.append((step, events)))
    sys.modules["wandb"] = wandb
    files = {"enabled": True, "output_path": folder, "job_name": "run"}
    options = {
        "csv_monitor": files,
        "tensorboard": {**files, "job_name": "board"},
        "wandb": {"enabled": True, "project": "p"},
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": f"{folder}/flops.txt"},
        "comms_logger": {"enabled": True},
    }
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, config=config(2, **options))
    losses = steps_of(engine, 3)
    sent = deepspeed.comm.log_summary(return_dict=True)
    assert sent["reduce_scatter"][2]["count"] > 0 and sent["reduce_scatter"][2]["bytes"] > 0
    deepspeed.comm.log_summary()
    del sys.modules["wandb"]
    if dist.get_rank() != 0:
        assert not logged and engine.flops is None
        return
    with open(f"{folder}/run/Train_Samples_lr.csv") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "lr"] and [row[0] for row in rows[1:]] == ["8", "16", "24"]
    assert float(rows[-1][1]) == pytest.approx(engine.get_lr()[0])
    with open(f"{folder}/run/Train_Samples_train_loss.csv") as file:
        assert len(list(csv.reader(file))) == 4
    assert [step for step, _ in logged] == [8, 16, 24] and "Train/Samples/lr" in logged[0][1]
    text = Path(f"{folder}/flops.txt").read_text()
    macs = sum(m.weight.numel() for m in make_model().modules() if isinstance(m, nn.Linear))
    assert engine.flops.total == 2 * macs * 4 and "step 2" in text and f"{2 * macs * 4:,}" in text
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(f"{folder}/board").Reload()
    assert [e.step for e in board.Scalars("Train/Samples/lr")] == [8, 16, 24]
    assert torch.isfinite(losses).all()


def test_monitors_and_reports(tmp_path):
    pytest.importorskip("tensorboard")
    run_ranks(2, check_reports, str(tmp_path))


def test_a_missing_library_is_named():
    with pytest.raises(EngineConfigError, match="pip install wandb"):
        initialize(nn.Linear(2, 2), config=json.loads(json.dumps({**config(0), "wandb": {"enabled": True}})))
