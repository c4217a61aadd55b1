"""`terrazzo top`: a run while it trains, or as it was when it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.filesize import decimal as human_size
from rich.live import Live
from rich.table import Table
from rich.text import Text

from terrazzo._meant import meant_beside
from terrazzo.checkpoint.manager.records import Catalog, latest_of
from terrazzo.checkpoint.native.names import name_of_step
from terrazzo.checkpoint.stores import Place, is_url
from terrazzo.cli.screen import OUT, Json, errors, print_json, shown
from terrazzo.errors import LaunchError
from terrazzo.launch.config import is_run_file, read_run
from terrazzo.launch.history import Happened, read_history
from terrazzo.launch.live import Host, Pace, read_live

_EVERY = 1.0  # seconds
_LATE = 5.0  # seconds without a step, and three steps of the others, after which a rank lags
_SHOWN = 16  # ranks, those that lag first


def top(
    run: Annotated[str, typer.Argument(help="The run's file or its folder of checkpoints.", show_default=False)],
    once: Annotated[bool, typer.Option("--once", help="Print it once, and exit.")] = False,
    json: Json = False,
) -> None:
    """Show a run live: its step, loss, speed, memory, communication, saves, restarts, and ranks that lag.

    It reads what `terrazzo train` and the manager of checkpoints write to the run's folder, so it may run on any host
    that has it; it ends with the run, or by Ctrl-C. --json prints it once.
    """
    with errors():
        folder = _folder(run)
        catalog = Catalog(Place(folder))
        if json:
            print_json(look(folder, catalog))
            return
        if once:
            OUT.print(_drawn(look(folder, catalog)))
            return
        try:
            with Live(console=OUT, auto_refresh=False) as screen:
                while True:
                    seen = look(folder, catalog)
                    screen.update(_drawn(seen), refresh=True)
                    if seen["state"] == "ended":
                        return
                    time.sleep(_EVERY)
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(130) from interrupt


def _folder(run: str) -> str:
    is_file = is_run_file(run)
    folder = str(read_run(run).checkpoints) if is_file else run
    if is_url(folder):
        raise LaunchError(f"{folder} is a URL, and where a run is now is written to folders only")
    if not is_file and not Path(folder).is_dir():
        close = meant_beside(folder)
        raise LaunchError(f"{folder} does not exist: name the file of a run, or the folder of its checkpoints{close}")
    return folder


def look(folder: str, catalog: Catalog) -> dict[str, Any]:
    """What is known of a run."""
    now = time.time()
    history = read_history(folder) if Path(folder).is_dir() else []
    hosts = read_live(folder)
    records = catalog.read() if Path(folder).is_dir() else []
    went_on = [each for each in history if each.what == "went on"]
    last = records[-1] if records else None
    return {
        "run": folder,
        "state": _state(history, hosts),
        "why": next((each.why for each in reversed(history) if each.what == "ended" and each.why), ""),
        "news": max((host.at for host in hosts), default=None),
        **_of_ranks(hosts),
        "saves": {
            "count": len(records),
            "latest": latest_of(folder) if records else None,
            "newest": None if last is None else name_of_step(last.step),
            "at": None if last is None else last.saved,
            "seconds_ago": None if last is None else now - last.saved,
            "metrics": {} if last is None else last.metrics,
        },
        "starts": sum(each.what == "started" for each in history),
        "restarts": len(went_on),
        "recovery": went_on[-1].seconds if went_on else None,
        "noted": [{"at": each.at, "host": each.host, "what": each.why} for each in history if each.what == "noted"],
    }


def _state(history: Sequence[Happened], hosts: Sequence[Host]) -> str:
    """Whether `terrazzo train` runs on any host; its start may be written when there is a checkpoint."""
    last = {each.host: each.what for each in history if each.what in ("started", "ended")}
    if not last:
        return "running" if hosts else "not started"
    return "running" if "started" in last.values() else "ended"


def _of_ranks(hosts: Sequence[Host]) -> dict[str, Any]:
    found = [(host, where) for host in hosts for where in host.ranks]
    newest: dict[int, tuple[Host, Pace]] = {}  # a rank that is on another host now is in two files
    for host, where in sorted(found, key=lambda each: each[1].beat.at):
        newest[where.beat.rank] = host, where
    if not newest:
        empty = dict.fromkeys(("step", "loss", "memory", "sent"))
        return {**empty, "per_second": dict.fromkeys(("steps", "samples", "tokens")), "ranks": [], "lagging": []}
    places = [where for _, where in newest.values()]
    beats = [where.beat for where in places]
    ahead = max(places, key=lambda where: (where.beat.step, where.beat.at))
    limit = max(_LATE, 3 / ahead.steps if ahead.steps else 0.0)
    ranks: list[dict[str, Any]] = []
    for rank, (host, where) in sorted(newest.items()):
        late = max(beat.at for beat in beats) - where.beat.at
        said = {"step": where.beat.step, "seconds_behind": late, "lags": late > limit, "loss": where.beat.loss}
        ranks.append({"rank": rank, "host": host.host, **said, "memory": where.beat.memory, "sent": where.beat.sent})
    losses = [beat.loss for beat in beats if beat.loss is not None]
    sent = [beat.sent for beat in beats if beat.sent is not None]
    return {
        "step": ahead.beat.step,
        "loss": fmean(losses) if losses else None,
        "memory": max(beat.memory for beat in beats),
        "sent": max(sent) if sent else None,
        "per_second": {"steps": ahead.steps, "samples": ahead.samples, "tokens": ahead.tokens},
        "ranks": ranks,
        "lagging": [rank["rank"] for rank in ranks if rank["lags"]],
    }


def _drawn(seen: dict[str, Any]) -> Group:
    now = time.time()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()

    def row(name: str, text: str, style: str = "") -> None:
        table.add_row(name, Text(shown(text), style=style))

    state, failed = seen["state"], bool(seen["why"])
    if state == "running" and seen["news"] is not None:
        state += f", last heard of {max(now - seen['news'], 0):.0f} s ago"
    elif state == "ended" and failed:
        state += f": {seen['why']}"
    row(seen["run"], state, "red" if seen["state"] == "ended" and failed else "")
    if seen["step"] is not None:
        loss = "" if seen["loss"] is None else f", loss {seen['loss']:.6g}"
        row("step", f"{seen['step']:,}{loss}")
        speed = [f"{rate:,.4g} {name}" for name, rate in seen["per_second"].items() if rate is not None]
        row("in a second", ", ".join(speed) or "not known yet")
        row("memory", f"{human_size(seen['memory'])} on the fullest rank")
        if seen["sent"] is not None:
            row("communication", f"{human_size(seen['sent'])} sent by a rank in a step")
    saves = seen["saves"]
    if saves["count"]:
        numbers = "".join(f", {name} {value:.6g}" for name, value in saves["metrics"].items())
        row("saves", f"{saves['count']}, newest {saves['newest']}, {_ago(saves['seconds_ago'])}{numbers}")
    else:
        row("saves", "none")
    took = f", the last one took {sum(seen['recovery'].values()):.1f} s" if seen["recovery"] else ""
    row("restarts", f"{seen['restarts']}{took}")
    for noted in seen["noted"][-3:]:
        row("", f"{_ago(now - noted['at'])}, {noted['host']}: {noted['what']}", "yellow")
    if not seen["ranks"]:
        return Group(table)
    behind = seen["lagging"]
    row("ranks", f"{len(seen['ranks'])}" + (f", {len(behind)} lag" if behind else ""), "red" if behind else "")
    each = Table("rank", "host", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("step", "behind", "loss", "memory", "sent"):
        each.add_column(name, justify="right")
    for rank in sorted(seen["ranks"], key=lambda rank: (not rank["lags"], rank["rank"]))[:_SHOWN]:
        loss, sent = rank["loss"], rank["sent"]
        each.add_row(
            *(str(rank["rank"]), Text(shown(rank["host"])), f"{rank['step']:,}"),
            *(f"{rank['seconds_behind']:.0f} s" if rank["lags"] else "", "" if loss is None else f"{loss:.6g}"),
            *(human_size(rank["memory"]), "" if sent is None else human_size(sent)),
            style="red" if rank["lags"] else None,
        )
    left = len(seen["ranks"]) - _SHOWN
    return Group(table, Text(), each, *([Text(f"and {left} more ranks")] if left > 0 else []))


def _ago(seconds: float) -> str:
    """How long ago, in words.

    >>> _ago(12.3), _ago(700.0), _ago(9000.0)
    ('12 s ago', '12 min ago', '2.5 h ago')
    """
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
