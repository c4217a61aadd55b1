"""`terrazzo demo`: a run that is killed while it saves, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.screen import OUT, errors


def demo(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=12, help="How many steps to train.")] = 180,
    out: Annotated[Path, typer.Option(help="Where checkpoints, the exported model and the loss curve go.")] = Path(
        "terrazzo-demo"
    ),
) -> None:
    """Train on 4 local ranks, be killed while saving, resume on 2, and compare with a run that was left alone."""
    from terrazzo.demo.plan import plan_of
    from terrazzo.demo.story import tell

    commands = context.find_root().command

    def terrazzo(arguments: list[str]) -> int:
        return int(commands.main(arguments, prog_name="terrazzo", standalone_mode=False) or 0)

    with errors():
        same = tell(plan_of(out, steps), OUT, terrazzo)
    raise typer.Exit(0 if same else 1)
