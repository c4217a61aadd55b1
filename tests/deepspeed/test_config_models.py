"""DeepSpeed's classes of config sections: pydantic models over the engine's config; and HJSON."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from terrazzo.deepspeed.runtime.config import DeepSpeedConfig
from terrazzo.deepspeed.settings import setting
from terrazzo.deepspeed.zero import config as zero_config
from terrazzo.engine.config import as_mapping, read_config
from terrazzo.errors import EngineConfigError

pydantic = pytest.importorskip("pydantic")
precision = importlib.import_module("terrazzo.deepspeed.runtime.precision_config")
DeepSpeedConfigModel = importlib.import_module("terrazzo.deepspeed.runtime.config_utils").DeepSpeedConfigModel
DeepSpeedFP16Config, DeepSpeedZeroConfig = precision.DeepSpeedFP16Config, zero_config.DeepSpeedZeroConfig


def test_sections_have_the_engines_keys_and_defaults():
    zero = DeepSpeedZeroConfig(stage=3, offload_optimizer={"device": "cpu"}, allgather_bucket_size=7)
    assert (zero.stage, zero.offload_optimizer.device, zero.allgather_bucket_size) == (3, "cpu", 7)
    assert zero.prefetch_bucket_size == 50_000_000 and zero.zero_hpz_partition_size == 1 and zero.zenflow is None
    assert DeepSpeedFP16Config().initial_scale_power == 16 and not precision.DeepSpeedBF16Config().enabled
    assert precision.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert zero_config.get_zero_config({}).stage == 0
    for old in ("stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"):
        assert DeepSpeedZeroConfig(**{old: True}).gather_16bit_weights_on_model_save
        assert setting({"zero_optimization": {old: True}}, "zero_gather_16bit_weights_on_model_save")


def test_the_engine_checks_them():
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (DeepSpeedZeroConfig, {"stage": 4}, "must be 0, 1, 2 or 3, not 4"),
        (DeepSpeedZeroConfig, {"stag": 1}, "did you mean stage"),
        (DeepSpeedFP16Config, {"loss_scale": -1}, "at least 0"),
        (DeepSpeedFP16Config, {"loss_scale": float("inf")}, "finite"),
        (DeepSpeedFP16Config, {"enabled": True, "loss_scale_window": 0}, "at least 1"),
        (DeepSpeedFP16Config, {"enabled": True, "min_loss_scale": True}, "a number"),
    ]
    for kind, given, words in wrong:
        with pytest.raises(pydantic.ValidationError, match=words):
            kind(**given)
    zero = DeepSpeedZeroConfig()
    zero.stage = 2
    with pytest.raises(pydantic.ValidationError):
        zero.stage = 5
    assert zero.stage == 2


def test_what_a_constant_scale_does_not_use_is_not_checked():
    for given in ({"enabled": True, "loss_scale": 8}, {"enabled": False}):
        section = {**given, "loss_scale_window": 0, "min_loss_scale": -1}
        assert DeepSpeedFP16Config(**section).min_loss_scale == -1
        assert read_config({"train_batch_size": 1, "fp16": section})[0].fp16.enabled is given["enabled"]
    with pytest.raises(EngineConfigError, match="loss_scale_window"):
        read_config({"train_batch_size": 1, "fp16": {"enabled": True, "loss_scale_window": 0}})


class Inner(DeepSpeedConfigModel):
    size: int = 0


class Section(DeepSpeedConfigModel):
    old: str | None = pydantic.Field(
        None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda value: [value]}
    )
    new: list[str] | None = None
    older: int = pydantic.Field(0, json_schema_extra={"deprecated": True, "new_param": "inner.size"})
    inner: Inner = Inner()


def test_sections_of_ones_own():
    assert Section(old="a").new == ["a"] and Section(older=3).inner.size == 3
    assert Section(new="auto").new is None
    for given in ({"new": "auto", "strict": True}, {"newer": 1}):
        with pytest.raises(pydantic.ValidationError):
            Section(**given)
    with pytest.raises(AssertionError, match="old name of new"):
        Section(old="a", new=["b"])


def test_hjson():
    pytest.importorskip("hjson")
    text = "{\n  # no quotes, no commas\n  train_batch_size: 4\n  zero_optimization: {\n    stage: 2\n  }\n}"
    assert as_mapping(text) == {"train_batch_size": 4, "zero_optimization": {"stage": 2}}
    assert DeepSpeedConfig(text).zero_optimization_stage == 2
    with pytest.raises(EngineConfigError, match="twice: a"):
        as_mapping("{\n  a: 1\n  a: 2\n}")
    with pytest.raises(EngineConfigError, match="not valid JSON"):
        as_mapping("{ a: ")
