"""What all commands share: where they print, how errors end them, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from terrazzo.errors import TerrazzoError

if TYPE_CHECKING:  # commands that open no checkpoint start without PyTorch
    from terrazzo.checkpoint import Checkpoint

OUT = Console()
ERR = Console(stderr=True)

CheckpointPath = Annotated[Path, typer.Argument(help="The checkpoint: a folder or a file.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def tensor_bytes(checkpoint: Checkpoint) -> int:
    tensors = (checkpoint.tensor(name) for name in checkpoint)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def print_json(document: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


@contextmanager
def errors() -> Iterator[None]:
    """Our errors and the system's as one line and exit status 2."""
    try:
        yield
    except (TerrazzoError, OSError) as error:
        ERR.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error


@contextmanager
def progress(what: str, total: int, *, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=ERR, transient=True, disable=hidden or not ERR.is_terminal) as bars:
        task = bars.add_task(what, total=total)
        yield lambda nbytes: bars.advance(task, nbytes)
