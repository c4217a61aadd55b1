"""`terrazzo ls`, `show`, `verify` and `diff`: look at checkpoints, check them, compare them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any

import torch
import typer
from rich.filesize import decimal as human_size
from rich.pretty import pretty_repr
from rich.table import Table
from rich.text import Text

from terrazzo.checkpoint import Checkpoint, LazyTensor, verify
from terrazzo.checkpoint.manager.listing import steps_at
from terrazzo.checkpoint.native.collector import paused_collector
from terrazzo.checkpoint.tools.compare import Difference, compare
from terrazzo.checkpoint.tools.describe import about, files_of, row
from terrazzo.checkpoint.tools.lazy import in_order
from terrazzo.cli.screen import ERR, OUT, CheckpointPath, Json, errors, print_json, progress, say, shown
from terrazzo.cli.steps import list_steps
from terrazzo.layout.box import Box

_SHOWN_CHUNKS = 32
_LAID_OUT = 2000  # more rows are listed without a table


def list_values(
    checkpoint: CheckpointPath,
    pattern: Annotated[str, typer.Argument(help="Only names that match this shell-style pattern.")] = "*",
    json: Json = False,
) -> None:
    """List what a checkpoint holds, with shapes, dtypes, sizes and the number of parts.

    For the folder of a run, list its steps, their metrics and why they are kept; with a pattern, the values of the last
    step.
    """
    with errors(), paused_collector():
        if pattern == "*" and (steps := steps_at(checkpoint)):
            list_steps(checkpoint, steps, json=json)
            return
        opened = Checkpoint(checkpoint)
        entries = dict(opened.metadata.state_dict_metadata.items())
        said: dict[int, dict[str, Any]] = {}  # by entry, of which many names share one
        rows = []
        for name in in_order(entries if pattern == "*" else (name for name in entries if fnmatchcase(name, pattern))):
            known = said.get(id(entries[name]))
            if known is None:
                known = said[id(entries[name])] = row(opened, name)
            rows.append(known | {"name": name})
        total = sum(each["bytes"] or 0 for each in rows)
        if json:
            print_json({"checkpoint": str(checkpoint), **about(opened), "bytes": total, "values": rows})
            return
        if len(rows) > _LAID_OUT:  # laying out a table takes longer than all the rest
            cells = {number: "  ".join(_cells(known)[1:]) for number, known in said.items()}
            typer.echo("\n".join(f"{shown(each['name'])}  {cells[id(entries[each['name']])]}" for each in rows))
        else:
            table = Table("name", "dtype", "shape", box=None, header_style="bold")
            table.add_column("size", justify="right")
            table.add_column("parts", justify="right")
            for each in rows:
                table.add_row(*map(Text, _cells(each)))
            OUT.print(table)
        OUT.print(f"{len(rows)} values, {human_size(total)}")


def show(
    checkpoint: CheckpointPath,
    name: Annotated[str, typer.Argument(help="The value's name, as `ls` lists it.", show_default=False)],
    json: Json = False,
) -> None:
    """Show one value: shape, dtype, where each part is in the tensor and in which file, and its first numbers."""
    with errors(), paused_collector():
        opened = Checkpoint(checkpoint)
        if name not in opened:
            close = [known for known in opened if name in known][:5]
            hint = f"; similar names are {', '.join(close)}" if close else ""
            raise typer.BadParameter(shown(f"the checkpoint has no value {name!r}{hint}"))
        value = opened[name]
        if not isinstance(value, LazyTensor):
            if json:
                print_json({"name": name, "type": type(value).__name__, "value": repr(value)})
            else:
                say(value if isinstance(value, str) else pretty_repr(value))
            return
        parts = _parts(opened, value)
        first = _first_numbers(value)
        if json:
            print_json(row(opened, name) | {"chunks": parts, "first": first})
            return
        say(f"{name}: {value.dtype}, shape {list(value.shape)}, {human_size(value.nbytes)}")
        rounded = [float(f"{number:.5g}") if isinstance(number, float) else number for number in first]
        say(f"begins with {rounded}")
        table = Table("part", "file", box=None, header_style="bold")
        for part in parts[:_SHOWN_CHUNKS]:
            table.add_row(Text(part["slice"]), Text(shown(part["file"] or "")))
        OUT.print(table)
        if len(parts) > _SHOWN_CHUNKS:
            OUT.print(f"and {len(parts) - _SHOWN_CHUNKS} more parts")


def verify_checkpoint(checkpoint: CheckpointPath, json: Json = False) -> None:
    """Read every byte and compare it with its checksum."""
    with errors(), paused_collector():
        total = Checkpoint(checkpoint).total_bytes()
        with progress("verifying", total, hidden=json) as advance:
            found = verify(checkpoint, advance)
        if json:
            print_json({"checkpoint": str(checkpoint), "damage": found})
        else:
            for damage in found:
                say(str(damage), on=ERR, style="red")
            OUT.print(f"{len(found)} damaged places" if found else f"{human_size(total)}, all as it was saved")
    raise typer.Exit(1 if found else 0)


def diff(
    one: CheckpointPath,
    other: CheckpointPath,
    tolerance: Annotated[float, typer.Option(help="Numbers that differ by no more than this are equal.")] = 0.0,
    json: Json = False,
) -> None:
    """Say what differs between two checkpoints: names, shapes, dtypes, values."""
    with errors(), paused_collector():
        a, b = Checkpoint(one), Checkpoint(other)
        total = a.total_bytes()
        with progress("comparing", total, hidden=json) as advance:
            found: list[Difference] = list(compare(a, b, tolerance=tolerance, progress=advance))
        if json:
            print_json({"one": str(one), "other": str(other), "differences": found})
        else:
            for difference in found:
                say(f"{difference.name}: {difference.what}")
            OUT.print(f"{len(found)} differences" if found else "no difference")
    raise typer.Exit(1 if found else 0)


def _cells(said: dict[str, Any]) -> list[str]:
    """A row of the list, as text."""
    shape = "" if said["shape"] is None else " x ".join(map(str, said["shape"])) or "scalar"
    size = "" if said["bytes"] is None else human_size(said["bytes"])
    return [shown(said["name"]), said["dtype"] or "object", shape, size, str(said["parts"] or "")]


def _parts(checkpoint: Checkpoint, tensor: LazyTensor) -> list[dict[str, Any]]:
    """Each stored part of a tensor: which slice it is, and in which file it lies."""
    files = files_of(checkpoint, tensor.name)
    return [
        {"slice": _slice_text(box), "offsets": box.offsets, "lengths": box.lengths, "file": file}
        for box, file in zip(tensor.chunks, files, strict=True)
    ]


def _slice_text(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.lengths, strict=True)) + "]"


def _first_numbers(tensor: LazyTensor) -> list[Any]:
    """The first elements."""
    if 0 in tensor.shape:
        return []
    corner = Box((0,) * len(tensor.shape), (*(1 for _ in tensor.shape[:-1]), *(min(n, 8) for n in tensor.shape[-1:])))
    values = tensor.read(corner).reshape(-1)
    shown: list[Any] = (values.to(torch.complex128) if values.is_complex() else values.double()).tolist()
    return [str(value) for value in shown] if values.is_complex() else shown
