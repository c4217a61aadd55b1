"""The checksums and the structure of other systems' files, for `verify`."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

from terrazzo.checkpoint.formats.format import Checked
from terrazzo.checkpoint.formats.safetensors_header import read_header
from terrazzo.checkpoint.formats.table import file_at
from terrazzo.checkpoint.formats.torch_archive import is_archive
from terrazzo.checkpoint.formats.zip_reading import Window, ZipDirectory
from terrazzo.checkpoint.native.verify import Damage
from terrazzo.checkpoint.stores import Store
from terrazzo.errors import CheckpointError

_PIECE: Final = 4 << 20  # bytes
_SEAL_IT: Final = "`terrazzo seal` writes checksums beside them"
NO_SUMS: Final = f"safetensors files have no checksums, so only their structure was checked; {_SEAL_IT}"
_OLD: Final = f"some values are stored without checksums, and were not read; {_SEAL_IT}"


class Value(NamedTuple):
    """A value in a file that has several."""

    name: str
    start: int
    length: int
    is_tensor: bool


def check_file(
    checked: Checked, store: Store, key: str, progress: Callable[[int], None], value: Value | None = None
) -> None:
    """Add the damage of a file, or of a value in it: an archive of `torch.save`, or safetensors data."""
    start, length = (0, None) if value is None else (value.start, value.length)
    name = None if value is None else value.name
    try:
        file = file_at(store, key)
        window = Window(store, file, start, length)
        if window.read(0, min(4, window.length)).startswith(b"PK\x03\x04"):
            _check_records(checked, window, progress, name)
        elif is_archive(window) or (value is not None and not value.is_tensor):
            checked.unchecked = _OLD
        else:
            _check_header(checked, Window(store, file, start))
            checked.unchecked = NO_SUMS
    except (CheckpointError, OSError) as error:
        checked.damage.append(Damage(key, str(error), name))


def _check_records(checked: Checked, window: Window, progress: Callable[[int], None], name: str | None) -> None:
    directory = ZipDirectory(window)
    for record, about in directory.records.items():
        start, crc = directory.start_of(record), 0
        for at in range(0, about.file_size, _PIECE):
            piece = window.read(start + at, min(_PIECE, about.file_size - at))
            crc = zlib.crc32(piece, crc)
            progress(len(piece))
        if about.CRC == 0 and about.file_size:
            checked.unchecked = _OLD  # written with the checksums switched off
        elif crc != about.CRC:
            first = window.start + start
            what = "not the bytes that were written"
            checked.damage.append(Damage(window.file.name, what, name or record, first, first + about.file_size))


def _check_header(checked: Checked, window: Window) -> None:
    """The tensors of a safetensors file follow one another, up to its end."""
    header = read_header(window)
    end = window.start + 8 + int.from_bytes(window.read(0, 8), "little")
    for chunk in sorted(header.tensors.values(), key=lambda chunk: (chunk.start, chunk.nbytes)):
        if chunk.nbytes and chunk.start != end:
            what = "overlaps another tensor" if chunk.start < end else "does not follow the tensor before it"
            checked.damage.append(Damage(window.file.name, what, chunk.name, chunk.start, chunk.start + chunk.nbytes))
        end = max(end, chunk.start + chunk.nbytes)
    if end != window.file.size:
        what = "bytes that belong to no tensor"
        checked.damage.append(Damage(window.file.name, what, None, end, window.file.size))
