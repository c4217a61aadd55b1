"""Which tensors of a model correspond to which tensors in files, where names differ or several tensors are joined.

A rule has patterns of names for the model and for the files. A placeholder such as `{n}` stands for one part of a
name, between dots; it must have the same value on both sides. One side has one pattern. If the other side has
several, the tensor of the first is the concatenation of theirs along a dim:

    Rule("layers.{n}.norm.weight", "model.layers.{n}.input_layernorm.weight")
    Rule("layers.{n}.gate_up.weight", ["layers.{n}.gate.weight", "layers.{n}.up.weight"])

A placeholder on one side only is a number: the index along a first dim of the other side's tensor:

    Rule("layers.{n}.experts.down", "layers.{n}.experts.{e}.down.weight")

All rules are reduced to links: a box of a tensor of the model is a box of a tensor in a file (`Link`). Loading and
saving use only links, so every rule works in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, TypeAlias

from terrazzo.errors import CheckpointMismatchError
from terrazzo.layout.box import Box, Link
from terrazzo.layout.drawing import ShownAsCall

_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_]+)\}")
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Rule:
    """One or several names in the model, and one or several in the files.

    Args:
        model: The names in the model.
        file: The names in the files.
        dim: The dim of the joined tensor along which the others are concatenated.
        sizes: Their lengths along this dim; None: all equal, or as in the model's tensors.
        groups: The joined tensor consists of this many groups, each with an equal part of every other tensor (in
            Megatron's order: the heads of queries with their keys and values).
    """

    model: str | Sequence[str]
    file: str | Sequence[str]
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.models)
        object.__setattr__(self, "file", self.files)
        if len(self.models) != 1 and len(self.files) != 1:
            raise ValueError(f"one side of a rule must be a single name, got {self.models} and {self.files}")
        if len(self.files) == len(self.models) == 1:
            extra = self._fields(self.models[0]) ^ self._fields(self.files[0])
        else:
            many = self.files if len(self.models) == 1 else self.models
            extra = self._fields(many[0]) - self._fields(self._one)
            for pattern in many:
                if self._fields(pattern) != self._fields(many[0]):
                    raise ValueError(f"{pattern!r} and {many[0]!r} must have the same placeholders")
            if self._fields(self._one) - self._fields(many[0]):
                raise ValueError(f"{self._one!r} has placeholders that {many[0]!r} does not have")
        if len(extra) > 1:
            raise ValueError(
                f"the placeholders {sorted(extra)} are on one side only of {self.models} and {self.files}; at most one "
                "placeholder may be"
            )
        if self.sizes is not None and len(self.sizes) != max(len(self.models), len(self.files)):
            raise ValueError(f"{len(self.sizes)} sizes for {max(len(self.models), len(self.files))} tensors")

    @property
    def models(self) -> tuple[str, ...]:
        """The names in the model."""
        return (self.model,) if isinstance(self.model, str) else tuple(self.model)

    @property
    def files(self) -> tuple[str, ...]:
        """The names in the files."""
        return (self.file,) if isinstance(self.file, str) else tuple(self.file)

    @property
    def _one(self) -> str:
        return self.models[0] if len(self.models) == 1 else self.files[0]

    @staticmethod
    def _fields(pattern: str) -> set[str]:
        return set(_PLACEHOLDER.findall(pattern))

    @cached_property
    def joins_in_model(self) -> bool:
        """Whether one tensor of the model is several of the files."""
        return len(self.models) == 1 and (len(self.files) > 1 or self.stacked in self._fields(self.files[0]))

    @cached_property
    def joins_in_file(self) -> bool:
        """Whether one tensor of the files is several of the model."""
        return not self.joins_in_model and (len(self.models) > 1 or bool(self.stacked))

    @cached_property
    def stacked(self) -> str:
        """The placeholder that is on one side only; empty if there is none."""
        extra = self._fields(self.models[0]) ^ self._fields(self.files[0])
        return next(iter(extra), "")

    def matches(self, name: str) -> tuple[int, dict[str, str]] | None:
        """The number of the model's pattern that a name matches, and the values of its placeholders."""
        for number, expression in enumerate(self._expressions):
            match = expression.fullmatch(name)
            if match is not None and match.groupdict().get(self.stacked, "0").isdecimal():
                return number, match.groupdict()
        return None

    @cached_property
    def _expressions(self) -> list[re.Pattern[str]]:
        expressions = []
        for pattern in self.models:
            parts = _PLACEHOLDER.split(pattern)
            seen: set[str] = set()
            text = ""
            for position, part in enumerate(parts):
                if position % 2 == 0:
                    text += re.escape(part)
                else:
                    text += f"(?P={part})" if part in seen else f"(?P<{part}>[^.]+)"
                    seen.add(part)
            expressions.append(re.compile(text))
        return expressions


class Rename(ShownAsCall):
    """Rules; a name follows the first rule that it matches, and stays the same if there is none.

    >>> rename = Rename([Rule("{n}.qk", ["{n}.q", "{n}.k"])])
    >>> for link in rename.links({"0.qk": (6, 2)}):
    ...     print(link.model_box, link.file)
    Box(offsets=(0, 0), lengths=(3, 2)) 0.q
    Box(offsets=(3, 0), lengths=(3, 2)) 0.k
    """

    def __init__(self, rules: Iterable[Rule] | Mapping[str, str | Sequence[str]] = ()) -> None:
        if isinstance(rules, Mapping):
            rules = [Rule(model, file) for model, file in rules.items()]
        self.rules = tuple(rules)

    @staticmethod
    def of(rename: Any) -> Rename:
        """The rules from a `rename=` argument: a `Rename`, a dict of names, or a list of rules."""
        return rename if isinstance(rename, Rename) else Rename(rename or ())

    def links(self, shapes: Shapes) -> list[Link]:
        """The links between the tensors of a model with these shapes and the files."""
        links: list[Link] = []
        joined: dict[tuple[Rule, str], dict[tuple[int, int], str]] = {}
        for name, shape in shapes.items():
            for rule in self.rules:
                found = rule.matches(name)
                if found is None:
                    continue
                number, fields = found
                if rule.joins_in_file:
                    index = int(fields.pop(rule.stacked, "0"))
                    joined.setdefault((rule, rule.files[0].format(**fields)), {})[index, number] = name
                elif rule.joins_in_model:
                    links += _taken_apart(rule, name, shape, fields)
                else:
                    links.append(Link(name, Box.whole(shape), rule.files[0].format(**fields), Box.whole(shape)))
                break
            else:
                links.append(Link(name, Box.whole(shape), name, Box.whole(shape)))
        for (rule, file), members in joined.items():
            links += _put_together(rule, file, members, shapes)
        _refuse_clashes(links)
        return links


def _taken_apart(rule: Rule, name: str, shape: tuple[int, ...], fields: dict[str, str]) -> list[Link]:
    """The links of one tensor of the model to several of the files."""
    first = 1 if rule.stacked else 0
    count = len(rule.files)
    if len(shape) <= max(rule.dim, first - 1) or (count > 1 and first and rule.dim == 0):
        raise CheckpointMismatchError(f"{name}: a tensor of shape {list(shape)} has no dim {rule.dim} to split")
    sizes = rule.sizes
    if count == 1:
        sizes = (shape[rule.dim],)
    elif sizes is None:
        if shape[rule.dim] % count:
            raise CheckpointMismatchError(
                f"{name}: dim {rule.dim} of shape {list(shape)} cannot be split into {count} equal parts"
            )
        sizes = (shape[rule.dim] // count,) * count
    elif sum(sizes) != shape[rule.dim]:
        raise CheckpointMismatchError(
            f"{name}: dim {rule.dim} of shape {list(shape)} should have length {' + '.join(map(str, sizes))}"
        )
    links = []
    for index in range(shape[0] if first else 1):
        outer = (index,) if first else ()
        for number, (start, stop, low) in _pieces(name, rule.groups, sizes) if count > 1 else [(0, (0, sizes[0], 0))]:
            file = rule.files[number].format(**fields, **({rule.stacked: index} if first else {}))
            offsets, lengths = [*outer, *[0] * (len(shape) - first)], [*[1] * first, *shape[first:]]
            in_file = [0] * (len(shape) - first)
            if count > 1:
                offsets[rule.dim], lengths[rule.dim] = start, stop - start
                in_file[rule.dim - first] = low
            box = Box(tuple(offsets), tuple(lengths))
            links.append(Link(name, box, file, Box(tuple(in_file), tuple(lengths[first:]))))
    return links


def _put_together(rule: Rule, file: str, members: dict[tuple[int, int], str], shapes: Shapes) -> list[Link]:
    """The links of several tensors of the model to one of the files."""
    first = 1 if rule.stacked else 0
    indices = range(max(index for index, _ in members) + 1)
    lacking = [(index, number) for index in indices for number in range(len(rule.models))]
    absent = [f"{rule.models[number]} {index if first else ''}".strip() for index, number in lacking
              if (index, number) not in members]  # fmt: skip
    if absent:
        raise CheckpointMismatchError(
            f"{file} is made of several tensors, of which these are not in the model: {', '.join(absent)}"
        )
    dim = rule.dim - first
    links = []
    for index in indices:
        names = [members[index, number] for number in range(len(rule.models))]
        found = [shapes[name] for name in names]
        rests = {(*shape[:dim], *shape[dim + 1 :]) if len(names) > 1 else shape for shape in found}
        if len(rests) > 1 or (len(names) > 1 and (dim < 0 or dim >= len(found[0]))):
            raise CheckpointMismatchError(
                f"{file}: {', '.join(names)} have shapes that cannot be concatenated: {found}"
            )
        sizes = tuple(shape[dim] for shape in found) if len(names) > 1 else (0,)
        if len(names) > 1 and rule.sizes not in (None, sizes):
            raise CheckpointMismatchError(
                f"{file}: {', '.join(names)} should have sizes {rule.sizes}, but have {sizes}"
            )
        for number, (start, stop, low) in _pieces(file, rule.groups, sizes) if len(names) > 1 else [(0, (0, 0, 0))]:
            shape = list(found[number])
            offsets, in_model = [0] * len(shape), [0] * len(shape)
            if len(names) > 1:
                shape[dim], offsets[dim], in_model[dim] = stop - start, start, low
            model_box = Box(tuple(in_model), tuple(shape))
            outer = ((index,), (1,)) if first else ((), ())
            file_box = Box((*outer[0], *offsets), (*outer[1], *shape))
            links.append(Link(names[number], model_box, file, file_box))
    return links


def _pieces(name: str, groups: int, sizes: Sequence[int]) -> list[tuple[int, tuple[int, int, int]]]:
    """The pieces along the joined dim: number of the tensor, range in the joined tensor, and start in its own."""
    if any(size % groups for size in sizes):
        raise CheckpointMismatchError(f"{name}: {tuple(sizes)} cannot be divided into {groups} groups")
    shares = [size // groups for size in sizes]
    starts = list(accumulate(shares, initial=0))
    return [
        (number, (group * starts[-1] + starts[number], group * starts[-1] + starts[number] + share, group * share))
        for group in range(groups)
        for number, share in enumerate(shares)
    ]


def _refuse_clashes(links: Sequence[Link]) -> None:
    """Raise if two tensors of the model correspond to the same tensor of a file."""
    owners: dict[str, list[Link]] = {}
    for link in links:
        owners.setdefault(link.file, []).append(link)
    for file, found in owners.items():
        if len(found) > 1 and sum(link.file_box.numel for link in found) != _extent(found):
            names = ", ".join(sorted({link.model for link in found}))
            raise CheckpointMismatchError(f"{names} would all be written as {file!r}: give them different names")


def _extent(links: Sequence[Link]) -> int:
    numel = 1
    for size in file_shape(links):
        numel *= size
    return numel


def file_shape(links: Sequence[Link]) -> tuple[int, ...]:
    """The shape of the file's tensor that these links form."""
    return tuple(max(ends) for ends in zip(*(link.file_box.ends for link in links), strict=True))
