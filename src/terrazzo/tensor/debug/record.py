"""What a debug mode records: a tree of modules, with the operations and collectives of each in forward and in backward.

The module of a forward operation is known from hooks. The module of a backward node is known from its sequence number:
autograd numbers nodes as it creates them, so the nodes of one call of a module are an interval of numbers. Nothing is
added to the graph, and no tensor is kept alive.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from terrazzo._torch.autograd import current_node, in_backward, node_count, number_of
from terrazzo.tensor.debug.counts import ByCollective
from terrazzo.tensor.dtensor import DTensor

Phase: TypeAlias = Literal["forward", "backward"]
PHASES: tuple[Phase, Phase] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: its kind, the axis and how many ranks it has, and the bytes (see `terrazzo.comm.observe`)."""

    kind: str
    axis: str
    ranks: int
    bytes: int
    op: str | None
    phase: Phase
    module: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: the user's own on DTensors (`distributed`), or one of ATen's on this rank's local tensors."""

    name: str
    arguments: tuple[str, ...]
    distributed: bool
    trivial: bool


Entry: TypeAlias = Collective | Operation


@dataclass(slots=True)
class ModuleRecord:
    """One module of the tree; the root is called Global and holds what ran outside all modules."""

    fqn: str
    type_name: str
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    children: list[ModuleRecord] = field(default_factory=list)
    entries: dict[Phase, list[Entry]] = field(default_factory=lambda: {"forward": [], "backward": []})

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ModuleRecord]]:
        """This record and all records below it, with their depths."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


@dataclass(frozen=True, slots=True)
class _Frame:
    """A module call that has not returned yet."""

    record: ModuleRecord
    first_node: int
    in_backward: bool  # a recomputation by activation checkpointing


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []


class _Calls:
    """The finished module calls of one thread, in the order in which they ended; calls nest."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._calls: list[tuple[int, bool, ModuleRecord]] = []

    def add(self, first_node: int, end: int, outermost: bool, record: ModuleRecord) -> None:
        self._ends.append(end)
        self._calls.append((first_node, outermost, record))

    def innermost(self, node: int) -> ModuleRecord | None:
        """The module that created node `node`: of the calls that were running then, the one that ended first."""
        for first_node, outermost, record in self._calls[bisect_right(self._ends, node) :]:
            if first_node <= node:
                return record
            if outermost:
                return None
        return None


class ModuleTree:
    """The record of one debug mode, and the module that is running now."""

    def __init__(self) -> None:
        self.root = ModuleRecord("Global", "")
        self._stack = _Stack()
        self._records: WeakKeyDictionary[nn.Module, ModuleRecord] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[nn.Module, tuple[str, dict[str, torch.Tensor]]] = WeakKeyDictionary()
        self._roots: Counter[str] = Counter()
        self._calls: defaultdict[int, _Calls] = defaultdict(_Calls)  # by thread, because sequence numbers are, too
        self._home = threading.get_ident()
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ hooks

    def enter(self, module: nn.Module, _args: Any) -> None:
        frames = self._stack.frames
        with self._lock:
            record = self._records.get(module)
            if record is None:
                parent = frames[-1].record if frames else self.root
                record = self._records[module] = self._new_record(module, parent)
        frames.append(_Frame(record, node_count(), current_node() is not None))

    def leave(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        frames = self._stack.frames
        if frames:  # empty if the mode was entered inside this call
            frame = frames.pop()
            self._calls[threading.get_ident()].add(frame.first_node, node_count(), not frames, frame.record)

    def _new_record(self, module: nn.Module, parent: ModuleRecord) -> ModuleRecord:
        if module not in self._known:
            self._get_to_know(module, parent)
        fqn, parameters = self._known[module]
        record = ModuleRecord(fqn, type(module).__name__, parameters)
        parent.children.append(record)
        return record

    def _get_to_know(self, module: nn.Module, parent: ModuleRecord) -> None:
        """Names and parameters of a module and of all inside it, before `fully_shard` unshards the first to run."""
        fqn = type(module).__name__
        if parent is not self.root:
            fqn = f"{parent.fqn}.{fqn}"
        self._roots[fqn] += 1
        if self._roots[fqn] > 1:
            fqn = f"{fqn}({self._roots[fqn]})"
        for name, inner in module.named_modules():
            parameters = {key: p.data for key, p in inner.named_parameters(recurse=False)}
            self._known.setdefault(inner, (f"{fqn}.{name}" if name else fqn, parameters))

    # ------------------------------------------------------------------ which module is running

    def current(self) -> tuple[ModuleRecord, Phase]:
        """The module that this thread runs, and whether it runs its forward or its backward."""
        node = current_node()
        frames = self._stack.frames
        top = frames[-1] if frames else None
        if node is None:
            return (self.root if top is None else top.record), "backward" if in_backward() else "forward"
        if top is not None and top.in_backward:
            return top.record, "backward"
        # Accelerators have their own backward threads; their nodes were created by the thread that entered the mode.
        here = threading.get_ident()
        made = self._calls[here if here in self._calls else self._home].innermost(number_of(node))
        return self.root if made is None else made, "backward"

    def write(self, entry: Operation) -> None:
        record, phase = self.current()
        record.entries[phase].append(entry)

    def write_collective(self, kind: str, axis: str, ranks: int, nbytes: int, op: str | None) -> Collective:
        record, phase = self.current()
        collective = Collective(kind, axis, ranks, nbytes, op, phase, record.fqn)
        record.entries[phase].append(collective)
        return collective


def describe_argument(value: Any) -> str:
    """An argument of an operation as text: tensors by shape and placements.

    >>> describe_argument([torch.ones(2, 3), 4])
    '[f32[2, 3], 4]'
    """
    if isinstance(value, DTensor):
        placements = "".join(str(p) for p in value.placements)
        return f"{short_dtype(value.dtype)}{list(value.shape)}{placements}"
    if isinstance(value, torch.Tensor):
        return f"{short_dtype(value.dtype)}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(describe_argument(v) for v in value)}]"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def short_dtype(dtype: torch.dtype) -> str:
    """A short name of a dtype.

    >>> short_dtype(torch.float32), short_dtype(torch.bfloat16), short_dtype(torch.bool)
    ('f32', 'bf16', 'bool')
    """
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name


# ------------------------------------------------------------------ text and JSON


_WITH_DETAILS = 1
_WITH_LOCAL_OPERATIONS = 2
_WITH_TRIVIAL_OPERATIONS = 3


def add_totals(record: ModuleRecord, result: dict[str, dict[Phase, ByCollective]]) -> None:
    """Add to `result`, by module and phase, the counts of collectives of a record and of all records below it."""
    for _, below in record.walk():
        for phase in PHASES:
            for entry in below.entries[phase]:
                if isinstance(entry, Collective):
                    _of(result, record)[phase].add(entry.kind, 1)
    if not record.type_name:
        _of(result, record)
    for child in record.children:
        add_totals(child, result)


def _of(result: dict[str, dict[Phase, ByCollective]], record: ModuleRecord) -> dict[Phase, ByCollective]:
    return result.setdefault(record.fqn, {phase: ByCollective() for phase in PHASES})


def shows(operation: Operation, noise_level: int) -> bool:
    """Whether an operation is shown at this level."""
    if noise_level < _WITH_DETAILS or (operation.trivial and noise_level < _WITH_TRIVIAL_OPERATIONS):
        return False
    return operation.distributed or noise_level >= _WITH_LOCAL_OPERATIONS


def text_table(root: ModuleRecord, noise_level: int) -> str:
    """The tree, indented; totals include what is below a module."""
    lines: list[str] = []
    for depth, record in root.walk():
        pad = "  " * depth
        kind = f" ({record.type_name})" if record.type_name and noise_level >= _WITH_DETAILS else ""
        lines.append(f"{pad}{record.fqn}{kind}")
        if noise_level >= _WITH_DETAILS:
            lines.extend(f"{pad}  * {name}: {_describe_parameter(p)}" for name, p in record.parameters.items())
        for phase in PHASES:
            body = list(_phase_lines(record, phase, noise_level))
            if body:
                lines.append(f"{pad}  {phase.upper()}")
                lines.extend(f"{pad}    {line}" for line in body)
    return "\n".join(lines) + "\n"


def _phase_lines(record: ModuleRecord, phase: Phase, noise_level: int) -> Iterable[str]:
    yield from _totals([e for _, r in record.walk() for e in r.entries[phase]])
    if noise_level < _WITH_DETAILS:
        return
    for entry in record.entries[phase]:
        if isinstance(entry, Collective):
            yield f"> {_describe_collective(entry)}"
        elif shows(entry, noise_level):
            yield f"{entry.name}({', '.join(entry.arguments)})"


def _totals(entries: Sequence[Entry]) -> Iterable[str]:
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in entries:
        if isinstance(entry, Collective):
            count, nbytes = totals.get((entry.kind, entry.axis), (0, 0))
            totals[entry.kind, entry.axis] = (count + 1, nbytes + entry.bytes)
    for (kind, axis), (count, nbytes) in totals.items():
        yield f"{kind} on {axis}: {count} x, {format_bytes(nbytes)}"


def _describe_collective(entry: Collective) -> str:
    op = f" ({entry.op})" if entry.op else ""
    return f"{entry.kind}{op} on {entry.axis} of {entry.ranks} ranks, {format_bytes(entry.bytes)}"


def _describe_parameter(parameter: torch.Tensor) -> str:
    text = f"{short_dtype(parameter.dtype)}{list(parameter.shape)}"
    if isinstance(parameter, DTensor):
        text += f" placed {[str(p) for p in parameter.placements]} on mesh {tuple(parameter.device_mesh.shape)}"
    return text


def format_bytes(count: int) -> str:
    """A number of bytes with a unit.

    >>> format_bytes(12), format_bytes(4096), format_bytes(5 * 2**20)
    ('12 B', '4.0 KiB', '5.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def json_tree(record: ModuleRecord, noise_level: int) -> dict[str, Any]:
    """The tree as plain data."""
    result: dict[str, Any] = {"fqn": record.fqn, "module_type": record.type_name, "parameters": []}
    if noise_level >= _WITH_DETAILS:
        result["parameters"] = [[name, _describe_parameter(p)] for name, p in record.parameters.items()]
    for phase in PHASES:
        entries = record.entries[phase]
        result[f"collectives_{phase}"] = [_json_collective(e) for e in entries if isinstance(e, Collective)]
        result[f"operations_{phase}"] = [
            {"name": e.name, "arguments": list(e.arguments), "distributed": e.distributed}
            for e in entries
            if isinstance(e, Operation) and shows(e, noise_level)
        ]
    result["children"] = [json_tree(child, noise_level) for child in record.children]
    return result


def _json_collective(entry: Collective) -> dict[str, Any]:
    return {"kind": entry.kind, "axis": entry.axis, "ranks": entry.ranks, "bytes": entry.bytes, "op": entry.op}
