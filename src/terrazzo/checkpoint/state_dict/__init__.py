"""State dicts that do not depend on the parallelism.

`get_state_dict` and the like use the names of the unwrapped model for tensors and for optimizer state, and keep
distributed tensors distributed. The setters accept the state dicts of any parallelism, or none. Wrappers (DDP, FSDP1,
`torch.compile`, activation checkpointing) are removed from names. All kinds of DTensors (PyTorch's, terrazzo's) are
used through their common interface.
"""

from terrazzo.checkpoint.state_dict.model import get_model_state_dict, set_model_state_dict
from terrazzo.checkpoint.state_dict.optim import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from terrazzo.checkpoint.state_dict.options import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
)

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
