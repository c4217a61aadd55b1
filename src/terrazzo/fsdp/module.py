"""`FSDPModule`: the methods that a module has after `fully_shard`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from terrazzo._torch.modules import modules_in
from terrazzo.comm.axis import axis_beside
from terrazzo.errors import FSDPError, FSDPTypeError, FSDPValueError
from terrazzo.fsdp.group import ATTRIBUTE, Group, group_of, with_switches
from terrazzo.fsdp.plan.state import Event
from terrazzo.fsdp.run.forming import part
from terrazzo.fsdp.run.hooks import after_forward, before_forward, forward_failed
from terrazzo.fsdp.run.root import Root, root_of
from terrazzo.fsdp.run.staging import DoubleBuffers, GroupMemory, SymmetricMemory
from terrazzo.fsdp.settings import AllGather, ReduceScatter
from terrazzo.fsdp.tree import Copies
from terrazzo.layout.drawing import ShownAsCall

if TYPE_CHECKING:
    _Module = nn.Module  # for type checkers: a sharded module is a module, too
else:
    _Module = object


class FSDPModule(_Module):
    """The class that `fully_shard` mixes into the class of a module.

    A sharded `nn.Linear` is an `FSDPLinear`, which is both an `FSDPModule` and an `nn.Linear`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Slicing a sharded nn.Sequential constructs type(self)(...), which must be an ordinary nn.Sequential.
        original: Any = cls.__mro__[2]
        instance = original.__new__(original, *args, **kwargs)
        instance.__init__(*args, **kwargs)
        return instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _with_parameters(self, super().__call__, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise FSDPValueError(
            f"{type(self).__name__} cannot be deep-copied (FSDP does not support deepcopy): its parameters are views "
            "of shared buffers. Copy the module before fully_shard; or construct a second one, shard it, and load this "
            "one's state dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise FSDPError(f"{type(self).__name__} cannot be pickled: save its state dict with terrazzo.checkpoint")

    # ------------------------------------------------------------------ parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's group, as its forward does; not those of inner groups.

        With `async_op=True` the gather is only started: `wait()` on the handle waits for it, as the module's forward
        does. Between steps a group that shares messages with others leaves them first; where a graph of an earlier
        forward exists, and in forward and backward, it is gathered together with them.
        """
        group = _group(self)
        root_of(group).unshard(group)
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the unsharded parameters of this module's group and register the sharded ones; not for inner groups.

        Groups that share messages with it are freed, too; in forward and backward all are when the last has run.
        """
        group = _group(self)
        root_of(group).reshard(group.unit)

    def reset_iter_state(self) -> None:
        """Reset after a failed iteration: reshard parameters, and drop gradients that were not reduced.

        Call it on the root. After a forward or backward that raised, the next forward resets by itself. But gradients
        that earlier micro-batches accumulated for the same step are dropped only by this method, or by a backward that
        raised.
        """
        group = _group(self)
        root = root_of(group)
        if group not in root.tops:
            raise FSDPError(
                f"reset_iter_state must be called on the root module, {root.tops[0].name!r}, not on {group.name!r} "
                "inside it"
            )
        root.recover()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those that `set_requires_gradient_sync(False)` has added up without reducing them.

        An optimizer's `zero_grad` knows of reduced gradients only.
        """
        for group in _groups(self, recurse=True):
            group.unit.abandon(group)
            for param in group.params:
                if set_to_none:
                    param.sharded.grad = None
                elif (grad := param.sharded.grad) is not None:
                    grad.detach_().zero_()
        super().zero_grad(set_to_none)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to reshard after forward, as `fully_shard`'s argument does; it replaces a number given there."""
        if not isinstance(reshard_after_forward, bool):
            raise FSDPValueError(f"reshard_after_forward must be True or False here, not {reshard_after_forward!r}")
        groups = _groups(self, recurse)
        for group in groups:
            _set(group, auto_reshard=False)
        _switch(groups, reshard_after_forward=reshard_after_forward, reshard_inner=False)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether to reshard after backward.

        If not, parameters stay unsharded for the next forward, which takes more memory and less communication while
        gradients are accumulated. When an optimizer has changed the shards, the next forward gathers again.
        """
        _switch(_groups(self, recurse), reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers the parameters. An embedding's backward, for instance, does not need them."""
        _switch([_group(self)], unshard_in_backward=unshard_in_backward)

    # ------------------------------------------------------------------ prefetching

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules whose gathers start, in forward, when this module's parameters are unsharded."""
        _set(_group(self), forward_prefetch=_prefetched(modules, "set_modules_to_forward_prefetch"))

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules whose gathers start, in backward, when this module's parameters are unsharded.

        By default that is the module whose forward ended just before this one's.
        """
        _set(_group(self), backward_prefetch=_prefetched(modules, "set_modules_to_backward_prefetch"))

    def set_coalesce_bytes(self, nbytes: int) -> None:
        """Set the most bytes of parameters of small groups in a row, with equal settings, that share messages.

        They are gathered in one message before the first of them runs, freed after the last, and their gradients are
        reduced in one message. Results do not change. The setting is for the whole model; with 0 each group has its own
        messages. Shards may get other memory, so take state dicts that are to be used again afterwards.

        >>> import torch
        >>> from terrazzo.fsdp import fully_shard
        >>> fully_shard(torch.nn.Linear(2, 2)).set_coalesce_bytes(4 << 20)

        Args:
            nbytes: The limit; 4 MiB by default.
        """
        if nbytes < 0:
            raise FSDPValueError(f"nbytes must be a number of bytes, 0 or more, not {nbytes}")
        root_of(_group(self)).coalesce(nbytes)

    # ------------------------------------------------------------------ gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. If not, each rank accumulates its unsharded gradients."""
        _switch(_groups(self, recurse), gradient_sync=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients over the replicas of HSDP; if not, each accumulates its own."""
        _switch(_groups(self, recurse), all_reduce=requires_all_reduce)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Change nothing: parameters without a gradient on this rank are always reduced, with zeros from this rank.

        So are groups that this rank's loss does not reach, if they ran in the forward. Ranks agree on which parameters
        any rank used; a parameter that no rank used gets no gradient.
        """
        _groups(self, recurse)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Change nothing: PyTorch's method moves the allocations of gathers to the stream of the computation."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many buffers of packed gradients may be in reduction before the next is packed; 1 by default, and 2
        on CPU.

        With more buffers, backward need not wait for reductions that are slower than it; they take memory.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise FSDPTypeError(f"max_input_buffers must be a number of buffers, not {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise FSDPValueError(f"max_input_buffers must be 1 or more, not {max_input_buffers}")
        for group in _groups(self, recurse):
            _set(group, reduce_buffers=max_input_buffers)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Set a hook that is called with each flat reduced gradient of this group, before it becomes `.grad`.

        It may change the tensor in place, for instance to reduce it over more ranks.

        Args:
            hook: Called as `hook(reduced)`.
            stream: The stream of the accelerator on which the hook runs; ignored with HSDP.
        """
        _set(_group(self), hook=hook, hook_stream=stream)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Set the factor by which the sum of the ranks' gradients is divided, instead of the number of ranks."""
        if not factor > 0:
            raise FSDPValueError(f"the divide factor must be positive, not {factor}")
        _set(_group(self), divisor=float(factor))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """The same as `set_reduce_scatter_divide_factor`."""
        self.set_reduce_scatter_divide_factor(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last before the optimizer's step: it then waits for all reductions."""
        root_of(_group(self)).set_is_last(bool(is_last_backward))

    def reduce_gradients(self) -> None:
        """Reduce the gradients that backwards without gradient sync have accumulated. Call it on the root.

        Use it if it is not known before a backward that it is the last one, as in a pipeline schedule.
        """
        root_of(_group(self)).advance_without_graph((Event.REDUCE,))

    def set_post_optim_event(self, event: Any) -> None:
        """Set an event for which the next forward's gathers wait, instead of for everything that was queued before.

        Args:
            event: Recorded after the optimizer's step, on a stream of the accelerator.
        """
        root_of(_group(self)).executor.stepped = event

    # ------------------------------------------------------------------ communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Use `comm` for this group's all-gathers, and for the memory of their results.

        Args:
            comm: Allocates with `allocate(size, dtype=, device=)`, and is called as `comm(output_tensor=,
                input_tensor=, group=, async_op=)`. Inputs have the same size on all ranks.
        """
        group = _group(self)
        if _set(group, all_gather=comm):
            _pad(group)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Use `comm` for this group's reduce-scatters.

        Args:
            comm: As for `set_custom_all_gather`, but called with `op=` too: `ReduceOp.SUM`, or `ReduceOp.AVG` on
                accelerators unless `set_force_sum_reduction_for_comms` was called.
        """
        group = _group(self)
        if group.settings.reduce_codec is not None:
            raise FSDPValueError(
                f"{group.settings.reduce_codec} of the group's policy sends what it encodes by an all-to-all: use a "
                "policy without reduce_codec, or no custom reduce-scatter"
            )
        if _set(group, reduce_scatter=comm):
            _pad(group)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether custom reductions are called with `ReduceOp.SUM` only; results are then divided afterwards."""
        _set(_group(self), force_sum=enable)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether gradients are reduced by a process group of their own, so that gathers do not wait for them.

        All ranks that shard must call it together.
        """
        for group in _groups(self, recurse):
            axes = [mesh.shard for mesh in group.meshes] if enable else []
            if set(group.options.reduce_axes) != set(axes):
                _set(group, reduce_axes={axis: axis_beside(axis) for axis in axes})

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether buffers of gathers and reductions are allocated by the process group's backend, if it can.

        NCCL sends from such memory without copies. Not possible with custom communication, which allocates by itself.
        """
        group, memory = _group(self), GroupMemory()
        serves = any(memory.serves(mesh.shard, mesh.device) for mesh in group.meshes)
        _stage(group, memory if enable and serves else None)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Use symmetric memory (CUDA) for gathers, which NCCL's fastest all-gathers need.

        Also for reductions if `set_force_sum_reduction_for_comms(True)` was called before: there NCCL can only sum.
        Not possible with custom communication. All ranks that shard must call it together.
        """
        group = _group(self)
        _stage(group, SymmetricMemory(group.meshes, backend))

    def set_double_buffers(self, enable: bool = True) -> None:
        """Set whether this module, and those in it, gather into two buffers of each size by turns, which are not freed,
        and pack gradients into two more; by default their memory is allocated each time.

        Their addresses stay, which backends want that register memory, and nothing is allocated for communication after
        the first step. They take memory all the time: see `report`. If explicit prefetching gathers further ahead, the
        other buffers are freed.
        """
        root, groups = root_of(_group(self)), _groups(self, recurse=True)
        if all((group.options.buffers is not None) is enable for group in groups):
            return
        buffers = DoubleBuffers() if enable else None
        for group in groups:
            root.reshard(group.unit)
            _set(group, buffers=buffers)
        root.form_units()
        for unit in dict.fromkeys(group.unit for group in groups):
            unit.arrange_again()

    # ------------------------------------------------------------------ nn.Module

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        groups = _groups(self, recurse)
        for group in groups:
            if group.root is not None:
                group.root.reshard(group.unit)
        result = super()._apply(fn, recurse)
        for group in groups:
            unit = group.unit
            if group.root is not None:
                group.root.follow(unit, partly=True)
            else:
                unit.adopt(unit.replaced(), partly=True)
        return result


class UnshardHandle(ShownAsCall):
    """A gather that `FSDPModule.unshard(async_op=True)` started."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait for the gather: afterwards the module's parameters are unsharded for the current stream."""
        root_of(self._group).advance((Event.WAIT, self._group.unit.index))


_shown_whole: WeakSet[Root] = WeakSet()  # the models whose state dicts are whole


def show_whole(model: nn.Module) -> None:
    """Gather all parameters, and have the unsharded ones registered until the next backward or `reshard`.

    Programs that know nothing of shards see them between steps, in state dicts too, from now on. What users write to
    them goes to the shards before the next forward or optimizer step.
    """
    for root in dict.fromkeys(root_of(group) for group in _groups(model, True)):
        _shown_whole.add(root)
        root.unshard_all()


def sharded_of(model: nn.Module, parameter: Tensor) -> Tensor | None:
    """The sharded parameter of an unsharded one, with what users have written to that, or itself; None: it is not one
    of the model."""
    for group in _groups(model, True):
        for param in group.params:
            if parameter is param.unsharded or parameter is param.sharded:
                if group.root is not None:
                    group.root.save_writes(group.unit)
                return param.sharded
    return None


def sharded_parameters(model: nn.Module) -> list[Tensor]:
    """All sharded parameters of a model, registered or not."""
    return [param.sharded for group in _groups(model, True) for param in group.params]


def accumulated_gradient(model: nn.Module, parameter: Tensor) -> Tensor | None:
    """What this rank's backwards have added up for a parameter and not reduced, in either form of it; None: nothing."""
    for group in _groups(model, True):
        for param in group.params:
            if parameter is param.unsharded or parameter is param.sharded:
                return group.unit.accumulated(param)
    return None


def keep_state_dicts_sharded(group: Group) -> None:
    """Reshard before a state dict is made or loaded, so that state dicts always have sharded parameters.

    Not those of a model that shows whole parameters between steps.
    """

    def reshard(*args: Any, **kwargs: Any) -> None:
        if group.root is not None:
            group.root.settle(wait=True)  # no state of ranks that have diverged is saved
            if group.root not in _shown_whole:
                group.root.reshard(group.unit)

    for module in dict.fromkeys(slot.module for param in group.params for slot in param.slots):
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method gather and reshard parameters as forward does. No effect on a module that is not sharded.

    >>> import torch
    >>> from terrazzo.fsdp import fully_shard
    >>> class Model(nn.Linear):
    ...     def generate(self, x):
    ...         return self.weight @ x
    >>> model = fully_shard(Model(2, 3))
    >>> register_fsdp_forward_method(model, "generate")
    >>> model.generate(torch.ones(2)).shape
    torch.Size([3])

    Args:
        module: The module.
        method_name: The name of a method that computes with the module's parameters, such as `generate`.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise FSDPValueError(f"{type(module).__name__} has no method {method_name!r}")
    method = getattr(module, method_name)

    @wraps(method)
    def with_parameters(*args: Any, **kwargs: Any) -> Any:
        return _with_parameters(module, method, args, kwargs)

    setattr(module, method_name, with_parameters)


def _with_parameters(module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a method of the module returns, for which its parameters are gathered."""
    group, copies = _group(module), Copies()
    args, kwargs = before_forward(group, module, args, kwargs, copies)
    try:
        outputs = method(*args, **kwargs)
    except BaseException:
        forward_failed(group, module)
        raise
    finally:
        copies.follow()
    return after_forward(group, module, outputs)


# Weak values: an FSDP class refers to the original one, and lives as long as its modules.
_classes: WeakKeyDictionary[type[nn.Module], weakref.ref[type[nn.Module]]] = WeakKeyDictionary()


def make_fsdp_module(module: nn.Module) -> None:
    """Replace the class of `module` by its FSDP class."""
    original = type(module)
    known = _classes.get(original)
    found = None if known is None else known()
    if found is None:
        found = type(f"FSDP{original.__name__}", (FSDPModule, original), {"__module__": __name__})
        _classes[original] = weakref.ref(found)
    module.__class__ = found


def _group(module: Any) -> Group:
    group = group_of(module)
    if group is None:
        raise FSDPError(f"{type(module).__name__} is not sharded: call fully_shard on it first")
    return group


def _groups(module: Any, recurse: bool) -> list[Group]:
    """The groups of the module and, with `recurse`, of those in it."""
    if not recurse:
        return [_group(module)]
    inside = [each.__dict__ for each in modules_in(module)]
    return list(dict.fromkeys([attributes[ATTRIBUTE] for attributes in inside if ATTRIBUTE in attributes]))


def expect_backward(module: Any, *, reduces: bool, reshards: bool) -> None:
    """Set whether the next backward reduces gradients, all that there are, and whether it reshards."""
    group = _group(module)
    root = root_of(group)
    root.set_is_last(reduces)
    groups = root.groups if root.tops == (group,) else _groups(module, True)  # which walks through all modules
    _switch(groups, gradient_sync=reduces, reshard_after_backward=reshards)


def _pad(group: Group) -> None:
    """Pad sections to equal length, now that the group's options say so."""
    if group.root is not None:
        group.root.reshard(group.unit)
        group.root.form_units()
    else:
        part(group.unit)
    group.unit.arrange_again()


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Make several models, such as the chunks of a pipeline stage, communicate on the same streams of an accelerator.

    >>> from terrazzo.fsdp import fully_shard
    >>> share_comm_ctx([fully_shard(nn.Linear(2, 2)), fully_shard(nn.Linear(2, 2))])

    Args:
        modules: The root module of each.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise FSDPValueError(f"share_comm_ctx expected modules that fully_shard was called on, not {module!r}")
    roots = [root_of(_group(module)) for module in modules]
    for root in roots[1:]:
        root.share_streams_of(roots[0])


def _set(group: Group, **options: Any) -> bool:
    """Set options of the group; returns whether one changes. Only then plans are made again: programs set some for
    every micro-batch."""
    if not _differs(group.options, options):
        return False
    group.options = replace(group.options, **options)
    if group.root is not None:
        group.root.changed(sizes=True)
    return True


def _switch(groups: Iterable[Group], **switches: bool) -> None:
    """`_set` for the switches of several groups."""
    suiting = None  # those that need no change, which most groups have
    for group in groups:
        if group.switches is not suiting:
            if _differs(group.switches, switches):
                group.switches = with_switches(group.switches, **switches)
                if group.root is not None:
                    group.root.changed(sizes=False)
            suiting = group.switches


def _differs(value: Any, settings: dict[str, Any]) -> bool:
    return any(getattr(value, name) != setting for name, setting in settings.items())


def _stage(group: Group, staging: GroupMemory | None) -> None:
    """Communicate in this memory."""
    own = {"set_custom_all_gather": group.options.all_gather, "set_custom_reduce_scatter": group.options.reduce_scatter}
    for name, comm in own.items():
        if comm is not None:
            raise FSDPValueError(
                f"{name} was called on this module, so its communication allocates by itself: allocate the special "
                "memory there"
            )
    _set(group, staging=staging)
    if staging is not None:
        _pad(group)


def _prefetched(modules: Iterable[Any], method: str) -> tuple[Group, ...]:
    result = []
    for module in modules:
        group = group_of(module) if isinstance(module, nn.Module) else None
        if group is None:
            raise FSDPValueError(
                f"{method} expected modules that fully_shard was called on, not {type(module).__name__}"
            )
        result.append(group)
    return tuple(result)
