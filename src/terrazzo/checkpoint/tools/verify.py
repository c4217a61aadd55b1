"""`verify`: is every byte of a checkpoint the one that was saved? And `seal`, for formats without checksums.

A seal has checksums of each file of a checkpoint, for each of its blocks:

    seal.terrazzo            in the folder of a checkpoint
    NAME.seal.terrazzo       beside a checkpoint that is one file

A save or conversion that replaces the checkpoint removes its seal.

It is JSON: {"version": 1, "algorithm": "xxh3-64", "block": bytes, "files": {name: {"size": bytes, "sums": [...]}}}.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from terrazzo.checkpoint.formats.format import Checked
from terrazzo.checkpoint.formats.registry import located
from terrazzo.checkpoint.native.format import SEAL, checksum, is_temporary, lease_name, save_of
from terrazzo.checkpoint.native.names import is_plain_name, named_by_latest
from terrazzo.checkpoint.native.verify import Damage
from terrazzo.checkpoint.stores import SMALL, Place, Store
from terrazzo.checkpoint.stores.places import doing
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError


def verify(path: str | os.PathLike[str] | Store, progress: Callable[[int], None] = lambda nbytes: None) -> list[Damage]:
    """Read a checkpoint from end to end and list all damage; an empty list means that it is whole.

    Warns if something has no checksum, as in safetensors files: then only its structure has been checked. `seal` writes
    checksums beside a checkpoint of such a format.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.ones(3)}, checkpoint_id=path)
    >>> verify(path)
    []
    """
    checked = check(path, progress)
    if checked.unchecked:
        warnings.warn(f"{path}: {checked.unchecked}", stacklevel=2)
    return checked.damage


def check(path: str | os.PathLike[str] | Store | Place, progress: Callable[[int], None]) -> Checked:
    """All damage that can be found of a checkpoint: by its seal if it has one, or by what its format has."""
    format, place = located(path)
    with doing("verifying", place):
        sealed = check_seal(place, progress)
        return format.verify(place, progress) if sealed is None else sealed


_VERSION, _ALGORITHM, _BLOCK = 1, "xxh3-64", 4 << 20
_LARGEST_BLOCK: Final = 64 << 20
_SAVED_AGAIN: Final = " (if another program has saved here since, seal it again)"


class _SealedFile(msgspec.Struct):
    size: int
    sums: list[str]


class _Seal(msgspec.Struct):
    version: int
    algorithm: str
    block: int
    files: dict[str, _SealedFile]


def seal(path: str | os.PathLike[str] | Store, progress: Callable[[int], None] = lambda nbytes: None) -> int:
    """Write checksums of all files beside a checkpoint of another format than terrazzo's, which has its own.

    `verify` compares with them. A seal that is there is replaced. Raises if the checkpoint is damaged, as far as its
    format lets that be seen. Returns the number of bytes of the files.

    >>> import pathlib, tempfile, torch
    >>> path = pathlib.Path(tempfile.mkdtemp(), "a.pt")
    >>> torch.save({"w": torch.zeros(100)}, path)
    >>> seal(path) == path.stat().st_size
    True
    """
    format, place = located(path)
    if format.name == "native":
        raise CheckpointFormatError(f"{place} has checksums of its own: it needs no seal")
    try:
        damage = format.verify(place, lambda nbytes: None).damage
    except CheckpointFormatError:  # a format that can check nothing
        damage = []
    if damage:
        raise CheckpointCorruptError(f"{place} is damaged, so it is not sealed: {damage[0]}")
    folder, key = _place_of_seal(place)
    found = {}
    for name in _files_of(place, key):
        file = folder / name
        store, size = file.parent.store, file.parent.store.stat(file.name).size
        sums = [f"{checksum(piece):016x}" for _, piece in _blocks(store, file.name, size, _BLOCK, progress)]
        found[name] = _SealedFile(size, sums)
    with doing("sealing", place):
        folder.store.put(key, msgspec.json.format(msgspec.json.encode(_Seal(_VERSION, _ALGORITHM, _BLOCK, found))))
    return sum(file.size for file in found.values())


def check_seal(place: Place, progress: Callable[[int], None]) -> Checked | None:
    """The files that are not as they were when the checkpoint at a place was sealed; None if it is not."""
    folder, key = _place_of_seal(place)
    where = f"{folder}/{key}"
    try:
        data = folder.store.get(key, SMALL)[0]
    except FileNotFoundError:
        return None
    try:
        found = msgspec.json.decode(data, type=_Seal)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"{where} is damaged ({error}): remove it, or seal the checkpoint again"
        ) from error
    if (found.version, found.algorithm) != (_VERSION, _ALGORITHM):
        raise CheckpointFormatError(
            f"{where} has version {found.version} with {found.algorithm!r}, which this release cannot read"
        )
    checked = Checked()
    for name, file in found.files.items():
        sound = 0 < found.block <= _LARGEST_BLOCK and file.size >= 0 and -(-file.size // found.block) == len(file.sums)
        if not sound or not is_plain_name(name):
            raise CheckpointCorruptError(f"{where} is damaged, at {name!r}: remove it, or seal again")
        checked.damage += _damage(folder / name, name, file, found.block, progress)
    absent = sorted(set(_files_of(place, key)).difference(found.files))
    if absent:
        checked.unchecked = f"{', '.join(absent[:3])}{', ...' if absent[3:] else ''} came after it was sealed"
    return checked


def _damage(place: Place, name: str, file: _SealedFile, block: int, progress: Callable[[int], None]) -> list[Damage]:
    store = place.parent.store
    try:
        size = store.stat(place.name).size
    except FileNotFoundError:
        return [Damage(name, f"is missing; it was there when the checkpoint was sealed{_SAVED_AGAIN}")]
    if size != file.size:
        return [Damage(name, f"has {size} bytes, and had {file.size} when the checkpoint was sealed{_SAVED_AGAIN}")]
    found = []
    for (start, piece), expected in zip(_blocks(store, place.name, size, block, progress), file.sums, strict=True):
        if f"{checksum(piece):016x}" != expected:
            what = f"not the bytes that were there when the checkpoint was sealed{_SAVED_AGAIN}"
            found.append(Damage(name, what, None, start, start + len(piece)))
    return found


def _blocks(
    store: Store, key: str, size: int, block: int, progress: Callable[[int], None]
) -> Iterator[tuple[int, memoryview]]:
    memory = memoryview(bytearray(min(block, size)))
    for start in range(0, size, block):
        piece = memory[: min(block, size - start)]
        try:
            store.read_at(key, start, piece)
        except EOFError as error:
            raise CheckpointCorruptError(f"{store.location}/{key} has become shorter while it was read") from error
        yield start, piece
        progress(len(piece))


def _place_of_seal(place: Place) -> tuple[Place, str]:
    """The folder that has the seal of a checkpoint, and the seal's name."""
    if place.is_file():
        return place.parent, f"{place.name}.{SEAL}"
    return next((folder for folder in named_by_latest(place) if folder.is_dir()), place), SEAL


def _files_of(place: Place, seal: str) -> list[str]:
    """The names of a checkpoint's files in the folder that has its seal."""
    if place.is_file():
        return [place.name]
    return [name for name in _beneath(_place_of_seal(place)[0]) if name != seal]


def _beneath(place: Place, prefix: str = "") -> Iterator[str]:
    for entry in sorted(place.store.list(), key=lambda entry: entry.key):
        save_id = save_of(entry.key)
        if not is_temporary(entry.key) and (save_id is None or entry.key != lease_name(save_id)):
            yield prefix + entry.key
    for name in sorted(place.store.folders()):
        if not place.store.is_link(name):
            yield from _beneath(place / name, f"{prefix}{name}/")
