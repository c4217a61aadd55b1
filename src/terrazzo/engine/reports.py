"""Reports that a config can ask for: the operations of one forward, and the communication."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from terrazzo.comm import CommEvent, add_observer, remove_observer
from terrazzo.engine.config import CommsConfig, FlopsConfig

LOGGER = logging.getLogger("terrazzo.engine")


class FlopsReport:
    """Counts the operations of the first forward of one step, by module, on one rank.

    Attributes:
        total: floating-point operations of that forward; None before it.
    """

    def __init__(self, module: nn.Module, config: FlopsConfig) -> None:
        self._config = config
        self._parameters = sum(p.numel() for p in module.parameters())
        self._mode: FlopCounterMode | None = None
        self.total: int | None = None
        self._steps = 0  # how many have ended
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        if self.total is None and self._mode is None and self._steps + 1 >= self._config.profile_step:
            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.__exit__(None, None, None)
        self.total = mode.get_total_flops()
        text = (
            f"forward of step {self._steps + 1} on this rank: {self.total:,} floating-point operations, "
            f"{self._parameters:,} parameters\n"
        )
        depth = self._config.module_depth
        for name, counts in mode.get_flop_counts().items():
            if depth < 0 or name.count(".") <= depth:
                text += f"{sum(counts.values()):>20,}  {name}\n"
        if self._config.output_file is None:
            LOGGER.info("%s", text)
        else:
            Path(self._config.output_file).write_text(text, encoding="utf-8")

    def end_step(self, steps: int) -> None:
        """Called with the number of steps taken."""
        self._steps = steps


class CommsReport:
    """Counts the collectives of this process."""

    def __init__(self, config: CommsConfig) -> None:
        self._verbose = config.verbose
        self._counts: dict[tuple[str, int], list[int]] = {}
        # The observer must not keep the report alive.
        self_reference = weakref.ref(self)

        def observe(event: CommEvent) -> None:
            report = self_reference()
            if report is not None:
                report.add(event)

        add_observer(observe)
        weakref.finalize(self, remove_observer, observe)

    def add(self, event: CommEvent) -> None:
        """Called when a collective starts."""
        entry = self._counts.setdefault((event.kind, event.axis.size), [0, 0])
        entry[0] += 1
        entry[1] += event.bytes
        if self._verbose:
            LOGGER.info("%s of %d bytes among %d ranks", event.kind, event.bytes, event.axis.size)

    def as_dict(self) -> dict[str, dict[int, Mapping[str, int]]]:
        """The number of collectives and the bytes that this rank sent, by kind and number of ranks."""
        found: dict[str, dict[int, Mapping[str, int]]] = {}
        for (kind, ranks), (count, sent) in sorted(self._counts.items()):
            found.setdefault(kind, {})[ranks] = {"count": count, "bytes": sent}
        return found

    def __str__(self) -> str:
        lines = [f"{'collective':<16}{'ranks':>8}{'count':>10}{'bytes sent':>18}"]
        for (kind, ranks), (count, sent) in sorted(self._counts.items()):
            lines.append(f"{kind:<16}{ranks:>8}{count:>10}{sent:>18,}")
        return "\n".join(lines)
