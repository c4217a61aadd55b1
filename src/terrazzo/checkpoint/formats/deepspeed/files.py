"""The files of a DeepSpeed checkpoint, tensors in them (in one file, or joined from ranks' parts), and its contents.

The contents have the names of terrazzo's engine:

module.<name>                    float32 weights from the optimizer's partitions; other tensors as in the model's file
optimizer.state.<name>.<key>     the optimizer's state, by parameter instead of by partition
optimizer.param_groups.<i>.<key>
global_steps, lr_scheduler.<key>, ...  and the client state, under its own names
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch

from terrazzo.checkpoint.formats.stored import StoredBox, file_at
from terrazzo.checkpoint.formats.torch_archive import TORCH_NAMES, Archive, StoredTensor, open_archive, refused
from terrazzo.checkpoint.formats.unpickle import Instance, Names, fields
from terrazzo.checkpoint.formats.windows import Window
from terrazzo.checkpoint.native.spans import strides_of
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    TerrazzoError,
    UnsafePickleError,
)
from terrazzo.layout.box import Box

Found = TypeVar("Found")
Kind = TypeVar("Kind")

UNFINISHED: Final = ".unfinished"  # a file that is there while a folder is written, in stores without renaming
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_LAYER: Final = re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt")
_EXPERT: Final = re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")


_TENSOR_CLASS: Final = refused("a tensor of another class")  # if it is called


def _with_attributes(rebuild: Any, kind: Any, args: Any, attributes: Any) -> Any:
    """A tensor without the attributes that DeepSpeed has set on it."""
    if kind is not _TENSOR_CLASS:
        raise UnsafePickleError("a pickle makes a tensor of an unknown class")
    return rebuild(*args)


def _stage(value: Any) -> int:
    if value not in (0, 1, 2, 3):
        raise CheckpointCorruptError("a pickle names a ZeRO stage that is none")
    return int(value)


_FIELDS: Final = Instance(lambda args, state: fields(state))  # an object, as a dict of its attributes
NAMES: Final[Names] = MappingProxyType(
    {
        **TORCH_NAMES,
        ("torch", "Tensor"): _TENSOR_CLASS,
        ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _stage,
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): _FIELDS,
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): _FIELDS,
        ("deepspeed.utils.tensor_fragment", "fragment_address"): _FIELDS,
        ("deepspeed.checkpoint.utils", "SubparamShape"): _FIELDS,
    }
)


def find_files(folder: Place) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The files of model states and of optimizer states, by data-parallel rank, of each model rank: of each stage."""
    models, optims = model_files(folder), _by_rank(folder, _OPTIM)
    if optims and len(optims) != len(models):
        raise CheckpointNotFoundError(
            f"{folder}: there are model states of {len(models)} model ranks, and optimizer states of {len(optims)}"
        )
    return list(zip(models, optims or [()] * len(models), strict=True))


def _matching(folder: Place, pattern: re.Pattern[str]) -> list[tuple[str, re.Match[str]]]:
    """The files of a folder whose names match, and how."""
    names = sorted(folder.names())
    if UNFINISHED in names:
        raise CheckpointNotFoundError(f"{folder} is not complete: it is being written, or the save was killed")
    return [(name, match) for name in names if (match := pattern.fullmatch(name))]


def layer_files(folder: Place) -> dict[int, str]:
    """The names of the files with a pipeline's layers, by number; none if the model is in other files."""
    found: dict[int, str] = {}
    for name, match in _matching(folder, _LAYER):
        if int(match["mp"] or 0) != 0:
            raise tensor_parallel(folder / name)
        found[int(match["layer"])] = name
    return found


def expert_files(folder: Place) -> list[str]:
    """The names of the files with one expert of a layer each."""
    found = _matching(folder, _EXPERT)
    for name, match in found:
        if match["layer"] is None:
            raise CheckpointFormatError(
                f"{folder / name}: a version of DeepSpeed before 0.5.8 wrote this file, without the layer's number: "
                "resume with a later one, and save again"
            )
        if int(match["mp"]):
            raise tensor_parallel(folder / name)
    return [name for name, _ in found]


def tensor_parallel(where: Place) -> CheckpointFormatError:
    """The error for a model that was tensor-parallel."""
    return CheckpointFormatError(
        f"{where}: the model was tensor-parallel, and the files do not say along which dims: convert it to a universal "
        "checkpoint with DeepSpeed's ds_to_universal"
    )


def model_files(folder: Place) -> list[tuple[str, ...]]:
    """The names of the files of model states: for each rank of a model, by data-parallel rank."""
    found = _by_rank(folder, _MODEL)
    if not found:
        raise CheckpointNotFoundError(f"{folder} has no file of model states")
    return found


def _by_rank(folder: Place, pattern: re.Pattern[str]) -> list[tuple[str, ...]]:
    """For each rank of a model, by data-parallel rank."""
    found: dict[int, dict[int, str]] = {}
    for name, match in _matching(folder, pattern):
        found.setdefault(int(match["mp"]), {})[int(match["dp"] or 0)] = name
    return [_complete(folder, "data-parallel", files) for files in _complete(folder, "model-parallel", found)]


def _complete(folder: Place, what: str, by_rank: Mapping[int, Found]) -> tuple[Found, ...]:
    absent = max(by_rank, default=-1) + 1 - len(by_rank)
    if absent:
        first = next(rank for rank in range(len(by_rank)) if rank not in by_rank)
        raise CheckpointNotFoundError(f"{folder}: the files of {absent} {what} ranks are missing, first of {first}")
    return tuple(by_rank[rank] for rank in range(len(by_rank)))


@contextmanager
def understood(where: object, whose: str) -> Iterator[None]:
    """Inside of this context, errors that come from values of other kinds say so: files can hold anything."""
    try:
        yield
    except TerrazzoError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointFormatError(
            f"{where}: the files hold something else than {whose} do ({type(error).__name__}: {error})"
        ) from error


class OpenFile:
    """A file of `torch.save` whose pickle has been read, for reading single tensors."""

    def __init__(self, folder: Place, name: str) -> None:
        self.archive: Archive = open_archive(Window(folder.store, file_at(folder.store, name)), NAMES)
        self.where = self.archive.where

    @property
    def value(self) -> dict[str, Any]:
        """The saved value."""
        value: dict[str, Any] = self.archive.value
        if not isinstance(value, dict):
            raise CheckpointFormatError(f"{self.where} has a {type(value).__name__}, not a dict")
        return value

    def get(self, key: str, kind: type[Kind]) -> Kind:
        """The entry of a key, which must exist and have that type."""
        return entry(self.value, key, kind, self.where)


def entry(value: Any, key: Any, kind: type[Kind], where: str) -> Kind:
    """An item of a dict or list, which must exist and have that type."""
    try:
        found = value[key]
    except (KeyError, IndexError, TypeError) as error:
        raise CheckpointFormatError(f"{where}: there is no {key!r}, which DeepSpeed's files have") from error
    if not isinstance(found, kind):
        raise CheckpointFormatError(f"{where}: {key!r} is a {type(found).__name__}, not a {kind.__name__}")
    return found


def count_in(value: Any, key: Any, where: str) -> int:
    """An item of a dict or list that says how many elements or ranks there are."""
    found = entry(value, key, int, where)
    if type(found) is not int or found < 0:
        raise CheckpointFormatError(f"{where}: {key!r} is {found}, which is no count")
    return found


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in the checkpoint's files; `rows` returns the boxes that they have of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Callable[[], list[StoredBox]]


def in_file(file: OpenFile, value: Any) -> Any:
    """A value of a file, where a tensor stays in the file, and tensors within other values are read."""
    if isinstance(value, StoredTensor):
        return FileTensor(value.dtype, value.shape, lambda: [file.archive.row(value)])
    return file.archive.read(value)


def alone_in_file(folder: Place, name: str, shape: Sequence[int] | None) -> FileTensor:
    """The tensor of a file with one tensor, alone or as `param`.

    Args:
        shape: the shape to use, if the number of elements agrees; if the tensor is alone, it must.
    """
    file = OpenFile(folder, name)
    stored = file.archive.value
    if not isinstance(stored, StoredTensor):
        stored = file.get("param", StoredTensor)
        shape = shape if shape is not None and prod(shape) == prod(stored.shape) else None
    if shape is not None and tuple(shape) != stored.shape:
        if prod(shape) != prod(stored.shape) or stored.strides != strides_of(stored.shape):
            raise CheckpointCorruptError(f"{file.where}: expected a tensor of shape {shape}, not {stored.shape}")
        stored = replace(stored, shape=tuple(shape), strides=strides_of(shape))
    row = StoredBox(Box.whole(stored.shape), folder.store, file.archive.located(stored, name))  # the pickle is not kept
    return FileTensor(stored.dtype, stored.shape, lambda: [row])


# ------------------------------------------------------------------ the contents, under the names of terrazzo's engine


# Keys of the model's files that are converted here, and therefore not passed on.
_TAKEN_APART: Final = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "lr_scheduler",
        "checkpoint_parallel_dimensions",
    }
)

Shapes = Mapping[str, Sequence[int]]


@dataclass
class Contents:
    """Everything in a checkpoint, by flat name.

    Attributes:
        values: a `FileTensor`, a tensor, or any other value.
        paths: the path of each name in the nested state dict.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def add(self, path: tuple[Any, ...], value: Any) -> None:
        """Add a value at a path."""
        name = ".".join(map(str, path))
        self.values[name] = value
        self.paths[name] = path

    def add_param_groups(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], scaler: Any
    ) -> None:
        """Add the optimizer's options, with the names of their parameters, and the loss scaler's state if it is one."""
        for number, (options, members) in enumerate(zip(groups, names, strict=True)):
            for key, value in options.items():
                if key not in ("params", "step"):
                    self.add(("optimizer", "param_groups", number, key), value)
            self.add(("optimizer", "param_groups", number, "params"), list(members))
        if isinstance(scaler, Mapping):
            self.add(("loss_scaler",), dict(scaler))

    def has(self, name: str) -> bool:
        """Whether this part of the model has been added."""
        return f"module.{name}" in self.values

    def add_untrained(self, file: OpenFile) -> None:
        """Add what else the model's file has: buffers, and parameters that were not trained."""
        shared = file.value.get("shared_params") or {}
        for name, value in file.get("module", dict).items():
            if not self.has(name) and name not in shared:
                self.add(("module", name), in_file(file, value))

    def add_rest(self, files: Sequence[OpenFile], renamed: Sequence[Mapping[str, str]] | None = None) -> None:
        """Add everything that is neither the model nor the optimizer; for a pipeline, the joined lists of names.

        Args:
            files: a file of each stage.
            renamed: for each stage, new names.
        """
        stages = [file.value for file in files]
        with_names = list(zip(stages, renamed or [{}] * len(stages), strict=True))
        shapes: dict[int, dict[str, Any]] = {}
        for stage, names in with_names:
            for number, named in enumerate(stage.get("param_shapes") or []):
                shapes.setdefault(number, {}).update((names.get(name, name), shape) for name, shape in named.items())
        self.add(("param_shapes",), [_pairs(shapes[number]) for number in sorted(shapes)])
        frozen = [stage.get("frozen_param_shapes") for stage in stages]  # None: untrained parameters may be left out
        together = {name: shape for named in frozen if named is not None for name, shape in named.items()}
        self.add(("frozen_param_shapes",), None if None in frozen else _pairs(together))
        buffers = [names.get(name, name) for stage, names in with_names for name in stage.get("buffer_names") or []]
        self.add(("buffer_names",), list(dict.fromkeys(buffers)))
        file, model = files[0], stages[0]
        scheduler = model.get("lr_scheduler")
        if isinstance(scheduler, dict) and scheduler:
            for key, value in scheduler.items():
                self.add(("lr_scheduler", key), file.archive.read(value))
        else:
            self.add(("lr_scheduler",), None)
        for name, value in model.items():
            if name not in _TAKEN_APART:
                plain = sorted(value) if isinstance(value, set) else value
                self.add((name,), file.archive.read(plain))


def shapes_of(file: OpenFile) -> list[Shapes]:
    """The shapes of the trained parameters, for each group that shares a flat tensor."""
    return [checked_shapes(named, "param_shapes", file) for named in file.get("param_shapes", list)]


def checked_shapes(named: Any, key: str, file: OpenFile) -> Shapes:
    """Names with shapes, which a file has under this key."""
    sound = isinstance(named, dict) and all(isinstance(name, str) for name in named)
    if not sound or not all(map(is_shape, named.values())):
        raise CheckpointFormatError(f"{file.where}: {key} has something else than names with shapes")
    return named


def is_shape(value: Any) -> bool:
    """Whether a value is a list or tuple of counts."""
    return isinstance(value, tuple | list) and all(type(size) is int and size >= 0 for size in value)


def names_by_group(shapes: Sequence[Iterable[str]], groups: Sequence[Mapping[str, Any]], where: str) -> list[list[str]]:
    """The parameters of each param group: in stage 3 several groups of `shapes` may belong to one."""
    names: list[list[str]] = [[] for _ in groups]
    for number, named in enumerate(shapes):
        names[group_of(groups, number, where)] += named
    return names


def group_of(groups: Sequence[Mapping[str, Any]], number: int, where: str) -> int:
    """The param group of the flat tensor with this number."""
    for group, options in enumerate(groups):
        if number in entry(options, "params", list, where):
            return group
    raise CheckpointFormatError(f"{where}: no param group of the optimizer has the flat tensor {number}")


def step_of(steps: Any, file: OpenFile) -> torch.Tensor:
    """The optimizer's step count as a tensor; some of DeepSpeed's optimizers have a number."""
    count = file.archive.tensor(steps) if isinstance(steps, StoredTensor) else torch.tensor(float(steps), device="cpu")
    if count.numel() != 1:
        raise CheckpointFormatError(f"{file.where}: a step count is one number, not of shape {list(count.shape)}")
    return count.detach().reshape(()).float()


def steps_in(state: Mapping[str, Any], options: Mapping[str, Any], file: OpenFile) -> Iterator[tuple[str, Any]]:
    """The step count of a parameter; some optimizers have one for each group."""
    steps = state.get("step", options.get("step"))
    if steps is not None:
        yield "step", step_of(steps, file)


def _pairs(named: Mapping[str, Sequence[int]]) -> list[list[Any]]:
    return [[name, list(shape)] for name, shape in named.items()]
