"""What a module can do once `fully_shard` was called on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from terrazzo.comm.axis import axis_beside
from terrazzo.errors import FSDPError, FSDPTypeError, FSDPValueError
from terrazzo.fsdp.group import Group, group_of
from terrazzo.fsdp.plan.state import Event
from terrazzo.fsdp.run.hooks import after_forward, before_forward, forward_failed
from terrazzo.fsdp.run.root import root_of
from terrazzo.fsdp.run.staging import GroupMemory, SymmetricMemory, use_staging
from terrazzo.fsdp.settings import AllGather, ReduceScatter

if TYPE_CHECKING:
    _Module = nn.Module  # what a sharded module is besides
else:
    _Module = object


class FSDPModule(_Module):
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
        group = _group(self)
        args, kwargs = before_forward(group, self, args, kwargs)
        try:
            outputs = super().__call__(*args, **kwargs)
        except BaseException:
            forward_failed(group, self)
            raise
        return after_forward(group, self, outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise FSDPValueError(
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
        group = _group(self)
        root_of(group).unshard(group.unit)
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters of this module's group and register the sharded ones; not for inner groups."""
        group = _group(self)
        root_of(group).reshard(group.unit)

    def reset_iter_state(self) -> None:
        """Forget an iteration that failed: parameters are resharded, and gradients that were not reduced are dropped.

        Called on the root. A forward or backward that raises needs no such call, as the next forward forgets it by
        itself; but what earlier micro-batches have added up for the same step is dropped only here, and by a backward
        that raised.
        """
        group = _group(self)
        root = root_of(group)
        if group not in root.tops:
            raise FSDPError(
                f"reset_iter_state was called on {group.name!r}, which is inside {root.tops[0].name!r}: call it on "
                "the root, the module whose forward is called first"
            )
        root.recover()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those that `set_requires_gradient_sync(False)` has added up without reducing them.

        An optimizer's `zero_grad` knows of reduced gradients only.
        """
        for group in _groups(self, recurse=True):
            for gradients in group.unit.gradients:
                gradients.abandon()
            for param in group.params:
                grad = param.sharded.grad
                if grad is not None and set_to_none:
                    param.sharded.grad = None
                elif grad is not None:
                    grad.detach_().zero_()
        super().zero_grad(set_to_none)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to reshard after forward, as the argument of `fully_shard`; instead of a number given there."""
        if not isinstance(reshard_after_forward, bool):
            raise FSDPValueError(f"set_reshard_after_forward takes True or False, got {reshard_after_forward!r}")
        for group in _all_changing(self, recurse):
            group.reshard_after_forward = reshard_after_forward
            group.auto_reshard = group.reshard_inner = False

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to reshard after backward.

        Without it parameters stay unsharded for the next forward: more memory and less communication while gradients
        are accumulated. Once an optimizer has changed the shards, the next forward gathers again.
        """
        for group in _all_changing(self, recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers the parameters; not if it does not need them, as that of an embedding."""
        group = _changing(self)
        group.unshard_in_backward = unshard_in_backward

    # ------------------------------------------------------------------ prefetching

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The modules whose gathers begin once this one's parameters are there, in forward."""
        _changing(self).forward_prefetch = _prefetched(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The modules whose gathers begin once this one's parameters are there, in backward.

        By default that is the module whose forward ended just before this one's.
        """
        _changing(self).backward_prefetch = _prefetched(modules, "set_modules_to_backward_prefetch")

    def set_coalesce_bytes(self, nbytes: int) -> None:
        """Up to how many bytes of unsharded parameters small groups that follow one another go in one message.

        One message takes them all before the first of them runs, and their gradients are reduced in one when the last
        of them has some. Numbers stay what they are. It holds for the whole model; 0 has each group go alone.

        >>> import torch
        >>> from terrazzo.fsdp import fully_shard
        >>> fully_shard(torch.nn.Linear(2, 2)).set_coalesce_bytes(4 << 20)

        Args:
            nbytes: 4 MiB unless this is called.
        """
        if nbytes < 0:
            raise FSDPValueError(f"set_coalesce_bytes takes a number of bytes, got {nbytes}")
        root = root_of(_group(self))
        root.coalesce_bytes = nbytes
        root.changed()

    # ------------------------------------------------------------------ gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; without it they add up on each rank, unsharded."""
        for group in _all_changing(self, recurse):
            group.gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over the replicas of HSDP, or lets reduced shards add up."""
        for group in _all_changing(self, recurse):
            group.options.all_reduce = requires_all_reduce

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Nothing, for it always is so: a parameter without a gradient here is reduced with zeros from this rank.

        Ranks agree which parameters any of them used, so that one that nobody used keeps no gradient.
        """
        _groups(self, recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many packed gradients may be under reduction at once before the next are packed; 1 by default.

        More of them let backward go on while reductions take longer than it does, for that much more memory.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise FSDPTypeError(
                f"set_reduce_scatter_max_input_buffers takes a number of buffers, got {max_input_buffers!r}"
            )
        if max_input_buffers < 1:
            raise FSDPValueError(
                f"set_reduce_scatter_max_input_buffers: there has to be one buffer, got {max_input_buffers}"
            )
        for group in _all_changing(self, recurse):
            group.options.reduce_buffers = max_input_buffers

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Have `hook` called with each flat reduced gradient of this group, before it is handed to the parameters.

        It may change the tensor in place, for instance to reduce it over further ranks.

        Args:
            hook: Called as `hook(reduced)`.
            stream: On an accelerator, where the hook runs; without meaning with HSDP.
        """
        options = _changing(self).options
        options.hook, options.hook_stream = hook, stream

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """By what the sum of the ranks' gradients is divided, instead of by their number."""
        if not factor > 0:
            raise FSDPValueError(f"the divide factor has to be positive, got {factor}")
        _changing(self).options.divisor = float(factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """The same as `set_reduce_scatter_divide_factor`."""
        self.set_reduce_scatter_divide_factor(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer: then it waits for all reductions."""
        root_of(_group(self)).is_last_backward = is_last_backward

    def reduce_gradients(self) -> None:
        """Reduce what backwards without gradient sync have added up, here and in inner groups; call it on the root.

        So it need not be known before a backward that it is the last: a pipeline schedule decides that, not its user.
        """
        root_of(_group(self)).reduce_now()

    def set_post_optim_event(self, event: Any) -> None:
        """What the next forward's gathers wait for, once, instead of for everything queued before it.

        Args:
            event: Recorded after the optimizer's step, on an accelerator's stream.
        """
        streams = root_of(_group(self)).streams
        if streams is not None:
            streams.post_optim_event = event

    # ------------------------------------------------------------------ communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Have this group's all-gathers, and the memory for their results, be those of `comm`.

        Args:
            comm: Allocates with `allocate(size, dtype=, device=)`, and is called as `comm(output_tensor=,
                input_tensor=, group=, async_op=)`. Inputs are equally long on all ranks.
        """
        group = _changing(self)
        group.options.all_gather = comm
        _pad(group)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Have this group's reduce-scatters be those of `comm`.

        Args:
            comm: As for `set_custom_all_gather`, and called with `op=` too: `ReduceOp.SUM`, or `ReduceOp.AVG` on
                accelerators unless `set_force_sum_reduction_for_comms` was called.
        """
        group = _changing(self)
        group.options.reduce_scatter = comm
        _pad(group)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether custom reductions are only asked for sums, which are divided afterwards."""
        _changing(self).options.force_sum = enable

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether gradients are reduced over connections of their own, so that gathers need not wait for them.

        All ranks that shard have to call it together.
        """
        for group in _all_changing(self, recurse):
            axes = [mesh.shard for mesh in group.meshes] if enable else []
            group.options.reduce_axes = {axis: axis_beside(axis) for axis in axes}

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether what is gathered and reduced lies in memory of the process group, if its backend has such memory.

        NCCL sends from there without copies. It does not go with communication of one's own, which allocates itself.
        """
        group, memory = _changing(self), GroupMemory()
        serves = any(memory.serves(mesh.shard, mesh.device) for mesh in group.meshes)
        use_staging(group, memory if enable and serves else None)
        if enable and serves:
            _pad(group)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Have gathers lie in symmetric memory, which NCCL's quickest all-gathers need; CUDA has it.

        Reductions do too, if `set_force_sum_reduction_for_comms(True)` was called before: NCCL only adds there.
        It does not go with communication of one's own. All ranks that shard have to call it together.
        """
        group = _changing(self)
        use_staging(group, SymmetricMemory(group.meshes, backend))
        _pad(group)

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


class UnshardHandle:
    """A gather that `FSDPModule.unshard(async_op=True)` began."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def wait(self) -> None:
        """End the gather: afterwards the module's parameters are unsharded, for what runs on the current stream."""
        root_of(self._group).advance((Event.WAIT, self._group.unit.index))


def keep_state_dicts_sharded(group: Group) -> None:
    """State dicts hold sharded parameters, whatever state the group is in."""

    def reshard(*args: Any, **kwargs: Any) -> None:
        if group.root is not None:
            group.root.reshard(group.unit)

    for module in group.holders():
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)


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
    group = _group(module)

    @wraps(method)
    def with_parameters(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before_forward(group, module, args, kwargs)
        try:
            outputs = method(*args, **kwargs)
        except BaseException:
            forward_failed(group, module)
            raise
        return after_forward(group, module, outputs)

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


def _group(module: Any) -> Group:
    group = group_of(module)
    if group is None:
        raise FSDPError(f"{type(module).__name__} was not sharded by fully_shard")
    return group


def _groups(module: Any, recurse: bool) -> list[Group]:
    """The groups of the module and, with `recurse`, of those in it."""
    if not recurse:
        return [_group(module)]
    groups = (group_of(m) for m in module.modules())
    return list(dict.fromkeys(group for group in groups if group is not None))


def _changing(module: Any) -> Group:
    """The module's group, of which something is about to be set."""
    group = _group(module)
    if group.root is not None:
        group.root.changed()
    return group


def _pad(group: Group) -> None:
    """Communication of users' own wants sections of equal length."""
    if group.root is not None:
        group.root.reshard(group.unit)
    group.unit.use_equal_sections()


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Have several models, such as the chunks of a pipeline stage, communicate on the same streams of an accelerator.

    Args:
        modules: The root of each.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise FSDPValueError(f"share_comm_ctx takes modules that fully_shard was called on, got {module!r}")
    roots = [root_of(_group(module)) for module in modules]
    for root in roots[1:]:
        root.share_streams_of(roots[0])


def _all_changing(module: Any, recurse: bool) -> list[Group]:
    groups = _groups(module, recurse)
    for group in groups:
        if group.root is not None:
            group.root.changed()
    return groups


def _prefetched(modules: Iterable[Any], method: str) -> list[Group]:
    result = []
    for module in modules:
        group = group_of(module) if isinstance(module, nn.Module) else None
        if group is None:
            raise FSDPValueError(f"{method} takes modules that fully_shard was called on, got {type(module).__name__}")
        result.append(group)
    return result


__all__ = [
    "FSDPModule",
    "UnshardHandle",
    "keep_state_dicts_sharded",
    "make_fsdp_module",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
