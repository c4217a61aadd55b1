"""`terrazzo train`: start a run on this host."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.screen import ERR, Json, errors, print_json, said_on_stderr


def train(
    config: Annotated[
        Path, typer.Argument(help="The run's file, TOML or JSON (docs/training.md).", show_default=False)
    ],
    per_host: Annotated[int | None, typer.Option(min=1, help="Ranks on this host, instead of the file's.")] = None,
    restarts: Annotated[int | None, typer.Option(min=0, help="Restarts after a crash, instead of the file's.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the equivalent torchrun command and exit.")] = False,
    json: Json = False,
) -> None:
    """Start or resume a run, and restart it when it crashes.

    On several hosts, give the same command on each. The exit status is that of the rank that failed. With --json, what
    the ranks print goes to stderr, and stdout gets how the run ended.
    """
    from terrazzo.launch.config import read_run, with_ranks
    from terrazzo.launch.history import History
    from terrazzo.launch.recovery import Recovery
    from terrazzo.launch.torchrun import start, torchrun_line

    with errors():
        changes = {"per_host": per_host, "restarts": restarts}
        run = with_ranks(read_run(config), **{name: value for name, value in changes.items() if value is not None})
        if show:
            line = torchrun_line(run)
            print_json({"command": shlex.split(line)}) if json else typer.echo(line)
            return
        latest = run.latest()
        _say(f"{run.checkpoints}: " + ("no checkpoint yet" if latest is None else f"the latest checkpoint is {latest}"))
        history = History(run.checkpoints)
        recoveries: list[dict[str, float]] = []

        def tell(recovery: Recovery) -> None:
            _say(f"went on: {recovery}")
            history.went_on(recovery)
            recoveries.append(asdict(recovery))

        def note(text: str) -> None:
            _say(text)
            history.noted(text)

        history.started()
        with said_on_stderr(json):
            ending = start(run, tell, note)
        history.ended(ending.status, ending.why)
        latest = run.latest()
        _say(f"{ending.why or 'done'}; the latest checkpoint is {latest or 'none'}")
        if json:
            places = {"checkpoints": str(run.checkpoints), "latest": latest}
            print_json({"status": ending.status, "why": ending.why, **places, "recoveries": recoveries})
    raise typer.Exit(ending.status)


def _say(text: str) -> None:
    ERR.print(text, markup=False, highlight=False, soft_wrap=True)
