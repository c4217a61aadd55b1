"""What one `fully_shard` call does around forward and backward of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo._torch.autograd import in_backward
from terrazzo._torch.compiling import disable_dynamo
from terrazzo.errors import FSDPError
from terrazzo.fsdp.bucket import Settings
from terrazzo.fsdp.direct import FIRST_TAG
from terrazzo.fsdp.group import Group
from terrazzo.fsdp.meshes import InnerMesh
from terrazzo.fsdp.misuse import remark_on_single_group
from terrazzo.fsdp.reduce import ReduceOptions, Reducer
from terrazzo.fsdp.schedule import Schedule
from terrazzo.fsdp.tree import has_tensor, map_tensors

ATTRIBUTE = "_terrazzo_fsdp_unit"

# How many roots there were on these ranks: their messages have tags of their own.
_roots: Counter[tuple[int, ...]] = Counter()


class Phase(Enum):
    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a module that `fully_shard` was called on."""
    found: Unit | None = module.__dict__.get(ATTRIBUTE)
    return found


class Unit:
    """Modules that one `fully_shard` call took, their group of parameters, and what the user set for them."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: Group | None,
        settings: Settings,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules = tuple(modules)
        self.group = group
        self.settings = settings
        self.options = ReduceOptions()
        self.reducers = [] if group is None else [Reducer(bucket, self.options) for bucket in group.buckets]
        self.name = ""
        self.index = 0  # among the units of the root
        self.schedule: Schedule | None = None
        self.gather_event: Any = None
        self.phase = Phase.IDLE
        self.modules_to_run: set[nn.Module] = set()  # of this pass, if there are several modules
        # What the user decides.
        self.auto_reshard = reshard_after_forward is None  # then the root is not resharded
        self.reshard_after_forward = reshard_after_forward is None or bool(reshard_after_forward)
        self.reshard_inner = False
        if group is not None and type(reshard_after_forward) is int:
            group.inner = InnerMesh.of(settings.mesh, reshard_after_forward)
            self.reshard_inner = True
        self.reshard_after_backward = True
        self.gradient_sync = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        for module in modules:
            module.__dict__[ATTRIBUTE] = self
        if group is not None:
            for module in group.modules():
                module.register_state_dict_pre_hook(self._before_state_dict)
                module.register_load_state_dict_pre_hook(self._before_state_dict)

    @property
    def is_idle(self) -> bool:
        """Whether neither its forward nor its backward is running."""
        return self.phase is Phase.IDLE

    def _before_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """State dicts hold sharded parameters, whatever state the group is in."""
        if self.group is not None:
            self.group.reshard()

    # ------------------------------------------------------------------ the root

    def ensure_schedule(self) -> Schedule:
        """The schedule of the root; a unit that has none yet becomes the root of the modules in it."""
        return self.schedule if self.schedule is not None else self._become_root()

    def _become_root(self) -> Schedule:
        if len(self.modules) > 1:
            raise FSDPError(
                f"the modules {[type(m).__name__ for m in self.modules]} were sharded together, but no module around "
                "them was: call fully_shard on the module that contains them too"
            )
        root = self.modules[0]
        units: dict[int, Unit] = {}
        for name, module in root.named_modules():
            unit = unit_of(module)
            if unit is not None:
                if id(unit) not in units:
                    unit.name = name or type(root).__mro__[2].__name__  # not that of the FSDP class
                units[id(unit)] = unit
        found = list(units.values())
        for unit in found:
            if unit.schedule is not None and unit.schedule.backward_running:
                raise FSDPError(
                    f"{unit.name!r} is in the middle of a backward, and cannot become part of a larger model now"
                )
        schedule = Schedule(found, self.settings.mesh.device)
        by_face = {id(p.sharded): p for unit in found if unit.group is not None for p in unit.group.params}
        for name, parameter in root.named_parameters():
            known = by_face.get(id(parameter))
            if known is not None:
                known.name = name
        number = _roots[self.settings.mesh.shard.ranks]
        _roots[self.settings.mesh.shard.ranks] += 1
        for index, unit in enumerate(found):
            unit.schedule, unit.index = schedule, index
            if unit.group is not None:
                unit.group.name = unit.name
                for i, bucket in enumerate(unit.group.buckets):
                    bucket.tag = FIRST_TAG + number % 4096 * (1 << 17) + index % (1 << 13) * 16 + i % 8 * 2
                for param in unit.group.params:
                    param.explain()
        if self.auto_reshard:
            self.reshard_after_forward = False  # backward would gather it again at once
        for unit in found:
            if unit is not self and unit.auto_reshard:
                unit.reshard_after_forward = True
        remark_on_single_group(root, found)
        return schedule

    # ------------------------------------------------------------------ forward

    @disable_dynamo
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make the parameters whole; returns the inputs as the module shall see them."""
        schedule = self.schedule
        if schedule is None:
            schedule = self._become_root()
        if self.phase is Phase.BACKWARD:
            if in_backward():  # a checkpoint recomputes
                schedule.start_unshard(self)
                schedule.finish_unshard(self)
                return self._cast_inputs(args, kwargs)
            schedule.recover()
        if schedule.forward_root is None:
            schedule.begin_forward(self)
            if schedule.stream is not None:
                args, kwargs = map_tensors((args, kwargs), lambda t: t.to(schedule.device, non_blocking=True))
        first = self.phase is Phase.IDLE
        if first:
            self.phase = Phase.FORWARD
            if len(self.modules) > 1:
                self.modules_to_run = set(self.modules)
        if self.group is not None:
            schedule.start_unshard(self)
            schedule.finish_unshard(self)
            if first:
                schedule.enter_forward(self)
        args, kwargs = self._cast_inputs(args, kwargs)
        if first and self.group is not None and torch.is_grad_enabled():
            # A tensor of our own, whose gradient is complete when everything in this forward has had its backward.
            args = map_tensors(args, self._watched)
            if kwargs:
                kwargs = map_tensors(kwargs, self._watched)
        return args, kwargs

    @disable_dynamo
    def after_forward(self, module: nn.Module, outputs: Any) -> Any:
        """Watch for backward, free the parameters if that is wanted; returns the outputs as others shall see them."""
        schedule = self.ensure_schedule()
        output_dtype = self.settings.precision.output_dtype
        if output_dtype is not None:
            outputs = map_tensors(outputs, lambda t: t.to(output_dtype) if t.is_floating_point() else t)
        if self.group is not None:
            outputs = map_tensors(outputs, self._independent)
        if self.phase is Phase.BACKWARD:
            return outputs
        keep = False
        if torch.is_grad_enabled():
            recomputing = in_backward()
            hook = partial(self._before_backward, schedule.ended)
            outputs = map_tensors(outputs, partial(self._announced, hook))
            if not recomputing:
                schedule.note_forward(self)
            # Where no output can be watched, backward may come unannounced, and would find no parameters.
            keep = recomputing or not has_tensor(outputs)
        if self.modules_to_run:
            self.modules_to_run.discard(module)
        if not self.modules_to_run:
            self.end_pass(keep)
        if schedule.forward_root is self:
            schedule.end_forward()
        return outputs

    def end_pass(self, keep: bool = False) -> None:
        """All modules have run, or those that will."""
        self.modules_to_run = set()
        self.phase = Phase.IDLE
        if self.reshard_after_forward and not keep and self.schedule is not None:
            self.schedule.reshard(self, inner=self.reshard_inner)

    def forward_failed(self) -> None:
        """Forward raised."""
        if self.phase is Phase.FORWARD:
            self.end_pass()
        if self.schedule is not None and self.schedule.forward_root is self:
            self.schedule.end_forward(failed=True)

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        precision = self.settings.precision
        dtype = precision.param_dtype
        if dtype is None or not precision.cast_forward_inputs:
            return args, kwargs

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_tensors(args, cast), map_tensors(kwargs, cast)

    def _watched(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        alias = tensor.view_as(tensor)
        alias.register_hook(self._after_backward)
        return alias

    def _independent(self, tensor: Tensor) -> Tensor:
        """A parameter handed out, or a view of one, outlives the parameters' memory: others get a copy."""
        return tensor.clone() if self.group is not None and self.group.lends(tensor) else tensor

    def _announced(self, hook: Any, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            if tensor.is_leaf:  # a parameter handed out: hooks on it would pile up
                tensor = tensor.view_as(tensor)
            tensor.register_hook(hook)
        return tensor

    # ------------------------------------------------------------------ backward

    def _before_backward(self, before: Sequence[Unit], grad: Tensor) -> None:
        """Backward reaches an output of the modules; `before` are units that ran before, the latest first."""
        if self.phase is Phase.BACKWARD:
            return
        schedule = self.ensure_schedule()
        schedule.begin_backward()
        self.phase = Phase.BACKWARD
        with torch.no_grad():
            schedule.make_room()
            if self.unshard_in_backward:
                schedule.start_unshard(self)
                schedule.finish_unshard(self)
            if self.backward_prefetch is not None:
                for unit in self.backward_prefetch:
                    schedule.start_unshard(unit, "prefetch")
            else:
                schedule.look_ahead([unit for unit in before if unit.unshard_in_backward])

    def _after_backward(self, grad: Tensor) -> None:
        """Backward leaves the modules through an input."""
        if self.phase is Phase.BACKWARD or (self.group is not None and self.group.has_gradients()):
            self.ensure_schedule().begin_backward()
            with torch.no_grad():
                self._leave_backward()

    def _leave_backward(self) -> None:
        self.phase = Phase.IDLE
        schedule = self.ensure_schedule()
        if self.reshard_after_backward:
            schedule.reshard(self)
        if self.gradient_sync:
            schedule.start_reduction(self)
        else:
            for reducer in self.reducers:
                reducer.accumulate()

    def finish_backward(self) -> None:
        """At the end of backward: what no input announced, and what was gathered for nothing."""
        if self.group is None:
            self.phase = Phase.IDLE
            return
        if self.phase is Phase.BACKWARD or (self.gradient_sync and self.group.has_gradients()):
            self._leave_backward()
        elif self.reshard_after_backward or self.group.is_gathering:
            self.group.reshard()

    def abandon(self) -> None:
        """Forget a backward that failed."""
        self.phase = Phase.IDLE
        self.modules_to_run = set()
        if self.group is not None:
            self.group.reshard()
        for reducer in self.reducers:
            reducer.abandon()
