"""`terrazzo.compile`: programs with DTensors as graphs, and `compile_report` about these graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload
from weakref import WeakValueDictionary

import torch
from torch import nn

from terrazzo._torch.compiling import stay_eager
from terrazzo.graphs.program import _BACKENDS, Program, Settings, is_fully_sharded
from terrazzo.layout.drawing import Shown

P = ParamSpec("P")
R = TypeVar("R")
ModuleT = TypeVar("ModuleT", bound=nn.Module)
GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]


@overload
def compile(
    target: ModuleT, *, backend: str | GraphCompiler = ..., fullgraph: bool = ..., recompile_limit: int = ...
) -> ModuleT: ...
@overload
def compile(
    target: Callable[P, R], *, backend: str | GraphCompiler = ..., fullgraph: bool = ..., recompile_limit: int = ...
) -> Callable[P, R]: ...
def compile(
    target: Any, *, backend: str | GraphCompiler = "inductor", fullgraph: bool = False, recompile_limit: int = 8
) -> Any:
    """Compile a module or function with DTensors into one graph, with its communication and its backward.

    The graph is made at the first call and used for all calls of the same kind: the same layouts, shapes, dtypes and
    devices, the same settings (training or not, grad mode, autocast) and the same values of all other arguments. A call
    that differs makes another graph. Values, gradients, random numbers and written buffers are the same as without
    compiling; `compile_report` lists the graphs and why each was made.

    Args:
        target: A module or a function. A module is not changed; the returned module shares its parameters, buffers,
            hooks and settings, and is an instance of the same class. The module's own hooks run around the graph. A
            module with modules inside on which `fully_shard` was called is returned itself: each of these that has no
            others inside becomes a graph, around which its parameters are gathered, the next one's meanwhile.
        backend: `"inductor"`, `"aot_eager"` (no code is generated), or a function that gets each graph of local
            operations (forward, and backward) with example inputs, and returns a function that runs it.
        fullgraph: What happens if no graph can be made: raise `terrazzo.errors.CaptureError` (True), or run eagerly
            and warn once (False).
        recompile_limit: The most graphs to make; calls that need another one run eagerly, with one warning.

    >>> import torch, terrazzo
    >>> from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_()
    >>> step = terrazzo.compile(lambda x: (x @ weight).relu().sum(), backend="aot_eager")
    >>> for _ in range(3):
    ...     step(distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)])).backward()
    >>> weight.grad.full_tensor()[0].tolist(), len(terrazzo.compile_report(step).graphs)
    ([6.0, 6.0, 6.0, 6.0], 1)
    """
    if isinstance(backend, str) and backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {sorted(_BACKENDS)} or a function, not {backend!r}")
    if recompile_limit < 1:
        raise ValueError(f"recompile_limit must be at least 1, not {recompile_limit}")
    settings = Settings(backend, fullgraph, recompile_limit)
    if isinstance(target, nn.Module):
        return _compiled_module(target, settings)
    if not callable(target):
        raise TypeError(f"terrazzo.compile takes a module or a function, got {type(target).__name__}")
    program = Program(target, target, _name_of(target), settings)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return program(*args, **kwargs)

    if hasattr(target, "__name__"):
        functools.update_wrapper(compiled, target)
    stay_eager(compiled)
    compiled._program = program  # type: ignore[attr-defined]
    return compiled


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


# ------------------------------------------------------------------ modules


class CompiledModule:
    """The first base class of a compiled module's class, before the module's own class."""

    __slots__ = ("_program",)  # beside `__dict__`, which is the module's own
    _program: Program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, as a graph."""
        return _program_of(self)(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy has its own parameters, so it needs its own graphs.
        classes = type(self).__mro__
        return _face, (classes[classes.index(CompiledModule) + 1], _program_of(self).settings), vars(self)


stay_eager(CompiledModule.forward)

_classes: WeakValueDictionary[type, type] = WeakValueDictionary()


def _compiled_module(module: nn.Module, settings: Settings) -> nn.Module:
    if isinstance(module, CompiledModule):
        raise TypeError(f"this {type(module).__name__} is compiled already: use it as it is")
    if "forward" in vars(module):
        raise TypeError(
            f"{type(module).__name__} has a forward that was set on the instance, which a compiled module would not "
            "call: compile that function instead (module.forward = terrazzo.compile(module.forward))"
        )
    if blocks := _blocks(module):
        if all(map(_is_compiled, blocks)):
            raise TypeError(
                f"the sharded modules in this {type(module).__name__} are compiled already: use it as it is"
            )
        return _compiled_inside(module, blocks, settings)
    face = _face(type(module), settings)
    object.__setattr__(face, "__dict__", vars(module))
    return face


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The sharded modules in it that have no others inside."""
    sharded = [each for each in module.modules() if each is not module and is_fully_sharded(each)]
    return [each for each in sharded if not any(other in sharded for other in each.modules() if other is not each)]


def _compiled_inside(module: nn.Module, blocks: Sequence[nn.Module], settings: Settings) -> nn.Module:
    """The module, with a graph for the forward of each of these modules in it."""
    for each in blocks:
        if not _is_compiled(each):
            each.forward = _CompiledForward(each.forward, settings)
    return module


class _CompiledForward:
    """A module's forward as a graph, set on the module itself; a copy of the module has one of its own."""

    def __init__(self, forward: Callable[..., Any], settings: Settings) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._program = Program(forward, forward, _name_of(forward), settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _CompiledForward, (self._forward, self._program.settings)


stay_eager(_CompiledForward.__call__)


def compile_for_torch(module: nn.Module, backend: str, fullgraph: bool, in_place: bool) -> nn.Module:
    """What `torch.compile` returns for a module; `in_place`, the module itself is compiled, once."""
    settings, blocks = Settings(backend, fullgraph), _blocks(module)
    if blocks or _is_compiled(module):
        return _compiled_inside(module, blocks, settings)
    if not in_place and "forward" not in vars(module):
        return _compiled_module(module, settings)
    return _compiled_inside(module, [module], settings)


def _is_compiled(module: nn.Module) -> bool:
    return bool(_programs_in([module]))


def _programs_in(modules: Iterable[nn.Module]) -> list[Program]:
    """The programs of modules that are compiled, or whose forward is."""
    found = [getattr(each, "_program", None) or getattr(each.forward, "_program", None) for each in modules]
    return [each for each in found if isinstance(each, Program)]


def _face(cls: type, settings: Settings) -> Any:
    found = _classes.get(cls)
    if found is None:
        found = _classes[cls] = type(f"Compiled{cls.__name__}", (CompiledModule, cls), {"__module__": __name__})
    face: Any = object.__new__(found)
    forward = functools.partial(cls.forward, face)  # type: ignore[attr-defined]  # it is a module class
    face._program = Program(forward, face, cls.__name__, settings)
    return face


def _program_of(compiled: Any) -> Program:
    program = getattr(compiled, "_program", None)
    if not isinstance(program, Program):
        raise TypeError(f"{compiled!r} was not returned by terrazzo.compile")
    return program


# ------------------------------------------------------------------ the report


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One graph of a compiled program."""

    calls: int
    """How often it ran."""
    conditions: dict[str, str]
    """What it was made for: arguments, parameters and settings, by name."""
    differs: dict[str, tuple[str, str]]
    """What differs from the most similar earlier graph: by name, the value of that one and of this one."""
    error: str | None
    """Why no graph could be made, so that such calls run eagerly; else None."""


@dataclass(frozen=True, slots=True, repr=False)
class CompileReport(Shown):
    """The graphs of a compiled program, in the order in which they were made."""

    name: str
    graphs: tuple[GraphReport, ...]

    @property
    def recompiles(self) -> int:
        """How many were made after the first one."""
        return max(len(self.graphs) - 1, 0)

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.graphs)} graphs"]
        for i, graph in enumerate(self.graphs):
            state = f"eager, {graph.error}" if graph.error else "compiled"
            lines.append(f"  {i}: {graph.calls} calls, {state}")
            lines += [f"     {name}: {before} before, {now} here" for name, (before, now) in graph.differs.items()]
        return "\n".join(lines)


def compile_report(compiled: Any) -> CompileReport:
    """The graphs of a compiled module or function: how often each ran, and why it was needed.

    Of a module whose sharded modules are compiled, the graphs of all of these.

    >>> compiled = compile(lambda x: x + 1, backend="aot_eager")
    >>> _ = compiled(torch.ones(2)), compiled(torch.ones(2))
    >>> [graph.calls for graph in compile_report(compiled).graphs]
    [2]
    """
    inside = not isinstance(compiled, CompiledModule) and isinstance(compiled, nn.Module)
    programs = (_programs_in(compiled.modules()) if inside else []) or [_program_of(compiled)]
    graphs = [
        GraphReport(r.calls, dict(r.what), dict(r.differs), None if r.error is None else str(r.error))
        for program in programs
        for r in program.records
    ]
    name = type(compiled).__name__ if len(programs) > 1 else programs[0].name
    return CompileReport(name, tuple(graphs))
