"""A module tree as text and as JSON, at four levels of detail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from terrazzo.tensor.debug.counts import ByCollective
from terrazzo.tensor.debug.record import PHASES, Collective, Entry, ModuleRecord, Operation, Phase, short_dtype
from terrazzo.tensor.dtensor import DTensor

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
