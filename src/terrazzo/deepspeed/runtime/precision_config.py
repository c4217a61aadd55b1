"""The sections `fp16` and `bf16` of a config, as classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.deepspeed.runtime.config_utils import DeepSpeedConfigModel, section_model

DeepSpeedFP16Config = section_model("DeepSpeedFP16Config", "fp16")
DeepSpeedBF16Config = section_model("DeepSpeedBF16Config", "bf16")


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedConfigModel:
    """The section `fp16` of a config."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedConfigModel:
    """The section `bf16` of a config, which may have its old name.

    >>> get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    True
    """
    return DeepSpeedBF16Config(**param_dict.get("bf16", param_dict.get("bfloat16", {})))


__all__ = ["DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config"]
