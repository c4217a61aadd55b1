"""What the demo shows while it runs: bars on a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

Show = Callable[[str, int, float], None]
"""Takes a run's title, the step that it has done, and the loss in it."""


class Screen:
    """Headings, sentences, commands with what they print, and training."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self._steps = steps
        self._headings = 0
        self._parts: dict[str, int] = {}

    def heading(self, text: str) -> None:
        """The next part of the story."""
        self._headings += 1
        self.console.print(f"\n[bold]{self._headings}. {text}[/bold]", highlight=False, soft_wrap=True)

    def say(self, text: str | Text, style: str = "") -> None:
        """A sentence of it."""
        self.console.print(text, style=style, highlight=False, soft_wrap=True)

    @contextmanager
    def training(self) -> Iterator[Show]:
        """While something trains: what is to be told of each step."""
        if not self.console.is_terminal:
            yield self._log
            return
        columns = (
            TextColumn("   {task.description}"),
            BarColumn(30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        with Progress(*columns, console=self.console) as bars:
            tasks: dict[str, TaskID] = {}

            def show(title: str, step: int, loss: float) -> None:
                if title not in tasks:
                    tasks[title] = bars.add_task(f"{title:<26}", total=self._steps, loss="")
                bars.update(tasks[title], completed=step, loss=f"loss {loss:.3f}")

            yield show

    def _log(self, title: str, step: int, loss: float) -> None:
        part = step * 6 // self._steps
        if part > self._parts.get(title, 0):
            self.say(f"   {title}: step {step} of {self._steps}, loss {loss:.3f}")
            self._parts[title] = part
