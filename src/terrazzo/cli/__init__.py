"""`terrazzo`: look at checkpoints, check them, compare them, convert them; start runs.

The table below is what `terrazzo --help` shows. A command's module, and PyTorch with it, is imported when the command
is used.
The exit status is 0 if all is well, 1 if a check or comparison finds something, 2 if a command cannot be carried out.
"""

from __future__ import annotations

from typing import Annotated

import typer

from terrazzo.cli.lazy import Lazy, LazyGroup

_HELP = """Look at checkpoints, check them, compare them, convert them; start runs.

Checkpoints may be of any format that terrazzo reads. With --json, commands print one JSON document. The exit status
is 0 if all is well, 1 if a check or comparison finds something, 2 if a command cannot be carried out.
"""


class _Commands(LazyGroup):
    table = {
        "ls": Lazy("terrazzo.cli.inspect:list_values", "CHECKPOINT [PATTERN]", "what is in it"),
        "show": Lazy("terrazzo.cli.inspect:show", "CHECKPOINT NAME", "one value: shape, dtype, parts, some numbers"),
        "verify": Lazy("terrazzo.cli.inspect:verify_checkpoint", "CHECKPOINT", "is every byte the one that was saved?"),
        "seal": Lazy("terrazzo.cli.inspect:seal_checkpoint", "CHECKPOINT", "write checksums beside another format's"),
        "diff": Lazy("terrazzo.cli.inspect:diff", "ONE OTHER", "what differs"),
        "view": Lazy("terrazzo.cli.view:view", "CHECKPOINT ...", "as one page; layouts, steps and runs, too"),
        "convert": Lazy("terrazzo.cli.convert:convert", "FROM TO", "to another format"),
        "ops": Lazy("terrazzo.cli.ops:ops", "[NAME]", "how operations on distributed tensors run, and where"),
        "train": Lazy("terrazzo.cli.train:train", "RUN.toml", "start a script on all ranks, again when it crashes"),
        "top": Lazy("terrazzo.cli.top:top", "RUN", "a run live: step, loss, speed, saves, restarts"),
        "deepspeed": Lazy("terrazzo.cli.deepspeed:deepspeed", "SCRIPT ...", "as DeepSpeed's command does", True),
        "run": Lazy("terrazzo.cli.run:run", "SCRIPT ...", "a script that imports PyTorch's names, on terrazzo's", True),
        "doctor": Lazy("terrazzo.cli.doctor:doctor", "[FOLDER ...]", "check this installation and this machine"),
        "demo": Lazy("terrazzo.cli.demo:demo", "", "watch a run survive a crash, in about a minute"),
    }


app = typer.Typer(cls=_Commands, help=_HELP, no_args_is_help=True, add_completion=True, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from terrazzo import __version__

        typer.echo(f"terrazzo {__version__} (PyTorch {version('torch')})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    pass


# Typer would show the callback's docstring instead.
_options.__doc__ = _HELP


def main() -> None:
    """The entry point of the command `terrazzo`."""
    app(prog_name="terrazzo")
