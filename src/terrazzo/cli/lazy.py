"""A command line whose commands are imported when they are used, so that --help and --version are fast."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from terrazzo._meant import meant

_MOMENT = 0.3  # seconds without a word


@contextmanager
def starting(what: str) -> Iterator[None]:
    """A word on stderr, if that is a terminal and what is inside takes longer than a moment: importing PyTorch does."""
    said = threading.Event()

    def say() -> None:
        said.set()
        print(f"starting {what} ...", end="\r", file=sys.stderr, flush=True)

    timer = threading.Timer(_MOMENT, say)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        if said.is_set():
            print("\x1b[2K", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Lazy:
    """Where a command's function is, and the line that the list of commands shows."""

    function: str  # "module:name"
    arguments: str
    line: str
    passes_on: bool = False  # unknown options are passed on: `terrazzo run` gives them to the script


class LazyGroup(TyperGroup):
    """A group whose commands are in a table, which subclasses define."""

    table: ClassVar[Mapping[str, Lazy]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the table's order."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; None if there is no command of that name."""
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        module, _, name = entry.function.partition(":")
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings: dict[str, Any] = {}
        if entry.passes_on:
            settings["context_settings"] = {"ignore_unknown_options": True, "allow_interspersed_args": False}
        with nullcontext() if ctx.resilient_parsing else starting(f"terrazzo {cmd_name}"):  # no word in completions
            function = getattr(importlib.import_module(module), name)
        alone.command(cmd_name, **settings)(function)
        return typer.main.get_command(alone)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Say which command may be meant by a name that is none."""
        if args and args[0] not in self.table and not ctx.resilient_parsing:
            ctx.fail(f"there is no command {args[0]!r}{meant(args[0], self.table)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The table, without importing the commands and without wrapping lines."""
        rows = [(f"{name} {entry.arguments}".rstrip(), entry.line) for name, entry in self.table.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows, col_max=36)
