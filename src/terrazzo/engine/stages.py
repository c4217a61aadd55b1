"""What the stages of a pipeline save together: each stage's lists of names, merged to those of the whole model.

Tensors need no merging: each has its name in the whole model, and is saved by the ranks of its stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from terrazzo.comm import Axis
from terrazzo.engine.gathering import gather_over

_LISTS = ("buffer_names", "frozen_param_shapes", "frozen_param_fragments")


def without_copies(optimizer: Mapping[str, Any], copies: Collection[str]) -> dict[str, Any]:
    """An optimizer's state without the state of parameters that another stage saves."""
    return {
        "state": {name: state for name, state in optimizer["state"].items() if name not in copies},
        "param_groups": [
            {**group, "params": [name for name in group["params"] if name not in copies]}
            for group in optimizer["param_groups"]
        ],
    }


def of_all_stages(state: Mapping[str, Any], axis: Axis) -> dict[str, Any]:
    """The content of a checkpoint with the names of all stages; its tensors stay those of this stage."""
    groups = state["optimizer"]["param_groups"]
    own = {
        **{name: state[name] for name in (*_LISTS, "shared_params")},
        "groups": [_plain(group) for group in groups],
        "shapes": state["param_shapes"],
    }
    parts = gather_over(axis, own)
    merged, shapes = _merged_groups(parts)
    shared = {name: first for part in parts for name, first in part["shared_params"].items()}
    return {
        **state,
        **{name: _joined([part[name] for part in parts]) for name in _LISTS},
        "shared_params": shared,
        "param_shapes": shapes,
        "optimizer": {**state["optimizer"], "param_groups": merged},
    }


def _joined(lists: list[list[Any] | None]) -> list[Any] | None:
    """The items of all lists, each once; None where the stages have none."""
    if any(items is None for items in lists):
        return None
    joined: list[Any] = []
    for items in lists:
        joined += [item for item in items or () if item not in joined]
    return joined


def _merged_groups(parts: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Param groups of all stages: those with the same number and options are merged; with their parameters' shapes."""
    groups: list[tuple[int, dict[str, Any], list[Any]]] = []
    for part in parts:
        for number, (group, shapes) in enumerate(zip(part["groups"], part["shapes"], strict=True)):
            options = {key: value for key, value in group.items() if key != "params"}
            same = next((known for known in groups if known[0] == number and _options(known[1]) == options), None)
            if same is None:
                groups.append((number, {**group, "params": list(group["params"])}, list(shapes)))
            else:
                same[1]["params"] += group["params"]
                same[2].extend(shapes)
    groups.sort(key=lambda known: known[0])
    return [group for _, group, _ in groups], [shapes for _, _, shapes in groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with tensors as numbers, because all ranks have to read them."""
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
