"""The names of the files of a checkpoint, and which of those that lie in a folder make one up.

As `from_pretrained` has it, `model.safetensors` is the checkpoint if it is there, or else what the index names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from terrazzo.checkpoint.native.format import save_of
from terrazzo.checkpoint.stores import SMALL, Store
from terrazzo.errors import CheckpointCorruptError

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
STEM: Final = "model"
_SHARD: Final = re.compile(
    r"(?P<stem>.+?)(?:-(?P<save>[0-9a-f]{12}))?-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors"
)

_OF_RANK: Final = re.compile(r"shard-[0-9]{5}-")  # of PyTorch's writer: a rank has only the files that it has a part of


def single_name(stem: str = STEM) -> str:
    """The name of the only file."""
    return f"{stem}{SUFFIX}"


def index_name(stem: str = STEM) -> str:
    """The name of the index of several."""
    return f"{stem}{INDEX_SUFFIX}"


def shard_name(number: int, count: int, stem: str = STEM, save_id: str = "") -> str:
    """The name of one of several files; with a save's id, where the usual names are in use.

    >>> shard_name(0, 3), shard_name(0, 3, save_id="0123456789ab")
    ('model-00001-of-00003.safetensors', 'model-0123456789ab-00001-of-00003.safetensors')
    """
    middle = f"-{save_id}" if save_id else ""
    return f"{stem}{middle}-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def is_shard(name: str, stem: str = STEM) -> bool:
    """Whether a file has the name of one of several."""
    match = _SHARD.fullmatch(name)
    return match is not None and match["stem"] == stem


def is_checkpoint(names: Iterable[str]) -> bool:
    """Whether a folder with files of these names is a checkpoint of this format."""
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) and _is_visible(name) for name in names)


def files_of(store: Store, names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """The data files among the files of a store, and which of them has which tensor, as far as an index says so."""
    present = sorted(filter(_is_visible, names))
    data = [name for name in present if name.endswith(SUFFIX)]
    for stem in (STEM, *sorted({name.removesuffix(INDEX_SUFFIX) for name in present if name.endswith(INDEX_SUFFIX)})):
        if single_name(stem) in data:
            return [single_name(stem)], {}
        if index_name(stem) in present:
            weight_map = read_index(store, index_name(stem))
            return sorted(set(weight_map.values())), weight_map
    _check_all_shards(store, data)
    return data, {}


def _check_all_shards(store: Store, names: Iterable[str]) -> None:
    """Raise if files without an index are those of a save that has not ended, or are not all there."""
    sets: dict[str, dict[tuple[str | None, int], set[int]]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None and _OF_RANK.match(name) is None:
            of_stem = sets.setdefault(match["stem"], {})
            of_stem.setdefault((match["save"], int(match["count"])), set()).add(int(match["number"]))
    for stem, saves in sets.items():
        if len(saves) > 1:
            raise CheckpointCorruptError(
                f"{store.location}: files of {len(saves)} checkpoints, and no {index_name(stem)} that says which counts"
            )
        ((_, count), numbers) = next(iter(saves.items()))
        if numbers not in (set(range(1, count + 1)), set(range(count))):  # some count from 0
            raise CheckpointCorruptError(
                f"{store.location}: {len(numbers)} of {count} files {stem}-...-of-{count:05d}{SUFFIX}, and no "
                f"{index_name(stem)}: the save has not ended, or files are missing. Save or download it again"
            )


def _is_visible(name: str) -> bool:
    """Whether a file is not hidden, nor one that an unfinished save of the native format left."""
    return not name.startswith(".") and save_of(name) is None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_index(store: Store, name: str) -> dict[str, str]:
    """Which file has which tensor."""
    where = f"{store.location}/{name}"
    try:
        weight_map = msgspec.json.decode(store.get(name, SMALL)[0], type=_Index).weight_map
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where}: a damaged index ({error})") from error
    for file in set(weight_map.values()):
        if "/" in file or "\\" in file or "\0" in file or not file.endswith(SUFFIX):
            raise CheckpointCorruptError(f"{where}: {file!r} is not the name of a safetensors file in this folder")
    return weight_map


def encode_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index, as transformers writes it."""
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
