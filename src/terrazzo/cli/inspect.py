"""`terrazzo ls`, `show`, `verify` and `diff`: look at checkpoints, check them, compare them.

They answer without PyTorch where the checkpoint is of terrazzo's own format; `diff` imports it when it has to read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from itertools import islice
from typing import Annotated, Any

import typer
from rich.filesize import decimal as human_size
from rich.pretty import pretty_repr
from rich.table import Table
from rich.text import Text

from terrazzo._meant import counted, meant
from terrazzo.checkpoint.listing import Listed, Listing, in_order
from terrazzo.checkpoint.manager.records import VALUE as MANAGERS_RECORD
from terrazzo.checkpoint.manager.records import steps_at
from terrazzo.checkpoint.tools import listing_of
from terrazzo.checkpoint.tools.verify import check
from terrazzo.cli.screen import (
    ERR,
    OUT,
    CheckpointPath,
    Json,
    errors,
    paused_collector,
    print_json,
    progress,
    say,
    shown,
)
from terrazzo.cli.steps import list_steps
from terrazzo.errors import CheckpointCorruptError
from terrazzo.layout.box import Box

_SHOWN_CHUNKS = 32
_SHOWN_NUMBERS = 8
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
        with progress("reading names"):
            listing = listing_of(checkpoint)
            entries = listing.entries
        names = in_order(entries if pattern == "*" else (name for name in entries if fnmatchcase(name, pattern)))
        if not names and pattern != "*":
            raise typer.BadParameter(shown(f"no value of the checkpoint matches {pattern!r}{_hint(pattern, entries)}"))
        total = sum(entries[name].nbytes or 0 for name in names)
        if json:
            rows = [entries[name].row(name) for name in names]
            print_json({"checkpoint": str(checkpoint), **listing.about(), "bytes": total, "values": rows})
            return
        if len(names) > _LAID_OUT:  # laying out a table takes longer than all the rest
            cells: dict[int, str] = {}  # by entry, of which many names share one
            for entry in entries.values():
                if id(entry) not in cells:
                    cells[id(entry)] = "  ".join(_cells(entry))
            typer.echo("\n".join([f"{shown(name)}  {cells[id(entries[name])]}" for name in names]))
        else:
            table = Table("name", "dtype", "shape", box=None, header_style="bold")
            table.add_column("size", justify="right")
            table.add_column("parts", justify="right")
            for name in names:
                table.add_row(*map(Text, (shown(name), *_cells(entries[name]))))
            OUT.print(table)
        OUT.print(f"{counted(len(names), 'value')}, {human_size(total)}")


def show(
    checkpoint: CheckpointPath,
    name: Annotated[str, typer.Argument(help="The value's name, as `ls` lists it.", show_default=False)],
    json: Json = False,
) -> None:
    """Show one value: shape, dtype, where each part is in the tensor and in which file, and its first numbers."""
    with errors(), paused_collector():
        with progress("reading names"):
            listing = listing_of(checkpoint)
            entry = listing.entry(name)
        if entry is None:
            raise typer.BadParameter(shown(f"the checkpoint has no value {name!r}{_hint(name, listing.entries)}"))
        if entry.dtype is None or entry.shape is None or entry.nbytes is None:
            value = listing.value(name)
            if json:
                print_json({"name": name, "type": type(value).__name__, "value": repr(value)})
            else:
                say(value if isinstance(value, str) else pretty_repr(value))
            return
        parts = _parts(listing, name)
        first = listing.first(name, _SHOWN_NUMBERS)
        if json:
            print_json(entry.row(name) | {"chunks": parts, "first": first})
            return
        say(f"{name}: torch.{entry.dtype}, shape {list(entry.shape)}, {human_size(entry.nbytes)}")
        rounded = [float(f"{number:.5g}") if isinstance(number, float) else number for number in first]
        say(f"begins with {rounded}")
        table = Table("part", "file", box=None, header_style="bold")
        for part in parts[:_SHOWN_CHUNKS]:
            table.add_row(Text(part["slice"]), Text(shown(part["file"] or "")))
        OUT.print(table)
        if len(parts) > _SHOWN_CHUNKS:
            OUT.print(f"and {len(parts) - _SHOWN_CHUNKS} more parts")


def verify_checkpoint(checkpoint: CheckpointPath, json: Json = False) -> None:
    """Read every byte and compare it with its checksum: terrazzo's, the format's, or the seal's."""
    with errors(), paused_collector():
        with progress("verifying") as bar:
            total = _total_bytes(checkpoint)
            bar.of(total)
            checked = check(checkpoint, bar.advance)
        found = checked.damage
        if json:
            print_json({"checkpoint": str(checkpoint), "damage": found, "unchecked": checked.unchecked})
        else:
            for damage in found:
                say(str(damage), on=ERR, style="red")
            whole = "all as it was saved" if not checked.unchecked else "no damage found"
            OUT.print(f"{len(found)} damaged places" if found else f"{human_size(total)}, {whole}")
            if checked.unchecked:
                say(f"not all was checked: {checked.unchecked}")
    raise typer.Exit(1 if found else 0)


def _total_bytes(checkpoint: CheckpointPath) -> int:
    """The bytes of all tensors; 0 if the checkpoint is too damaged to say."""
    try:
        return listing_of(checkpoint).total_bytes()
    except CheckpointCorruptError:
        return 0


def seal_checkpoint(checkpoint: CheckpointPath, json: Json = False) -> None:
    """Write checksums beside a checkpoint of another format than terrazzo's, for `verify`."""
    with errors(), paused_collector():
        from terrazzo.checkpoint.tools.verify import seal

        with progress("sealing") as bar:
            bar.of(listing_of(checkpoint).total_bytes())
            nbytes = seal(checkpoint, bar.advance)
        if json:
            print_json({"checkpoint": str(checkpoint), "bytes": nbytes})
        else:
            OUT.print(f"{human_size(nbytes)} sealed")


def diff(
    one: CheckpointPath,
    other: CheckpointPath,
    tolerance: Annotated[float, typer.Option(help="Numbers that differ by no more than this are equal.")] = 0.0,
    only: Annotated[str, typer.Option(help="Compare only names that match this shell-style pattern.")] = "*",
    summary: Annotated[bool, typer.Option("--summary", help="One line for each module.")] = False,
    json: Json = False,
) -> None:
    """Say what differs between two checkpoints: names, shapes, dtypes, values.

    The time and the metrics that a CheckpointManager keeps in its checkpoints are left out, unless `--only` names them.
    """
    with errors(), paused_collector():

        def wanted(name: str) -> bool:
            return name == only or (name != MANAGERS_RECORD and fnmatchcase(name, only))

        found: list[Any] = []
        modules: list[Any] = []
        with progress("comparing") as bar:
            a, b = listing_of(one), listing_of(other)
            if only != "*" and not any(map(wanted, a.names | b.names)):
                raise typer.BadParameter(shown(f"no name matches {only!r}{_hint(only, a.names)}"))
            if not _known_to_be_equal(a, b, wanted):
                from terrazzo.checkpoint.tools.compare import by_module, compare  # imports PyTorch, to read values
                from terrazzo.checkpoint.tools.lazy import Checkpoint

                pair = Checkpoint(one), Checkpoint(other)
                bar.of(a.total_bytes())
                found = list(compare(*pair, tolerance=tolerance, wanted=wanted, progress=bar.advance))
                modules = by_module(found) if summary else []
        if json:
            said = {"modules": modules} if summary and found else {"differences": found}
            print_json({"one": str(one), "other": str(other), **said})
        elif summary and found:
            table = Table("module", box=None, header_style="bold")
            for title in ("values", "elements that differ", "of", "by up to"):
                table.add_column(title, justify="right")
            for each in modules:
                counts = (each.values, each.differing, each.elements, f"{each.largest:g}")
                table.add_row(Text(shown(each.module or "-")), *map(str, counts))
            OUT.print(table)
        else:
            for difference in found:
                say(f"{difference.name}: {difference.what}")
        if not json:
            OUT.print(f"{len(found)} differences" if found else "no difference")
    raise typer.Exit(1 if found else 0)


def _known_to_be_equal(one: Listing, other: Listing, wanted: Callable[[str], bool]) -> bool:
    """Whether checksums say that two checkpoints had the same values when they were saved."""
    mine, others = one.digests(), other.digests()
    if mine == others and len(mine) == len(one.names) == len(other.names):  # a digest for each name
        return True
    names = set(filter(wanted, one.names))
    if names != set(filter(wanted, other.names)):
        return False
    return all(name in mine and mine[name] == others.get(name) for name in names)


def _hint(name: str, known: Collection[str]) -> str:
    """Names of which `name` is a part, or one that is nearly the same, for an error message."""
    close = list(islice((each for each in known if name in each), 5))
    return f"; similar names are {', '.join(close)}" if close else meant(name, known)


def _cells(entry: Listed) -> list[str]:
    """The cells of a value's row beside its name."""
    shape = "" if entry.shape is None else " x ".join(map(str, entry.shape)) or "scalar"
    size = "" if entry.nbytes is None else human_size(entry.nbytes)
    return [entry.dtype or "object", shape, size, str(entry.parts or "")]


def _parts(listing: Listing, name: str) -> list[dict[str, Any]]:
    """Each stored part of a tensor: which slice it is, and in which file it lies."""
    return [
        {"slice": _slice_text(box), "offsets": box.offsets, "lengths": box.lengths, "file": file}
        for box, file in zip(listing.boxes_of(name), listing.files_of(name), strict=True)
    ]


def _slice_text(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.lengths, strict=True)) + "]"
