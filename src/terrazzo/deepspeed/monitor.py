"""`deepspeed.monitor`: writing numbers to where a config's `tensorboard`, `wandb` and `csv_monitor` say.

monitor = MonitorMaster(config.monitor_config)
monitor.write_events([("Eval/loss", loss, engine.global_samples)])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch.distributed as dist

from terrazzo.engine.config import EngineConfig
from terrazzo.engine.monitors import monitors_of

DeepSpeedMonitorConfig = EngineConfig


class MonitorMaster:
    """All monitors that a config enables; the first rank writes."""

    def __init__(self, monitor_config: EngineConfig) -> None:
        sections = (monitor_config.tensorboard, monitor_config.wandb, monitor_config.csv_monitor)
        self.enabled = any(section.enabled for section in sections)
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._monitors = monitors_of(monitor_config) if first else []

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write events, each a name, a number and the number of samples so far."""
        for name, value, samples in event_list:
            for monitor in self._monitors:
                monitor({name: float(value)}, samples)


class _Alone(MonitorMaster):
    """One monitor, with the values of its section as attributes."""

    _section = ""

    def __init__(self, section: Any) -> None:
        super().__init__(msgspec.structs.replace(EngineConfig(), **{self._section: section}))
        for name in section.__struct_fields__:
            setattr(self, name, getattr(section, name))


class TensorBoardMonitor(_Alone):
    """Writes for TensorBoard."""

    _section = "tensorboard"


class WandbMonitor(_Alone):
    """Writes to Weights & Biases."""

    _section = "wandb"


class csvMonitor(_Alone):  # DeepSpeed's name
    """Writes CSV files."""

    _section = "csv_monitor"


__all__ = ["DeepSpeedMonitorConfig", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]
