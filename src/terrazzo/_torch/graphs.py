"""What `terrazzo.compile` uses of torch: tracing without data, AOTAutograd, Inductor.

Not imported with the package, because it takes long; its declarations are checked when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from terrazzo._torch.declared import check, later, private

_CAPTURE = "terrazzo.compile captures programs on tensors without data"
_SIZES = "one graph of terrazzo.compile serves arguments of several sizes"

FakeTensorMode: Any = private("torch._subclasses.fake_tensor.FakeTensorMode", _CAPTURE)
FakeTensor: Any = private("torch._subclasses.fake_tensor.FakeTensor", _CAPTURE)
NEEDS_VALUE: Any = private("torch._subclasses.fake_tensor.DataDependentOutputException", "errors say what is missing")
NEEDS_SHAPE: Any = private("torch._subclasses.fake_tensor.DynamicOutputShapeException", "errors say what is missing")
NO_FAKE: Any = private("torch._subclasses.fake_tensor.UnsupportedOperatorException", "errors name the operation")
ShapeEnv: Any = private("torch.fx.experimental.symbolic_shapes.ShapeEnv", _SIZES)
_DimDynamic: Any = private("torch.fx.experimental.symbolic_shapes.DimDynamic", _SIZES)
_SymbolicContext: Any = private("torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext", _SIZES)
_LocalSource: Any = private("torch._dynamo.source.LocalSource", _SIZES)
without_modes: Any = private("torch.utils._python_dispatch._disable_current_modes", "random keys are real numbers")


def of_any_size(tensor: torch.Tensor, dims: Collection[int], fake: Any, name: str) -> torch.Tensor:
    """A tensor without data like this one, with symbols for the sizes of some dims: one symbol for equal sizes."""
    sizes = [_DimDynamic.DUCK if dim in dims else _DimDynamic.STATIC for dim in range(tensor.ndim)]
    result: torch.Tensor = fake.from_tensor(
        _at_start(tensor), symbolic_context=_SymbolicContext(dynamic_sizes=sizes), source=_LocalSource(name)
    )
    return result


def size_behind(value: Any) -> Any:
    """The number that a symbol stands for in this capture, without an assumption that it stays so; others as given."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def _at_start(tensor: torch.Tensor) -> torch.Tensor:
    # Where it begins in its memory is compared, too, but no graph depends on it.
    return tensor.detach().as_strided(tensor.shape, tensor.stride(), 0)


def check_of_sizes(environment: Any, examples: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Whether tensors in place of the examples have sizes for which what was traced with the examples holds."""
    code = environment.produce_guards_expression(examples, ignore_static=False)

    def check(tensors: Sequence[torch.Tensor]) -> bool:
        return code is None or bool(environment.evaluate_guards_expression(code, [_at_start(t) for t in tensors]))

    return check


# ------------------------------------------------------------------ settings around a call

_AROUND = "a compiled program has one graph for each state of the settings around it"
any_autocast: Callable[[], bool] = private("torch._C._is_any_autocast_enabled", _AROUND)
_disable_autocast: Any = private("torch._C._DisableAutocast", "graphs hold their casts, and are not cast again")
dispatch_modes: Callable[[], int] = private("torch._C._len_torch_dispatch_stack", _AROUND)
_function_modes: Callable[[], int] = private("torch._C._len_torch_function_stack", _AROUND)
_function_mode_stack: Any = private("torch.overrides._get_current_function_mode_stack", _AROUND)
_backend_name: Callable[[], str] = private("torch._C._get_privateuse1_backend_name", _AROUND)


def function_modes() -> tuple[Any, ...]:
    """The active function modes: that of a default device, for instance."""
    return tuple(_function_mode_stack()) if _function_modes() else ()


def autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    """The device types for which autocast is enabled, and with which dtype."""
    if not any_autocast():
        return ()
    kinds = dict.fromkeys(["cpu", "cuda", _backend_name(), "xpu", "mps"])
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


@contextmanager
def no_autocast() -> Iterator[None]:
    """A block without autocast; it may be enabled again inside."""
    if not any_autocast():
        yield
        return
    guard = _disable_autocast()
    try:
        yield
    finally:
        del guard


_HOOKS = "capturing under activation checkpointing must not call its hooks"
_top_hooks: Any = private("torch._C._autograd._top_saved_tensors_default_hooks", _HOOKS)
_pop_hooks: Any = private("torch._C._autograd._pop_saved_tensors_default_hooks", _HOOKS)
_push_hooks: Any = private("torch._C._autograd._push_saved_tensors_default_hooks", _HOOKS)


@contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """A block without the saved-tensor hooks that are set outside: they would save tensors that exist only while the
    graph is captured."""
    outer = []
    while (top := _top_hooks(True)) is not None:
        outer.append(top)
        _pop_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(outer):
            _push_hooks(pack, unpack)


# ------------------------------------------------------------------ compilers

_AOT = "forward and backward of a captured program become graphs"
aot_module: Any = private("torch._functorch.aot_autograd.aot_module_simplified", _AOT)
default_partition: Any = private("torch._functorch.aot_autograd.default_partition", _AOT)
make_boxed: Any = private("torch._functorch.aot_autograd.make_boxed_func", _AOT)
TracingContext: Any = private("torch._guards.TracingContext", _AOT)
tracing: Any = private("torch._guards.tracing", _AOT)
fake_mode_of: Any = private("torch._guards.detect_fake_mode", _AOT)

_INDUCTOR = "the default backend of terrazzo.compile"
inductor_config: Callable[[], Any] = later("torch._inductor.config", _INDUCTOR)
inductor_compile: Callable[[], Any] = later("torch._inductor.compile_fx", _INDUCTOR)
inductor_decomposition: Callable[[], Any] = later("torch._inductor.decomposition", _INDUCTOR)
inductor_virtualized: Callable[[], Any] = later("torch._inductor.virtualized", _INDUCTOR)

check()
