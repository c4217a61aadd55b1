"""One parameter of a group: where it is registered, and its two faces.

Outside forward and backward modules hold the *sharded* face, a DTensor that optimizers and state dicts see.  Inside
they hold the *unsharded* face, a plain tensor, or a tensor-parallel DTensor if it was one.  Both live as long as the
module; only which of them is registered changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.modules import children_of, parameters_of
from terrazzo._torch.tensors import PARAMETER_MARK, mark_as_parameter
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp.meshes import DataMesh, ShardPlacementResult
from terrazzo.layout import Layout, Shard
from terrazzo.tensor import DTensor
from terrazzo.tensor.dtensor import WRITTEN, wrap

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]

_REPLACED = "_fully_shard_replaced"  # on a parameter that fully_shard took: the name that it had
_IGNORED = "_fully_shard_ignored"  # on a parameter that fully_shard was told to ignore


class Slot:
    """A place where a parameter is registered."""

    __slots__ = ("direct", "module", "name")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        # Some modules (RNNs) keep lists of their parameters up to date in __setattr__.
        self.direct = type(module).__setattr__ is nn.Module.__setattr__


class ShardedParameter:
    """A parameter that `fully_shard` manages."""

    __slots__ = (
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
        local = parameter._local if isinstance(parameter, DTensor) else parameter
        self.shape = tuple(local.shape)  # of what forward sees on this rank
        self.layout = mesh.layout(tuple(parameter.shape), dim, self.within)
        self.requires_grad = parameter.requires_grad
        self.sharded: Any = None
        self.unsharded: Any = None
        self.unsharded_local: Tensor = local

    def make_sharded(self, local: Tensor, attributes: dict[str, Any]) -> None:
        """The sharded face, around `local`."""
        self.sharded = as_parameter(local, self.layout, self.requires_grad, attributes)

    def explain(self) -> None:
        """Say on the sharded face what errors about it should say."""
        self.sharded._note = (
            f"{self.name!r} is a parameter of a module that fully_shard took, and unsharded only while that runs: call "
            "the module itself, not its forward or a module in it; other methods need register_fsdp_forward_method, or "
            "unshard()"
        )

    def make_unsharded(self, local: Tensor, attributes: dict[str, Any]) -> None:
        """The unsharded face, around `local`, with a version counter of its own: gathering again is no modification."""
        if self.within is not None:
            self.unsharded = as_parameter(local.data, self.within, self.requires_grad, attributes)
            self.unsharded_local = self.unsharded._local
        else:
            self.unsharded = nn.Parameter(local.data, self.requires_grad)
            self.unsharded.__dict__.update(attributes)
            self.unsharded_local = self.unsharded

    def make_unsharded_of(self, local: Tensor, attributes: dict[str, Any]) -> None:
        """The unsharded face around a tensor that a subclass has made, of whatever class, with its own counter."""
        if self.within is not None:
            self.unsharded = as_parameter(local, self.within, self.requires_grad, attributes)
            self.unsharded_local = self.unsharded._local
        else:
            self.unsharded = nn.Parameter(local, self.requires_grad)
            self.unsharded.__dict__.update(attributes)
            self.unsharded_local = self.unsharded

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


def as_parameter(local: Tensor, layout: Layout, requires_grad: bool, attributes: dict[str, Any]) -> Any:
    """A DTensor that is an `nn.Parameter`, around exactly this local tensor."""
    result = wrap(local.detach().requires_grad_(requires_grad), layout)
    result.__dict__.update(attributes)
    mark_as_parameter(result)
    return result


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """What users hung on a parameter, which its faces keep."""
    ours = (PARAMETER_MARK, "_note", _REPLACED, _IGNORED, WRITTEN)
    return {name: value for name, value in parameter.__dict__.items() if name not in ours}


def mark_replaced(parameter: nn.Parameter, name: str) -> None:
    """Remember on the original that it no longer is what the module computes with."""
    parameter.__dict__[_REPLACED] = name


def replaced_name(parameter: Any) -> str | None:
    """The name of a parameter that `fully_shard` replaced, None for any other."""
    found: str | None = parameter.__dict__.get(_REPLACED)
    return found


def mark_ignored(parameter: nn.Parameter) -> None:
    """Remember that its user averages its gradient, if anybody does."""
    parameter.__dict__[_IGNORED] = True


def is_ignored(parameter: nn.Parameter) -> bool:
    """Whether it was given as one to ignore."""
    return _IGNORED in parameter.__dict__


def collect(
    modules: Iterable[nn.Module], taken: Callable[[nn.Module], bool], ignored: set[nn.Parameter]
) -> list[tuple[str, nn.Parameter, list[Slot]]]:
    """The parameters of `modules` with every place where they are registered, but for those of inner groups.

    `taken` tells modules that are sharded by a call of their own.
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
    """Along which dim the parameter is cut, after checking that it can be, and the mesh if it has one of its own."""
    before = replaced_name(parameter)
    if before is not None:
        raise FSDPError(
            f"parameter {name!r} is shared with {before!r}, which another fully_shard call has sharded already; "
            "parameters that are shared between modules belong to one group: fully_shard([module_a, module_b])"
        )
    if type(parameter.data).__module__.startswith("torch.distributed"):
        raise FSDPError(
            f"parameter {name!r} is a {type(parameter.data).__name__} of torch.distributed; make it a DTensor of "
            "terrazzo.tensor (terrazzo.tensor.parallel.parallelize_module, distribute_tensor)"
        )
    kind = type(parameter._local if isinstance(parameter, DTensor) else parameter.data)
    if _acts_otherwise(kind):
        raise FSDPError(
            f"parameter {name!r} is a {kind.__name__}, a tensor subclass whose operations fully_shard cannot follow: "
            "to be sharded it has to define __tensor_flatten__ and __tensor_unflatten__, fsdp_pre_all_gather and "
            "fsdp_post_all_gather; or put it among ignored_params"
        )
    if isinstance(parameter, DTensor) and any(p.is_partial() for p in parameter.placements):
        raise FSDPError(f"parameter {name!r} is placed {list(parameter.placements)}: redistribute its terms first")
    if parameter.ndim == 0:
        raise FSDPValueError(
            f"parameter {name!r} is a scalar, which cannot be cut: give it the shape (1,), or ignore it"
        )
    if parameter.requires_grad and not (parameter.is_floating_point() or parameter.is_complex()):
        raise FSDPError(f"parameter {name!r} of {parameter.dtype} cannot have a gradient")
    if mesh.whole is not None:
        _check_on_whole(name, parameter, mesh)
    answer: Any = placement_fn(parameter) if placement_fn is not None else None
    placement, own = answer, None
    if hasattr(answer, "mesh_info"):  # PyTorch's class for this is private, and may be used with this function
        placement, own = answer.placement, _mesh_in(name, answer.mesh_info)
    if placement is None:
        return 0, own
    if not isinstance(placement, Shard):
        raise FSDPValueError(
            f"shard_placement_fn returned {answer!r} for {name!r}; it has to return a Shard, a ShardPlacementResult or "
            "None"
        )
    dim = placement.dim + parameter.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.ndim:
        raise FSDPValueError(f"shard_placement_fn returned {answer!r} for {name!r} of shape {tuple(parameter.shape)}")
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
            f"parameter {name!r} is a plain tensor: with dp_mesh_dims all parameters are DTensors on the mesh that "
            "fully_shard is given (distribute_module, parallelize_module)"
        )
    names = mesh.whole.mesh_dim_names or () if mesh.whole is not None else ()
    if parameter.device_mesh != mesh.whole:
        raise FSDPValueError(
            f"parameter {name!r} lies on {parameter.device_mesh}, and with dp_mesh_dims it has to lie on the mesh that "
            f"fully_shard is given, {mesh.whole}"
        )
    for dim, placement in zip(names, parameter.placements, strict=True):
        if dim in mesh.dims and not placement.is_replicate():
            raise FSDPValueError(
                f"parameter {name!r} is placed {placement!r} on the data-parallel dim {dim!r}: it has to be "
                "Replicate() there, for fully_shard to cut it"
            )


def _acts_otherwise(kind: type[Tensor]) -> bool:
    """Whether a class has operations of its own, and does not say of which tensors it consists."""
    if hasattr(kind, "__tensor_flatten__") or kind.__module__.startswith("torch."):  # torch's fake tensors
        return False
    usual = (Tensor.__torch_function__, nn.Parameter.__torch_function__)
    own_functions = getattr(kind.__torch_function__, "__func__", kind.__torch_function__) not in [
        getattr(function, "__func__", function) for function in usual
    ]
    return own_functions or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


__all__ = [
    "ShardPlacementFn",
    "ShardedParameter",
    "Slot",
    "as_parameter",
    "attributes_of",
    "collect",
    "is_ignored",
    "mark_ignored",
    "mark_replaced",
    "placed",
    "replaced_name",
]
