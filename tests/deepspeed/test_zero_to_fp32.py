"""Weights for programs without an engine, by DeepSpeed's names for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import terrazzo.deepspeed as deepspeed
from ranks import run_ranks
from terrazzo.deepspeed.utils import zero_to_fp32
from terrazzo.errors import CheckpointNotFoundError, UnsupportedValueError

pytestmark = pytest.mark.on_late


def make() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6, bias=False), nn.Linear(6, 9, bias=False))
    model.append(nn.Linear(9, 6, bias=False))
    model[4].weight = model[2].weight
    model[3].requires_grad_(False)
    model.register_buffer("seen", torch.tensor(7))
    return model


def trained(folder: str, stage: int) -> dict[str, Tensor]:
    settings = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    model = make()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(8 // dist.get_world_size(), 6, dtype=torch.bfloat16)).square().mean())
        engine.step()
        engine.save_checkpoint(folder, tag=f"step{step}")
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value
             for name, value in engine.core.module_state_dict().items()}  # fmt: skip
    return {name: value.clone() for name, value in whole.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_state_dict_is_the_models_in_float32(tmp_path: Path, stage: int) -> None:
    expected = run_ranks(2, trained, str(tmp_path), stage)[0]
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == make().state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert found["0.weight"].dtype == torch.float32 and found["4.weight"] is found["2.weight"]
    earlier = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "step0", lazy_mode=True)
    assert earlier["0.weight"].shape == (9, 6)
    assert not torch.equal(earlier["0.weight"].contiguous(), found["0.weight"])
    trained_only = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert found.keys() - trained_only.keys() == {"3.weight"}
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(make(), tmp_path)
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


def check_load_into_an_engine(folder: str) -> None:
    for stage in (0, 2, 3):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

        def train(engine: deepspeed.DeepSpeedEngine = engine) -> None:
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()

        def now(engine: deepspeed.DeepSpeedEngine = engine) -> dict[str, Tensor]:
            parameters = engine.module.named_parameters()
            return {name: deepspeed.utils.safe_get_full_fp32_param(p).cpu() for name, p in parameters}

        train()
        engine.save_checkpoint(f"{folder}/{stage}")
        saved = now()
        train()
        if stage == 3:
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, f"{folder}/{stage}")
                assert all(torch.equal(value.cpu(), saved[name]) for name, value in loaded.state_dict().items())
            assert not torch.equal(now()["0.weight"], saved["0.weight"])
        assert zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, f"{folder}/{stage}") is engine.module
        assert all(torch.equal(value, saved[name]) for name, value in now().items())
        train()


def test_weights_are_loaded_into_the_model_of_an_engine(tmp_path: Path) -> None:
    run_ranks(2, check_load_into_an_engine, str(tmp_path))


def test_files_for_other_programs(tmp_path: Path) -> None:
    run_ranks(2, trained, str(tmp_path / "run"), 2)
    whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    zero_to_fp32.main([str(tmp_path / "run"), str(tmp_path / "one")])
    one = torch.load(tmp_path / "one" / "pytorch_model.bin")
    assert one.keys() == whole.keys() and all(torch.equal(one[name], whole[name]) for name in whole)

    several = tmp_path / "several"
    zero_to_fp32.main([str(tmp_path / "run"), str(several), "--max_shard_size", "300", "--dtype", "bfloat16"])
    index = json.loads((several / "pytorch_model.bin.index.json").read_text())
    files = {name: torch.load(several / name) for name in sorted(set(index["weight_map"].values()))}
    assert len(files) > 1 and sorted(files) == sorted(path.name for path in several.glob("*.bin"))
    for name, value in whole.items():
        stored = files[index["weight_map"][name]][name]
        assert torch.equal(stored, value.bfloat16() if value.is_floating_point() else value)

    safe = tmp_path / "safe"
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "run", safe, max_shard_size=None, safe_serialization=True, tag="step2"
    )
    stored = load_file(safe / "model.safetensors")
    assert whole.keys() - stored.keys() == {"4.weight"}, "a weight under two names is stored once"
    assert all(torch.equal(value, whole[name]) for name, value in stored.items())


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no file `latest`"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint .*step9"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "step9")
    with pytest.raises(UnsupportedValueError, match="float32, float16 or bfloat16, not int8"):
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "out", dtype="int8")
