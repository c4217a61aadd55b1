"""Any checkpoint as a source of tensors and values, and of rows to write; and how formats copy it, in pieces."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from terrazzo.checkpoint.formats.format import Writing
from terrazzo.checkpoint.metadata import Metadata, TensorStorageMetadata
from terrazzo.checkpoint.native.chunks import complete_parts
from terrazzo.checkpoint.native.format import SEAL
from terrazzo.checkpoint.native.objects import ObjectBytes, encode
from terrazzo.checkpoint.native.root import RAW, TYPED
from terrazzo.checkpoint.native.rows import Form, Row, form_of, object_row
from terrazzo.checkpoint.native.tensors import bytes_of
from terrazzo.checkpoint.plan.flatten import check_names
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place, Store, Upload
from terrazzo.checkpoint.torch_api.storages import Boxes, RowWriter
from terrazzo.errors import CheckpointError, CheckpointExistsError, UnsupportedValueError
from terrazzo.layout.box import Box, boxes_of_flat_range, row_major_windows

_PIECE: Final = 16 << 20  # bytes in memory at a time while a tensor is copied
_CHUNK: Final = 64 << 20  # larger chunks are copied in parts, so that a file that claims much costs little memory
_SMALL: Final = 64 << 10  # smaller tensors are read with others
_TOGETHER: Final = 256  # as many at most


class Source:
    """A checkpoint behind a reader.

    Attributes:
        metadata: its metadata.
        paths: the path of each name in the nested state dict.
    """

    def __init__(self, reader: StorageReader) -> None:
        self._boxes = Boxes(reader)
        self._small = _Small(self._boxes)
        self.metadata = self._boxes.metadata
        known = self.metadata.planner_data
        self.paths: dict[str, tuple[Any, ...]] = known if isinstance(known, dict) else {}

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Fill `target` with a box of a tensor."""
        small = self._small.take(name)
        if small is None:
            self._boxes.read([(name, box, target)])
        else:
            target.copy_(small[box.slices()])

    def whole(self, name: str) -> Any:
        """All of a tensor, or another value."""
        entry = self.metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            found = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            self.read(name, Box.whole(entry.size), found)
            return found
        value = self.value(name)
        if not isinstance(value, ObjectBytes):
            raise UnsupportedValueError(f"{name}: its bytes can be read only by the custom planner that wrote them")
        return value.value

    def pieces(
        self,
        name: str,
        progress: Callable[[str, int], None] | None = None,
        elements: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[memoryview]:
        """A tensor's bytes in row-major order, in pieces; each is valid until the next one is requested.

        Args:
            progress: called for each piece when the next one is requested.
            elements: the first one, and the one after the last; None: all.
            dtype: another dtype to convert them to.
        """
        entry = self.metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{name} is not a tensor")
        own = entry.properties.dtype
        start, stop = elements or (0, entry.size.numel())
        limit = max(_PIECE // (own.itemsize + (0 if dtype is None or dtype is own else dtype.itemsize)), 1)
        buffer = torch.empty(min(stop - start, limit), dtype=own, device="cpu")
        for box in boxes_of_flat_range(entry.size, start, stop):
            for window in row_major_windows(box.lengths, limit):
                part = buffer[: window.numel]
                self.read(name, window.shifted(box.offsets), part.view(window.lengths))
                yield bytes_of(part if dtype is None else part.to(dtype))
                if progress is not None:
                    progress(name, part.nbytes)

    def rows(self, progress: Callable[[str, int], None] | None = None, *, allow_pickle: bool = False) -> list[Row]:
        """All there is, chunk by chunk, to be written; a tensor is read when the writer needs it.

        Raises unless each tensor's chunks make it up.

        Args:
            progress: called for each tensor that has been read, and each other value.
            allow_pickle: whether values that have no typed form are pickled.
        """
        rows = []
        check_names(self.metadata.state_dict_metadata)
        for name, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                dtype, requires_grad = entry.properties.dtype, entry.properties.requires_grad
                complete_parts(name, entry.chunks, Box.whole(entry.size))
                for chunk in [chunk.box for chunk in entry.chunks] or [Box.whole(entry.size)]:
                    for part in row_major_windows(chunk.lengths, _CHUNK // dtype.itemsize):
                        form = form_of(dtype, tuple(entry.size), part.shifted(chunk.offsets), requires_grad)
                        rows.append(Row(name, form, source=partial(self._chunk, name, form, progress)))
                continue
            found = self.value(name)
            try:
                payload = found.getvalue() if not isinstance(found, ObjectBytes) else _typed(found, allow_pickle)
            except UnsupportedValueError as error:
                raise UnsupportedValueError(f"{name}: {error}") from error
            rows.append(object_row(name, TYPED if isinstance(payload, ObjectBytes) else RAW, payload))
            if progress is not None:
                progress(name, 0)
        return rows

    def _chunk(self, name: str, form: Form, progress: Callable[[str, int], None] | None) -> torch.Tensor:
        target = torch.empty(form.box.lengths, dtype=form.dtype, device="cpu")
        self.read(name, form.box, target)
        if progress is not None:
            progress(name, form.nbytes)
        return target

    def value(self, name: str) -> io.BytesIO:
        """A stored value that is not a tensor: an `ObjectBytes`, or bytes that a custom planner encoded."""
        return self._boxes.value(name)


class _Small:
    """Reads small tensors, more and more of them together while they are asked for in the order of the metadata.

    For one alone the request takes longer than the copy.
    """

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        names = boxes.metadata.state_dict_metadata
        self._names = [name for name, entry in names.items() if _is_small(entry)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._there: dict[str, torch.Tensor] = {}
        self._following, self._together = 0, 1
        self._lock = threading.Lock()

    def take(self, name: str) -> torch.Tensor | None:
        """A tensor, if it is small."""
        number = self._numbers.get(name)
        if number is None:
            return None
        with self._lock:
            if name not in self._there:
                in_order = number == self._following
                self._together = min(2 * self._together, _TOGETHER) if in_order else 1
                try:
                    self._read(number)
                except Exception:
                    if self._together == 1:
                        raise
                    self._together = 1  # perhaps nobody asks for the one that cannot be read
                    self._read(number)
            return self._there[name]

    def _read(self, number: int) -> None:
        self._there = self._boxes.read_many(self._names[number : number + self._together])
        self._following = number + len(self._there)


def _is_small(entry: object) -> bool:
    return isinstance(entry, TensorStorageMetadata) and entry.size.numel() * entry.properties.dtype.itemsize <= _SMALL


def _typed(found: ObjectBytes, allow_pickle: bool) -> ObjectBytes:
    return ObjectBytes(found.value, encode(found.value, allow_pickle=allow_pickle))


# ------------------------------------------------------------------ copying to another format


def copy_checkpoint(source: Source, writer: RowWriter, how: Writing) -> None:
    """Save the source with a writer, in this process alone."""
    writer.set_up_storage_writer(True)
    try:
        rows = source.rows(how.progress, allow_pickle=how.allow_pickle)
        results = writer.write(rows, writer.arranged([writer.about(rows)]), 0)
        writer.finish(Metadata({}, planner_data=source.paths or None), [results])
    except BaseException:
        if writer.may_abandon():
            writer.abandon()
        raise


def make_ready(target: Place, how: Writing) -> None:
    """Make the folder of the target, a file; raise if it exists and may not be replaced."""
    if target.local is not None and target.is_dir():
        raise CheckpointExistsError(f"{target} is a folder, and the checkpoint one file: convert to a name in it")
    if not how.overwrite and target.exists():
        raise CheckpointExistsError(f"{target} exists: convert to another name, or with overwrite=True")
    target.parent.store.prepare()


@contextmanager
def new_file(store: Store, name: str) -> Iterator[Upload]:
    """A new file, to be written from its beginning to its end. It replaces an existing one when it is complete.

    If an error is raised, the existing file stays.
    """
    with store.stream(name) as file:
        yield file
    store.delete([f"{name}.{SEAL}"])
