"""Conversions: local tensors to DTensors and back, and DTensors to other placements and other meshes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.groups import current_mesh as enclosing_mesh
from terrazzo._torch.tensors import is_view
from terrazzo._torch.tensors import make_wrapper as _make
from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import all_gather, broadcast
from terrazzo.comm.mesh import canonical_mesh
from terrazzo.comm.observe import origin
from terrazzo.comm.simulated import is_simulated
from terrazzo.comm.wrapped import inner_of, is_wrapper, rebuilt
from terrazzo.errors import DTensorArgumentError, DTensorError, DTensorTypeError, PlacementsError
from terrazzo.layout import Layout, Partial, Placement, Replicate, plan_transition
from terrazzo.layout.chunk import ChunkStorageMetadata
from terrazzo.layout.placement import CUTS, check_placement
from terrazzo.layout.transition import LOCAL_STEPS, ToPartial
from terrazzo.tensor.cross_mesh import redistribute_across
from terrazzo.tensor.dtensor import DTensor, gradient_layout, sums_only, wrap
from terrazzo.tensor.foreign import check_plain
from terrazzo.tensor.links import links
from terrazzo.tensor.policy import asked_for, describing
from terrazzo.tensor.redistribute import Gathered, gathered_from, redistribute_local, run_step, start_step, steps_for
from terrazzo.tensor.strides import global_stride


def current_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """`mesh`, or that of the enclosing `with mesh:`."""
    if mesh is None:
        try:
            mesh = enclosing_mesh()
        except RuntimeError:
            raise DTensorError("no device mesh: pass device_mesh, or call this inside `with mesh:`") from None
    return canonical_mesh(mesh)


def placements_on(mesh: DeviceMesh, placements: Sequence[Placement] | None) -> tuple[Placement, ...]:
    """The placements as a tuple; None replicates."""
    if isinstance(placements, Placement):
        raise DTensorTypeError(
            f"placements are a list with one for each of the {mesh.ndim} dims of the mesh, not {placements!r}: write "
            f"[{placements!r}]"
        )
    return (Replicate(),) * mesh.ndim if placements is None else tuple(placements)


def from_local(
    local: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    if isinstance(local, DTensor):
        raise DTensorError(
            "from_local takes this rank's plain tensor, got a DTensor: use redistribute to change its placements"
        )
    check_plain("from_local", local)
    if local.layout is not torch.strided:
        raise DTensorError(f"a DTensor holds strided tensors, not {local.layout}: use local_tensor.to_dense()")
    mesh = current_mesh(mesh)
    placed = placements_on(mesh, placements)
    if local.device.type != mesh.device_type and local.device.type != "meta":
        local = local.to(mesh.device_type)
    if shape is None:
        shape = _even_shape(local, mesh, placed)
    layout = Layout.of(mesh, placed, tuple(shape))
    if layout.coord is None:  # a rank outside the mesh holds nothing, whatever it passes
        return wrap(local.new_zeros(layout.local_shape, requires_grad=local.requires_grad), layout)
    if tuple(local.shape) != tuple(layout.local_shape):
        raise DTensorArgumentError(
            f"rank {dist.get_rank()}: a local tensor of shape {tuple(local.shape)} is not this rank's part of a "
            f"tensor of shape {tuple(shape)} placed {list(placed)}, which has shape {tuple(layout.local_shape)}; pass "
            "shape=, the global shape, when ranks hold parts of different sizes"
        )
    if run_check:
        _check_alike(local, layout)
    if grad_placements is not None and local.requires_grad:
        needed = layout.with_placements(tuple(grad_placements))
        local = _OfLeaf.apply(_GradTo.apply(local, gradient_layout(layout), needed))
        return wrap(_FirstReplica.apply(local, layout) if run_check else local, layout)
    if not local.requires_grad and forward_ad.unpack_dual(local).tangent is None:
        # Not detach() of a wrapper, of which some do not keep all that they know (torchao's float8 its scaled dim).
        local = rebuilt(local, inner_of(local), local.shape) if is_wrapper(local) else local.detach()
    elif local.requires_grad and local.is_leaf:
        local = _OfLeaf.apply(local)
    else:
        local = local.view_as(local)
    return wrap(_FirstReplica.apply(local, layout) if run_check else local, layout)


class _OfLeaf(torch.autograd.Function):
    """A tensor that shares a leaf's memory, for a DTensor that may be written in place.

    Autograd forbids in-place writes to a view of a leaf. Here the DTensor is the result of an operation on the leaf,
    not a view: a write changes the leaf's values, and the written elements no longer depend on the leaf.
    """

    generate_vmap_rule = True  # torch.func's transforms reach it when they transform a function that calls from_local

    @staticmethod
    def forward(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Backward needs nothing saved."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> Any:
        return tangent.view_as(tangent)


def _even_shape(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    shape = list(local.shape)
    for m, p in enumerate(placements[: mesh.ndim]):
        check_placement(p)
        if isinstance(p, CUTS):
            if not -len(shape) <= p.dim < len(shape):
                raise PlacementsError(
                    f"{p!r} does not exist in a local tensor of shape {tuple(local.shape)}: dim must be from "
                    f"{-len(shape)} to {len(shape) - 1}"
                )
            shape[p.dim] *= mesh.size(m)
    return shape


_DESCRIPTION_BYTES = 256


def _check_alike(local: torch.Tensor, layout: Layout) -> None:
    """Compare across the mesh what ranks must agree on: dtype, global shape, requires_grad, order of dims."""
    everyone = axis_of(layout.mesh, tuple(range(len(layout.mesh_shape))))
    if everyone.group is None or is_simulated(everyone.group):
        return
    strides = global_stride(local, layout.shape) if local.numel() else "of no elements"
    mine = [
        f"{local.dtype}, global shape {tuple(layout.shape)}, requires_grad={local.requires_grad}",
        f"global strides {strides}",
    ]
    # Fixed-size descriptions, because ranks may disagree on the number of dims.
    data = b"".join(text.encode()[:_DESCRIPTION_BYTES].ljust(_DESCRIPTION_BYTES) for text in mine)
    row = torch.tensor([list(data)], dtype=torch.uint8, device=local.device)
    rows = all_gather(row, everyone, 0, (1,) * everyone.size).cpu().view(everyone.size, 2, _DESCRIPTION_BYTES)
    for rank, texts in zip(everyone.ranks, rows.tolist(), strict=True):
        other = [bytes(text).decode(errors="replace").rstrip() for text in texts]
        comparable = 1 if any(text.endswith("of no elements") for text in (mine[1], other[1])) else 2
        if other[:comparable] != [text[:_DESCRIPTION_BYTES] for text in mine[:comparable]]:
            raise DTensorArgumentError(
                f"from_local: the local tensors do not fit together. Rank {rank} has {', '.join(other)}; rank "
                f"{dist.get_rank()} has {', '.join(mine)}"
            )


class _FirstReplica(torch.autograd.Function):
    """Replicas with the values of the first of their ranks; each rank's tensor gets its own gradient."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: Layout) -> torch.Tensor:
        first = local.detach().clone()
        for m, p in enumerate(layout.placements):
            if isinstance(p, Replicate):
                first.copy_(broadcast(first, axis_of(layout.mesh, m), 0))  # in the strides of this rank's
        return first

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _GradTo(torch.autograd.Function):
    """The identity, whose gradient arrives in one layout and is redistributed to another."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, arrives: Layout, needed: Layout) -> torch.Tensor:
        ctx.layouts = (arrives, needed)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        arrives, needed = ctx.layouts
        return redistribute_local(grad, arrives, needed), None, None


def to_local(tensor: DTensor, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
    local, layout = tensor._local, tensor._layout
    if not local.requires_grad:
        return local
    if not torch.is_grad_enabled():
        return local.detach()
    if grad_placements is not None:
        arrives = layout.with_placements(tuple(grad_placements))
        if arrives is not layout.dual:
            if type(tensor._memo) is Gathered and all(p == Replicate() or p == Partial() for p in arrives.placements):
                # The gradient of a gather is partial, so it is reduce-scattered instead of reduced as a whole.
                with asked_for():
                    return tensor._memo.varying(local, arrives.varying)
            return _GradTo.apply(local, arrives, layout.dual)
    return local.view_as(local)


def full_tensor(tensor: DTensor, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
    return to_local(redistribute(tensor, None, None), grad_placements)


def redistribute(
    tensor: DTensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    *,
    order: Sequence[int] | None = None,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    with asked_for():
        if forward_dtype in (None, tensor.dtype) and backward_dtype in (None, tensor.dtype):
            return _redistribute(tensor, mesh, placements, order, async_op)
        return _redistribute_as(tensor, mesh, placements, order, forward_dtype, backward_dtype)


class _RedistributeAs(torch.autograd.Function):
    """A redistribution with one dtype in forward and another in backward; the gradient gets the input's dtype."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, src: Layout, dst: Layout, dtype: torch.dtype, backward_dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.of = src, dst, local.dtype, backward_dtype
        result = _own_memory(redistribute_local(local.to(dtype), src, dst), src, dst)
        return result.clone() if result is local or is_view(result) else result  # a custom Function's view is read-only

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        src, dst, dtype, backward_dtype = ctx.of
        own = redistribute_local(grad.to(backward_dtype), dst.dual, src.dual).to(dtype)
        return own, None, None, None, None


def _redistribute_as(
    tensor: DTensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    order: Sequence[int] | None,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> DTensor:
    src, local = tensor._layout, tensor._local
    if mesh is not None and canonical_mesh(mesh) is not src.mesh:
        raise DTensorArgumentError(
            "redistribute: forward_dtype and backward_dtype cannot be used with another mesh; convert the tensor with "
            ".to(dtype) before moving it there"
        )
    dst = Layout.of(src.mesh, placements_on(src.mesh, placements), src.shape, order)
    # Terms of other reductions than sums have other gradients than the tensor, so they are made and reduced apart.
    if not sums_only(src):
        local, src = redistribute_local(local, src, src.dual), src.dual
    between = dst if sums_only(dst) else dst.dual
    made = _RedistributeAs.apply(local, src, between, forward_dtype or local.dtype, backward_dtype or local.dtype)
    return wrap(redistribute_local(made, between, dst), dst)


def _redistribute(
    tensor: DTensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    order: Sequence[int] | None,
    async_op: bool,
) -> DTensor:
    src = tensor._layout
    if mesh is not None and (mesh := canonical_mesh(mesh)) is not src.mesh:
        placed = placements_on(mesh, placements)
        return redistribute_across(tensor, Layout.of(mesh, placed, src.shape, order))
    dst = Layout.of(src.mesh, placements_on(src.mesh, placements), src.shape, order)
    if dst is src:
        local = tensor._local
        return wrap(local.view_as(local) if local.requires_grad else local, dst)
    if async_op and not (src.packed or dst.packed):
        return _redistribute_later(tensor, dst)
    result = wrap(_own_memory(redistribute_local(tensor._local, src, dst), src, dst), dst)
    result._memo = gathered_from(tensor._local, src, dst, result._local)
    return result


def _own_memory(local: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
    """Copy a slice of the rank's tensor: a write to it must not change the replica on one rank only, and it must not
    keep the whole tensor alive."""
    if dst.packed:
        return local.clone(memory_format=torch.contiguous_format)
    if src.packed:
        return local
    steps = [step for step in plan_transition(src, dst) if axis_of(src.mesh, step.mesh_dims).size > 1]
    # All other steps make memory of their own, and some wrapper subclasses' own clone quantizes again.
    if steps and all(isinstance(step, ToPartial) for step in steps):
        return local.clone(memory_format=torch.contiguous_format)
    return local


def _redistribute_later(tensor: DTensor, dst: Layout) -> DTensor:
    """Start the first communication now; the rest happens when the result's local tensor is used for the first time."""
    src, local = tensor._layout, tensor._local
    finish = _start(local, src, dst)
    grad_mode = torch.is_grad_enabled()
    describe = origin.describe

    def receive() -> tuple[torch.Tensor, Gathered | None]:
        with torch.set_grad_enabled(grad_mode), describing(describe):
            made = finish()
            return made, gathered_from(local, src, dst, made)

    result: PendingDTensor = _make(PendingDTensor, dst.shape, None, None, None, local.dtype, _STRIDED, local.device)
    result._layout = dst
    result._memo = None
    result._pending = threading.Lock(), receive
    return result


def _start(local: torch.Tensor, src: Layout, dst: Layout) -> Callable[[], torch.Tensor]:
    steps = steps_for(local, src, dst)
    communicates = [not isinstance(s, LOCAL_STEPS) and axis_of(src.mesh, s.mesh_dims).size > 1 for s in steps]
    first = communicates.index(True) if True in communicates else None
    if first is None:
        return lambda: _own_memory(redistribute_local(local, src, dst), src, dst)
    for step in steps[:first]:
        local = run_step(local, step, src.mesh, ())
    started = start_step(local, steps[first], src.mesh)

    def finish() -> torch.Tensor:
        result = run_step(local, steps[first], src.mesh, (), started)
        for step in steps[first + 1 :]:
            result = run_step(result, step, src.mesh, ())
        return result

    return finish


def chunk_list(tensor: DTensor) -> list[Any]:
    layout = tensor._layout
    if any(p.is_partial() for p in layout.placements):
        raise DTensorArgumentError(
            f"a DTensor placed {list(layout.shown)} is partial, and partial terms cannot be stored in a "
            "checkpoint: redistribute it to Shard or Replicate first"
        )
    boxes = [] if layout.coord is None else layout.pieces()
    return [ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.lengths)) for box in boxes]


def chunk_at(tensor: DTensor, offset: Sequence[int]) -> torch.Tensor:
    """The part of the local tensor that `chunk_list` has with this offset."""
    layout, local = tensor._layout, tensor.to_local()
    for dim, pieces in layout.packed.items():
        length = local.shape[dim] // pieces
        local = local.narrow(dim, offset[dim] // (layout.shape[dim] // pieces) * length, length)
    return local


links.from_local, links.to_local, links.full_tensor = from_local, to_local, full_tensor
links.redistribute, links.chunk_list, links.chunk_at = redistribute, chunk_list, chunk_at

__all__ = ["chunk_at", "chunk_list", "current_mesh", "from_local", "full_tensor", "redistribute", "to_local"]

_STRIDED = torch.strided  # passed by position, which saves a tenth of an operation's cost


class PendingDTensor(DTensor):
    """A DTensor whose communication is running; it becomes a plain `DTensor` when its local tensor is first used."""

    __slots__ = ()

    @property
    def _local(self) -> torch.Tensor:  # type: ignore[override]  # a slot in the base class, which is set at the end
        pending = self._pending
        if pending is not None:  # None: another thread has received it
            lock, receive = pending
            with lock:
                if self._pending is not None:
                    local, self._memo = receive()
                    _local_slot.__set__(self, local)
                    object.__setattr__(self, "__class__", DTensor)
                    self._pending = None  # it holds the tensor that was sent
        received: torch.Tensor = _local_slot.__get__(self)
        return received

    def _shown(self) -> str:
        """Not the local tensor: what is still to be sent needs all ranks, and one alone may print."""
        return "<in communication>"


_local_slot: Any = DTensor.__dict__["_local"]
