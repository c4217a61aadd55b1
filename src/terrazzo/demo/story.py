"""The demo from its beginning to its end."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal as human_size

from terrazzo.demo import text
from terrazzo.demo.crash import HalfSaved, half_saved
from terrazzo.demo.ending import TOLERANCE, Command, check_and_export, compare
from terrazzo.demo.messages import Inbox, Probed, Ready, Saved, Trained, Warned
from terrazzo.demo.plan import FIRST, SECOND, Leg, Plan
from terrazzo.demo.processes import TrainingRanks
from terrazzo.demo.screen import Screen, Show
from terrazzo.demo.worker import train_alone, train_sharded
from terrazzo.errors import DemoError

OUTPUTS = ("checkpoints", "model.pt", "loss.png", "loss.csv")
_SILENCE = 180.0  # seconds without a message from any process
_WATCHFUL, _PATIENT = 0.0005, 0.1  # seconds between looks at the disk, while a save is expected and otherwise


class Run:
    """Ranks that train, and what they have reported so far."""

    def __init__(self, ranks: TrainingRanks, messages: Path) -> None:
        self.ranks = ranks
        self.losses: dict[int, float] = {}
        self.saved: list[int] = []
        self.warnings: list[str] = []
        self.ready: Ready | None = None
        self.probe: float | None = None
        self.ended = False
        self.heard = time.monotonic()
        self._inbox = Inbox(messages)

    @property
    def step(self) -> int:
        """The last that was trained."""
        return max(self.losses, default=0)

    def read(self) -> bool:
        """Read new messages; returns whether there were any."""
        self.ended = self.ranks.have_ended  # looked at first, so that no message comes after the end
        messages = self._inbox.new()
        if messages:
            self.heard = time.monotonic()
        for message in messages:
            match message:
                case Ready():
                    self.ready = message
                case Trained(step=step, loss=loss):
                    self.losses[step] = loss
                case Saved(step=step):
                    self.saved.append(step)
                case Probed(loss=loss):
                    self.probe = loss
                case Warned(text=text):
                    self.warnings.append(text)
        return bool(messages)


def tell(plan: Plan, console: Console, terrazzo: Command) -> dict[str, Any]:
    """Run the demo; returns its results, such as whether the run that crashed and the one that did not are the same."""
    began = time.monotonic()
    screen = Screen(console, plan.steps)
    _make_room(plan.folder)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="terrazzo-") as temporary:
        messages = Path(temporary, "alone")
        alone = Run(TrainingRanks("1 process, uninterrupted", 1, train_alone, plan, messages), messages)
        runs = [alone]
        try:
            first = _start(plan, FIRST, Path(temporary))
            runs.append(first)
            killed_at, rest = _train_until_killed(plan, first, alone, screen)
            resumed_from = _tell_crash(plan, killed_at, rest, screen)
            second = _start(plan, SECOND, Path(temporary))
            runs.append(second)
            _train_to_the_end(plan, second, alone, resumed_from, screen)
        finally:
            for run in runs:
                run.ranks.kill()
    same_model = check_and_export(plan, resumed_from, alone.probe, screen, terrazzo)
    worst = compare(plan, alone.losses, first.losses, second.losses, killed_at, resumed_from, screen)
    written = [name for name in OUTPUTS if (plan.folder / name).exists()]
    seconds = time.monotonic() - began
    screen.say(f"\nIn {plan.folder}: {', '.join(written)} ({seconds:.0f} s)")
    return {
        "same": same_model and worst <= TOLERANCE,
        "same_model": same_model,
        "largest_difference_of_losses": worst,
        "steps": plan.steps,
        "killed_while_saving": killed_at,
        "resumed_from": resumed_from,
        "folder": str(plan.folder),
        "written": written,
        "seconds": seconds,
    }


def _make_room(folder: Path) -> None:
    """Create the folder, or remove what an earlier demo left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    strange = sorted(path.name for path in folder.iterdir() if path.name not in OUTPUTS)
    if strange:
        raise DemoError(f"{folder} has files that are not the demo's ({', '.join(strange[:3])}): choose another --out")
    for name in OUTPUTS:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _start(plan: Plan, leg: Leg, folder: Path) -> Run:
    messages = folder / f"{leg.ranks}-ranks"
    return Run(TrainingRanks(leg.title, leg.ranks, train_sharded, plan, leg, messages), messages)


# ------------------------------------------------------------------ the two legs


def _train_until_killed(plan: Plan, first: Run, alone: Run, screen: Screen) -> tuple[int, HalfSaved]:
    """Train until a save is half written, and kill all ranks in it."""
    screen.say(
        f"A small GPT learns this project's own prose, {human_size(len(text.text()))}, on CPU ranks of this machine.",
    )
    screen.heading(f"Train on {FIRST.title}, saving in the background every {plan.save_every} steps")
    with screen.training() as show:
        while True:
            watching = first.step >= plan.kill_from
            _listen([first, alone], show, _WATCHFUL if watching else _PATIENT)
            if first.ended:
                first.ranks.join(10)
                raise DemoError(
                    f"{FIRST.title}: trained to the end before a save was seen half written: run the demo again"
                )
            saving = first.step // plan.save_every * plan.save_every
            rest = _kill_if_saving(first, plan.checkpoint(saving)) if watching else None
            if rest is not None:
                break
        first.read()  # messages from before the end
    _tell_size(first, plan, screen)
    return saving, rest


def _kill_if_saving(run: Run, folder: Path) -> HalfSaved | None:
    """Kill the ranks if a save into the folder is half written; returns what is left of it."""
    if half_saved(folder) is None:
        return None
    run.ranks.freeze()  # so that no file changes while we look again
    rest = half_saved(folder)
    if rest is None:
        run.ranks.thaw()
    else:
        run.ranks.kill()
    return rest


def _tell_crash(plan: Plan, killed_at: int, rest: HalfSaved, screen: Screen) -> int:
    """Show what the crash left; returns the step from which to resume."""
    screen.heading(f"Crash: all {FIRST.ranks} ranks are killed (SIGKILL) while they save step {killed_at}")
    latest = (plan.checkpoints / "latest").read_text()
    screen.say(
        f"   {plan.checkpoint(killed_at).name}: {rest.files} of {FIRST.ranks} data files begun, "
        f"{human_size(rest.nbytes)}, no manifest: this is no checkpoint\n"
        f"   latest: {latest}, which is whole"
    )
    return int(latest.removeprefix("global_step"))


def _train_to_the_end(plan: Plan, second: Run, alone: Run, resumed_from: int, screen: Screen) -> None:
    screen.heading(f"Resume from step {resumed_from} on {SECOND.title}")
    with screen.training() as show:
        while not (second.ended and alone.ended):
            _listen([second, alone], show, _PATIENT)
            for run in (second, alone):
                if run.ended:
                    run.ranks.join(30)
    _tell_size(second, plan, screen)
    if second.ready is None or second.ready.step != resumed_from or second.step != plan.steps:
        raise DemoError(f"{SECOND.title}: went from {second.ready} to step {second.step}, not from {resumed_from}")


def _tell_size(run: Run, plan: Plan, screen: Screen) -> None:
    if run.ready is not None:
        saved = ", ".join(map(str, run.saved))
        screen.say(
            f"   {run.ready.parameters:,} parameters, of which a rank holds {run.ready.held:,}; saved in steps {saved}"
        )
    for warning in run.warnings:
        screen.say(f"   the library says: {warning.removeprefix(f'{plan.checkpoints}/')}")


def _listen(runs: Sequence[Run], show: Show, pause: float) -> None:
    """Read new messages of all runs and show them, or pause if there are none."""
    any_new = False
    for run in runs:
        if not run.ended and run.read():
            any_new = True
            if run.step:
                show(run.ranks.title, run.step, run.losses[run.step])
    if not any_new:
        time.sleep(pause)
    if time.monotonic() - max(run.heard for run in runs) > _SILENCE:
        raise DemoError(f"no message from {', '.join(run.ranks.title for run in runs)} for {_SILENCE:.0f} s")
