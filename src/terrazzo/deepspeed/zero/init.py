"""`zero.Init`: the model is created as usual, and sharded later by `initialize`."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from terrazzo.deepspeed.zero.status import mark_as_created
from terrazzo.engine.config import as_mapping
from terrazzo.engine.placing import keep_in_fp32
from terrazzo.layout.drawing import ShownAsCall


class Init(ShownAsCall):
    """A context in which a model is created.

    DeepSpeed shards every module as soon as it is created. Here `initialize` shards the model; until then each rank
    holds all of it in CPU memory, and its parameters have DeepSpeed's attributes of one that is whole. Create a model
    that does not fit on the meta device, which `initialize` supports.

    >>> with Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
    ...     model = nn.Linear(2, 2)
    >>> model.weight.shape, model.weight.ds_numel, model.weight.ds_status.name
    (torch.Size([2, 2]), 4, 'AVAILABLE')

    Args:
        module: A model that exists already: its parameters get the attributes, too.
        dtype: The dtype of new parameters; in stages 1 to 3 they are trained in float32 in any case.
        enabled: If False, nothing happens.
        config_dict_or_path: The config, of which `data_types.keep_in_fp32_modules` is read: which buffers are made
            float32, before they get their values.
        options: DeepSpeed's other arguments, for where and how it keeps shards; they have no effect.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *args: Any,
        enabled: bool = True,
        dtype: Any = None,
        config_dict_or_path: Any = None,
        **options: Any,
    ) -> None:
        self._enabled, self._dtype = enabled, dtype if enabled else None
        self._before: torch.dtype | None = None
        self._hooks: list[Any] = []
        self._parents: dict[nn.Module, None] = {}  # of modules that are created
        names = (as_mapping(config_dict_or_path or {}).get("data_types") or {}).get("keep_in_fp32_modules", "auto")
        self._in_fp32 = None if names == "auto" else names
        for parameter in module.parameters() if module is not None and enabled else ():
            mark_as_created(parameter)

    def __enter__(self) -> None:
        if self._dtype is not None:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
        if self._enabled:
            self._hooks = [
                register_module_parameter_registration_hook(lambda _, __, p: mark_as_created(p)),
                register_module_module_registration_hook(lambda parent, _, __: self._parents.setdefault(parent)),
            ]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            torch.set_default_dtype(self._before)
            self._before = None
        for hook in self._hooks:
            hook.remove()
        keep_in_fp32(self._parents, self._in_fp32)
        self._parents.clear()


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Callable[..., Tensor]:
    """A constructor of tensors on this device, which have this dtype if they are of floating point.

    DeepSpeed's `Init` wraps PyTorch's constructors so, and Transformers replaces this name meanwhile, so that positions
    keep their dtype. Here `Init` sets the default dtype, and no tensor that is made with a dtype has another one.

    >>> zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.float16, None)(1)
    tensor([1.], dtype=torch.float16)
    """

    def constructor(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        if target_fp_dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(target_fp_dtype)
        return tensor

    return constructor


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that a module uses a parameter of another one.

    Such modules must be gathered together: put the class of a module that contains both into the config's
    `zero_optimization.wrap`, or leave the model in one piece.
    """
