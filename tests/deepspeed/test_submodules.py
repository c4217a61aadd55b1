"""What scripts import from inside DeepSpeed, and read off parameters."""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import operator
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import terrazzo.deepspeed as deepspeed
from engine.runs import batches, config, loss_of, make_model
from ranks import fresh_values, run_ranks
from terrazzo.deepspeed.submodules import ABSENT, SUBMODULES
from terrazzo.errors import EngineCallError, EngineConfigError, EngineError, RankError

pytestmark = pytest.mark.on_late


def test_modules_are_found_where_deepspeed_has_them():
    for place, module in SUBMODULES.items():
        found = importlib.import_module(f"terrazzo.deepspeed.{place}")
        assert not module or found is importlib.import_module(f"terrazzo.deepspeed.{module}")
        parent, _, name = f"terrazzo.deepspeed.{place}".rpartition(".")
        # `from deepspeed.utils import logging` is not Python's module; `z3_leaf_module` is a function, too.
        assert getattr(sys.modules[parent], name) is found or place == "utils.z3_leaf_module", place
    assert deepspeed.checkpoint.utils.clone_tensors_for_torch_save([torch.ones(2)])[0].tolist() == [1.0, 1.0]
    from terrazzo.deepspeed.runtime.activation_checkpointing import checkpointing
    from terrazzo.deepspeed.runtime.pipe.topology import ProcessTopology
    from terrazzo.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from terrazzo.deepspeed.utils.logging import logger

    assert checkpointing is deepspeed.checkpointing and ProcessTopology is deepspeed.pipe.ProcessTopology
    assert ZeroParamStatus is deepspeed.zero.ZeroParamStatus and logger is deepspeed.logger


def check_attributes() -> None:
    names = ["moe.utils", "ops.adam.cpu_adam", "runtime.config_utils"]
    names += ["runtime.lr_schedules", "runtime.precision_config", "runtime.utils", "utils.groups", "utils.zero_to_fp32"]
    for name in names:
        assert operator.attrgetter(name)(deepspeed).__name__.startswith("terrazzo.deepspeed."), name


def test_modules_are_attributes_without_being_imported():
    fresh_values(1, check_attributes)


def check_without_pydantic() -> None:
    for name in [name for name in sys.modules if name.startswith(("terrazzo.deepspeed", "pydantic"))]:
        del sys.modules[name]
    here = importlib.machinery.PathFinder.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            importlib.machinery.PathFinder,
            "find_spec",
            lambda name, *more: None if name == "pydantic" else here(name, *more),
        )
        found = importlib.import_module("terrazzo.deepspeed")
        assert found.initialize and not hasattr(found.runtime, "config_utils")
        with pytest.raises(ImportError, match="need pydantic, as DeepSpeed does: install it"):
            importlib.import_module("terrazzo.deepspeed.runtime.config_utils")


def test_it_is_there_without_pydantic():
    fresh_values(1, check_without_pydantic)


def test_an_import_of_what_is_absent_says_what_there_is():
    for name in ("compression", "linear", "sequence"):
        with pytest.raises(ModuleNotFoundError, match=f"terrazzo.deepspeed has no {name}: {ABSENT[name]}"):
            importlib.import_module(f"terrazzo.deepspeed.{name}.layer")
    with pytest.raises(ModuleNotFoundError, match="1-bit optimizers are not supported"):
        importlib.import_module("terrazzo.deepspeed.runtime.fp16.onebit.lamb")
    with pytest.raises(ModuleNotFoundError, match="use torch.profiler"):
        from terrazzo.deepspeed.utils import timer  # noqa: F401  # which is not there
    for name in ("nonsense", "runtime.nonsense", "utils.nonsense.more"):
        with pytest.raises(ModuleNotFoundError, match="No module named 'terrazzo.deepspeed.*lists what there is"):
            importlib.import_module(f"terrazzo.deepspeed.{name}")


def test_monitors_of_a_config_write(tmp_path):
    from terrazzo.deepspeed.monitor.csv_monitor import csvMonitor
    from terrazzo.deepspeed.monitor.monitor import MonitorMaster

    from terrazzo.deepspeed.utils.zero_to_fp32 import get_optim_files

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "one"}
    monitors = deepspeed.DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": section}).monitor_config
    both = MonitorMaster(monitors), csvMonitor(monitors.csv_monitor)
    for number, monitor in enumerate(both):
        assert monitor.enabled
        monitor.write_events([(f"Eval/loss{number}", torch.tensor(0.5), 8)])
        assert (tmp_path / "one" / f"Eval_loss{number}.csv").read_text().split() == [f"step,loss{number}", "8,0.5"]
    assert both[1].job_name == "one" and not MonitorMaster(deepspeed.DeepSpeedConfig({"train_batch_size": 1})).enabled
    for number in (10, 9):
        (tmp_path / f"zero_{number}_optim_states.pt").touch()
    assert [Path(file).name for file in get_optim_files(tmp_path)] == [f"zero_{n}_optim_states.pt" for n in (9, 10)]


def test_scripts_ask_what_there_is():
    from terrazzo.deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
    from terrazzo.deepspeed.runtime.lr_schedules import WARMUP_LR, WARMUP_MIN_LR
    from terrazzo.deepspeed.utils.torch import required_torch_version
    from terrazzo.engine import WarmupLR

    found = deepspeed.ops.__compatible_ops__
    assert found[CPUAdamBuilder.NAME] and not found[AsyncIOBuilder.NAME] and not AsyncIOBuilder().is_compatible()
    with pytest.raises(EngineError, match="terrazzo.deepspeed.ops"):
        CPUAdamBuilder().load()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert WARMUP_LR == WarmupLR.__name__ and WarmupLR(optimizer, **{WARMUP_MIN_LR: 0.5}).rates() == [0.5]
    assert required_torch_version(min_version="2.6") and not required_torch_version(min_version=99.0)
    assert deepspeed.DeepSpeedConfig({"train_batch_size": 8}).gradient_accumulation_steps == 1


def check_grid() -> None:
    grid = deepspeed.pipe.PipelineParallelGrid(deepspeed.pipe.PipeDataParallelTopology(num_pp=2, num_dp=1))
    rank = dist.get_rank()
    assert (grid.stage_id, grid.is_first_stage, grid.is_last_stage) == (rank, rank == 0, rank == 1)
    assert grid.stage_to_global(1) == 1 and grid.pp_group == [0, 1] and grid.dp_group == [rank]
    there = torch.full((1,), float(rank))
    dist.all_reduce(there, group=grid.get_pipe_parallel_group())
    assert there.item() == 1.0
    dist.all_reduce(there, group=grid.get_data_parallel_group())
    assert there.item() == 1.0


def test_a_grid_has_the_groups_of_its_axes():
    run_ranks(2, check_grid)


# As DeepSpeed 0.19.8 does: it ignores the first, and refuses the others.
IGNORED = (
    {"optimizer": {"type": "AdamW", "torch_adam": True}},
    {"scheduler": {"type": "WarmupLR", "foo": 1}},
    {"flops_profiler": {"step": 1}},
    {"aio": {"thread_count": 1}},
    {"activation_checkpointing": {"partition_activation": True}},
    {"checkpoint": {"foo": 1}},
    {"data_types": {"foo": 1}},
    {"data_efficiency": {"foo": 1, "data_sampling": {"num_worker": 1, "curriculum_learning": {"foo": 1}}}},
)
REFUSED = (
    *({name: {"enabled": enabled, "foo": 1}} for name in ("fp16", "bf16") for enabled in (True, False)),
    *({name: {"foo": 1}} for name in ("zero_optimization", "tensorboard", "csv_monitor", "comms_logger")),
    {"zero_optimization": {"stage": 1, "offload_optimizer": {"foo": 1}}},
)


def check_unknown_keys() -> None:
    for given in IGNORED:
        settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}} | given
        with pytest.warns(UserWarning, match="these keys are ignored") as warned:
            deepspeed.initialize(model=torch.nn.Linear(2, 2), config=settings)
        said = next(str(each.message) for each in warned if "these keys" in str(each.message))
        assert f"{next(iter(given))}." in said and "(unknown" in said
    assert "num_worker (unknown; did you mean num_workers?)" in said and "curriculum_learning.foo (unknown)" in said
    for given in REFUSED:
        with pytest.raises(EngineConfigError, match=r"there is no key .*\.foo"):
            deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1} | given)
    with pytest.warns(UserWarning, match=r"mine \(unknown\)"):
        assert deepspeed.DeepSpeedConfig({"train_batch_size": 1, "mine": 1, "aio": {"mine": 1}}).train_batch_size == 1


def test_unknown_keys_are_warned_about_where_deepspeed_ignores_them():
    run_ranks(1, check_unknown_keys)


def check_getters() -> None:
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "allgather_bucket_size": 5e7,
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "stage3_max_live_parameters": 1e9,
        "overlap_comm": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
    }
    settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero, "dump_state": "auto"}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=settings)
    expected = {
        "zero_reduce_bucket_size": 500_000_000,
        "zero_allgather_bucket_size": 50_000_000,
        "zero_gather_16bit_weights_on_model_save": False,
        "zero_max_live_parameters": 1_000_000_000,
        "zero_overlap_comm": True,
        "zero_offload_param": None,
        "optimizer_name": "adamw",
        "dump_state": False,
    }
    found = {name: getattr(engine, name)() for name in expected}
    assert found == expected and {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in expected.items()
    }
    assert engine.communication_data_type is torch.float32
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_offload_optimizer().pin_memory is True
    for given, dtype in (
        ({"communication_data_type": "fp16"}, torch.float16),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
    ):
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1} | given)
        assert engine.communication_data_type is dtype


def check_errors_of_the_first_rank(folder: str) -> None:
    model = torch.nn.Linear(2, 2)
    monitor = {"tensorboard": {"enabled": False}, "csv_monitor": {"enabled": True, "output_path": f"{folder}/file"}}
    settings = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
    if dist.get_rank() == 0:
        open(f"{folder}/file", "w").close()
    with pytest.raises(EngineConfigError, match="(?s)opening the config's monitors.*rank 0.*NotADirectoryError"):
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=settings | monitor)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    with pytest.raises(RankError, match="(?s)rank 0.*(NotADirectoryError|FileExistsError)"):
        engine.save_16bit_model(f"{folder}/file")


def test_an_error_of_the_rank_that_writes_is_one_on_all(tmp_path):
    run_ranks(2, check_errors_of_the_first_rank, str(tmp_path))


def test_settings_are_those_with_which_the_engine_runs():
    run_ranks(1, check_getters)


def check_what_is_ignored() -> None:
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_cliping": 1.0}
    with pytest.warns(UserWarning, match=r"gradient_cliping \(unknown; did you mean gradient_clipping\?\)"):
        engine, optimizer, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=settings)
    assert optimizer is None and engine.log_level() is None
    before = deepspeed.logger.level
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1, "log_level": "error"})
    assert engine.log_level() == "error" and deepspeed.logger.level == logging.ERROR
    deepspeed.logger.setLevel(before)
    with pytest.raises(EngineConfigError, match="log_level must be DEBUG, INFO"):
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1, "log_level": "loud"})
    with pytest.raises(EngineError, match="step.. needs an optimizer"):
        engine.step()
    with pytest.raises(EngineError, match="custom_load_fn"):
        engine.load_checkpoint("nowhere", custom_load_fn=print)
    with pytest.raises(EngineError, match="schedule"):
        engine.compile(schedule=[])


def test_what_is_ignored_is_said():
    run_ranks(1, check_what_is_ignored)


def check_no_optimizer(folder: str) -> None:
    model = torch.nn.Linear(2, 2)
    engine, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})
    expected = model.weight.detach().clone()
    engine.save_checkpoint(folder)
    with torch.no_grad():
        model.weight.zero_()
    engine.load_checkpoint(folder)
    assert torch.equal(model.weight, expected)
    assert engine.optimizer is None
    with pytest.raises(EngineCallError, match="twice with the same FSDPLinear: go on with its engine"):
        deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})


def test_an_engine_without_an_optimizer_is_saved(tmp_path):
    run_ranks(2, check_no_optimizer, str(tmp_path))


def whole_of(param: Tensor) -> Tensor:
    """As scripts have it that train in stage 3 and elsewhere."""
    if hasattr(param, "ds_id"):
        assert param.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters([param]):
            assert param.ds_status == deepspeed.zero.ZeroParamStatus.AVAILABLE
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


def check_parameters(stage: int) -> None:
    model = make_model()
    expected = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage))
    for round_ in range(2):
        found = {name: whole_of(p) for name, p in engine.module.named_parameters()}
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert type(tensor) is Tensor and tensor.shape == expected[name].shape, name
            assert round_ or torch.equal(tensor, expected[name]), name
        sizes = [p.ds_numel if hasattr(p, "ds_id") else p.numel() for p in engine.module.parameters()]
        assert sum(sizes) == sum(p.numel() for p in expected.values())
        [(x, y)] = batches(1)
        half = len(x) // dist.get_world_size()
        engine.backward(loss_of(engine, x[dist.get_rank() * half :][:half], y[dist.get_rank() * half :][:half]))
        engine.step()
    numbers = [p.ds_id for p in engine.module.parameters() if hasattr(p, "ds_id")]
    assert len(set(numbers)) == len(numbers) == (len(expected) if stage == 3 else 0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_say_whether_they_are_whole(stage):
    run_ranks(2, check_parameters, stage)


def test_parameters_that_are_created_in_zero_init_say_that_they_are_whole():
    class Scaled(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.scale = torch.nn.Parameter(torch.ones(2))

    given = torch.nn.Linear(2, 2)
    with deepspeed.zero.Init(), deepspeed.zero.Init(dtype=torch.bfloat16):
        model = torch.nn.Sequential(Scaled(), torch.nn.Linear(2, 1))
    deepspeed.zero.Init(module=given)
    with deepspeed.zero.Init(enabled=False):
        plain = torch.nn.Linear(2, 2)
    marked: list[Any] = [*model.parameters(), *given.parameters()]
    assert len({p.ds_id for p in marked}) == len(marked) == 7
    for p in marked:
        assert (p.ds_shape, p.ds_numel) == (p.shape, p.numel())
        assert p.ds_status is deepspeed.zero.ZeroParamStatus.AVAILABLE
    others = [*plain.parameters(), *torch.nn.Linear(2, 2).parameters()]
    assert not any(hasattr(p, "ds_id") for p in others) and model[0].scale.dtype == torch.bfloat16


class Router(torch.nn.Module):
    _keep_in_fp32_modules_strict = ("bias_b*f",)  # as Transformers' models say it
    _keep_in_fp32_modules = {"third"}  # where float16 is too narrow

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        for name in ("bias_buf", "other", "third"):
            self.register_buffer(name, torch.ones(2))


@pytest.mark.parametrize(
    ("half", "names", "expected"),
    [
        ("bf16", "auto", {"inner.bias_buf"}),
        ("fp16", "auto", {"inner.bias_buf", "inner.third"}),
        ("bf16", ["inner.*bias_"], {"inner.bias_buf"}),
        ("fp16", ["third"], {"inner.third"}),
        ("bf16", [], set()),
    ],
)
def test_buffers_that_stay_in_float32_are_deepspeeds(half, names, expected):
    run_ranks(1, check_buffers, half, names, expected)


def check_buffers(half: str, names: Any, expected: set[str]) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[half]
    config = {"train_batch_size": 1, half: {"enabled": True}, "data_types": {"keep_in_fp32_modules": names}}

    def made() -> torch.nn.Module:
        model = torch.nn.Module()
        model.inner = Router()
        model.register_buffer("bias_buf", torch.ones(2))
        return model

    with deepspeed.zero.Init(dtype=dtype, config_dict_or_path=config):
        created = made()
    trained = deepspeed.initialize(model=made().to(dtype), config=config)[0].module
    for model in (created, trained):
        found = {name for name, buffer in model.named_buffers() if buffer.dtype is torch.float32}
        assert found == expected
    with deepspeed.zero.Init(dtype=dtype, config_dict_or_path=config, enabled=False):
        assert all(buffer.dtype is torch.float32 for buffer in made().buffers())
