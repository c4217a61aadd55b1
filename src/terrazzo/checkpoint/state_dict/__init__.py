"""State dicts that do not depend on the parallelism.

`get_state_dict` and its kin name every tensor as the unwrapped model would, key optimizer state by those names, and
keep distributed tensors distributed; the setters take what any parallelism, or none, has produced.  They see through
DDP, FSDP1, `torch.compile` and activation checkpointing, and treat every kind of DTensor (PyTorch's FSDP2 and tensor
parallelism, terrazzo's own) by its interface.
"""

from terrazzo.checkpoint.state_dict.both import get_state_dict, set_state_dict
from terrazzo.checkpoint.state_dict.model import get_model_state_dict, set_model_state_dict
from terrazzo.checkpoint.state_dict.optim import get_optimizer_state_dict, set_optimizer_state_dict
from terrazzo.checkpoint.state_dict.options import OptimizerStateType, StateDictOptions, ValueType

__all__ = [
    "OptimizerStateType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
