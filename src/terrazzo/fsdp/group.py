"""A group: the parameters that one `fully_shard` call gathers and reduces together, and the state they are in."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrazzo._torch.modules import parameters_of
from terrazzo._torch.tensors import version_of
from terrazzo.comm.axis import Axis
from terrazzo.comm.pending import Pending
from terrazzo.errors import FSDPError
from terrazzo.fsdp.bucket import Bucket, Settings
from terrazzo.fsdp.flat import FlatPlan
from terrazzo.fsdp.meshes import InnerMesh
from terrazzo.fsdp.offload import park_state_of
from terrazzo.fsdp.parameter import ShardedParameter, as_parameter
from terrazzo.tensor import DTensor


class State(Enum):
    """What is registered in the modules."""

    SHARDED = "sharded"
    WHOLE = "whole"
    INNER = "sharded over the smaller mesh"


class Group:
    """Parameters and their buffers. It does what it is told; when is the schedule's business."""

    def __init__(self, params: Sequence[ShardedParameter], settings: Settings) -> None:
        self.params = tuple(params)
        self.settings = settings
        self.name = ""
        by_dtype: dict[torch.dtype, list[ShardedParameter]] = {}
        for param in params:
            by_dtype.setdefault(param.whole_local.dtype, []).append(param)
        self.buckets = tuple(Bucket(members, settings) for members in by_dtype.values())
        self.state = State.SHARDED
        self.inner: InnerMesh | None = None
        self._inner_buffers: list[tuple[Tensor, FlatPlan, list[Tensor]]] = []
        self._pending: list[Pending[Tensor]] | None = None
        self._version = -1
        self._direct = [(parameters_of(s.module), s.name, i) for i, p in enumerate(params) for s in p.slots if s.direct]
        self._indirect = [(s.module, s.name, i) for i, p in enumerate(params) for s in p.slots if not s.direct]
        self._prepared = False
        self._sharded: list[Any] = [p.sharded for p in params]
        self._whole: list[Any] = []
        self._register(self._sharded)

    # ------------------------------------------------------------------ registration

    def _register(self, faces: Sequence[Any]) -> None:
        for parameters, name, i in self._direct:
            parameters[name] = faces[i]
        for module, name, i in self._indirect:
            setattr(module, name, faces[i])

    def adopt(self) -> None:
        """Notice what users did to the sharded parameters since the last time: moved, replaced, frozen, loaded.

        Cheap when nothing happened, which is the rule: it runs before every forward of a root.
        """
        if self.state is State.INNER:
            return
        faces = self._whole if self.state is State.WHOLE else self._sharded
        replaced = False
        for parameters, name, i in self._direct:
            if faces and parameters[name] is not faces[i]:
                self._adopt_one(self.params[i], parameters[name])
                replaced = True
        if self.state is State.WHOLE:
            if not replaced:
                return
            self.reshard()
        if replaced:
            self._sharded = [p.sharded for p in self.params]
            self._register(self._sharded)
            self._prepared = False
        for bucket in self.buckets:
            if replaced or not bucket.shards_intact():
                self._check_alike(bucket)
                bucket.rebuild()
                self._prepared = False
        for param in self.params:
            if param.sharded.requires_grad is not param.requires_grad:
                param.requires_grad = param.sharded.requires_grad
                if self._prepared:
                    param.set_requires_grad(param.requires_grad)
        if not self._prepared:
            self._prepare()

    def _adopt_one(self, param: ShardedParameter, found: Any) -> None:
        if found is param.sharded:
            return
        if not isinstance(found, DTensor) or found._layout is not param.layout:
            placed = f"DTensor placed {list(found.placements)}" if isinstance(found, DTensor) else type(found).__name__
            raise FSDPError(
                f"rank {dist.get_rank()}: parameter {param.name!r} was replaced by a {placed} of shape "
                f"{tuple(found.shape)}; what takes its place has to be a DTensor of shape {tuple(param.layout.shape)} "
                f"placed {list(param.layout.placements)} on the same mesh"
            )
        param.sharded = found

    def _check_alike(self, bucket: Bucket) -> None:
        locals_ = [(p.name, p.sharded._local) for p in bucket.params]
        kinds = {(local.device.type, local.dtype) for _, local in locals_}
        if len(kinds) > 1:
            first = locals_[0]
            name, other = next(
                (n, x) for n, x in locals_ if (x.device.type, x.dtype) != (first[1].device.type, first[1].dtype)
            )
            raise FSDPError(
                f"parameters that were sharded together now differ: {first[0]!r} is {first[1].dtype} on "
                f"{first[1].device}, {name!r} is {other.dtype} on {other.device}; move or materialise all of them"
            )
        rest = bucket.settings.rest_device
        device = locals_[0][1].device
        if device.type not in (rest.type, "meta"):
            raise FSDPError(
                f"the sharded parameters {locals_[0][0]!r}, ... are on {device}, but rest on {rest} by their mesh and "
                f"offload policy: move the module back to {rest}"
            )

    def _prepare(self) -> None:
        """Precompute all that is the same in every step."""
        self._sharded = [p.sharded for p in self.params]
        if any(bucket.is_meta for bucket in self.buckets):
            return
        for bucket in self.buckets:
            bucket.prepare()
        for param in self.params:
            param.set_requires_grad(param.requires_grad)
        if self.settings.parks_state:
            for face in self._sharded:
                park_state_of(face, self.settings)
        self._whole = [p.whole for p in self.params]
        self._inner_buffers = []
        self._prepared = True

    def _check_ready(self) -> None:
        if not self._prepared:
            self.adopt()
        if not self._prepared:
            names = [p.name for b in self.buckets if b.is_meta for p in b.params]
            raise FSDPError(
                f"parameters are still on the meta device: {names}; call module.to_empty(device=...) and give them "
                "values (reset_parameters() of each module, or load a state dict) before the first forward"
            )

    # ------------------------------------------------------------------ unshard and reshard

    @property
    def is_gathering(self) -> bool:
        return self._pending is not None

    @property
    def version(self) -> int:
        """Changes whenever a sharded parameter is written to."""
        return sum(version_of(bucket.shard) for bucket in self.buckets)

    @property
    def is_stale(self) -> bool:
        """Whether shards were written to since the whole parameters were made of them."""
        return self.state is not State.SHARDED and self.version != self._version

    @property
    def gather_bytes(self) -> int:
        """What a rank sends, on average, for one gather."""
        if self.state is State.INNER and self.inner is not None:
            return self.gather_bytes_over(self.inner.axis)
        return self.gather_bytes_over(self.settings.mesh.shard)

    def gather_bytes_over(self, axis: Axis) -> int:
        """The same for a gather over another axis."""
        totals = [
            bucket.plan_over(axis, bucket.params).total * bucket.compute_dtype.itemsize for bucket in self.buckets
        ]
        return sum((axis.size - 1) * total // axis.size for total in totals)

    def start_unshard(self, careful: bool = False) -> bool:
        """Begin to make the parameters whole; False if they are, or will be without more ado.

        `careful` if ranks may want different groups now: then they wait for each other, and nothing is mixed up.
        """
        if self.state is State.WHOLE or self._pending is not None:
            return False
        self._check_ready()
        if self.state is State.INNER:
            assert self.inner is not None
            self._pending = [
                bucket.start_gather(buffer, plan, self.inner.axis, careful)
                for bucket, (buffer, plan, _) in zip(self.buckets, self._inner_buffers, strict=True)
            ]
        else:
            self._version = self.version
            axis = self.settings.mesh.shard
            self._pending = [b.start_gather(b.shard, b.plan, axis, careful) for b in self.buckets if not b.aliased]
        return True

    def finish_unshard(self) -> None:
        """Wait for the gather, and register the whole parameters."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if self.state is State.INNER:
            for bucket, part, (_, plan, pieces) in zip(self.buckets, pending, self._inner_buffers, strict=True):
                bucket.fill(part.wait(), plan, pieces)
            self._inner_buffers = [(b.new_empty(0), plan, pieces) for b, plan, pieces in self._inner_buffers]
        else:
            gathered = iter(pending)
            for bucket in self.buckets:
                if not bucket.aliased:
                    bucket.fill(next(gathered).wait(), bucket.plan, bucket.pieces)
        self._register(self._whole)
        self.state = State.WHOLE

    def reshard(self) -> None:
        """Register the sharded parameters and free the whole ones."""
        if self._pending is not None:
            for part in self._pending:  # a prefetch that nobody used
                part.wait()
            self._pending = None
        if self.state is State.SHARDED:
            return
        if self.state is State.WHOLE:
            for bucket in self.buckets:
                bucket.free()
        else:
            self._inner_buffers = [(b.new_empty(0), plan, pieces) for b, plan, pieces in self._inner_buffers]
        self._register(self._sharded)
        self.state = State.SHARDED

    def reshard_inner(self) -> None:
        """Keep this rank's part over the smaller mesh, and free the rest."""
        assert self.inner is not None
        if self.state is not State.WHOLE or any(bucket.aliased for bucket in self.buckets):
            return
        if not self._inner_buffers:
            for bucket in self.buckets:
                plan = bucket.plan_over(self.inner.axis, bucket.params)
                pieces = plan.pieces(_without_history(bucket.whole_locals()))
                self._inner_buffers.append((bucket.shard.new_empty(0), plan, pieces))
        kept: list[tuple[Tensor, FlatPlan, list[Tensor]]] = []
        faces: dict[int, Any] = {}
        with torch.no_grad():
            for bucket, (_, plan, pieces) in zip(self.buckets, self._inner_buffers, strict=True):
                whole = bucket.whole_locals()
                buffer = whole[0].new_empty(plan.own_size)
                views = plan.own_views(buffer)
                torch._foreach_copy_(views, plan.own_chunks(whole))
                kept.append((buffer, plan, pieces))
                for param, view in zip(bucket.params, views, strict=True):
                    layout = self.inner.layout(param.shape, param.dim)
                    faces[id(param)] = as_parameter(view, layout, param.requires_grad, {})
                bucket.free()
        self._inner_buffers = kept
        self._register([faces[id(p)] for p in self.params])
        self.state = State.INNER

    def lends(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory of whole parameters, which goes when they are resharded."""
        local = tensor._local if isinstance(tensor, DTensor) else tensor
        return any(bucket.owns(local) for bucket in self.buckets)

    # ------------------------------------------------------------------ gradients

    def has_gradients(self) -> bool:
        """Whether backward left gradients at the whole parameters."""
        return self._prepared and any(p.whole_local.grad is not None for p in self.params)

    def modules(self) -> list[nn.Module]:
        """Those that hold parameters of the group."""
        return list(dict.fromkeys(slot.module for param in self.params for slot in param.slots))


def _without_history(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory, written to without anybody's version counter."""
    return [t.data for t in tensors]
