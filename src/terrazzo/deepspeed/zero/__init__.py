"""`deepspeed.zero`: creating models for sharding, and blocks in which parameters are whole."""

from terrazzo.deepspeed.zero.gathered import GatheredParameters, unwrap_model_for_generation
from terrazzo.deepspeed.zero.init import Init, register_external_parameter, zero_wrapper_for_fp_tensor_constructor
from terrazzo.deepspeed.zero.status import ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unwrap_model_for_generation",
    "zero_wrapper_for_fp_tensor_constructor",
]
