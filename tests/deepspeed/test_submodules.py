"""What scripts import from inside DeepSpeed, and read off parameters."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import terrazzo.deepspeed as deepspeed
from engine.runs import batches, config, loss_of, make_model
from ranks import run_ranks
from terrazzo.deepspeed.submodules import ABSENT, SUBMODULES

pytestmark = pytest.mark.on_late


def test_modules_are_found_where_deepspeed_has_them():
    for place, module in SUBMODULES.items():
        found = importlib.import_module(f"terrazzo.deepspeed.{place}")
        assert not module or found is importlib.import_module(f"terrazzo.deepspeed.{module}")
    from terrazzo.deepspeed.runtime.activation_checkpointing import checkpointing
    from terrazzo.deepspeed.runtime.pipe.topology import ProcessTopology
    from terrazzo.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from terrazzo.deepspeed.utils.logging import logger

    assert checkpointing is deepspeed.checkpointing and ProcessTopology is deepspeed.pipe.ProcessTopology
    assert ZeroParamStatus is deepspeed.zero.ZeroParamStatus and logger is deepspeed.logger


def test_an_import_of_what_is_absent_says_what_there_is():
    for name in ("moe", "monitor", "linear", "sequence"):
        with pytest.raises(ModuleNotFoundError, match=f"terrazzo.deepspeed has no {name}: {ABSENT[name]}"):
            importlib.import_module(f"terrazzo.deepspeed.{name}.layer")
    with pytest.raises(ModuleNotFoundError, match="No module named 'terrazzo.deepspeed.nonsense'"):
        importlib.import_module("terrazzo.deepspeed.nonsense")


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
    assert len(set(numbers)) == len(numbers) == len(expected)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_say_whether_they_are_whole(stage):
    run_ranks(2, check_parameters, stage)
