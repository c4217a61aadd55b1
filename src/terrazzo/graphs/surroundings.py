"""The surroundings of a program: modules, objects, classes, closures and globals, where it finds what is no argument.

A graph is valid for what these hold when it is captured, so each call looks at them again: tensors become inputs of
the graph, and everything else is compared, by value (numbers, strings, flags) or by identity (other objects).
A tensor that is not found here but used while the program is captured raises an error.

What a program reads is known from the code that ran when it was captured (`Executed`): these functions' globals and
closures, and from there all attributes whose names occur in that code. So other values of attributes that only code
outside of the program uses do not matter.
"""

from __future__ import annotations

import array
import dis
import enum
import functools
import gc
import inspect
import logging
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, pairwise
from operator import is_, itemgetter
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import Function

from terrazzo.graphs.values import digits_of, has_data

SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
# Their functions are not searched; the last four are what PyTorch runs, for sizes, types and the order of products.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "terrazzo", "sympy", "mpmath", "typing_extensions", "opt_einsum")
}
_TABLES = ("_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_MOST_ITEMS = 1000  # a longer list or dict is not searched: its items are compared if they are numbers and the like
_UNCOMPARABLE = (set, deque, bytearray, array.array, np.ndarray)  # sets and deques, if they are long or subclasses
_OBSERVERS = (logging.Logger.handle.__code__, warnings._showwarnmsg.__code__)  # type: ignore[attr-defined]
_ANY_NAME = frozenset(("getattr", "vars", "__dict__", "attrgetter"))  # what reads attributes that code does not name


class NotSearched:
    """The base class of objects that keep what a program does not read, such as its graphs."""


class Stale(Exception):
    """The surroundings have other parts now than when they were searched."""


class Executed:
    """The code of a program, outside of PyTorch, terrazzo and Python's library, that has run so far."""

    def __init__(self) -> None:
        self.globals: dict[tuple[CodeType, int], dict[str, Any]] = {}  # of each code, and by their id
        self.codes: set[CodeType] = set()
        self.names: set[str] = set()
        self._collecting = False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A block in which this thread's calls are noted, except those that `_interrupts` or a collection makes."""
        before, thread = sys.getprofile(), threading.get_ident()

        def collect(phase: str, info: dict[str, int]) -> None:
            if threading.get_ident() == thread:
                self._collecting = phase == "start"

        gc.callbacks.insert(0, collect)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
            gc.callbacks.remove(collect)
            self._collecting = False

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and not self._collecting:
            code, variables = frame.f_code, frame.f_globals
            known = (code, id(variables)) in self.globals or _is_of_library(variables.get("__name__"))
            if not known and not _interrupts(frame):
                self.add(code, variables)

    def add(self, code: CodeType, variables: dict[str, Any]) -> None:
        """Note code, and the globals that it uses."""
        if (code, id(variables)) not in self.globals and not _is_of_library(variables.get("__name__")):
            self.globals[code, id(variables)] = variables
            self.codes.add(code)
            self.names |= set(_names_in(code))

    def line_with(self, name: str) -> tuple[str, int] | None:
        """The file and first line of a function that uses `name`."""
        for code in self.codes:
            if name in code.co_names or name in code.co_freevars:
                return code.co_filename, code.co_firstlineno
        return None


def _interrupts(frame: FrameType | None) -> bool:
    """Whether a frame runs for a log record, a warning, a signal or a collection that came while the program ran."""
    while frame is not None and frame.f_globals.get("__name__") != "terrazzo.graphs.capture":
        if frame.f_code in _OBSERVERS or _is_handler(frame):
            return True
        frame = frame.f_back
    return False


def _is_handler(frame: FrameType) -> bool:
    """Whether a frame is of what is registered for a signal or for collections, and called as the interpreter does."""
    code = frame.f_code
    count = code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS) + code.co_kwonlyargcount
    given = [frame.f_locals.get(name) for name in code.co_varnames[:count]] if count else []
    if code.co_flags & inspect.CO_VARARGS:
        given += given.pop() or ()
    for first, second in pairwise(given):
        if second is frame.f_back and isinstance(first, int) and first in signal.valid_signals():
            return code is _code_of(signal.getsignal(first))
        if type(first) is str and type(second) is dict and code in map(_code_of, gc.callbacks):
            return True
    return False


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def _is_of_library(module: Any) -> bool:
    if not isinstance(module, str):
        return False
    return module.partition(".")[0] in _LIBRARIES or module.startswith("namedtuple_")  # what `namedtuple` generates


class _Cell:
    """The cell of a closure, as a mapping with one name."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def __getitem__(self, name: str) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value


class _Variable(_Cell):
    """A `ContextVar`, in the context that asks."""

    def __getitem__(self, name: str) -> Any:
        return self.cell.get(None)

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.set(value)


class _Elements(_Cell):
    """The elements of a set, deque, list or dict, as a mapping with one name: the same tuple until they change."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self._seen: tuple[Any, ...] = ()

    def __getitem__(self, name: str) -> Any:
        now = tuple(chain.from_iterable(self.cell.items()) if isinstance(self.cell, dict) else self.cell)
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            self._seen = now
        return self._seen

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.clear()
        if isinstance(self.cell, dict):
            value = zip(value[::2], value[1::2], strict=True)
        (self.cell.update if isinstance(self.cell, set | dict) else self.cell.extend)(value)


class _Attributes:
    """The attributes of a class, of an object with slots, or of a `threading.local` in the thread that asks."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._own = vars(owner) if isinstance(owner, type) else None

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.owner, name) if self._own is None else self._own[name]
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def __contains__(self, name: str) -> bool:
        return hasattr(self.owner, name) if self._own is None else name in self._own

    def __len__(self) -> int:
        return len(vars(self.owner))


class Container:
    """One dict, list or cell: which of its items are tensors, and the values of the others."""

    def __init__(self, label: str, holder: Any, tensors: list[Any], settings: list[Any]) -> None:
        self.label = label
        self.holder = holder
        self.tensor_names = tensors
        self.setting_names = settings
        self.get_tensors = _getter(tensors)
        self.get_settings = _getter(settings)
        self.seen: tuple[Any, ...] = self.get_settings(holder)
        self._numbers: dict[Any, int] = {}
        self.number = self._number(self.seen)

    def update(self, values: tuple[Any, ...]) -> None:
        """Record changed settings; raises Stale if they are of another kind."""
        for before, now in zip(self.seen, values, strict=True):
            if before is not now and not (isinstance(before, SCALARS) and isinstance(now, SCALARS)):
                raise Stale
        self.seen, self.number = values, self._number(values)

    def describe(self) -> Iterator[tuple[str, str]]:
        """Each setting with its name, for a report."""
        for name, value in zip(self.setting_names, self.seen, strict=True):
            if isinstance(value, SCALARS):
                yield self.name_of(name), repr(value)

    def name_of(self, name: Any) -> str:
        """The name of one item, for a report."""
        if isinstance(self.holder, list | tuple):
            return f"{self.label}[{name}]"
        return f"{self.label}.{name}" if self.label else str(name)

    def _number(self, values: tuple[Any, ...]) -> int:
        # Objects are kept alive, so that no other object gets their ids.
        key = tuple((type(v), digits_of(v)) if isinstance(v, SCALARS) else _Same(v) for v in values)
        return self._numbers.setdefault(key, len(self._numbers))


class _Same:
    """Compares an object by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Surroundings:
    """All containers that belong to a program."""

    def __init__(self, program: Any, executed: Executed) -> None:
        """What runs later is not searched; what will run in backward is added to `executed`."""
        self.executed = frozenset(executed.globals)
        self._all = executed
        self.uncomparable: tuple[str, str] | None = None
        """The name, and the type, of a value that the program uses and that cannot be compared at each call."""
        self.containers: list[Container] = []
        self.modules: list[nn.Module] = []
        self._sized: list[Any] = []
        self._kept: list[tuple[str, Any]] = []
        self._classes: set[type] = set()
        self._visited: dict[int, Any] = {}
        self._places: dict[tuple[int, Any], Any] = {}  # of single variables and attributes; keeps the ids unique
        self._names, self._codes = set(executed.names), set(executed.codes)
        self._any_name = not _ANY_NAME.isdisjoint(self._names)
        if isinstance(program, nn.Module):
            self._module("", program)
        else:
            self._search("", program)
        for (code, _), variables in executed.globals.items():
            self._globals(code, variables)
        self._with_tensors = [container for container in self.containers if container.tensor_names]
        self._with_settings = [container for container in self.containers if container.setting_names]
        self._settings = [(container.get_settings, container.holder) for container in self._with_settings]
        self._tensors = [(container.get_tensors, container.holder) for container in self._with_tensors]
        self._sizes = [len(holder) for holder in self._sized]
        self._remember()

    def look(self) -> tuple[list[Any], tuple[int, ...]]:
        """The tensors that are there now, and numbers that identify everything else; raises Stale."""
        if list(map(len, self._sized)) != self._sizes:
            raise Stale
        try:
            values = [get(holder) for get, holder in self._settings]
            tensors = list(chain.from_iterable([get(holder) for get, holder in self._tensors]))
        except (KeyError, IndexError, ValueError):
            raise Stale from None
        if not all(map(is_, chain.from_iterable(values), self._seen)):
            for container, now in zip(self._with_settings, values, strict=True):
                container.update(now)
            self._remember()
        return tensors, self._numbers

    def _remember(self) -> None:
        self._seen = list(chain.from_iterable([container.seen for container in self._with_settings]))
        self._numbers = tuple([container.number for container in self._with_settings])

    def freeze(self, tensors: Sequence[Any]) -> Frozen:
        """What all containers hold at this moment; `tensors` are those in them."""
        return Frozen(self._kept, self.containers, tensors)

    def slots(self) -> list[tuple[Container, Any]]:
        """Where each of the tensors of `look` is, in its order."""
        return [(container, name) for container in self._with_tensors for name in container.tensor_names]

    def describe(self) -> dict[str, str]:
        """Each setting with its name, for a report."""
        return dict(chain.from_iterable(container.describe() for container in self.containers))

    # ------------------------------------------------------------------ the search

    def _search(self, label: str, value: Any) -> None:
        """Find the containers in `value`, which is not a tensor; what is logged, and how, is not the program's."""
        if id(value) in self._visited or isinstance(value, (*SCALARS, torch.Tensor, logging.Filterer, NotSearched)):
            return
        self._visited[id(value)] = value
        if isinstance(value, nn.Module):
            self._module(label, value)
        elif isinstance(value, FunctionType):
            self._function(label, value)
        elif isinstance(value, MethodType):
            self._search(label, value.__func__)
            self._search(label, value.__self__)
        elif isinstance(value, functools.partial):
            for i, part in enumerate((value.func, value.args, value.keywords)):
                self._search(f"{label}.{('func', 'args', 'keywords')[i]}", part)
        elif isinstance(value, list | tuple | dict):
            if len(value) <= _MOST_ITEMS:
                self._container(label, value)
            else:
                self._many(label, value)
            if type(value) not in (list, tuple, dict):
                self._object(label, value)
        elif isinstance(value, ModuleType):
            if not _is_of_library(value.__name__):
                self._named(label, vars(value), self._names)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ContextVar):
            self._value(label, _Variable(value), label, value.get(None))
        elif isinstance(value, threading.local):
            self._class(type(value))
            own, names = _Attributes(value), vars(value).keys()
            self._sized.append(own)  # an attribute may be new there
            self._named(label, own, set(names) if self._any_name else self._names & names)
        elif type(value) in (set, deque) and len(value) <= _MOST_ITEMS:
            elements = _Elements(value)
            self._value(label, elements, label, elements[label])
        elif isinstance(value, _UNCOMPARABLE):
            self._refuse(label, value)
        else:
            self._object(label, value)

    def _module(self, label: str, module: nn.Module) -> None:
        self._visited[id(module)] = module
        self.modules.append(module)
        own = vars(module)
        for table in _TABLES:
            holder = own.get(table)
            if holder is not None:
                names = [name for name, t in holder.items() if isinstance(t, torch.Tensor)]
                self._add(label, holder, names, [name for name in holder if name not in names])
        for table in _HOOKS:
            if table in own:
                self._add(f"{label}.{table}".lstrip("."), own[table], [], list(own[table]))
        names = [name for name, value in own.items() if isinstance(value, torch.Tensor)]
        settings = [name for name in own if name not in names and name not in _OF_TORCH]
        self._add(label, own, names, settings)
        for name, child in own["_modules"].items():
            self._search(f"{label}.{name}".lstrip("."), child)
        self._add(label, own["_modules"], [], list(own["_modules"]))
        for name, value in own.items():
            if name in self._names:
                self._search(f"{label}.{name}".lstrip("."), value)
            elif type(value) in (list, tuple, dict) and not name.startswith("_"):
                before = self.uncomparable  # of PyTorch's modules it is not known which attributes they use
                self._search(f"{label}.{name}".lstrip("."), value)
                self.uncomparable = before
        for cls in type(module).__mro__:
            forward = vars(cls).get("forward")
            if isinstance(forward, FunctionType):
                self._search("", forward)
        self._class(type(module))

    def _class(self, cls: type) -> None:
        """A class: the attributes that the program names, and the functions of it that have run."""
        for each in cls.__mro__:
            if each in self._classes or _is_of_library(each.__module__):
                continue
            self._classes.add(each)
            self._sized.append(vars(each))  # an attribute that is new there may hide one of a base class
            self._named(each.__name__, _Attributes(each), self._names & vars(each).keys())
            for name, value in vars(each).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    if name == "backward" and issubclass(each, Function):  # it runs after the program
                        self._all.add(function.__code__, function.__globals__)
                    if function.__code__ in self._codes:
                        self._search(each.__name__, function)

    def _function(self, label: str, function: FunctionType) -> None:
        if _is_of_library(function.__module__):
            return
        self._names |= set(_names_in(function.__code__))
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # the closure variable has not been assigned yet
            self._value(name, _Cell(cell), name, value)
        if function.__defaults__:
            self._search(f"{label} defaults", function.__defaults__)
        if function.__kwdefaults__:
            self._search(f"{label} defaults", function.__kwdefaults__)
        if vars(function):
            self._named(label, vars(function), self._names)
        self._globals(function.__code__, function.__globals__)

    def _globals(self, code: CodeType, variables: dict[str, Any]) -> None:
        self._named("", variables, set(_globals_in(code)))

    def _named(self, label: str, holder: Any, names: set[str]) -> None:
        """Note the variables or attributes of `holder` that have these names."""
        for name in sorted(names if isinstance(holder, _Attributes) else names & holder.keys()):
            self._value(f"{label}.{name}".lstrip("."), holder, name, holder[name])

    def _value(self, label: str, holder: Any, name: str, value: Any) -> None:
        place = (id(holder.owner) if isinstance(holder, _Attributes) else id(holder), name)
        if place not in self._places:
            self._places[place] = holder
            tensors, settings = ([name], []) if isinstance(value, torch.Tensor) else ([], [name])
            self._add(label.rpartition(".")[0], holder, tensors, settings, sized=False)
        self._search(label, value)

    def _object(self, label: str, value: Any) -> None:
        """Any other object: those attributes that occur in the program."""
        self._class(type(value))
        own = getattr(value, "__dict__", None)
        if type(own) is dict and id(own) not in self._visited:
            self._visited[id(own)] = own
            if not _is_of_library(type(value).__module__):
                self._sized.append(own)  # an attribute that is new there may hide one of its class
                self._kept.append((label, own))  # or it may hold what the capture computed (`cached_property`)
            self._named(label, own, set(own) if self._any_name else self._names)
        slots = {name for cls in type(value).__mro__ for name in _slots_of(cls)}
        if slots:
            slots = {name for name in slots if hasattr(value, name) and (self._any_name or name in self._names)}
            self._named(label, _Attributes(value), slots)

    def _container(self, label: str, value: Any) -> None:
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        if any(isinstance(name, torch.Tensor) for name in items):
            return
        tensors = [name for name, item in items.items() if isinstance(item, torch.Tensor)]
        self._add(label, value, tensors, [name for name in items if name not in tensors])
        for name, item in items.items():
            if not isinstance(item, torch.Tensor):
                self._search(f"{label}[{name!r}]", item)

    def _many(self, label: str, value: Any) -> None:
        """A long list, tuple or dict: compared as a whole, without a search for what is in it."""
        if not all(isinstance(item, SCALARS) for item in (value.values() if isinstance(value, dict) else value)):
            self._refuse(label, value)
        elif not isinstance(value, tuple):
            elements = _Elements(value)
            self._value(label, elements, label, elements[label])

    def _refuse(self, label: str, value: Any) -> None:
        if self.uncomparable is None:
            many = f" of {len(value)} items" if isinstance(value, list | tuple | dict) else ""
            self.uncomparable = label, type(value).__name__ + many

    def _add(self, label: str, holder: Any, tensors: list[Any], settings: list[Any], sized: bool = True) -> None:
        if sized and not isinstance(holder, tuple):
            self._sized.append(holder)
            self._kept.append((label, holder))
        if tensors or settings:
            self.containers.append(Container(label, holder, tensors, settings))


class Frozen:
    """The contents of containers before a program runs, to find out what it changes there, and to undo it.

    A tensor with data that has come there is another thread's: what a captured program makes has none.
    """

    def __init__(self, kept: list[tuple[str, Any]], containers: list[Container], tensors: Sequence[Any]) -> None:
        self._known = {id(tensor) for tensor in tensors}
        held = {id(holder) for _, holder in kept}
        self._items: list[tuple[str, Any, dict[Any, Any]]] = [
            (label, holder, dict(enumerate(holder)) if isinstance(holder, list) else dict(holder))
            for label, holder in kept
        ]
        for container in containers:
            if id(container.holder) not in held and not isinstance(container.holder, tuple):
                names = (*container.tensor_names, *container.setting_names)
                self._items.append(
                    (container.label, container.holder, {name: container.holder[name] for name in names})
                )
        self._sized = held

    def changes(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """What has changed: label, holder, name, value."""
        for label, holder, before in self._items:
            for name in self._names(holder, before):
                now = holder[name] if self._has(holder, name) else None
                if now is not before.get(name) and not self._is_of_others(now):
                    yield f"{label}.{name}".lstrip("."), holder, name, now

    def restore(self) -> None:
        """Restore the old contents."""
        for _, holder, before in self._items:
            if isinstance(holder, list):
                holder[:] = before.values()
                continue
            for name in self._names(holder, before):
                if self._has(holder, name) and self._is_of_others(holder[name]):
                    continue
                if name not in before:
                    del holder[name]
                elif not self._has(holder, name) or holder[name] is not before[name]:
                    holder[name] = before[name]

    def _is_of_others(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and id(value) not in self._known and has_data(value)

    def _names(self, holder: Any, before: dict[Any, Any]) -> list[Any]:
        if id(holder) not in self._sized:
            return list(before)
        now = range(len(holder)) if isinstance(holder, list) else holder
        return list(dict.fromkeys((*before, *now)))

    @staticmethod
    def _has(holder: Any, name: Any) -> bool:
        if isinstance(holder, _Cell):
            return True
        return name < len(holder) if isinstance(holder, list) else name in holder


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():  # getattr(x, "name")
            yield constant


def _globals_in(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_in(constant)


def _slots_of(cls: type) -> Iterator[str]:
    slots = () if _is_of_library(cls.__module__) else vars(cls).get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        yield f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _getter(names: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda holder: ()
    if len(names) == 1:
        (name,) = names
        return lambda holder: (holder[name],)
    return itemgetter(*names)
