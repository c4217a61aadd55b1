"""The engines of this process, for functions of DeepSpeed that get a parameter but not its engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from terrazzo.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from terrazzo.engine import Engine
from terrazzo.engine.reports import CommsReport
from terrazzo.errors import EngineCallError
from terrazzo.fsdp.module import accumulated_gradient, sharded_of, sharded_parameters, show_whole
from terrazzo.tensor import DTensor

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def remember(engine: Engine) -> None:
    """Called when an engine is created."""
    _engines.add(engine)


def forget(engine: Engine) -> None:
    """Called when an engine is no longer used."""
    _engines.discard(engine)


def check_new(model: nn.Module) -> None:
    """Raise if an engine trains a model, because a second one cannot."""
    if engine_that_trains(model) is not None:
        raise EngineCallError(
            f"deepspeed.initialize was called twice with the same {type(model).__name__}: go on with its engine, which "
            "load_checkpoint changes, too, or pass a model of its own"
        )


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
    """The sharded parameter of an unsharded one, with what users have written to that."""
    if isinstance(parameter, DTensor):
        return parameter
    found = (sharded_of(engine.module, parameter) for engine in _engines)
    return next((p for p in found if p is not None), parameter)


def accumulated(parameter: Tensor) -> Tensor | None:
    """The gradient that this rank has added up inside `no_sync()`; None if there is none."""
    found = (accumulated_gradient(engine.module, parameter) for engine in _engines)
    return next((grad for grad in found if grad is not None), None)


def whole_parameters() -> set[int]:
    """The ids of all whole parameters between steps, which users may write to."""
    return {id(parameter) for engine in _engines if shows_whole(engine) for parameter in engine.module.parameters()}


def show_again(written: Iterable[Tensor]) -> None:
    """Have whole parameters between steps show what was written to these shards; called on all ranks."""
    # In the order of the parameters, which is the same on all ranks.
    owners = {id(p): engine for engine in _engines if shows_whole(engine) for p in sharded_parameters(engine.module)}
    for engine in dict.fromkeys(owners[id(p)] for p in written if id(p) in owners):
        engine.reshard()
        engine.show()


def load_whole(engine: Engine, state: Mapping[str, Any], strict: bool) -> None:
    """Load whole tensors into an engine's model; called on all ranks."""
    engine.reshard()
    set_model_state_dict(engine.module, dict(state), options=StateDictOptions(strict=strict, full_state_dict=True))
    engine.show()


def engine_that_trains(model: nn.Module) -> Engine | None:
    """The engine of a model."""
    return next((engine for engine in _engines if engine.module is model), None)


def shows_whole(engine: Engine) -> bool:
    """Whether the parameters of an engine are whole, plain tensors now."""
    return engine.stage < 3 and engine.pipeline is None and engine.between_steps


def show_between_steps(engine: Engine) -> None:
    """Have whole, plain tensors as parameters, where every rank has all of them in DeepSpeed."""
    if shows_whole(engine):
        show_whole(engine.module)


def reshard_all() -> None:
    """Reshard the parameters of all engines."""
    for engine in _engines:
        engine.reshard()
