"""`terrazzo`: look at checkpoints, check them, compare them, convert them; start runs.

    terrazzo ls CHECKPOINT              what is in it
    terrazzo show CHECKPOINT NAME       one value: shape, dtype, where its parts are, some of its numbers
    terrazzo verify CHECKPOINT          is every byte the one that was saved?
    terrazzo diff ONE OTHER             what differs
    terrazzo convert FROM TO            to another format
    terrazzo ops [NAME]                 how each operation on distributed tensors runs, and where that is written
    terrazzo train RUN.toml             start a script on all ranks, and again when it crashes
    terrazzo demo                       watch a run survive a crash, in about a minute

Checkpoints may be of any format that terrazzo reads.  With `--json`, commands print one JSON document.  The
exit status is 0 if all is well, 1 if a check or comparison finds something, 2 if a command cannot be carried
out.
"""

from __future__ import annotations

import typer

from terrazzo.cli.convert import convert
from terrazzo.cli.demo import demo
from terrazzo.cli.inspect import diff, list_values, show, verify_checkpoint
from terrazzo.cli.ops import ops
from terrazzo.cli.train import train

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command("ls")(list_values)
app.command("show")(show)
app.command("verify")(verify_checkpoint)
app.command("diff")(diff)
app.command("convert")(convert)
app.command("ops")(ops)
app.command("train")(train)
app.command("demo")(demo)


def main() -> None:
    """The entry point of the command `terrazzo`."""
    app()
