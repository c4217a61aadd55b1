"""`terrazzo demo`: a run that is killed while it saves, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.screen import OUT, errors
from terrazzo.demo.plan import plan_of


def demo(
    steps: Annotated[int, typer.Option(min=12, help="How many steps to train.")] = 180,
    out: Annotated[Path, typer.Option(help="Where checkpoints, the exported model and the loss curve go.")] = Path(
        "terrazzo-demo"
    ),
) -> None:
    """Train on 4 local ranks, be killed while saving, resume on 2, and compare with a run that was left alone."""
    # Here, because the story uses these commands itself.
    from terrazzo.demo.story import tell

    with errors():
        same = tell(plan_of(out, steps), OUT)
    raise typer.Exit(0 if same else 1)
