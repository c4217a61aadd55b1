"""The engines of this process, for functions of DeepSpeed that get a parameter but not its engine."""

from __future__ import annotations

import weakref

from torch import Tensor

from terrazzo.engine import Engine
from terrazzo.engine.reports import CommsReport
from terrazzo.tensor import DTensor

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def remember(engine: Engine) -> None:
    """Called when an engine is created."""
    _engines.add(engine)


def forget(engine: Engine) -> None:
    """Called when an engine is no longer used."""
    _engines.discard(engine)


def engine_of(parameter: Tensor) -> Engine | None:
    """The engine that trains a parameter."""
    for engine in _engines:
        if any(parameter is p for group in engine.optimizer.param_groups for p in group["params"]):
            return engine
    return None


def comms_reports() -> list[CommsReport | None]:
    """The communication reports of the engines that have one."""
    return [engine.comms for engine in _engines]


def as_sharded(parameter: Tensor) -> Tensor:
    """The shard of a parameter, which may be unsharded while gradients are accumulated."""
    for engine in _engines:
        for name, found in engine.module.named_parameters():
            if found is parameter and not isinstance(found, DTensor):
                engine.reshard()
                return dict(engine.module.named_parameters())[name]
    return parameter


def reshard_all() -> None:
    """Reshard the parameters of all engines."""
    for engine in _engines:
        engine.reshard()
