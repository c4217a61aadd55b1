"""What a module can do once `fully_shard` was called on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp.unit import Unit, unit_of


class FSDPModule:
    """The class that `fully_shard` mixes into the class of a module.

    A sharded `nn.Linear` is an `FSDPLinear`, which is both an `FSDPModule` and an `nn.Linear`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Slicing a sharded nn.Sequential constructs type(self)(...): the parts are together in an ordinary one.
        original: Any = cls.__mro__[2]
        instance = original.__new__(original, *args, **kwargs)
        instance.__init__(*args, **kwargs)
        return instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = _unit(self)
        args, kwargs = unit.before_forward(self, args, kwargs)  # type: ignore[arg-type]  # it is a module
        try:
            outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]  # nn.Module's
        except BaseException:
            unit.forward_failed()
            raise
        return unit.after_forward(self, outputs)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise FSDPError(
            f"{type(self).__name__} cannot be deep-copied: its parameters are views of shared buffers. Copy the "
            "module before fully_shard, or make a second one, shard it too, and load this one's state dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise FSDPError(f"{type(self).__name__} cannot be pickled: save its state dict, as with terrazzo.checkpoint")

    # ------------------------------------------------------------------ parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's group, as forward would; not those of inner groups.

        With `async_op=True` the gather is only begun: `wait()` on the handle ends it, as does the module's forward.
        """
        unit = _unit(self)
        schedule = unit.ensure_schedule()
        if unit.group is not None:
            unit.group.adopt()
            if schedule.stream is not None and schedule.forward_root is None and not schedule.backward_running:
                schedule.stream.wait_for_current()
            schedule.start_unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters of this module's group and register the sharded ones; not for inner groups."""
        unit = _unit(self)
        unit.ensure_schedule().reshard(unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to reshard after forward, as the argument of `fully_shard`."""
        for unit in _units(self, recurse):
            unit.reshard_after_forward = reshard_after_forward
            unit.auto_reshard = False
            unit.reshard_inner = unit.reshard_inner and reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to reshard after backward.

        Without it parameters stay whole for the next forward: more memory and less communication while gradients are
        accumulated. Once an optimizer has changed the shards, the next forward gathers again.
        """
        for unit in _units(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers the parameters; not if it does not need them, as that of an embedding."""
        _unit(self).unshard_in_backward = unshard_in_backward

    # ------------------------------------------------------------------ prefetching

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The modules whose gathers begin once this one's parameters are there, in forward."""
        _unit(self).forward_prefetch = _prefetched(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The modules whose gathers begin once this one's parameters are there, in backward.

        By default that is the module whose forward ended just before this one's.
        """
        _unit(self).backward_prefetch = _prefetched(modules, "set_modules_to_backward_prefetch")

    # ------------------------------------------------------------------ gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; without it they add up on each rank, unsharded."""
        for unit in _units(self, recurse):
            unit.gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over the replicas of HSDP, or lets reduced shards add up."""
        for unit in _units(self, recurse):
            unit.options.all_reduce = requires_all_reduce

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Have `hook` called with each flat reduced gradient of this group, before it is handed to the parameters.

        It may change the tensor in place, for instance to reduce it over further ranks.

        Args:
            hook: Called as `hook(reduced)`.
            stream: On an accelerator, where the hook runs; without meaning with HSDP.
        """
        options = _unit(self).options
        options.hook, options.hook_stream = hook, stream

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """By what the sum of the ranks' gradients is divided, instead of by their number."""
        if not factor > 0:
            raise FSDPValueError(f"the divide factor has to be positive, got {factor}")
        _unit(self).options.divisor = float(factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """The same as `set_reduce_scatter_divide_factor`."""
        self.set_reduce_scatter_divide_factor(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer: then it waits for all reductions."""
        _unit(self).ensure_schedule().is_last_backward = is_last_backward

    def reduce_gradients(self) -> None:
        """Reduce what backwards without gradient sync have added up, here and in inner groups; call it on the root.

        So it need not be known before a backward that it is the last: a pipeline schedule decides that, not its user.
        """
        _unit(self).ensure_schedule().reduce_now()

    def set_post_optim_event(self, event: Any) -> None:
        """What the next forward's gathers wait for, once, instead of for everything queued before it.

        Args:
            event: Recorded after the optimizer's step, on an accelerator's stream.
        """
        _unit(self).ensure_schedule().post_optim_event = event

    # ------------------------------------------------------------------ nn.Module

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        units = _units(self, recurse)
        for unit in units:
            if unit.group is not None:
                unit.group.reshard()
        result = super()._apply(fn, recurse)  # type: ignore[misc]  # nn.Module's
        for unit in units:
            if unit.group is not None:
                unit.group.adopt()
        return result


class UnshardHandle:
    """A gather that `FSDPModule.unshard(async_op=True)` began."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """End the gather: afterwards the module's parameters are whole, for what runs on the current stream."""
        self._unit.ensure_schedule().finish_unshard(self._unit)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method gather and free parameters as forward does; without effect on a module that is not sharded.

    Args:
        module: The module.
        method_name: Of a method that computes with the module's parameters, such as `generate`.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise FSDPValueError(f"{type(module).__name__} has no method {method_name!r}")
    method = getattr(module, method_name)
    unit = _unit(module)

    @wraps(method)
    def with_parameters(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = unit.before_forward(module, args, kwargs)
        try:
            outputs = method(*args, **kwargs)
        except BaseException:
            unit.forward_failed()
            raise
        return unit.after_forward(module, outputs)

    setattr(module, method_name, with_parameters)


# A class that was made refers to the one that it was made of, and lives as long as its modules do.
_classes: WeakKeyDictionary[type[nn.Module], weakref.ref[type[nn.Module]]] = WeakKeyDictionary()


def make_fsdp_module(module: nn.Module) -> None:
    """Turn the class of `module` into an FSDP class, in place."""
    original = type(module)
    known = _classes.get(original)
    found = None if known is None else known()
    if found is None:
        found = type(f"FSDP{original.__name__}", (FSDPModule, original), {"__module__": __name__})
        _classes[original] = weakref.ref(found)
    module.__class__ = found


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise FSDPError(f"{type(module).__name__} was not sharded by fully_shard")
    return unit


def _units(module: Any, recurse: bool) -> list[Unit]:
    """The units of the module and, with `recurse`, of those in it."""
    if not recurse:
        return [_unit(module)]
    units = (unit_of(m) for m in module.modules())
    return list(dict.fromkeys(unit for unit in units if unit is not None))


def _prefetched(modules: Iterable[Any], method: str) -> list[Unit]:
    result = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise FSDPValueError(f"{method} takes modules that fully_shard was called on, got {type(module).__name__}")
        result.append(unit)
    return result


__all__ = ["FSDPModule", "UnshardHandle", "make_fsdp_module", "register_fsdp_forward_method"]
