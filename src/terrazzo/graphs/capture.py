"""Capturing a call: one graph of what a program does with local tensors, forward and backward.

The program runs on stand-ins for its local tensors (`stand_ins`). DTensors then leave only local operations and
functional collectives, which AOTAutograd records together with their backward.

Before that the program runs once on tensors without data, the *rehearsal*. It shows which inputs reach the result, what
is written, and how many random numbers are drawn; and errors in it have the program's own traceback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from terrazzo._torch.autograd import leaves_of
from terrazzo._torch.compiling import compiled_functions_run_eagerly
from terrazzo._torch.dispatching import TorchDispatchMode, tree_flatten, tree_unflatten
from terrazzo._torch.graphs import (
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    check_of_sizes,
    no_autocast,
    no_saved_tensor_hooks,
    of_any_size,
    size_behind,
)
from terrazzo._torch.storages import memory_of
from terrazzo.comm import captured
from terrazzo.errors import CaptureError
from terrazzo.graphs.draws import Draws
from terrazzo.graphs.stand_ins import StandIns
from terrazzo.graphs.surroundings import Executed, Frozen, Surroundings
from terrazzo.graphs.values import Outputs, collect, take_apart
from terrazzo.tensor.copied_view import CopiedView
from terrazzo.tensor.dtensor import DTensor, local_of, wrap

Compiled = Callable[..., Sequence[torch.Tensor]]
Backend = Callable[[nn.Module, list[Any]], Compiled]
"""A function of a module of local tensors and its inputs without data; it returns a function that runs the module."""

_SLICE = torch.ops.aten.slice.Tensor
_lock = threading.RLock()  # programs are captured one after the other


@dataclass(frozen=True, slots=True)
class Conditions:
    """Settings around a call that change what operations do (autocast, grad mode, ...)."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]


class NewCode(Exception):
    """The program ran code that was not known when its surroundings were searched."""


class Subject:
    """One call that is to be captured."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Any],
        surroundings: Surroundings,
        conditions: Conditions,
    ) -> None:
        """`tensors` are those in the arguments, then those in the surroundings."""
        self.function, self.args, self.kwargs = function, args, kwargs
        self.tensors = tensors
        self.surroundings = surroundings
        self.conditions = conditions
        self.slots = [(container.holder, name) for container, name in surroundings.slots()]
        self.from_args = len(tensors) - len(self.slots)
        self.inputs, self.position = distinct(tensors)

    def locals(self) -> list[torch.Tensor]:
        """The real local tensors that are inputs of the graph."""
        return [local_of(self.tensors[i]) for i in self.inputs]


def distinct(tensors: Sequence[Any]) -> tuple[list[int], list[int]]:
    """The positions of the distinct tensors, and for each tensor its position among those; -1 for other values."""
    first: dict[int, int] = {}
    inputs: list[int] = []
    position: list[int] = []
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            position.append(-1)
            continue
        known = first.setdefault(id(local_of(tensor)), len(inputs))
        if known == len(inputs):
            inputs.append(i)
        position.append(known)
    return inputs, position


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured program, compiled."""

    run: Compiled
    inputs: tuple[tuple[int, bool], ...]  # positions among the call's tensors; and whether it is passed detached
    draws: tuple[tuple[Any, torch.Generator | None], ...]
    outputs: Outputs
    writes: tuple[tuple[Any, Any, Outputs], ...]  # attributes or items to set: holder, name and the new tensors
    written: tuple[int, ...]  # the inputs whose data is changed
    sizes: tuple[tuple[int, int], ...] = ()  # that are inputs, too: positions among the call's tensors, and dims
    fits: Callable[[Sequence[torch.Tensor]], bool] | None = None  # for several sizes: whether it is right for these

    # ------------------------------------------------------------------ the program on stand-ins


class _LocalProgram(nn.Module):
    """The program as a function of local tensors and of the random keys that it draws."""

    def __init__(self, subject: Subject, draws: Draws, inputs: int) -> None:
        super().__init__()
        self.subject: Subject | None = subject
        self.draws, self._inputs = draws, inputs
        self.outputs: Outputs | None = None
        self.writes: list[tuple[Any, Any, Outputs]] = []

    def forward(self, *flat: Any) -> tuple[torch.Tensor, ...]:
        draws = self._inputs + len(self.draws.sources)
        return self.run(flat[: self._inputs], flat[self._inputs : draws])  # sizes follow, for backward

    def run(
        self, stand_ins: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Run the program with these in place of its local tensors; return the local tensors of its result."""
        subject = self.subject
        assert subject is not None
        frozen = subject.surroundings.freeze(subject.tensors)
        try:
            with StandIns(self.draws.fake) as seen:
                used = [_used(subject, i, stand_ins, seen) for i in range(len(subject.tensors))]
                given = iter(used[: subject.from_args])
                args, kwargs = _replaced(subject.args, given), _replaced(subject.kwargs, given)
                before = _shape_of((args, kwargs))
                with _autocast(subject.conditions.autocast), self.draws.run(numbers):
                    result = subject.function(*args, **kwargs)
                if _shape_of((args, kwargs)) != before:
                    raise CaptureError(
                        "it changes a list or dict among its arguments, which a graph cannot do",
                        operation="a write to an argument",
                    )
                return self._returned(subject, result, used, stand_ins, frozen)
        finally:
            frozen.restore()

    def _returned(
        self,
        subject: Subject,
        result: Any,
        used: Sequence[Any],
        stand_ins: Sequence[torch.Tensor],
        frozen: Frozen,
    ) -> tuple[torch.Tensor, ...]:
        sources = {id(tensor): i for i, tensor in reversed(list(enumerate(used))) if isinstance(tensor, torch.Tensor)}
        locals_ = {id(stand_in): subject.inputs[i] for i, stand_in in enumerate(stand_ins)}
        locals_ = {key: i for key, i in locals_.items() if not isinstance(subject.tensors[i], DTensor)}
        self.outputs, returned = take_apart(result, sources, locals_)
        self.writes = []
        containers = {(id(holder), name) for holder, name in subject.slots}
        for label, holder, name, value in list(frozen.changes()):
            if not isinstance(value, torch.Tensor) or (id(holder), name) not in containers:
                raise CaptureError(f"it changes {label}, which a graph cannot do", operation=f"a write to {label}")
            built, more = take_apart(value, sources, locals_)
            self.writes.append((holder, name, built.shifted(len(returned))))
            returned += more
        return tuple(returned)


def _used(subject: Subject, i: int, stand_ins: Sequence[torch.Tensor], seen: StandIns) -> Any:
    """What the program finds as one of its tensors."""
    tensor = subject.tensors[i]
    if not isinstance(tensor, torch.Tensor):
        return tensor
    stand_in = stand_ins[subject.position[i]]
    if isinstance(tensor, DTensor) and type(tensor) is not DTensor:
        stand_in = wrap(stand_in, tensor._layout)
    if i < subject.from_args and type(tensor) is not DTensor:
        return stand_in
    seen.add(tensor, stand_in)
    return tensor


def _replaced(value: Any, given: Iterator[Any]) -> Any:
    """A copy of an argument in which each tensor is replaced by the next of `given`, in the order of `collect`."""
    if isinstance(value, torch.Tensor):
        return next(given)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_replaced(item, given) for item in value])
    if kind is dict:
        return {name: _replaced(item, given) for name, item in value.items()}
    key: list[Any] = []
    tensors: list[Any] = []
    collect(value, key, tensors)
    if not tensors:
        return value
    leaves, spec = tree_flatten(value)
    return tree_unflatten([_replaced(leaf, given) for leaf in leaves], spec)


def _shape_of(arguments: Any) -> tuple[list[Any], list[int]]:
    key: list[Any] = []
    tensors: list[Any] = []
    collect(arguments, key, tensors)
    return key, [id(tensor) for tensor in tensors]


@contextmanager
def _autocast(enabled: Sequence[tuple[str, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for device_type, dtype in enabled:
            stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
        yield


# ------------------------------------------------------------------ capture


def capture(subject: Subject, backend: Backend, executed: Executed, sizes: Mapping[int, Collection[int]]) -> Graph:
    """Make the graph of one call; raises NewCode, after `executed` got that code.

    `sizes` are the positions of arguments that may have other sizes in other calls, each with the dims for which the
    graph shall not depend on the size.
    """
    environment = ShapeEnv() if sizes else None
    fake = FakeTensorMode(shape_env=environment)
    draws = Draws(fake)
    with ExitStack() as stack:
        stack.enter_context(_lock)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(subject.conditions.grad))
        stack.enter_context(no_autocast())
        stack.enter_context(no_saved_tensor_hooks())
        stack.enter_context(compiled_functions_run_eagerly())
        if captured.recording is not None:
            raise CaptureError("another program is being captured at the same time")
        program = _LocalProgram(subject, draws, len(subject.inputs))
        captured.recording = draws
        try:
            real = subject.locals()
            exact, steps = None, None
            if sizes:  # the program may ask for what numbers and symbols differ in
                numbered = _LocalProgram(subject, Draws(fake), len(subject.inputs))
                exact, steps = _Steps(), _Steps()
                captured.recording = numbered.draws
                _rehearse(numbered, subject, real, real, executed, exact)
                captured.recording = draws
            examples = {i: of_any_size(real[subject.position[i]], dims, fake, f"t{i}") for i, dims in sizes.items()}
            forms = list(real)
            for i, example in examples.items():
                forms[subject.position[i]] = example
            detached, written = _rehearse(program, subject, real, forms, executed, steps)
            if exact is not None and steps is not None and steps.seen != exact.seen:
                raise CaptureError("it looks at what a size is, such as its type or its text", operation="a size")
            with fake:
                inputs = [
                    _without_data(form, not cut and local.requires_grad)
                    for form, local, cut in zip(forms, real, detached, strict=True)
                ]
            with fake:
                numbers = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in draws.sources]
            count = len(draws.sources)
            symbols = {
                str(size): (i, dim, size)
                for i, example in examples.items()
                for dim, size in enumerate(example.shape)
                if isinstance(size, torch.SymInt)
            }
            run = backend(program, [*inputs, *numbers, *(size for _, _, size in symbols.values())])
            assert len(draws.sources) == count and program.outputs is not None
        finally:
            captured.recording = None
            program.subject = None  # the compiled graph may keep this module, which must not keep the call's tensors
    cut_inputs = tuple(zip(subject.inputs, detached, strict=True))
    graph = Graph(run, cut_inputs, tuple(draws.sources), program.outputs, tuple(program.writes), written)
    if not sizes:
        return graph
    fits = check_of_sizes(environment, list(examples.values()))
    return replace(graph, sizes=tuple((i, dim) for i, dim, _ in symbols.values()), fits=fits)


class _Steps(TorchDispatchMode):
    """Notes the operations in its block, with the numbers that symbols stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # For symbols only, C++ also takes whole slices and asks for devices.
        if func.namespace != "prim" and (func is not _SLICE or _noted(result) != _noted(args[0])):
            leaves, spec = tree_flatten((args, kwargs, result))
            self.seen.append((func, spec, [_noted(leaf) for leaf in leaves]))
        return result


def _noted(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [size_behind(n) for n in value.shape], value.dtype, value.device
    value = size_behind(value)
    return repr(value) if type(value) is float else value  # a NaN is not equal to itself


def _rehearse(
    program: _LocalProgram,
    subject: Subject,
    real: Sequence[torch.Tensor],
    forms: Sequence[torch.Tensor],
    executed: Executed,
    steps: _Steps | None,
) -> tuple[list[bool], tuple[int, ...]]:
    """Run once without data: which inputs have no gradient path to the result, and which are written."""
    with program.draws.fake:
        leaves = [_without_data(form, local.requires_grad) for form, local in zip(forms, real, strict=True)]
        # Not leaves, because programs may write to tensors that are not leaves.
        stand_ins = [
            leaf if local.is_leaf or not local.requires_grad else leaf.view_as(leaf)
            for leaf, local in zip(leaves, real, strict=True)
        ]
        before = [stand_in._version for stand_in in stand_ins]
        looks = [_form(stand_in) for stand_in in stand_ins]
        returned = _noting(program, stand_ins, subject.surroundings, executed, steps)
    if [_form(stand_in) for stand_in in stand_ins] != looks:
        raise CaptureError("it changes the shape, layout or storage of one of its inputs", operation="a write")
    if any(leaf.grad is not None for leaf in leaves):
        raise CaptureError(
            "it calls backward, and the gradients would be lost: compile the part before it, and call backward on "
            "the result",
            operation="backward",
        )
    written = tuple(i for i, stand_in in enumerate(stand_ins) if stand_in._version != before[i])
    for i in written:
        if isinstance(subject.tensors[subject.inputs[i]], CopiedView):
            raise CaptureError(
                "it writes to a view that is a copy, because it needed a redistribution", operation="a write"
            )
    if written:
        memory = [memory_of(local) for local in real]
        if any(memory.count(memory[i]) > 1 for i in written):
            raise CaptureError("it writes to an input that shares memory with another", operation="a write")
    reached = leaves_of([*returned, *(stand_ins[i] for i in written)])
    if any(not isinstance(leaf, FakeTensor) for leaf in reached.values()):
        raise CaptureError(
            "it passes a tensor that is not among its arguments to code that does not ask PyTorch's functions, such as "
            "an extension in C++: give the program this tensor as an argument",
            operation="a tensor",
        )
    detached = [leaf.requires_grad and id(leaf) not in reached for leaf in leaves]
    return detached, written


def _noting(
    program: _LocalProgram,
    stand_ins: Sequence[torch.Tensor],
    surroundings: Surroundings,
    executed: Executed,
    steps: _Steps | None,
) -> tuple[torch.Tensor, ...]:
    error: Exception | None = None
    with steps or nullcontext(), executed.noting():
        try:
            returned = program.run(stand_ins)
        except Exception as raised:  # perhaps of a tensor that is found in what is searched now
            error = raised
    if executed.globals.keys() != surroundings.executed:
        raise NewCode from error
    if error is not None:
        raise error
    return returned


def _without_data(form: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    result = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=form.device)
    return result.requires_grad_(requires_grad)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return memory_of(tensor), tensor.shape, tensor.stride(), tensor.storage_offset()
