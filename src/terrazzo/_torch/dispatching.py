"""Operators, the dispatcher, its modes, and thread-local state."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from terrazzo._torch.declared import attribute, later, private

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    OpOverload = private("torch._ops.OpOverload", "operators differ from functions, and rules are registered for them")
    OpOverloadPacket = private("torch._ops.OpOverloadPacket", "operators differ from functions")
    TorchDispatchMode = private(
        "torch.utils._python_dispatch.TorchDispatchMode", "debug modes and register_sharding see operators"
    )

_SCHEMA = "an operator's name, and whether it writes its arguments"
attribute("torch._ops.OpOverload._schema", _SCHEMA, there=lambda: hasattr(torch.ops.aten.add.Tensor, "_schema"))
attribute(
    "torch._ops.OpOverload._overloadname",
    "the functional form of an in-place operator",
    there=lambda: hasattr(torch.ops.aten.add.Tensor, "_overloadname"),
)
attribute(
    "torch._ops.OpOverloadPacket._qualified_op_name",
    "an operator's name",
    there=lambda: hasattr(torch.ops.aten.add, "_qualified_op_name"),
)


def qualified_name(operator: Any) -> str:
    """`namespace::name` of an overload or a packet; empty for anything else."""
    if isinstance(operator, OpOverload):
        name: str = operator._schema.name
        return name
    return getattr(operator, "_qualified_op_name", "")


def schema_of(operator: OpOverload) -> Any:
    """The operator's arguments and results, and which of them share memory."""
    return operator._schema


def writes_arguments(operator: OpOverload) -> bool:
    """Whether the operator changes an argument in place."""
    return operator._schema.is_mutable


def overload_name(operator: OpOverload) -> str:
    """The name of an overload within its operator."""
    return operator._overloadname


# ------------------------------------------------------------------ attributes

_TensorBase: Any = private("torch._C.TensorBase", "the attributes of tensors are descriptors of this class")


def names_of_attributes() -> list[str]:
    """The attributes of tensors that are descriptors in C, but for Python's own."""
    attributes = vars(_TensorBase)
    kind = type(attributes["dtype"])
    return [name for name, each in attributes.items() if type(each) is kind and not name.startswith("__")]


def attribute_of_wrapper(name: str) -> Callable[[Any], Any]:
    """A function that reads an attribute of a wrapper itself, past `__torch_function__`."""
    get = vars(_TensorBase)[name].__get__

    def read(tensor: Any) -> Any:
        with without_subclass_functions():
            return get(tensor)

    return read


# ------------------------------------------------------------------ calls that go through C++

without_subclass_functions: Any = private(
    "torch._C.DisableTorchFunctionSubclass", "composites decompose in C++, and wrappers are asked for what they know"
)

run_without_overrides_once: Callable[..., Any] | None = private(
    "torch._C._skip_one_hop_torch_function",
    "the body of a function of torch runs with DTensors, without checking for overrides again",
    since="2.13",
    instead=None,
    without="bodies are run as C++ composites are",
)

_has_kernel: Callable[[str, str], bool] = private(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "composite operators are decomposed"
)


def is_composite(operator: OpOverload) -> bool:
    """Whether the operator is composed of others, which define its derivative."""
    return _has_kernel(operator.name(), "CompositeImplicitAutograd")


thread_state_before_dispatch: Any = private(
    "torch._C._RestorePythonTLSSnapshot", "operations on locals record the graph although C++ autograd was passed"
)

_Key: Any = private("torch._C.DispatchKey", "parts of composites are not cast by autocast a second time")
_KeySet: Any = private("torch._C.DispatchKeySet", "parts of composites are not cast by autocast a second time")
_without_keys: Any = private(
    "torch._C._ExcludeDispatchKeyGuard", "parts of composites are not cast by autocast a second time"
)


@functools.cache
def _autocast() -> Any:
    return _KeySet(_Key.AutocastCPU) | _KeySet(_Key.AutocastCUDA)


def without_autocast() -> Any:
    """A block in which autocast does not cast the arguments of operators."""
    return _without_keys(_autocast())


# ------------------------------------------------------------------ modes

_mode_of: Callable[[Any], Any] = private("torch._C._get_dispatch_mode", "communication is captured by make_fx")
_PROXY: Any = private("torch._C._TorchDispatchModeKey.PROXY", "communication is captured by make_fx")
_FAKE: Any = private("torch._C._TorchDispatchModeKey.FAKE", "random draws are captured on autograd's threads")


def being_traced() -> bool:
    """Whether operations are being recorded as a graph."""
    return _mode_of(_PROXY) is not None


def fake_mode() -> Any:
    """The mode by which operations of this thread create fake tensors, which have no values; else None."""
    return _mode_of(_FAKE)


def under_fake_tensors() -> bool:
    """Whether operations create fake tensors."""
    return fake_mode() is not None


_UNSEEN = "what a plan tries on stand-ins is not part of the program"
_without_dispatch_modes: Any = private("torch.utils._python_dispatch._disable_current_modes", _UNSEEN)
_without_function_mode: Any = private("torch.overrides._pop_mode_temporarily", _UNSEEN)
_dispatch_modes: Callable[[], int] = private("torch._C._len_torch_dispatch_stack", _UNSEEN)
_function_modes: Callable[[], int] = private("torch._C._len_torch_function_stack", _UNSEEN)
_may_hook_saved: Callable[[], bool] = private("torch._C._autograd._saved_tensors_hooks_is_enabled", _UNSEEN)


@contextmanager
def unseen() -> Iterator[None]:
    """A block of which no mode and no hook of saved tensors knows: the program does not have what is computed here.

    Subclasses still have their own operations. Activation checkpointing counts what is saved, and a selective one keeps
    results by their numbers, so both would take what is tried for results of the program.
    """
    with ExitStack() as stack:
        if _dispatch_modes():
            stack.enter_context(_without_dispatch_modes())
        for _ in range(_function_modes()):
            stack.enter_context(_without_function_mode())
        if _may_hook_saved():  # in torch.func's transforms there are no hooks, and none may be set
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        yield


real_values: Any = private(
    "torch._subclasses.fake_tensor.unset_fake_temporarily", "ranks of a mesh stay numbers under FakeTensorMode"
)

has_inner_tensors: Callable[[Any], bool] = private(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", "saving refuses wrapper subclasses"
)

# ------------------------------------------------------------------ per thread, inherited by autograd's threads

_ACROSS = "settings of tensors hold in the backward threads of the thread that made them"
_keep: Callable[[str, Any], None] = private("torch._C._stash_obj_in_tls", _ACROSS)
_is_kept: Callable[[str], bool] = private("torch._C._is_key_in_tls", _ACROSS)
_kept: Callable[[str], Any] = private("torch._C._get_obj_in_tls", _ACROSS)


def _takes_callers_reference() -> bool:
    """Whether PyTorch gives back a reference to what it keeps without having taken one, as 2.11 does."""
    value = object()
    before = sys.getrefcount(value)
    _keep("terrazzo: whose reference it is", value)
    if sys.getrefcount(value) > before:
        return False
    _one_more_reference(value)
    return True


_one_more_reference = ctypes.pythonapi.Py_IncRef
_one_more_reference.argtypes, _one_more_reference.restype = [ctypes.py_object], None
_gives_a_reference = _takes_callers_reference()


def set_in_thread(name: str, value: Any) -> None:
    """Set a value for this thread, and for the threads of the backward passes that it starts."""
    if _gives_a_reference:
        _one_more_reference(value)
    _keep(name, value)


def get_in_thread(name: str) -> Any:
    """The value that was set under `name`; None if there is none."""
    return _kept(name) if _is_kept(name) else None


@contextmanager
def set_within(name: str, value: Any) -> Iterator[None]:
    """A block in which this thread has `value` under `name`."""
    outer = get_in_thread(name)
    set_in_thread(name, value)
    try:
        yield
    finally:
        set_in_thread(name, outer)


# ------------------------------------------------------------------ trees of values

tree_flatten: Any = private("torch.utils._pytree.tree_flatten", "torch's own trees: transforms, local_map, pipelines")
tree_unflatten: Any = private("torch.utils._pytree.tree_unflatten", "torch's own trees: transforms, local_map")
tree_leaves: Any = private("torch.utils._pytree.tree_leaves", "torch's own trees: transforms, pipelines")
tree_map: Any = private("torch.utils._pytree.tree_map", "torch's own trees: transforms")

# ------------------------------------------------------------------ collectives as operators

functional_collectives: Callable[[], Any] = later(
    "torch.distributed._functional_collectives", "communication is captured by make_fx; asynchronous tensors of torch's"
)


def collective_operators() -> Any:
    """The operators that a captured graph uses for communication."""
    functional_collectives()  # the import registers their fake implementations
    return torch.ops._c10d_functional
