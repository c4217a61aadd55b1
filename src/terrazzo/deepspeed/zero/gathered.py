"""Blocks in which parameters are whole, for reading and writing.

Outside, a parameter is a DTensor of which each rank holds a part. While it is gathered, every operation on it runs on
the whole tensor instead; afterwards each rank takes its part of one rank's whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.dispatching import tree_map
from terrazzo.comm import axis_of, collectives
from terrazzo.deepspeed.engines import as_sharded, reshard_all, show_again, whole_parameters
from terrazzo.deepspeed.utils.sharded import copy_into, whole
from terrazzo.deepspeed.zero.status import mark_as_whole
from terrazzo.engine.placing import on_device
from terrazzo.errors import EngineError, EngineValueError
from terrazzo.layout.drawing import ShownAsCall
from terrazzo.tensor import DTensor, distribute_tensor


class GatheredParameters(ShownAsCall):
    """A block in which these parameters are whole, on every rank.

    >>> model = nn.Linear(2, 2)
    >>> with GatheredParameters(model.weight, modifier_rank=0):
    ...     _ = nn.init.ones_(model.weight)
    >>> model.weight.sum().item()
    4.0

    Args:
        params: One parameter, or several.
        modifier_rank: The rank whose values are kept; None: writes inside the block are lost, as in DeepSpeed. In a
            pipeline it counts the ranks that hold the parameter, those of its stage; other numbers are global ranks.
        fwd_module: Has no effect.
        enabled: If False, nothing happens.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self._given = {id(p): p for p in given if isinstance(p, Tensor)} if enabled else {}
        self._writer = modifier_rank
        self._whole: list[tuple[Any, Tensor]] = []  # sharded parameters, and their whole tensors
        self._plain: list[Tensor] = []  # parameters that are not sharded
        if self._writer is not None and dist.is_initialized():
            for parameter in self._given.values():
                _source(holders(parameter), self._writer)

    def __enter__(self) -> None:
        # While gradients are accumulated the user may pass the unsharded parameter instead of the sharded one.
        between_steps = whole_parameters()
        shards = {number: p if number in between_steps else as_sharded(p) for number, p in self._given.items()}
        sharded = {id(p): p for p in shards.values() if isinstance(p, DTensor)}
        self._plain = [p for p in shards.values() if not isinstance(p, DTensor)]
        if sharded:
            reshard_all()
        for number, parameter in sharded.items():
            gathered = whole(parameter)
            self._whole.append((parameter, gathered))
            face = _faces[number] = nn.Parameter(gathered, parameter.requires_grad)
            mark_as_whole(face, parameter)
            parameter.__class__ = _Gathered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        gathered, self._whole = self._whole, []
        for parameter, _ in gathered:
            parameter.__class__ = DTensor
            del _faces[id(parameter)]
        if self._writer is None or error is not None or not dist.is_initialized():
            return
        for parameter, tensor in gathered:
            copy_into(parameter, _from_writer(tensor, holders(parameter), self._writer))
        show_again([parameter for parameter, _ in gathered])
        for parameter in self._plain:
            copy_into(parameter, _from_writer(parameter.detach().clone(), holders(parameter), self._writer))


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """The model of an engine, for `generate`; call that on all ranks.

    DeepSpeed gathers all parameters for it; here each forward gathers what it needs.
    """
    yield getattr(model, "module", model)


def is_gathered(parameter: Tensor) -> bool:
    """Whether a parameter is inside `GatheredParameters`."""
    return type(parameter) is _Gathered


def holders(parameter: Tensor) -> DeviceMesh | None:
    """The ranks that hold a parameter; None: all."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh
    return getattr(parameter, "ds_stage_mesh", None)  # of a `PipelineModule`


def _source(mesh: DeviceMesh | None, writer: int) -> int:
    """The global rank of the writer."""
    world = dist.get_world_size()
    ranks = list(range(world)) if mesh is None else mesh.mesh.flatten().tolist()
    if len(ranks) == world:
        found = writer if 0 <= writer < world else None
    else:
        found = ranks[writer] if 0 <= writer < len(ranks) else writer if writer in ranks else None
    if found is None:
        raise EngineValueError(
            f"modifier_rank is {writer}, but the parameter is on the ranks {ranks}: pass one of these"
            + ("" if len(ranks) == world else f", or a number from 0 to {len(ranks) - 1} to count only them")
        )
    return found


def _from_writer(tensor: Tensor, mesh: DeviceMesh | None, writer: int) -> Tensor:
    """The writer's tensor, on all ranks that hold the parameter."""
    source = _source(mesh, writer)
    if mesh is None:
        dist.broadcast(tensor, src=source)
        return tensor
    [position] = (mesh.mesh == source).nonzero().tolist()
    for dim, index in enumerate(position):
        axis = axis_of(mesh, dim)
        tensor = collectives.broadcast(on_device(tensor, axis), axis, index)
    return tensor


_faces: dict[int, nn.Parameter] = {}
"""The whole tensors of gathered parameters, by the id of the parameter."""


class _Gathered(DTensor):
    """The class of a parameter while it is gathered: it behaves as the whole, plain tensor."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        # PyTorch looks these up to find out what kind of tensor it is.
        if name in ("__class__", "__torch_function__", "__torch_dispatch__"):
            return object.__getattribute__(self, name)
        if name in ("_local", "_layout"):  # with which its module gathers it for a forward
            found = object.__getattribute__(self, name)
            if name == "_local":
                _check_unwritten(found, object.__getattribute__(self, "_layout"), _faces[id(self)])
            return found
        return getattr(_faces[id(self)], name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: _faces[id(x)] if type(x) is _Gathered else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _check_unwritten(local: Tensor, layout: Any, face: Tensor) -> None:
    """Raise if the whole tensor has other values than this rank's shard."""
    with torch.no_grad():
        part = distribute_tensor(face.detach(), layout.mesh, layout.shown, src_data_rank=None).to_local()
        if not torch.allclose(part, local, rtol=0, atol=0, equal_nan=True):
            raise EngineError(
                "a module ran inside GatheredParameters after its parameters were written there: other ranks get what "
                "was written when the block ends, so run the module after it"
            )


def _as_the_face(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_faces[id(self)], name)(*args, **kwargs)

    return method


# Python looks these up in the class, not in the object.
for _name in ("__repr__", "__format__", "__len__", "__iter__", "__bool__", "__int__", "__float__", "__index__"):
    setattr(_Gathered, _name, _as_the_face(_name))
for _name in ("__contains__", "__deepcopy__", "__reduce_ex__", "__array__"):
    setattr(_Gathered, _name, _as_the_face(_name))

__all__ = ["GatheredParameters", "unwrap_model_for_generation"]
