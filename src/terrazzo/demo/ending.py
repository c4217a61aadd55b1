"""The demo's last parts: look at the checkpoint, take it elsewhere, compare the curves."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rich.text import Text

from terrazzo.demo import text
from terrazzo.demo.model import GPT, write_on
from terrazzo.demo.plan import FIRST, SECOND, Plan
from terrazzo.demo.plot import Chart, Mark, Series, can_draw, png_of, text_of
from terrazzo.demo.screen import Screen
from terrazzo.demo.worker import probe

TOLERANCE = 1e-4
_GREY, _BLUE, _ORANGE, _RED = (198, 204, 214), (31, 92, 168), (226, 120, 24), (200, 40, 50)
_EXAMPLE = "module.blocks.0.up.weight"


Command = Callable[[list[str]], int]
"""Runs `terrazzo` with these arguments; returns its exit status."""


def check_and_export(plan: Plan, resumed_from: int, expected: float | None, screen: Screen, terrazzo: Command) -> bool:
    """Verify and show the checkpoints, and export the last; whether its model is the uninterrupted run's."""
    before, last, exported = plan.checkpoint(resumed_from), plan.checkpoint(plan.steps), plan.folder / "model.pt"
    screen.heading("Verify and inspect: one tensor, saved by four ranks and then by two")

    def run(*arguments: str) -> int:
        screen.say(f"[dim]$ terrazzo {' '.join(arguments)}[/dim]")
        return terrazzo(list(arguments))

    whole = run("verify", str(last)) == 0
    run("show", str(before), _EXAMPLE)
    run("show", str(last), _EXAMPLE)
    screen.heading("Export, for PyTorch alone")
    run("convert", str(last), str(exported), "--to", "torch_save")
    model = GPT(plan.sizes)
    model.load_state_dict(torch.load(exported, weights_only=True)["module"])
    found = probe(model)
    beginning = "The checkpoint "
    written = text.decode(write_on(model, text.encode(beginning), 100)).replace("\n", " ")
    screen.say(
        f"   {exported.name} in plain PyTorch: loss {found:.4f} on a probe; the uninterrupted model: {expected:.4f}"
    )
    screen.say(Text.assemble(f"   after {plan.steps} steps it writes: ", (beginning, "bold"), (written, "italic")))
    return whole and expected is not None and abs(found - expected) <= TOLERANCE


def compare(
    plan: Plan,
    alone: Mapping[int, float],
    first: Mapping[int, float],
    second: Mapping[int, float],
    killed_at: int,
    resumed_from: int,
    screen: Screen,
) -> float:
    """Draw the loss across the crash beside the uninterrupted run's; by how much they differ at most."""
    screen.heading("The loss across the crash")
    chart = Chart(
        "Loss across a crash, beside an uninterrupted run",
        "step",
        (
            Series("1 process, plain PyTorch, uninterrupted", tuple(alone.items()), _GREY, width=10),
            Series(FIRST.title, tuple(first.items()), _BLUE, width=5.5),
            Series(SECOND.title, tuple(second.items()), _ORANGE, width=2.5),
        ),
        (
            Mark(resumed_from, f"resumed from step {resumed_from}", _ORANGE, "left"),
            Mark(max(first), f"killed while saving step {killed_at}", _RED, "right"),
        ),
    )
    if can_draw():
        screen.say(text_of(chart, columns=min(screen.console.width, 100)))
        (plan.folder / "loss.png").write_bytes(png_of(chart))
    else:
        screen.say("   the curves are not drawn without matplotlib and plotext: pip install 'terrazzo\\[demo]'")
    _write_table(plan.folder / "loss.csv", alone, first, second)
    steps = [*first.items(), *second.items()]
    worst = max(abs(loss - alone[step]) for step, loss in steps)
    same = worst <= TOLERANCE
    verdict = "the same run" if same else f"NOT the same run: the tolerance is {TOLERANCE:g}"
    screen.say(
        f"   loss {alone[1]:.3f} in step 1, {first[resumed_from]:.3f} in step {resumed_from}, "
        f"{second[plan.steps]:.3f} in step {plan.steps}\n"
        f"   in {len(steps)} steps the loss differs from the uninterrupted run's by at most {worst:.1e}: {verdict}",
        style="green" if same else "red",
    )
    return worst


def _write_table(
    path: Path, alone: Mapping[int, float], first: Mapping[int, float], second: Mapping[int, float]
) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "uninterrupted", FIRST.title, SECOND.title])
        for step, loss in alone.items():
            table.writerow([step, loss, first.get(step, ""), second.get(step, "")])
