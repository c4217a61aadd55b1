"""`terrazzo demo`: a run that is killed while it saves, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.screen import OUT, Json, errors, print_json, said_on_stderr


def demo(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=12, help="How many steps to train.")] = 180,
    out: Annotated[Path, typer.Option(help="Where checkpoints, the exported model and the loss curve go.")] = Path(
        "terrazzo-demo"
    ),
    json: Json = False,
) -> None:
    """Train on 4 local ranks, be killed while saving, resume on 2, and compare with a run that was left alone.

    With --json, the story goes to stderr, and stdout gets the results.
    """
    from terrazzo.demo.plan import plan_of
    from terrazzo.demo.story import tell

    commands = context.find_root().command

    def terrazzo(arguments: list[str]) -> int:
        return int(commands.main(arguments, prog_name="terrazzo", standalone_mode=False) or 0)

    with errors():
        with said_on_stderr(json):
            results = tell(plan_of(out, steps), OUT, terrazzo)
        if json:
            print_json(results)
    raise typer.Exit(0 if results["same"] else 1)
