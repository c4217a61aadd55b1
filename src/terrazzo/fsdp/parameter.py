"""One parameter of a group: its sharded and its unsharded tensor, and where it is registered.

Outside of forward and backward the *sharded* parameter is registered in the modules, a DTensor that optimizers and
state dicts use. During forward and backward it is the *unsharded* parameter: a plain tensor, or a tensor-parallel
DTensor if it was one. Both exist as long as the module; only the registration changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.counting import OWN_ATTRIBUTES, CountingParameter
from terrazzo._torch.dispatching import has_inner_tensors
from terrazzo._torch.modules import children_of, parameters_of
from terrazzo._torch.tensors import PARAMETER_MARK, mark_as_parameter
from terrazzo.comm.axis import Axis
from terrazzo.comm.collectives import broadcast
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp.meshes import DataMesh, ShardPlacementResult
from terrazzo.layout import Layout, Shard
from terrazzo.tensor import DTensor
from terrazzo.tensor.dtensor import WRITTEN, local_of, wrap
from terrazzo.tensor.redistribute import redistribute_local

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]

# Marks on parameters, whose values are names.
REPLACED = "_fully_shard_replaced"  # the module does not use it any more: fully_shard or the user has replaced it
IGNORED = "_fully_shard_ignored"  # its gradient is not averaged; the user may do that
KEPT = "_fully_shard_kept"  # a part that is registered while it is kept over a smaller mesh
SHARDED = "_fully_shard_sharded"  # it is, or has been, a sharded parameter


class Slot:
    """A module, and the name under which a parameter is registered in it."""

    __slots__ = ("direct", "module", "name")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        # Some modules (RNNs) keep lists of their parameters up to date in __setattr__.
        self.direct = type(module).__setattr__ is nn.Module.__setattr__


class ShardedParameter:
    """A parameter of a group."""

    __slots__ = (
        "attributes",
        "dim",
        "layout",
        "mesh",
        "name",
        "requires_grad",
        "sharded",
        "shape",
        "slots",
        "unsharded",
        "unsharded_local",
        "within",
    )

    def __init__(self, name: str, parameter: nn.Parameter, slots: list[Slot], dim: int, mesh: DataMesh) -> None:
        self.name = name
        self.slots = slots
        self.dim = dim
        self.mesh = mesh
        self.within: Layout | None = parameter._layout if isinstance(parameter, DTensor) else None
        local = local_of(parameter)
        self.shape = tuple(local.shape)  # of the unsharded local tensor
        self.layout = mesh.layout(tuple(parameter.shape), dim, self.within)
        self.requires_grad = parameter.requires_grad
        self.sharded: Any = None
        self.unsharded: Any = None
        self.unsharded_local: Tensor = local
        self.attributes = _attributes_of(parameter)  # all faces have them

    @property
    def values(self) -> Tensor:
        """This rank's shard; before it is sharded the whole local tensor."""
        local: Tensor = self.unsharded_local if self.sharded is None else self.sharded._local
        return local

    def make_sharded(self, local: Tensor) -> None:
        """Create the sharded parameter, with the memory of `local` as its local tensor. It has its own version counter:
        a write to one parameter is none to the others in the same buffer."""
        self.sharded = as_parameter(local.data.requires_grad_(self.requires_grad), self.layout)
        self.sharded.__dict__.update(self.attributes)
        mark(self.sharded, SHARDED, self.name)

    def adopt(self, found: Any) -> None:
        """Have `found`, which is registered instead of the sharded parameter, be that; raise if it does not fit."""
        if found is self.sharded:
            return
        if isinstance(found, DTensor) and not isinstance(found, nn.Parameter):
            raise FSDPError(
                f"rank {dist.get_rank()}: parameter {self.name!r} was replaced by a DTensor that is no nn.Parameter, "
                "as torch.func.functional_call does: the gather has no derivative, so gradients would be lost. Write "
                "the values to the parameters (copy_, .data, load_state_dict), or call the module before fully_shard"
            )
        if not (isinstance(found, DTensor) and _is_same(found._layout, self.layout)):
            placed = f"DTensor placed {list(found.placements)}" if isinstance(found, DTensor) else type(found).__name__
            raise FSDPError(
                f"rank {dist.get_rank()}: parameter {self.name!r} was replaced by a {placed} of shape "
                f"{tuple(found.shape)}; it must be a DTensor of shape {tuple(self.layout.shape)} with the placements "
                f"{list(self.layout.shown)} on the same mesh"
            )
        found._layout = self.layout  # equal meshes may have different process groups
        self.sharded = found

    def place_again(self) -> None:
        """Bring the sharded parameter back to its layout, if users have set `.data` to a DTensor with another one."""
        face, layout = self.sharded, self.layout
        if face._layout is layout:
            return
        if tuple(face.shape) != tuple(layout.shape) or face._layout.mesh != layout.mesh:
            raise FSDPError(
                f".data of parameter {self.name!r} was set to a DTensor of shape {tuple(face.shape)} on "
                f"{face._layout.mesh}; it must have the shape {tuple(layout.shape)}, on {layout.mesh}"
            )
        if face._layout.shown == layout.shown:
            return
        with torch.no_grad():
            local = redistribute_local(face._local.detach(), face._layout, layout)
        face.data = wrap(local, layout)

    def explain(self, name: str) -> None:
        """Take this name, and set the text on the sharded parameter that error messages about it contain."""
        self.name = name
        self.sharded._note = (
            f"{self.name!r} was sharded by fully_shard, and is unsharded only while its module runs: call "
            "the module itself, not its forward or a module in it; other methods need register_fsdp_forward_method, or "
            "unshard()"
        )

    def make_unsharded(self, local: Tensor, kind: type[nn.Parameter] = CountingParameter) -> None:
        """Create the unsharded parameter from `local`, whose version counter it gets. If there was one before, it takes
        over that one's accumulated gradient."""
        grad = self.unsharded_local.grad if self.unsharded is not None else None
        self.unsharded_local = kind(local, self.requires_grad)
        within = self.within
        self.unsharded = self.unsharded_local if within is None else as_parameter(self.unsharded_local, within)
        self.unsharded.__dict__.update(self.attributes)
        if grad is not None:
            self.unsharded_local.grad = grad.to(local.device, local.dtype)

    def follow_flag(self) -> bool:
        """Note it if users have set `requires_grad`, on whichever face; returns whether they have."""
        if self.sharded.requires_grad is not self.requires_grad:
            self.set_requires_grad(not self.requires_grad)
        elif self.unsharded is not None and self.unsharded_local.requires_grad is not self.requires_grad:
            self.set_requires_grad(not self.requires_grad)
        else:
            return False
        return True

    def set_requires_grad(self, value: bool) -> None:
        """Set it on both faces."""
        self.requires_grad = value
        self.sharded.requires_grad_(value)
        if self.unsharded is not None:
            self.unsharded_local.requires_grad_(value)


def share_scalars(params: Sequence[ShardedParameter]) -> None:
    """Give scalars, which every rank holds whole, the values of the first rank: the others may have drawn their own.

    A rank on which they are on the meta device takes part with ones that nobody uses.
    """
    alike: dict[tuple[Axis, torch.dtype], list[Tensor]] = {}
    for param in params:
        axis, values = param.mesh.replicate, param.unsharded_local.detach()
        if not param.shape and axis is not None:
            alike.setdefault((axis, values.dtype), []).append(values)
    for (axis, dtype), those in alike.items():
        device = torch.device(axis.device_type)
        here = [torch.ones((), dtype=dtype, device=device) if each.is_meta else each.to(device) for each in those]
        known = torch.tensor([not each.is_meta for each in those], dtype=dtype, device=device)
        sent = torch.cat([torch.stack(here), known])
        first, known = broadcast(sent, axis, 0).chunk(2)
        for values, value, own, is_known in zip(those, first, here, known, strict=True):
            if not values.is_meta:
                values.copy_(torch.where(is_known != 0, value, own))


def are_alike(params: Sequence[ShardedParameter]) -> bool:
    """Whether shards are of one dtype and on one kind of device."""
    return len({(p.sharded._local.device.type, p.sharded._local.dtype) for p in params}) == 1


def check_alike(params: Sequence[ShardedParameter], rest: torch.device) -> None:
    """Raise if parameters of one group and one dtype are not alike any more, or not on the device `rest`."""
    if not params:
        return
    shards = [(p.name, p.sharded._local) for p in params]
    name, first = shards[0]
    for other, shard in shards:
        if (shard.device.type, shard.dtype) != (first.device.type, first.dtype):
            raise FSDPError(
                f"parameters of one group must be alike, but {name!r} is {first.dtype} on {first.device}, and "
                f"{other!r} is {shard.dtype} on {shard.device}: move or materialise all of them"
            )
    if first.device.type not in (rest.type, "meta"):
        raise FSDPError(
            f"the sharded parameters {name!r}, ... are on {first.device}, but must be on {rest} by their mesh and "
            f"offload policy: move the module back to {rest}"
        )


def _is_same(one: Layout, other: Layout) -> bool:
    return one is other or (
        (one.placements, one.shape, one.order) == (other.placements, other.shape, other.order)
        and one.mesh == other.mesh
    )


def as_parameter(local: Tensor, layout: Layout) -> Any:
    """A DTensor that is an `nn.Parameter`, with exactly this local tensor."""
    result = wrap(local, layout)
    mark_as_parameter(result)
    return result


def _attributes_of(parameter: Any) -> dict[str, Any]:
    """What users hung on a parameter, without what its class sets."""
    others = {PARAMETER_MARK, "_note", REPLACED, IGNORED, KEPT, SHARDED, WRITTEN, *OWN_ATTRIBUTES}
    if not isinstance(parameter, DTensor) and has_inner_tensors(parameter):
        others.update(parameter.__tensor_flatten__()[0], vars(parameter.detach()))
    return {name: value for name, value in parameter.__dict__.items() if name not in others}


def mark(parameter: Any, what: str, name: str) -> None:
    """Mark a parameter, with the name that it has or had in the model: as `REPLACED`, `IGNORED` or `KEPT`."""
    parameter.__dict__[what] = name


def marked(parameter: Any, what: str) -> str | None:
    """The name with which a parameter is marked so, or None."""
    found: str | None = parameter.__dict__.get(what)
    return found


def collect(
    modules: Iterable[nn.Module], taken: Callable[[nn.Module], bool], ignored: set[nn.Parameter]
) -> list[tuple[str, nn.Parameter, list[Slot]]]:
    """The parameters of `modules`, without those of inner groups, with all modules where each is registered.

    `taken` returns whether a module has a group of its own.
    """
    found: dict[nn.Parameter, tuple[str, list[Slot]]] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        if module in seen or taken(module):
            return
        seen.add(module)
        for name, parameter in parameters_of(module).items():
            if parameter is not None and parameter not in ignored:
                found.setdefault(parameter, (prefix + name, []))[1].append(Slot(module, name))
        for name, child in children_of(module).items():
            if child is not None:
                visit(child, f"{prefix}{name}.")

    several = list(modules)
    for i, module in enumerate(several):
        visit(module, f"{i}." if len(several) > 1 else "")
    return [(name, parameter, slots) for parameter, (name, slots) in found.items()]


def placed(
    name: str, parameter: nn.Parameter, placement_fn: ShardPlacementFn | None, mesh: DataMesh
) -> tuple[int, DeviceMesh | None]:
    """The dim along which to shard a parameter, after checks, and its own mesh if it has one."""
    before = marked(parameter, REPLACED)
    if before is not None:
        raise FSDPError(
            f"parameter {name!r} is shared with {before!r}, which an earlier fully_shard call took. Modules that share "
            "a parameter must be one group: fully_shard([module_a, module_b])"
        )
    before = marked(parameter, SHARDED)
    if before is not None:
        raise FSDPError(
            f"parameter {name!r} was taken as {before!r} by an earlier fully_shard call, on another module that has "
            "the same module in it. Call fully_shard on the module that they share first, so that its parameters are "
            "gathered wherever it runs"
        )
    if type(parameter.data).__module__.startswith("torch.distributed"):
        raise FSDPError(
            f"parameter {name!r} is a {type(parameter.data).__name__} of torch.distributed: use "
            "terrazzo.tensor.parallel.parallelize_module or terrazzo.tensor.distribute_tensor"
        )
    kind = type(parameter._local if isinstance(parameter, DTensor) else parameter.data)
    if _acts_otherwise(kind):
        raise FSDPError(
            f"parameter {name!r} is a {kind.__name__}, a tensor subclass that fully_shard cannot shard: it must define "
            "__tensor_flatten__, __tensor_unflatten__, fsdp_pre_all_gather and fsdp_post_all_gather; or add it to "
            "ignored_params"
        )
    if isinstance(parameter, DTensor) and any(p.is_partial() for p in parameter.placements):
        raise FSDPError(
            f"parameter {name!r} has the placements {list(parameter.placements)}: redistribute the Partial ones first"
        )
    if parameter.ndim == 0 and has_inner_tensors(local_of(parameter)):
        raise FSDPValueError(
            f"parameter {name!r} is a scalar and a {kind.__name__}, whose rows fully_shard would gather. Change {name} "
            "to a 1D tensor with numel equal to 1, or add it to ignored_params"
        )
    if parameter.requires_grad and not (parameter.is_floating_point() or parameter.is_complex()):
        raise FSDPError(f"parameter {name!r} has dtype {parameter.dtype}, which cannot have a gradient")
    if mesh.whole is not None:
        _check_on_whole(name, parameter, mesh)
    answer: Any = placement_fn(parameter) if placement_fn is not None else None
    placement, own = answer, None
    if hasattr(answer, "mesh_info"):  # ours, or PyTorch's class of this name, which is private
        placement, own = answer.placement, _mesh_in(name, answer.mesh_info)
    if placement is None or parameter.ndim == 0:  # a scalar is not sharded, whatever the function returns
        return 0, own
    if not isinstance(placement, Shard):
        raise FSDPValueError(
            f"shard_placement_fn returned {answer!r} for {name!r}; it must return a Shard, a ShardPlacementResult or "
            "None"
        )
    dim = placement.dim + parameter.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.ndim:
        raise FSDPValueError(
            f"shard_placement_fn returned {answer!r} for {name!r} of shape {tuple(parameter.shape)}: "
            f"Shard dim {dim} is invalid for {parameter.ndim}D tensor; "
            f"dim must be from {-parameter.ndim} to {parameter.ndim - 1}"
        )
    return dim, own


def _mesh_in(name: str, info: Any) -> DeviceMesh:
    mesh: DeviceMesh = info.mesh
    if (info.replicate_mesh_dim, info.shard_mesh_dim) != ((None, 0) if mesh.ndim == 1 else (0, 1)):
        raise FSDPValueError(
            f"shard_placement_fn gave {name!r} the mesh {mesh}, with shard_mesh_dim={info.shard_mesh_dim} and "
            f"replicate_mesh_dim={info.replicate_mesh_dim}: a 1-D mesh shards on dim 0, and a 2-D mesh replicates on "
            "dim 0 and shards on dim 1"
        )
    return mesh


def _check_on_whole(name: str, parameter: nn.Parameter, mesh: DataMesh) -> None:
    if not isinstance(parameter, DTensor):
        raise FSDPValueError(
            f"parameter {name!r} is a plain tensor: with dp_mesh_dims all parameters must be DTensors on fully_shard's "
            "mesh (distribute_module, parallelize_module)"
        )
    names = mesh.whole.mesh_dim_names or () if mesh.whole is not None else ()
    if parameter.device_mesh != mesh.whole:
        raise FSDPValueError(
            f"parameter {name!r} is on {parameter.device_mesh}: with dp_mesh_dims it must be on fully_shard's mesh, "
            f"{mesh.whole}"
        )
    for dim, placement in zip(names, parameter.placements, strict=True):
        if dim in mesh.dims and not placement.is_replicate():
            raise FSDPValueError(
                f"parameter {name!r} is {placement!r} on the data-parallel dim {dim!r}: it must be Replicate() there, "
                "so that fully_shard can shard it"
            )


def _acts_otherwise(kind: type[Tensor]) -> bool:
    """Whether a tensor subclass has operations of its own, but no `__tensor_flatten__`."""
    if hasattr(kind, "__tensor_flatten__") or kind.__module__.startswith("torch."):  # torch's fake tensors
        return False
    usual = (Tensor.__torch_function__, nn.Parameter.__torch_function__)
    own_functions = getattr(kind.__torch_function__, "__func__", kind.__torch_function__) not in [
        getattr(function, "__func__", function) for function in usual
    ]
    return own_functions or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
