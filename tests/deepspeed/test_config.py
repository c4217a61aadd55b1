"""Configs that people have: every key of DeepSpeed's is known, and what becomes of it is said."""

from __future__ import annotations

import csv
import inspect
import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo.deepspeed as deepspeed
import terrazzo.engine
from engine.deepspeed_cases import deepspeed_is_installed
from engine.runs import averaged, batches, config, loss_of, make_model, train_plainly, weights
from ranks import run_ranks
from terrazzo.comm import add_observer, remove_observer
from terrazzo.deepspeed.settings import SETTINGS, setting
from terrazzo.engine import EngineConfig, initialize
from terrazzo.engine.config import OptimizerConfig, read_config
from terrazzo.engine.deepspeed_keys import KEYS, SECTIONS
from terrazzo.engine.optim import make_optimizer
from terrazzo.errors import EngineCallError, EngineConfigError
from terrazzo.tensor.debug import CommDebugMode

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


@pytest.fixture(scope="module")
def asked() -> tuple[list[str], str, dict[str, Any]]:
    """What DeepSpeed itself says: its keys, the page with its tables, and its defaults."""
    if not deepspeed_is_installed():
        pytest.skip("DeepSpeed is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p and "tests" not in p)}
    run = {"capture_output": True, "text": True, "env": environment, "timeout": 300}
    # In one process: importing DeepSpeed takes seconds.
    script = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import keys, table, defaults\n"
        "page = table.with_tables(open(sys.argv[2]).read())\n"
        "print('====' + json.dumps([sorted(keys.keys()), page, defaults.defaults()]))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(HERE), str(DOCS)], **run)
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(json.loads(done.stdout.rpartition("====")[2]))


def test_every_key_of_deepspeeds_is_known_and_the_page_says_so(asked):
    found, page, _ = asked
    assert len(found) > 200 and "zero_optimization.stage" in found and "fp16.enabled" in found

    def known(key: str) -> bool:
        parents = [key[:i] for i, letter in enumerate(key) if letter == "."]
        return key in KEYS or key in SECTIONS or any(parent in KEYS for parent in parents)

    assert [key for key in found if not known(key)] == []
    assert page == DOCS.read_text(), "run: python tests/deepspeed/table.py --write docs/deepspeed.md"


# Defaults of which the engine has others than DeepSpeed.
OTHER_DEFAULTS = {
    # On a CPU this is what DeepSpeed's default, that of torch.autocast, means. On CUDA it would be float16, whose
    # gradients vanish without a loss scale.
    "torch_autocast.dtype": "bfloat16",
    "data_types.keep_in_fp32_modules": None,  # what "auto" means: those that the model names
}
# Keys that mean the same as in DeepSpeed, but which it does not have (any more), or whose sections need them.
WITHOUT_DEFAULT = {
    "zero_optimization.wrap", "zero_optimization.offload_optimizer.step_on", "seed",  # terrazzo's own
    "zero_optimization.offload_optimizer.buffer_size",  # too
    "sequence_parallel_size", "sequence_parallel_method",  # the first is DeepSpeed's, which has no default
    "use_data_before_expert_parallelism",  # False: DeepSpeed reads it by a function of its own
}  # fmt: skip
# Arguments of DeepSpeed's optimizers that are left out here.
ALWAYS_SO = {
    "set_grad_none": True,  # as the engine does
    "fp32_optimizer_states": True,
    "bias_correction": True,
    "max_grad_norm": 0.0,  # `gradient_clipping`
    "amsgrad": False,
    "ns_method": "gram",  # another way to the same product
}


def engines_default(path: str) -> Any:
    kind: Any = EngineConfig
    for name in path.split("."):
        if kind is None:
            return None
        field = next(f for f in msgspec.structs.fields(kind) if f.name == name)
        value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        kind = type(value) if isinstance(value, msgspec.Struct) else None
    return list(value) if isinstance(value, tuple) else value


def test_defaults_are_deepspeeds(asked):
    theirs = asked[2]
    done = {path for path, key in KEYS.items() if key.fate == "done"}
    assert done - set(theirs) == WITHOUT_DEFAULT
    found = {path: engines_default(path) for path in done & set(theirs)}
    assert found == {path: OTHER_DEFAULTS.get(path, theirs[path]) for path in found}
    assert len(found) > 50 and found["gradient_clipping"] == 1.0 and found["bf16.check_grad_overflow"] is True
    # What DeepSpeed does by itself is neither refused nor warned about.
    unlike = {path for path, key in KEYS.items() if key.fate in ("warned", "refused")}
    assert [path for path in unlike & set(theirs) if KEYS[path].asks(theirs[path])] == []
    assert {path for path in unlike - set(theirs) if KEYS[path].fate == "warned"} == set()
    # The engine's methods that return a setting.
    for name, (path, default) in SETTINGS.items():
        if path in theirs and name != "dynamic_loss_scale":
            assert default == theirs[path], name
            for stage in (1, 2, 3):
                expected = theirs.get(f"{path}@{stage}", theirs[path])
                assert setting({"zero_optimization": {"stage": stage}}, name) == expected, name


def test_defaults_of_optimizers_and_schedules_are_deepspeeds(asked):
    theirs = asked[2]
    optimizers, schedules = {}, {}
    for path, value in theirs.items():
        kind, _, rest = path.partition(":")
        if rest:
            name, argument = rest.split(".")
            {"OPTIMIZER": optimizers, "SCHEDULER": schedules}[kind].setdefault(name, {})[argument] = value
    assert len(optimizers) == 8 and len(schedules) == 5
    model = nn.Linear(2, 2, bias=False)
    for name, arguments in optimizers.items():
        own = OptimizerConfig(type="AdamW", params={"torch_adam": True}) if name == "torch_adam" else None
        made = make_optimizer(None, own or OptimizerConfig(type=name), model, {})
        found = {k: list(v) if isinstance(v, tuple) else v for k, v in (made.param_groups[0] | made.defaults).items()}
        decoupled = {arguments.pop("adam_w_mode", None), arguments.pop("adamw_mode", None)}
        assert decoupled == ({True} if name in ("Adam", "AdamW") else {None})
        assert isinstance(made, torch.optim.AdamW) == (name in ("Adam", "AdamW", "torch_adam"))
        for argument, value in arguments.items():
            assert found.get(argument, ALWAYS_SO.get(argument)) == value, (name, argument)
    for name, arguments in schedules.items():
        classes = reversed(getattr(terrazzo.engine, name).__mro__)
        found = {}
        for kind in classes:
            found |= {n: p.default for n, p in inspect.signature(kind.__init__).parameters.items()}
        assert {argument: found[argument] for argument in arguments} == arguments, name


# Asks for what saves memory in DeepSpeed and has no effect here.
THRIFTY = {
    "train_batch_size": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True, "profile": True},
    "data_types": {"grad_accum_dtype": "bf16"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "stage3_max_live_parameters": 1e9,  # the default: nothing is asked for
        "stage3_prefetch_bucket_size": "auto",
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "ratio": 0.3, "nvme_path": "/none"},
    },
}
WARNED = [
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing",
    "data_types.grad_accum_dtype",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.offload_optimizer.ratio",
]


def test_what_would_save_memory_is_warned_about():
    assert read_config(THRIFTY)[1].warned.keys() == set(WARNED)
    with pytest.warns(UserWarning, match="have no effect here") as caught:
        initialize(nn.Linear(2, 2), config=THRIFTY)
    text = str(caught[0].message)
    assert len(caught) == 1 and all(key in text for key in WARNED) and "follows from" in text
    quiet = {"train_batch_size": 4, "optimizer": THRIFTY["optimizer"], "wall_clock_breakdown": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        initialize(nn.Linear(2, 2), config=quiet)
        deepspeed.checkpointing.configure(None, profile=True, checkpoint_in_cpu=False)
        deepspeed.checkpointing.partition_activations_in_checkpoint(False)
    with pytest.warns(UserWarning, match="partition_activations, checkpoint_in_cpu: no effect"):
        deepspeed.checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True)
    with pytest.warns(UserWarning, match="no effect"):
        deepspeed.checkpointing.partition_activations_in_checkpoint(True)


def test_configs_that_people_have():
    read, ignored = read_config(OF_THE_TRAINER)
    assert read.optimizer.params == {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert read.scheduler.params == {"warmup_min_lr": 0.0, "warmup_max_lr": 5e-5, "warmup_num_steps": 0}
    assert read.gradient_clipping == 1.0 and read.zero_optimization.sub_group_size == 10**9
    assert read.train_batch_size is None and read.train_micro_batch_size_per_gpu == 2 and read.steps_per_print is None
    assert not read.fp16.enabled and "zero_optimization.reduce_bucket_size" in ignored.harmless
    assert not ignored.warned
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
    assert read_config({**base, "gradient_allreduce_op": "SUM"})[0].gradient_allreduce_op == "sum"
    assert read_config({**base, "zero_optimization": True})[0].zero_optimization.stage == 1
    off = {"enabled": False, "curriculum_metrics": {"m": {"difficulty_type": "value"}}}
    sampling = {"enabled": True, "curriculum_learning": off, "num_epochs": 3, "num_workers": 2}
    routing = {"enabled": True, "random_ltd": {"enabled": False, "random_ltd_layer_num": 4}}
    data = {"enabled": True, "seed": 7, "data_sampling": sampling, "data_routing": routing}
    assert read_config({**base, "data_efficiency": data})[0].data_efficiency.data_sampling.num_workers == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
            "zero_quantized_nontrainable_weights is not supported",
        ),
        ({"tensor_parallel": {"autotp_size": 4}}, "autotp_size 4 does not divide the 1 ranks"),
        ({"zero_optimization": {"stage": 2, "zenflow": {}}}, "zenflow is not supported"),
        ({"compile": {"deepcompile": True}}, "torch.compile"),
        ({"elasticity": {"enabled": True}}, "any number of ranks"),
        ({"amp": {"enabled": True}}, "has removed it"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size 2 does not divide the 1 data-parallel ranks"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "not both true"),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, "needs stage 3"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, "zero_quantized_weights needs stage 3"),
        ({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}, "stage 0, 1 or 2"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype"),
        (
            {"scheduler": {"type": "NoSuchLR"}, "optimizer": {"type": "SGD", "params": {"lr": 1}}},
            "nor a scheduler of PyTorch",
        ),
        ({"checkpoint": {"tag_validation": "Wran"}}, "tag_validation must be one of ignore, warn, fail, not 'Wran'"),
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
    quantized = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    engine = initialize(make_model(), config=config(3, zero_optimization={"stage": 3, **quantized}))
    with CommDebugMode() as seen:
        losses = steps_of(engine)
    plain = initialize(make_model(), config=config(3, zero_optimization={"stage": 3, "zero_hpz_partition_size": 2}))
    with CommDebugMode() as seen_plain:
        steps_of(plain)
    assert seen.get_total_bytes() < seen_plain.get_total_bytes()
    torch.testing.assert_close(losses, expected, rtol=0.05, atol=0.05)
    assert not torch.equal(losses, expected)
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
    run_ranks(4, check_sharding_within_a_group)


class WithLogits(nn.Module):
    """Returns the loss and what it is made of, as models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x, y):
        logits = self.inner(x)
        return nn.functional.mse_loss(logits, y), logits


def check_unmanaged() -> None:
    """The caller decides when a step ends; forward under autocast; no waiting for the norm."""
    rank = dist.get_rank()
    expected = torch.tensor(train_plainly(STEPS)[0])
    for stage in (0, 2):
        options = config(stage, gradient_accumulation_steps=2, managed_gradient_accumulation=False)
        engine = initialize(make_model(), config=options)
        with pytest.raises(EngineCallError, match="each step\\(\\) ends a step"):
            engine.set_gradient_accumulation_boundary(False)
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
        counted = initialize(WithLogits(), config=options)
        x, y = torch.ones(2, 6), torch.ones(2, 3)
        counted(x, y)[0].backward()  # arrives at the loss and at the logits
        (counted(x, y)[0] + counted(x, y)[0]).backward()
        counted.step()
        assert counted.global_samples == 2 * 2 * 2  # two backwards of two samples on two ranks
    cast = initialize(make_model(), config=config(1, torch_autocast={"enabled": True, "dtype": "bfloat16"}))
    assert cast(torch.zeros(2, 6)).dtype is torch.bfloat16
    torch.testing.assert_close(steps_of(cast), expected, rtol=3e-2, atol=3e-2)
    half = initialize(make_model(), config=config(1, bf16={"enabled": True}))
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
