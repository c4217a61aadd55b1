"""The parts of a model that a rank has, under their published names.

Trainer and receiver each list what they have as boxes of named tensors. From that follows which rank sends what, what
is read and what is compared. The names are the model's, without the prefixes of wrappers, or those that `rename`
gives; each side has its own `rename`, so that a fused projection on one side fits three projections on the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import torch
from torch import nn

from terrazzo.checkpoint.native.merging import refuse_gaps
from terrazzo.checkpoint.native.tensors import dtype_from_name, dtype_name
from terrazzo.checkpoint.plan.sharded import ShardView, ShardViews, check_storable, is_sharded, local_chunks
from terrazzo.checkpoint.state_dict.names import state_of
from terrazzo.errors import CheckpointError, DivergentValueError, PublishError, UnsupportedValueError
from terrazzo.layout.box import Box, Link

RESERVED: Final = "terrazzo.publish/"  # prefix of the names of entries that are not published tensors


class RenameLike(Protocol):
    """Published names for a model's tensors, such as a `Rename` of `terrazzo.integrations.huggingface`."""

    def links(self, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Link]: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The dtype and the global shape of a published tensor, which are the same on all ranks."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ModelPart:
    """A box of a published tensor, and the model's memory for it on this rank.

    Attributes:
        is_plain: whether it is a plain tensor, not a DTensor; other ranks may then have other values.
        is_buffer: whether it is a buffer, not a parameter.
    """

    name: str
    box: Box
    data: torch.Tensor
    is_plain: bool
    is_buffer: bool


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of a model that this rank has.

    Attributes:
        infos: the tensors by published name, including those of which this rank has no element.
        parts: the boxes on this rank that have elements.
        aliases: the published name of each other name of a tied tensor.
    """

    infos: Mapping[str, TensorInfo]
    parts: tuple[ModelPart, ...]
    aliases: Mapping[str, str]


@torch.no_grad()
def parts_of(model: nn.Module | Mapping[str, torch.Tensor], rename: RenameLike | None) -> Parts:
    """The parts of a model, or of tensors by name, on this rank; their memory is the model's."""
    tensors, known_as = _named(model)
    shapes = {name: tuple(tensors[first].size()) for first in tensors for name in (first, *known_as[first])}
    by_model: dict[str, list[Link]] = {name: [] for name in shapes}
    same = [Link(name, Box.whole(shape), name, Box.whole(shape)) for name, shape in shapes.items()]
    for link in same if rename is None else rename.links(shapes):
        by_model[link.model].append(link)
    viewer = ShardViews()
    infos: dict[str, TensorInfo] = {}
    parts: list[ModelPart] = []
    aliases: dict[str, str] = {}
    ends: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        _check(name, tensor)
        view = local_chunks(name, tensor, viewer.view)
        is_buffer = isinstance(model, nn.Module) and not isinstance(tensor, nn.Parameter)
        for link in by_model[name]:
            if link.file.startswith(RESERVED):
                raise PublishError(
                    f"{link.file!r} cannot be published: names that begin with {RESERVED!r} are reserved. Rename it"
                )
            info = infos.setdefault(link.file, TensorInfo(tensor.dtype, ()))
            if info.dtype != tensor.dtype:
                raise UnsupportedValueError(
                    f"{link.file} is made of tensors of several dtypes, {info.dtype} and {tensor.dtype} ({name})"
                )
            known = ends.setdefault(link.file, [0] * link.file_box.ndim)
            ends[link.file] = [max(a, b) for a, b in zip(known, link.file_box.ends, strict=True)]
            parts += _parts_under(link, view, is_plain=not is_sharded(tensor), is_buffer=is_buffer)
        for alias in known_as[name]:
            for other, link in zip(by_model[alias], by_model[name], strict=False):
                if other.file != link.file and other.file_box == link.file_box:
                    aliases[other.file] = link.file
    infos = {name: TensorInfo(info.dtype, tuple(ends[name])) for name, info in infos.items()}
    return Parts(infos, tuple(parts), {alias: name for alias, name in aliases.items() if alias not in infos})


def _named(
    model: nn.Module | Mapping[str, torch.Tensor],
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, tuple[str, ...]]]:
    """Each tensor once, under its first name, and the aliases: other names of tied tensors."""
    if isinstance(model, nn.Module):
        state = state_of(model)
        return state.tensors, state.aliases
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) and not is_sharded(value):
            raise UnsupportedValueError(f"{name} is a {type(value).__name__}; pass a model, or tensors by name")
        found.setdefault(id(value), (value, []))[1].append(name)
    tensors = {names[0]: value for value, names in found.values()}
    return tensors, {names[0]: tuple(names[1:]) for _, names in found.values()}


def _parts_under(link: Link, view: ShardView, *, is_plain: bool, is_buffer: bool) -> list[ModelPart]:
    """This rank's parts of the published box of a link."""
    found = []
    for box, data in view.chunks:
        common = box.intersect(link.model_box)
        if common is None:
            continue
        place = link.in_file(common)
        piece = data[common.relative_to(box).slices()]
        if piece.ndim != place.ndim:  # by a first dim of length 1
            piece = piece.view(place.lengths)
        if not place.is_empty:
            found.append(ModelPart(link.file, place, piece, is_plain, is_buffer))
    return found


def _check(name: str, tensor: Any) -> None:
    local = tensor.to_local() if is_sharded(tensor) and hasattr(tensor, "to_local") else tensor
    try:
        check_storable(local)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{name}: {error}") from error


# ------------------------------------------------------------------ which rank publishes what


def published_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is published: `asked` if it is floating-point, else its own."""
    return asked if asked is not None and dtype.is_floating_point else dtype


def changed(since: str) -> PublishError:
    """The error of a model that is not described as it was before; `since` says when, and what to do."""
    return PublishError(f"the model's tensors, dtypes or layout have changed since {since}")


class _Row(msgspec.Struct, array_like=True, frozen=True):
    """A box of a tensor on a rank."""

    tensor: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    is_plain: bool
    is_buffer: bool


class _Table(msgspec.Struct, array_like=True, frozen=True):
    """The description that a rank sends to the others."""

    tensors: list[tuple[str, str, tuple[int, ...]]]  # name, dtype, shape
    rows: list[_Row]
    aliases: dict[str, str]


class ListedBox(msgspec.Struct, array_like=True, frozen=True):
    """A box that a rank publishes."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PublishedShares:
    """Which of its parts each rank publishes.

    Attributes:
        own: for each rank, the indices of the parts that it publishes.
        held: for each rank, the boxes that these are.
        compared: the indices of this rank's plain parameters that other ranks have, too, and that must be equal there,
            each with the name under which ranks compare it.
        infos: all tensors of all ranks, as they are published.
        aliases: other names of tied tensors.
    """

    own: list[list[int]]
    held: list[list[ListedBox]]
    compared: list[tuple[int, str]]
    infos: dict[str, TensorInfo]
    aliases: dict[str, str]


def described(parts: Parts) -> bytes:
    """This rank's encoded description, for the other ranks."""
    numbers = {name: number for number, name in enumerate(parts.infos)}
    tensors = [(name, dtype_name(info.dtype), info.shape) for name, info in parts.infos.items()]
    rows = [
        _Row(numbers[part.name], part.box.offsets, part.box.lengths, part.is_plain, part.is_buffer)
        for part in parts.parts
    ]
    return msgspec.msgpack.encode(_Table(tensors, rows, dict(parts.aliases)))


def shares_of(descriptions: Sequence[bytes], me: int | None, dtype: torch.dtype | None) -> PublishedShares:
    """The shares of all ranks, from their descriptions, in order; `me` is this rank, if it is one of them.

    Floating-point tensors are published in this dtype; None: in their own.
    """
    tables = [msgspec.msgpack.decode(each, type=_Table) for each in descriptions]
    infos = _agreed(tables)
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}  # rank, place
    for rank, table in enumerate(tables):
        for place, row in enumerate(table.rows):
            key = table.tensors[row.tensor][0], Box(row.offsets, row.lengths)
            holders.setdefault(key, []).append((rank, place))
    _check_whole(infos, list(holders))
    load = [0] * len(tables)
    shares: list[dict[int, ListedBox]] = [{} for _ in tables]
    compared: list[tuple[int, str]] = []
    for (name, box), found in holders.items():
        rows = [tables[rank].rows[place] for rank, place in found]
        if any(row.is_buffer and row.is_plain for row in rows):
            owner, place = found[0]  # buffers such as running statistics may differ: the lowest rank's are published
        else:
            owner, place = min(found, key=lambda each: (load[each[0]], each[0]))
            if len(found) > 1 and any(row.is_plain for row in rows):
                compared += [(mine, f"{name}{box.offsets}") for rank, mine in found if rank == me]
        load[owner] += box.numel * infos[name].dtype.itemsize
        shares[owner][place] = ListedBox(name, box.offsets, box.lengths)
    own = [sorted(share) for share in shares]
    held = [[share[place] for place in places] for share, places in zip(shares, own, strict=True)]
    aliases = {alias: name for table in tables for alias, name in table.aliases.items() if alias not in infos}
    published = {name: TensorInfo(published_dtype(info.dtype, dtype), info.shape) for name, info in infos.items()}
    return PublishedShares(own, held, compared, published, aliases)


def _agreed(tables: Sequence[_Table]) -> dict[str, TensorInfo]:
    """All ranks' tensors. Ranks may have different tensors (stages of a pipeline); dtypes and shapes must agree."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, table in enumerate(tables):
        for name, dtype, shape in table.tensors:
            first = found.setdefault(name, (dtype, shape))
            if first != (dtype, shape):
                raise DivergentValueError(
                    f"{name} is {dtype} {list(shape)} on rank {rank} of the process group, but {first[0]} "
                    f"{list(first[1])} on a lower rank"
                )
    return {name: TensorInfo(dtype_from_name(dtype), shape) for name, (dtype, shape) in found.items()}


def _check_whole(infos: dict[str, TensorInfo], keys: Sequence[tuple[str, Box]]) -> None:
    """Raise unless the boxes make up each tensor exactly."""
    by_name: dict[str, list[Box]] = {name: [] for name, info in infos.items() if 0 not in info.shape}
    for name, box in keys:
        by_name[name].append(box)
    try:
        refuse_gaps({name: (infos[name].shape, boxes) for name, boxes in by_name.items()})
    except CheckpointError as error:
        raise PublishError(
            "these ranks together do not have all elements of all tensors: construct the Publisher on all ranks that "
            f"have a part of the model ({error})"
        ) from error


def refuse_differences(digests: Sequence[Mapping[str, int]]) -> None:
    """Raise if a plain parameter is not equal on all ranks that have it, from the digests that they sent."""
    seen: dict[str, tuple[int, int]] = {}
    wrong = []
    for rank, said in enumerate(digests):
        for name, digest in said.items():
            first = seen.setdefault(name, (rank, digest))
            if first[1] != digest:
                wrong.append(f"{name} on ranks {first[0]} and {rank}")
    if wrong:
        raise DivergentValueError(
            f"plain parameters differ between ranks of the process group: {', '.join(wrong[:10])}"
            f"{' and more' if wrong[10:] else ''}. Make them DTensors, or give them the same values on all ranks"
        )
