"""What a rank has to write, as chunks: from a plan of our own, or from PyTorch's items and their planner."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, Protocol

import msgspec
import torch

from terrazzo.checkpoint.native import objects
from terrazzo.checkpoint.native.codec import FRAME
from terrazzo.checkpoint.native.datafile import Chunk
from terrazzo.checkpoint.native.dtypes import dtype_name
from terrazzo.checkpoint.native.format import INLINE_LIMIT, block_of
from terrazzo.checkpoint.native.from_planner import data_of
from terrazzo.checkpoint.native.index import RAW, ZSTD
from terrazzo.checkpoint.native.plans import Form, Piece, WritePlan
from terrazzo.checkpoint.native.root import RAW as RAW_OBJECT
from terrazzo.checkpoint.native.root import TENSOR, TYPED, ObjectEntry, TensorEntry
from terrazzo.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from terrazzo.errors import CheckpointError
from terrazzo.layout.box import Box

_WORTH_COMPRESSING: Final = 1024  # bytes


class Work(Protocol):
    """What a rank has to write. A chunk's `source` is the plan's own key for its data."""

    def chunks(self, compression: bool) -> tuple[list[Chunk], list[ObjectEntry]]:
        """Chunks for data files, and the objects that are small enough for the root."""
        ...

    def tensor(self, source: Any) -> Any:
        """The data of a chunk of a tensor."""
        ...

    def key(self, source: Any) -> Hashable:
        """A key that no other source has."""
        ...

    def tied_to(self, source: Any) -> Hashable | None:
        """The key of another source in the same memory, which is written instead of this one; None if there is none."""
        ...


class PlannedPieces:
    """A plan of our own."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def chunks(self, compression: bool) -> tuple[list[Chunk], list[ObjectEntry]]:
        made = _Made(compression)
        for piece in self._plan.pieces:
            if piece.form is None:
                made.add_object(piece.name, TYPED, piece.value.encoded(), piece)
            else:
                made.add(piece.name, piece.form, piece)
        return made.chunks, made.inline

    def tensor(self, source: Piece) -> Any:
        return source.value

    def key(self, source: Piece) -> Hashable:
        return source.holding, source.part

    def tied_to(self, source: Piece) -> Hashable | None:
        first = self._plan.ties.get(source.holding)
        return None if first is None else (first, source.part)


class PlannedItems:
    """PyTorch's items, and the planner that made them."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._plan = plan
        self._planner = planner
        self._tied_to = getattr(planner, "tied_to", None)

    def chunks(self, compression: bool) -> tuple[list[Chunk], list[ObjectEntry]]:
        made = _Made(compression)
        # Many items share one description; the plan keeps it alive, and with it its id.
        forms: dict[int, Form] = {}
        for item in self._plan.items:
            if item.type is WriteItemType.BYTE_IO:
                made.add_object(item.index.fqn, *self._payload(item), item)
                continue
            data = item.tensor_data
            if data is None:
                raise CheckpointError(f"{item.index.fqn!r}: an item of type {item.type} needs tensor_data")
            form = forms.get(id(data))
            if form is None:
                box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
                form = forms[id(data)] = Form(
                    data.properties.dtype, tuple(data.size), box, item.tensor_storage_size() or 0
                )
            made.add(item.index.fqn, form, item)
        return made.chunks, made.inline

    def _payload(self, item: WriteItem) -> tuple[int, bytes]:
        data = self._planner.resolve_data(item)
        if isinstance(data, objects.ObjectBytes):
            return TYPED, data.encoded()
        if isinstance(data, torch.Tensor):
            raise CheckpointError(
                f"{item.index.fqn!r}: the plan promised bytes, but the planner's resolve_data gave a tensor"
            )
        return RAW_OBJECT, data.getvalue()

    def tensor(self, source: WriteItem) -> Any:
        return data_of(self._planner, source)

    def key(self, source: WriteItem) -> Hashable:
        return source.index

    def tied_to(self, source: WriteItem) -> Hashable | None:
        found: Hashable | None = None if self._tied_to is None else self._tied_to(source.index)
        return found


class _Stored(msgspec.Struct, frozen=True):
    """How chunks of one form are stored."""

    form: Form  # kept, so that its number stays its own
    dtype_name: str
    block: int
    codec: int


class _Made:
    """Chunks and small objects, as they are made."""

    def __init__(self, compression: bool) -> None:
        self._compression = compression
        self._stored: dict[int, _Stored] = {}
        self.chunks: list[Chunk] = []
        self.inline: list[ObjectEntry] = []

    def add(self, name: str, form: Form, source: object) -> None:
        """A chunk of a tensor."""
        stored = self._stored.get(id(form))
        if stored is None:
            codec = ZSTD if self._compression and form.nbytes >= _WORTH_COMPRESSING else RAW
            block = FRAME if codec else block_of(form.box.lengths, form.dtype.itemsize)
            stored = self._stored[id(form)] = _Stored(form, dtype_name(form.dtype), block, codec)
        entry = TensorEntry(name, stored.dtype_name, form.shape, TENSOR)
        box = form.box
        self.chunks.append(
            Chunk(
                entry,
                form.dtype,
                box.offsets,
                box.lengths,
                form.nbytes,
                source,
                None,
                None,
                stored.block,
                stored.codec,
            )
        )

    def add_object(self, name: str, kind: int, payload: bytes, source: object) -> None:
        """An object."""
        nbytes = len(payload)
        if nbytes <= INLINE_LIMIT:
            self.inline.append(ObjectEntry(name, kind, payload))
            return
        entry = TensorEntry(name, "uint8", (nbytes,), kind)
        self.chunks.append(Chunk(entry, torch.uint8, (0,), (nbytes,), nbytes, source, payload))
