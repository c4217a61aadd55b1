"""`terrazzo`: look at checkpoints, check them, compare them, convert them.

    terrazzo ls CHECKPOINT              what is in it
    terrazzo show CHECKPOINT NAME       one value: shape, dtype, where its parts are, some of its numbers
    terrazzo verify CHECKPOINT          is every byte the one that was saved?
    terrazzo diff ONE OTHER             what differs
    terrazzo convert FROM TO            to another format

Checkpoints may be of any format that terrazzo reads.  With `--json`, commands print one JSON document.  The
exit status is 0 if all is well, 1 if a check or comparison finds something, 2 if a command cannot be carried
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from rich.console import Console
from rich.filesize import decimal as human_size
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from terrazzo.checkpoint import Checkpoint, LazyTensor, verify
from terrazzo.checkpoint.compare import Difference, compare
from terrazzo.checkpoint.formats.convert import convert as convert_checkpoint
from terrazzo.checkpoint.formats.detect import Format
from terrazzo.checkpoint.lazy import names_of
from terrazzo.checkpoint.native.manifest import Manifest
from terrazzo.errors import TerrazzoError
from terrazzo.layout.box import Box

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
_out = Console()
_err = Console(stderr=True)

CheckpointPath = Annotated[Path, typer.Argument(help="The checkpoint: a folder or a file.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_SHOWN_CHUNKS = 32


@app.command("ls")
def list_values(
    checkpoint: CheckpointPath,
    pattern: Annotated[str, typer.Argument(help="Only names that match this shell-style pattern.")] = "*",
    json: Json = False,
) -> None:
    """List what a checkpoint holds, with shapes, dtypes, sizes and the number of parts."""
    with _errors():
        opened = Checkpoint(checkpoint)
        rows = [_row(opened, name) for name in names_of(opened) if fnmatchcase(name, pattern)]
        total = sum(row["bytes"] or 0 for row in rows)
        if json:
            _print_json({"checkpoint": str(checkpoint), **_about(opened), "bytes": total, "values": rows})
            return
        table = Table("name", "dtype", "shape", box=None, header_style="bold")
        table.add_column("size", justify="right")
        table.add_column("parts", justify="right")
        for row in rows:
            shape = "" if row["shape"] is None else " x ".join(map(str, row["shape"])) or "scalar"
            size = "" if row["bytes"] is None else human_size(row["bytes"])
            table.add_row(escape(row["name"]), row["dtype"] or "object", shape, size, str(row["parts"] or ""))
        _out.print(table)
        _out.print(f"{len(rows)} values, {human_size(total)}")


@app.command()
def show(
    checkpoint: CheckpointPath,
    name: Annotated[str, typer.Argument(help="The value's name, as `ls` lists it.", show_default=False)],
    json: Json = False,
) -> None:
    """Show one value: shape, dtype, where each part lies in the tensor and on which file, and its first numbers."""
    with _errors():
        opened = Checkpoint(checkpoint)
        if name not in opened:
            close = [known for known in opened if name in known][:5]
            hint = f"; there are {', '.join(close)}" if close else ""
            raise typer.BadParameter(f"the checkpoint holds no {name!r}{hint}")
        value = opened[name]
        if not isinstance(value, LazyTensor):
            if json:
                _print_json({"name": name, "type": type(value).__name__, "value": repr(value)})
            else:
                _out.print(value)
            return
        parts = _parts(opened, value)
        first = _first_numbers(value)
        if json:
            _print_json(_row(opened, name) | {"chunks": parts, "first": first})
            return
        _out.print(
            f"{escape(name)}: {value.dtype}, shape {list(value.shape)}, {human_size(value.nbytes)}", highlight=False
        )
        _out.print(f"begins with {first}", highlight=False)
        table = Table("part", "file", box=None, header_style="bold")
        for part in parts[:_SHOWN_CHUNKS]:
            table.add_row(escape(part["slice"]), part["file"] or "")
        _out.print(table)
        if len(parts) > _SHOWN_CHUNKS:
            _out.print(f"and {len(parts) - _SHOWN_CHUNKS} more parts")


@app.command("verify")
def verify_checkpoint(checkpoint: CheckpointPath, json: Json = False) -> None:
    """Read every byte and compare it with its checksum."""
    with _errors():
        total = _tensor_bytes(Checkpoint(checkpoint))
        with _progress("verifying", total, hidden=json) as advance:
            found = verify(checkpoint, advance)
        if json:
            _print_json({"checkpoint": str(checkpoint), "damage": found})
        else:
            for damage in found:
                _err.print(str(damage), style="red", markup=False, highlight=False)
            _out.print(f"{len(found)} damaged places" if found else f"{human_size(total)}, all as it was saved")
    raise typer.Exit(1 if found else 0)


@app.command()
def diff(
    one: CheckpointPath,
    other: CheckpointPath,
    tolerance: Annotated[float, typer.Option(help="Numbers that differ by no more than this are equal.")] = 0.0,
    json: Json = False,
) -> None:
    """Say what differs between two checkpoints: names, shapes, dtypes, values."""
    with _errors():
        a, b = Checkpoint(one), Checkpoint(other)
        total = _tensor_bytes(a)
        with _progress("comparing", total, hidden=json) as advance:
            found: list[Difference] = list(compare(a, b, tolerance=tolerance, progress=advance))
        if json:
            _print_json({"one": str(one), "other": str(other), "differences": found})
        else:
            for difference in found:
                _out.print(f"{difference.name}: {difference.what}", markup=False, highlight=False)
            _out.print(f"{len(found)} differences" if found else "no difference")
    raise typer.Exit(1 if found else 0)


@app.command()
def convert(
    source: CheckpointPath,
    target: Annotated[Path, typer.Argument(help="Where the new checkpoint goes.", show_default=False)],
    to: Annotated[Format, typer.Option(help="The new checkpoint's format.")] = Format.NATIVE,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Convert a checkpoint into another format, with little memory."""
    with _errors():
        total = _tensor_bytes(Checkpoint(source))
        with _progress("converting", total) as advance:
            convert_checkpoint(source, target, to, overwrite=overwrite, progress=lambda name, nbytes: advance(nbytes))
        _out.print(f"{source} -> {target} ({to.value})", markup=False, highlight=False)


def _row(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """What `ls` says of one value."""
    tensor = checkpoint.tensor(name)
    if tensor is None:
        return {"name": name, "dtype": None, "shape": None, "bytes": None, "parts": None}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "parts": len(tensor.chunks),
    }


def _tensor_bytes(checkpoint: Checkpoint) -> int:
    tensors = (checkpoint.tensor(name) for name in checkpoint)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the manifest says of the save as a whole, where there is one."""
    manifest = checkpoint.metadata.storage_data
    if not isinstance(manifest, Manifest):
        return {}
    head = manifest.head
    return {"writer": head.writer, "created": head.created, "ranks": head.ranks, "files": len(head.files)}


def _parts(checkpoint: Checkpoint, tensor: LazyTensor) -> list[dict[str, Any]]:
    """Each stored part of a tensor: which slice it is, and in which file it lies."""
    manifest = checkpoint.metadata.storage_data
    files: list[str | None] = [None] * len(tensor.chunks)
    if isinstance(manifest, Manifest):
        record = manifest.record(tensor.name)
        rows = manifest.files[record.first : record.first + record.count]
        files = [manifest.head.files[number].name for number in rows.tolist()]
    return [
        {"slice": _slice_text(box), "offsets": box.offsets, "lengths": box.lengths, "file": file}
        for box, file in zip(tensor.chunks, files, strict=True)
    ]


def _slice_text(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.lengths, strict=True)) + "]"


def _first_numbers(tensor: LazyTensor) -> list[Any]:
    """A few elements from the beginning."""
    if 0 in tensor.shape:
        return []
    corner = Box((0,) * len(tensor.shape), (*(1 for _ in tensor.shape[:-1]), *(min(n, 8) for n in tensor.shape[-1:])))
    values = tensor.read(corner).reshape(-1)
    shown: list[Any] = (values.to(torch.complex128) if values.is_complex() else values.double()).tolist()
    return [str(value) for value in shown] if values.is_complex() else shown


def _print_json(document: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


@contextmanager
def _errors() -> Iterator[None]:
    """Our errors and the system's as one line and exit status 2."""
    try:
        yield
    except (TerrazzoError, OSError) as error:
        _err.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error


@contextmanager
def _progress(what: str, total: int, *, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=_err, transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def main() -> None:
    """The entry point of the command `terrazzo`."""
    app()


if __name__ == "__main__":
    main()
