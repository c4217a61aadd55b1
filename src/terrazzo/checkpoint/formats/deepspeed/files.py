"""The files of a DeepSpeed checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

from terrazzo.checkpoint.formats import unpickle
from terrazzo.checkpoint.formats.deepspeed.folder import UNFINISHED
from terrazzo.checkpoint.formats.stand_ins import Call, pickled
from terrazzo.checkpoint.formats.table import file_at
from terrazzo.checkpoint.formats.torch_archive import TORCH_NAMES, Archive, open_archive
from terrazzo.checkpoint.formats.zip_reading import Window
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError, UnsafePickleError

Found = TypeVar("Found")
Kind = TypeVar("Kind")

_MODEL: Final = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_LAYER: Final = re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt")
_EXPERT: Final = re.compile(r".*expert_\d+_mp_rank_.*|expp_rank_.*")


class _TensorClass:
    """A stand-in for the class `torch.Tensor`."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError("a pickle tries to change a class")


def _with_attributes(rebuild: Any, kind: Any, args: Any, attributes: Any) -> Any:
    """A tensor without the attributes that DeepSpeed has set on it."""
    if not isinstance(rebuild, Call) or not isinstance(kind, _TensorClass) or type(args) is not tuple:
        raise UnsafePickleError("a pickle makes a tensor of an unknown class")
    return rebuild(*args)


def _stage(value: Any) -> int:
    if value not in (0, 1, 2, 3):
        raise CheckpointCorruptError(f"a pickle names the ZeRO stage {value!r}")
    return int(value)


_FIELDS: Final = pickled("deepspeed", lambda self: dict(self.fields))  # an object, as a dict of its attributes
NAMES: Final[unpickle.Names] = MappingProxyType(
    {
        **TORCH_NAMES,
        ("torch", "Tensor"): _TensorClass(),
        ("torch._tensor", "_rebuild_from_type_v2"): Call(_with_attributes),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Call(_stage),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): _FIELDS,
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): _FIELDS,
        ("deepspeed.utils.tensor_fragment", "fragment_address"): _FIELDS,
        ("deepspeed.checkpoint.utils", "SubparamShape"): _FIELDS,
    }
)


@dataclass(frozen=True, slots=True)
class Files:
    """The names of a model rank's files, by data-parallel rank."""

    model: tuple[str, ...]
    optim: tuple[str, ...]

    @property
    def model_of_each_rank(self) -> bool:
        """Whether each rank has a file of model states, as in stage 3."""
        match = _MODEL.fullmatch(self.model[0])
        return match is not None and match["dp"] is not None


def find_files(folder: Place) -> list[Files]:
    """The files of a tag's folder, by model rank: of a pipeline, by stage."""
    names = _names(folder)
    for name in names:
        if _EXPERT.fullmatch(name):
            raise CheckpointFormatError(f"{folder / name}: models with a mixture of experts cannot be read")
    models, optims = _by_rank(folder, names, _MODEL), _by_rank(folder, names, _OPTIM)
    if not models:
        raise CheckpointNotFoundError(f"{folder} has no file of model states")
    if optims and len(optims) != len(models):
        raise CheckpointNotFoundError(
            f"{folder}: there are model states of {len(models)} model ranks, and optimizer states of {len(optims)}"
        )
    return [Files(model, optim) for model, optim in zip(models, optims or [()] * len(models), strict=True)]


def _names(folder: Place) -> list[str]:
    names = sorted(folder.names())
    if UNFINISHED in names:
        raise CheckpointNotFoundError(f"{folder} is not complete: it is being written, or the save was killed")
    return names


def layer_files(folder: Place) -> dict[int, str]:
    """The names of the files with a pipeline's layers, by number; none if the model is in other files."""
    found: dict[int, str] = {}
    for name in _names(folder):
        match = _LAYER.fullmatch(name)
        if match is None:
            continue
        if int(match["mp"] or 0) != 0:
            raise tensor_parallel(folder / name)
        found[int(match["layer"])] = name
    return found


def tensor_parallel(where: Place) -> CheckpointFormatError:
    """The error for a model that was tensor-parallel."""
    return CheckpointFormatError(
        f"{where}: the model was tensor-parallel, and the files do not say along which dims: convert it to a universal "
        "checkpoint with DeepSpeed's ds_to_universal"
    )


def model_files(folder: Place) -> list[tuple[str, ...]]:
    """The names of the files of model states: for each rank of a model, by data-parallel rank."""
    found = _by_rank(folder, _names(folder), _MODEL)
    if not found:
        raise CheckpointNotFoundError(f"{folder} has no file of model states")
    return found


def _by_rank(folder: Place, names: list[str], pattern: re.Pattern[str]) -> list[tuple[str, ...]]:
    """For each rank of a model, by data-parallel rank."""
    found: dict[int, dict[int, str]] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            found.setdefault(int(match["mp"]), {})[int(match["dp"] or 0)] = name
    return [_complete(folder, "data-parallel", files) for files in _complete(folder, "model-parallel", found)]


def _complete(folder: Place, what: str, by_rank: Mapping[int, Found]) -> tuple[Found, ...]:
    absent = sorted(set(range(max(by_rank, default=-1))) - set(by_rank))
    if absent:
        raise CheckpointNotFoundError(f"{folder}: the files of {what} ranks {absent} are missing")
    return tuple(by_rank[rank] for rank in range(len(by_rank)))


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
