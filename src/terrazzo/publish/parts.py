"""What a rank has of a model, under the names by which it is published.

Trainer and receiver each say what they have as boxes of named tensors, and everything else (who sends, what is read,
what is compared) is worked out from that.  Names are the model's own without any wrapper, or those that `rename` gives
them, on each side its own: a fused projection on one side meets three on the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn

from terrazzo.checkpoint.plan.sharded import ShardView, Viewer, check_storable, is_sharded, local_chunks
from terrazzo.checkpoint.state_dict.persistent import state_of
from terrazzo.errors import PublishError, UnsupportedValueError
from terrazzo.layout import Box

RESERVED: Final = "terrazzo.publish/"  # names of what is stored beside the tensors begin so


class LinkLike(Protocol):
    """A box of a tensor of the model that is a box of a published one."""

    @property
    def model(self) -> str: ...
    @property
    def model_box(self) -> Box: ...
    @property
    def file(self) -> str: ...
    @property
    def file_box(self) -> Box: ...
    def in_file(self, box: Box) -> Box: ...


class RenameLike(Protocol):
    """What gives names: a `Rename` of `terrazzo.integrations.huggingface`, say, whose files are what is published."""

    def links(self, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[LinkLike]: ...


@dataclass(frozen=True, slots=True)
class About:
    """What is the same on all ranks."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A box of a published tensor, and the model's own memory of it on this rank.

    Attributes:
        is_plain: it is no distributed tensor, so nothing says that other ranks have the same numbers.
        is_buffer: it is no parameter.
    """

    name: str
    box: Box
    data: torch.Tensor
    is_plain: bool
    is_buffer: bool


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """All that this rank has.

    Attributes:
        abouts: the tensors by published name, also those of which this rank has no element.
        parts: the boxes that have elements.
        aliases: other names of tied tensors, and the published name that stands for each.
    """

    abouts: Mapping[str, About]
    parts: tuple[Part, ...]
    aliases: Mapping[str, str]


@torch.no_grad()
def parts_of(model: nn.Module | Mapping[str, torch.Tensor], rename: RenameLike | None) -> Parts:
    """What this rank has of a model, or of tensors by name; their memory is the model's."""
    tensors, known_as = _named(model)
    shapes = {name: tuple(tensors[first].size()) for first in tensors for name in (first, *known_as[first])}
    by_model: dict[str, list[LinkLike]] = {name: [] for name in shapes}
    for link in _Same().links(shapes) if rename is None else rename.links(shapes):
        by_model[link.model].append(link)
    viewer = Viewer()
    abouts: dict[str, About] = {}
    parts: list[Part] = []
    aliases: dict[str, str] = {}
    ends: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        _check(name, tensor)
        view = local_chunks(name, tensor, viewer.view)
        is_buffer = isinstance(model, nn.Module) and not isinstance(tensor, nn.Parameter)
        for link in by_model[name]:
            _reserved(link.file)
            about = abouts.setdefault(link.file, About(tensor.dtype, ()))
            if about.dtype != tensor.dtype:
                raise UnsupportedValueError(
                    f"{link.file} is made of tensors of several dtypes, {about.dtype} and {tensor.dtype} ({name})"
                )
            known = ends.setdefault(link.file, [0] * link.file_box.ndim)
            ends[link.file] = [max(a, b) for a, b in zip(known, link.file_box.ends, strict=True)]
            parts += _parts_under(link, view, is_plain=not is_sharded(tensor), is_buffer=is_buffer)
        for alias in known_as[name]:
            for other, link in zip(by_model[alias], by_model[name], strict=False):
                if other.file != link.file and other.file_box == link.file_box:
                    aliases[other.file] = link.file
    abouts = {name: About(about.dtype, tuple(ends[name])) for name, about in abouts.items()}
    return Parts(abouts, tuple(parts), {alias: name for alias, name in aliases.items() if alias not in abouts})


def _named(
    model: nn.Module | Mapping[str, torch.Tensor],
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, tuple[str, ...]]]:
    """Each tensor once, and the other names that it has."""
    if isinstance(model, nn.Module):
        state = state_of(model)
        return state.tensors, state.aliases
    firsts: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, list[str]] = {}
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) and not is_sharded(value):
            raise UnsupportedValueError(f"{name} is a {type(value).__name__}; pass a model, or tensors by name")
        first = firsts.setdefault(id(value), name)
        if first == name:
            tensors[name], aliases[name] = value, []
        else:
            aliases[first].append(name)
    return tensors, {name: tuple(found) for name, found in aliases.items()}


def _parts_under(link: LinkLike, view: ShardView, *, is_plain: bool, is_buffer: bool) -> list[Part]:
    """What this rank has of what a link leads to."""
    found = []
    for box, data in view.chunks:
        common = box.intersect(link.model_box)
        if common is None:
            continue
        place = link.in_file(common)
        piece = data[common.relative_to(box).slices()]
        if piece.ndim > place.ndim:
            piece = piece.squeeze(0)
        elif piece.ndim < place.ndim:
            piece = piece.unsqueeze(0)
        if not place.is_empty:
            found.append(Part(link.file, place, piece, is_plain, is_buffer))
    return found


def _check(name: str, tensor: Any) -> None:
    local = tensor.to_local() if is_sharded(tensor) and hasattr(tensor, "to_local") else tensor
    try:
        check_storable(local)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{name}: {error}") from error


def _reserved(name: str) -> None:
    if name.startswith(RESERVED):
        raise PublishError(f"{name!r} is not a name for a published tensor: names with {RESERVED!r} are taken")


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor that is published under its own name."""

    model: str
    model_box: Box

    @property
    def file(self) -> str:
        return self.model

    @property
    def file_box(self) -> Box:
        return self.model_box

    def in_file(self, box: Box) -> Box:
        return box


class _Same:
    """No other names."""

    def links(self, shapes: Mapping[str, tuple[int, ...]]) -> list[_Whole]:
        return [_Whole(name, Box.whole(shape)) for name, shape in shapes.items()]
