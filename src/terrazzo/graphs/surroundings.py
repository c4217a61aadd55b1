"""The surroundings of a program: modules, closures and globals, where it finds tensors and settings besides arguments.

A graph is valid for what these hold when it is captured, so each call looks at them again: tensors become inputs of
the graph, and everything else is compared, by value (numbers, strings, flags) or by identity (other objects).
A tensor that is not found here but used while the program is captured raises an error.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_, itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
_LIBRARIES = ("torch", "terrazzo")  # their functions are not searched for globals
_TABLES = ("_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_MOST_ITEMS = 1000  # a longer list or dict is taken for data, not settings


class Stale(Exception):
    """The surroundings have other parts now than when they were searched."""


class _Cell:
    """The cell of a closure, as a mapping with one name."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def __getitem__(self, name: str) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value


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
        key = tuple((type(v), v) if isinstance(v, SCALARS) else _Same(v) for v in values)
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

    def __init__(self, program: Any, name: str = "") -> None:
        self.containers: list[Container] = []
        self.modules: list[nn.Module] = []
        self._sized: list[Any] = []
        self._sized_labels: list[str] = []
        self._visited: dict[int, Any] = {}
        self._names: set[str] = set()
        if isinstance(program, nn.Module):
            self._module(name, program)
        else:
            self._search(name, program)
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

    def freeze(self) -> Frozen:
        """What all containers hold at this moment."""
        return Frozen(self._sized_labels, self._sized, self.containers)

    def slots(self) -> list[tuple[Container, Any]]:
        """Where each of the tensors of `look` is, in its order."""
        return [(container, name) for container in self._with_tensors for name in container.tensor_names]

    def describe(self) -> dict[str, str]:
        """Each setting with its name, for a report."""
        return dict(chain.from_iterable(container.describe() for container in self.containers))

    # ------------------------------------------------------------------ the search

    def _search(self, label: str, value: Any) -> None:
        """Find the containers in `value`, which is not a tensor."""
        if id(value) in self._visited or isinstance(value, SCALARS):
            return
        self._visited[id(value)] = value
        if isinstance(value, nn.Module):
            self._module(label, value, visited=False)
        elif isinstance(value, FunctionType):
            self._function(label, value)
        elif isinstance(value, MethodType):
            self._search(label, value.__func__)
            if isinstance(value.__self__, nn.Module):
                self._search(label, value.__self__)
            else:
                self._object(label, value.__self__)
        elif isinstance(value, functools.partial):
            for i, part in enumerate((value.func, value.args, value.keywords)):
                self._search(f"{label}.{('func', 'args', 'keywords')[i]}", part)
        elif type(value) in (list, tuple, dict) and len(value) <= _MOST_ITEMS:
            self._container(label, value)

    def _module(self, label: str, module: nn.Module, visited: bool = False) -> None:
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
            if type(value) in (list, tuple, dict) and not name.startswith("_"):
                self._search(f"{label}.{name}".lstrip("."), value)
        if not type(module).__module__.startswith(_LIBRARIES):
            for cls in type(module).__mro__:
                forward = vars(cls).get("forward")
                if isinstance(forward, FunctionType) and not cls.__module__.startswith(_LIBRARIES):
                    self._search("", forward)

    def _function(self, label: str, function: FunctionType) -> None:
        if (function.__module__ or "").startswith(_LIBRARIES):
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
        for name in sorted(set(_names_in(function.__code__)) & function.__globals__.keys()):
            value = function.__globals__[name]
            if not isinstance(value, ModuleType | type) and not inspect.isbuiltin(value):
                self._value(name, function.__globals__, name, value)

    def _value(self, label: str, holder: Any, name: str, value: Any) -> None:
        """One variable of a function: from a closure or global."""
        if isinstance(value, torch.Tensor):
            self._add("", holder, [name], [], sized=False)
            return
        self._add("", holder, [], [name], sized=False)
        self._search(label, value)
        if not isinstance(value, SCALARS) and not isinstance(value, ModuleType | type | nn.Module):
            self._object(label, value)

    def _object(self, label: str, value: Any) -> None:
        """Any other object: those attributes that occur in the functions found so far."""
        own = getattr(value, "__dict__", None)
        if type(own) is not dict or id(own) in self._visited or isinstance(value, FunctionType | MethodType):
            return
        self._visited[id(own)] = own
        names = [name for name in own if name in self._names]
        tensors = [name for name in names if isinstance(own[name], torch.Tensor)]
        self._add(label, own, tensors, [name for name in names if name not in tensors], sized=False)
        for name in names:
            if name not in tensors:
                self._search(f"{label}.{name}", own[name])

    def _container(self, label: str, value: Any) -> None:
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        if any(isinstance(name, torch.Tensor) for name in items):
            return
        tensors = [name for name, item in items.items() if isinstance(item, torch.Tensor)]
        self._add(label, value, tensors, [name for name in items if name not in tensors])
        for name, item in items.items():
            if not isinstance(item, torch.Tensor):
                self._search(f"{label}[{name!r}]", item)

    def _add(self, label: str, holder: Any, tensors: list[Any], settings: list[Any], sized: bool = True) -> None:
        if sized and type(holder) is not tuple:
            self._sized.append(holder)
            self._sized_labels.append(label)
        if tensors or settings:
            self.containers.append(Container(label, holder, tensors, settings))


class Frozen:
    """What the containers held, to find out what a program changes there, and to undo it."""

    def __init__(self, labels: list[str], sized: list[Any], containers: list[Container]) -> None:
        held = {id(holder) for holder in sized}
        self._items: list[tuple[str, Any, dict[Any, Any]]] = [
            (label, holder, dict(enumerate(holder)) if isinstance(holder, list) else dict(holder))
            for label, holder in zip(labels, sized, strict=True)
        ]
        for container in containers:
            if id(container.holder) not in held and type(container.holder) is not tuple:
                names = (*container.tensor_names, *container.setting_names)
                self._items.append(
                    (container.label, container.holder, {name: container.holder[name] for name in names})
                )
        self._sized = held

    def changes(self, expected: dict[tuple[int, Any], Any]) -> Iterator[tuple[str, Any, Any, Any]]:
        """What has changed and is not as `expected`, by (id of the holder, name): label, holder, name, value."""
        for label, holder, before in self._items:
            for name in self._names(holder, before):
                now = holder[name] if self._has(holder, name) else None
                if now is not expected.get((id(holder), name), before.get(name)):
                    yield f"{label}.{name}".lstrip("."), holder, name, now

    def restore(self) -> None:
        """Restore the old contents."""
        for _, holder, before in self._items:
            if isinstance(holder, list):
                holder[:] = before.values()
                continue
            for name in self._names(holder, before):
                if name not in before:
                    del holder[name]
                elif not self._has(holder, name) or holder[name] is not before[name]:
                    holder[name] = before[name]

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


def _getter(names: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda holder: ()
    if len(names) == 1:
        (name,) = names
        return lambda holder: (holder[name],)
    return itemgetter(*names)
