"""What a bucket sends with codecs: matrices as the policy's codec encodes them, vectors as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.comm.axis import Axis
from terrazzo.comm.codecs import Codec, Plain
from terrazzo.comm.encoded import Encoded
from terrazzo.comm.flat import ALIGNMENT, FlatPlan
from terrazzo.comm.in_place import InPlace
from terrazzo.comm.pending import Pending
from terrazzo.errors import FSDPValueError
from terrazzo.fsdp.parameter import ShardedParameter
from terrazzo.fsdp.run.bucket import Bucket
from terrazzo.fsdp.run.comm import Comm
from terrazzo.fsdp.settings import Settings


def bucket_of(params: Sequence[ShardedParameter], settings: Settings, equal: bool) -> Bucket:
    """A bucket that gathers as the settings say."""
    encodes = settings.gather_codec is not None and settings.mesh.shard.size > 1
    return (EncodedBucket if encodes else Bucket)(params, settings, equal)


def encoded(
    params: Sequence[ShardedParameter],
    plan: FlatPlan,
    codec: Codec,
    dtype: torch.dtype,
    sent: torch.dtype,
    settings: Settings,
    equal: bool,
) -> Encoded:
    """The sections of parameters, or of their gradients, of `dtype`; what is not encoded is sent in `sent`."""
    codecs = []
    for param in params:
        own = codec if len(param.shape) > 1 else Plain(sent)
        allowed = own.refuses(param.shape, dtype, param.dim, plan.n)
        if allowed:
            raise FSDPValueError(
                f"{codec} cannot encode parameter {param.name!r}, {dtype} of shape {tuple(param.shape)}, cut along dim "
                f"{param.dim} into {plan.n} parts: {allowed}. Or give fully_shard a policy without it for this module"
            )
        codecs.append(own)
    return Encoded(plan, codecs, equal, 1 if settings.mesh.device.type == "cpu" else ALIGNMENT)


def over_replicas(
    params: Sequence[ShardedParameter], plan: FlatPlan, codec: Codec, sent: torch.dtype, axis: Axis, settings: Settings
) -> Encoded:
    """This rank's chunks of gradients with this plan, of which each replica along the axis adds some rows."""
    codecs = [codec if len(param.shape) > 1 else Plain(sent) for param in params]
    rows = FlatPlan(plan.own_shapes, [0] * len(params), axis.size, axis.index, True, plan.extra)
    return Encoded(rows, codecs, True, 1 if settings.mesh.device.type == "cpu" else ALIGNMENT)


class EncodedBucket(Bucket):
    """A bucket that gathers what a codec makes of the shards."""

    def __init__(self, params: Sequence[ShardedParameter], settings: Settings, equal: bool) -> None:
        self._known: dict[tuple[FlatPlan, torch.dtype], Encoded] = {}
        super().__init__(params, settings, equal)
        _ = self._encoded  # so that what cannot be encoded raises at once

    @property
    def _encoded(self) -> Encoded:
        key = self.plan, self.dtype
        if key not in self._known:
            codec, equal = self.settings.gather_codec, self.plan.equal
            assert codec is not None
            found = encoded(self.params, self.plan, codec, self.dtype, self.compute_dtype, self.settings, equal)
            self._known[key] = found
        return self._known[key]

    @property
    def gather_plan(self) -> FlatPlan:
        """The flat plan of what is gathered."""
        return self._encoded.plan

    def _gather_sizes(self) -> tuple[int, int, int]:
        plan = self.gather_plan
        moved = self.shard_bytes * (self.settings.rest_device != self.settings.mesh.device)
        return moved + 2 * plan.own_size, plan.total, plan.moved(1)  # the parts, and the section of them

    def in_place(self) -> InPlace | None:
        return None

    def gather(self, comm: Comm, tag: int) -> Pending[Tensor]:
        return comm.gather(self.section(), self.gather_plan, self.settings.mesh.shard, tag)

    def section(self) -> Tensor:
        """What this rank sends."""
        shard = self.shard.detach().to(self.settings.mesh.device, non_blocking=True)
        return self._encoded.encode(self.plan.own_views(shard))

    def receive(self, pending: Pending[Tensor]) -> None:
        gathered = pending.wait()
        self.take()
        self._encoded.decode(gathered, self._places)

    @property
    def is_rounded(self) -> bool:
        return True

    def rounded(self, i: int, shard: Tensor) -> Tensor:
        codec = self._encoded.codecs[i]
        values = torch.empty(shard.shape, dtype=self.compute_dtype, device=self.settings.mesh.device)
        codec.decode(codec.encode(shard.detach().to(values.device)), values)
        return values


__all__ = ["EncodedBucket", "bucket_of", "encoded", "over_replicas"]
