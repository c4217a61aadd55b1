"""`load_sharded_optimizer_state_dict`: an optimizer's state from a checkpoint, sharded as a model."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.checkpoint.default_planner import DefaultLoadPlanner, set_element
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, is_tensor_entry
from terrazzo.checkpoint.planner import LoadPlanner
from terrazzo.checkpoint.state_dict_loader import load
from terrazzo.checkpoint.storage import StorageReader

__all__ = ["load_sharded_optimizer_state_dict"]


def load_sharded_optimizer_state_dict(
    model_state_dict: STATE_DICT_TYPE,
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> STATE_DICT_TYPE:
    """The optimizer's state that a checkpoint has under a key, without an optimizer.

    A state that has its parameter's shape is placed as the parameter in `model_state_dict`; others are whole.
    `get_optimizer_state_dict` and `load` do the same for an optimizer that is there.

    Args:
        model_state_dict: The model's state dict.
        optimizer_key: The name of the optimizer's state in the checkpoint.
        storage_reader: The reader of the checkpoint.
        planner: What to load, if not all of it.

    Returns:
        `{optimizer_key: {"state": {name: {...}}, "param_groups": ...}}`.

    >>> import tempfile
    >>> from terrazzo.checkpoint import FileSystemReader, save
    >>> folder = tempfile.mkdtemp()
    >>> _ = save({"optim": {"state": {"w": {"exp_avg": torch.ones(2)}}}}, checkpoint_id=folder)
    >>> load_sharded_optimizer_state_dict({"w": torch.zeros(2)}, "optim", FileSystemReader(folder))
    {'optim': {'state': {'w': {'exp_avg': tensor([1., 1.])}}}}
    """
    metadata = storage_reader.read_metadata()
    paths: Any = metadata.planner_data or {}
    state: STATE_DICT_TYPE = {}
    for name, entry in metadata.state_dict_metadata.items():
        path = paths.get(name) or (name,)
        if path[0] != optimizer_key:
            continue
        value: Any = None
        if is_tensor_entry(entry):
            like = next((model_state_dict[key] for key in path[2:3] if key in model_state_dict), None)
            if isinstance(like, torch.Tensor) and like.shape == entry.size:
                value = torch.empty_like(like, dtype=entry.properties.dtype, requires_grad=False)
            else:
                device = None if like is None else like.device
                value = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        set_element(state, path, value)
    load(state, storage_reader=storage_reader, planner=planner or DefaultLoadPlanner())
    return state
