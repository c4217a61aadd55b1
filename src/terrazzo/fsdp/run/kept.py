"""The part of a bucket's unsharded parameters that this rank keeps between forward and backward, over a smaller mesh.

It is a copy in the dtype of computation, so backward uses the same parameters as forward, and gathers them among
neighbouring ranks. Meanwhile the modules' parameters are DTensors on the smaller mesh.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terrazzo._torch.counting import CountingParameter, writes_to
from terrazzo.comm.pending import Pending
from terrazzo.fsdp.meshes import InnerMesh
from terrazzo.fsdp.parameter import KEPT, ShardedParameter, as_parameter, mark
from terrazzo.fsdp.run.bucket import Bucket
from terrazzo.fsdp.run.comm import Comm


class _Part(NamedTuple):
    """What is kept between a forward and its backward."""

    buffer: Tensor
    views: list[Tensor]  # the parameters' parts of the buffer
    faces: list[Any]
    versions: list[int]  # of the faces, when only this module had written there


class Kept:
    """The kept part of one bucket, whose unsharded parameters exist."""

    def __init__(self, bucket: Bucket, inner: InnerMesh) -> None:
        self._bucket, self._axis = bucket, inner.axis
        self._plan = bucket.plan_over(inner.axis, bucket.params)
        self._layouts = [inner.layout(p.layout, p.dim) for p in bucket.params]
        # Through .data, so that writes do not change the parameters' version counters.
        self._pieces = self._plan.pieces([t.data for t in bucket.unsharded_locals()])
        self._part: _Part | None = None
        # The local tensors of those before that still exist, with names: a graph may give them gradients.
        self._former: list[tuple[str, weakref.ref[Any]]] = []

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self) -> dict[int, Any]:
        """Copy this rank's part; returns the parameters to register meanwhile, by the `id` of `ShardedParameter`s."""
        plan, values = self._plan, self._bucket.unsharded_locals()
        buffer = values[0].new_zeros(plan.own_size) if plan.padded else values[0].new_empty(plan.own_size)
        views = plan.own_views(buffer)
        torch._foreach_copy_(views, plan.own_chunks(values))
        params = self._bucket.params
        faces = [
            as_parameter(CountingParameter(view.data, param.requires_grad), layout)
            for param, view, layout in zip(params, views, self._layouts, strict=True)
        ]
        for param, face in zip(params, faces, strict=True):
            mark(face, KEPT, param.name)
        self._part = _Part(buffer, views, faces, [writes_to(face._local) for face in faces])
        return {id(param): face for param, face in zip(params, faces, strict=True)}

    def _own(self) -> list[tuple[ShardedParameter, Any]]:
        """The parameters with what is registered meanwhile; none if nothing is kept now."""
        return [] if self._part is None else list(zip(self._bucket.params, self._part.faces, strict=True))

    @property
    def is_there(self) -> bool:
        return self._part is not None

    @property
    def is_written(self) -> bool:
        """Whether users may have written to the kept part."""
        if self._part is None:
            return False
        own = zip(self._part.faces, self._part.views, self._part.versions, strict=True)
        return any(face._local.data_ptr() != view.data_ptr() or writes_to(face._local) != n for face, view, n in own)

    aliased = False  # a bucket whose shards are its parameters keeps none

    def gather(self, comm: Comm, tag: int, in_place: bool) -> Pending[Tensor]:
        """Start to gather the parts of the smaller mesh's ranks, which is not done in place."""
        part = self._part
        assert part is not None
        with torch.no_grad():
            for face, view in zip(part.faces, part.views, strict=True):
                if face._local.data_ptr() != view.data_ptr():  # users have set its `.data`
                    view.copy_(face._local)
        return comm.gather(part.buffer, self._plan, self._axis, tag)

    def receive(self, pending: Pending[Tensor]) -> None:
        """Wait for that gather, and fill the unsharded parameters."""
        self._bucket.fill(pending.wait(), self._plan, self._pieces)
        assert self._part is not None
        for i, (face, version) in enumerate(zip(self._part.faces, self._part.versions, strict=True)):
            if writes_to(face._local) != version:
                self._bucket.note_write(i)

    def copy_flags(self) -> None:
        """Copy `requires_grad` to the sharded parameters, where users have set it on those registered meanwhile."""
        for param, face in self._own():
            if face.requires_grad is not param.requires_grad:
                param.sharded.requires_grad_(face.requires_grad)

    def set_flags(self) -> None:
        """Set `requires_grad` as the sharded parameters have it."""
        for param, face in self._own():
            face.requires_grad_(param.requires_grad)

    def drop(self) -> None:
        """Free the kept part."""
        self.copy_flags()
        self._former[:] = [(name, ref) for name, ref in self._former if ref() is not None]
        self._former.extend((param.name, weakref.ref(face._local)) for param, face in self._own())
        self._part = None

    def with_gradients(self) -> list[str]:
        """The names of parameters whose part has a gradient, of which nothing would come."""
        found = [(param.name, face._local) for param, face in self._own()]
        found += [(name, ref()) for name, ref in self._former]
        self._former.clear()
        return [name for name, local in found if local is not None and local.grad is not None]
