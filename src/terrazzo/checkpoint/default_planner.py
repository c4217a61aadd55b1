"""The default planners, and the helpers that planners derived from them use, under the names PyTorch gives them."""

from terrazzo.checkpoint.flatten import flatten_state_dict, set_element
from terrazzo.checkpoint.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.save_planner import DefaultSavePlanner
from terrazzo.checkpoint.sharded import flatten_sharded_tensors as _flatten_sharded_tensors

__all__ = ["DefaultLoadPlanner", "DefaultSavePlanner", "_flatten_sharded_tensors", "flatten_state_dict", "set_element"]
