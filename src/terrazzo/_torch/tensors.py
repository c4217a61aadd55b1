"""Tensors: wrapper subclasses, version counters, views, and the types that list operations accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from terrazzo._torch.declared import attribute, private

make_wrapper: Any = private("torch.Tensor._make_wrapper_subclass", "every DTensor is made by it")

set_wrapper_data: Callable[[Any, Any], None] = private(
    "torch._C.TensorBase.data.__set__", "a DTensor takes over the shape and dtype of another (in-place, .data = ...)"
)

swap_wrappers: Callable[[Any, Any], None] = private(
    "torch._C._swap_tensor_impl", "a DTensor takes over the device of another, also to and from the meta device"
)

is_view: Callable[[torch.Tensor], bool] = private(
    "torch.Tensor._is_view", "results of communication must not be views; fallbacks mark views among results"
)

same_kind_of_storage: Callable[[torch.Tensor, torch.Tensor], bool] = private(
    "torch._has_compatible_shallow_copy_type", "nn.Module.to asks whether a parameter's data can be exchanged"
)

chunk_cat: Any = private(
    "torch._chunk_cat", "fully_shard packs gradients of half types into a buffer of float32 by one kernel"
)

assert_async: Any = private("torch._assert_async", "indices out of bounds raise without waiting for the device")

attribute("torch.Tensor._version", "whether a tensor was written after something was derived from it")


def version_of(tensor: torch.Tensor) -> int:
    """The version counter: how often the tensor was written in place."""
    return tensor._version


attribute("torch.Tensor._base", "writes to views of leaves that require grad are refused")


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view is based on; the tensor itself if it is not a view."""
    return tensor if tensor._base is None else tensor._base


for _name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
    attribute(f"torch.Tensor.{_name}", "a parameter that leaves the meta device keeps its hooks")


def move_hooks(one: Any, other: Any) -> None:
    """Take all hooks on gradients from one leaf and register them on another, where their handles remove them."""
    other._backward_hooks, one._backward_hooks = one._backward_hooks, None
    other._post_accumulate_grad_hooks, one._post_accumulate_grad_hooks = one._post_accumulate_grad_hooks, None


_creation_meta: Any = private(
    "torch._C._autograd._get_creation_meta", "in-place changes of views that were created together are refused"
)


def is_one_of_several_views(tensor: torch.Tensor) -> bool:
    """Whether autograd forbids in-place changes, because the view was created together with others (split, ...)."""
    return is_view(tensor) and _creation_meta(tensor).name == "MULTI_OUTPUT_NODE"


PARAMETER_MARK = "_is_param"
"""An attribute of tensor subclasses: those that have it count as `nn.Parameter`."""


def mark_as_parameter(tensor: Any) -> None:
    """Make `isinstance(tensor, nn.Parameter)` true for a tensor of a subclass."""
    tensor._is_param = True


class _Subclass(torch.Tensor):
    pass


def _counts_as_parameter() -> bool:
    probe = torch.empty(0, device="cpu").as_subclass(_Subclass)
    mark_as_parameter(probe)
    return isinstance(probe, torch.nn.Parameter)


attribute("torch.nn.Parameter._is_param", "DTensors can be parameters", there=_counts_as_parameter)
