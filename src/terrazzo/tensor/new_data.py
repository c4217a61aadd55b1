"""`x.data = y` for DTensors: `x` gets the values, dtype, device and layout of `y`, and stays the same object.

The parameters that `nn.Module.to`, `half` or `to_empty` convert do so, because these methods set `.data`: modules that
share a parameter still share it afterwards, and an optimizer that was made before still has it.

Where PyTorch can set `.data` of the local tensor, that stays the same object, too. It cannot if one of the two is on
the meta device, and for a tensor subclass it would exchange the wrapper without the tensors inside. There the DTensor
gets another local tensor, with the hooks of the former one. A graph that was recorded before would give the gradient to
the former one, so its backward raises an error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from terrazzo._torch.dispatching import has_inner_tensors, without_subclass_functions
from terrazzo._torch.tensors import move_hooks, same_kind_of_storage, set_wrapper_data, swap_wrappers
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.links import links
from terrazzo.tensor.strides import take_over_strides


def set_data(target: DTensor, value: Any) -> None:
    """Give `target` the data of another DTensor."""
    if not isinstance(value, DTensor):
        raise DTensorError(f"DTensor.data can only be set to a DTensor, got {type(value).__name__}")
    old, local, layout = target._local, value._local.detach(), value._layout
    if _suits(old, local) or not old.is_leaf:
        if (layout.shape, local.dtype, local.device) != (target._layout.shape, old.dtype, old.device):
            with without_subclass_functions():
                set_wrapper_data(target, wrap(local, layout))
        old.data = local
    else:
        _exchange(target, local, layout)
    take_over_strides(target._local, value._local)
    if layout is not target._layout:
        target._layout, target._grad_wrapper = layout, None
    target._memo = None


def _suits(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether setting `.data` gives one local tensor all that the other has."""
    return bool(same_kind_of_storage(old, new)) and not has_inner_tensors(old) and not has_inner_tensors(new)


def _exchange(target: DTensor, local: torch.Tensor, layout: Layout) -> None:
    """Make `local` the local tensor of `target`, with the gradient and the hooks of the former one."""
    old, grad = target._local, target.grad
    local.requires_grad_(old.requires_grad)
    if grad is not None:
        values = grad._local
        moved = torch.zeros_like(values, device=local.device) if values.is_meta else values.to(local.device)
        grad.data = wrap(moved.to(local.dtype), grad._layout)
        local.grad = grad._local
    swap_wrappers(target, wrap(local, layout))
    move_hooks(old, local)
    if old.requires_grad:
        old.register_hook(_refuse)
    target._local, target._grad_wrapper = local, grad


def _refuse(grad: torch.Tensor) -> NoReturn:
    raise DTensorError(
        "backward reached a parameter that was moved to or from the meta device after the forward (to, to_empty, "
        ".data =), so its gradient has no place: move a module before its forward, or after its backward"
    )


links.set_data = set_data
