"""Writing safetensors files from sharded tensors: every rank its share, committed at once.

In a folder each rank writes its byte ranges of the files, where they lie, under names of this save. In stores that
take a file only as a whole, each file has an owner (`streamed`).

What each step is there for:
- files get their final names when all ranks have written all of them; several are named by an index, which is put last
  and on condition that no other save has put one since: so a reader finds the old checkpoint or the new one;
- `model.safetensors` is found before any index. So a checkpoint of one file is there when the file takes that name,
  and one of several files replaces one of one file when that is deleted, after the index is there;
- the usual names of shards are used if no file has such a name and no other save is under way; else names with the
  save's id, so no save ever writes to a file of another checkpoint;
- what the new checkpoint does not name goes afterwards, and what a killed save left, when its lease has ended.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from terrazzo.checkpoint.filesystem import InFolder
from terrazzo.checkpoint.formats.huggingface.layout import (
    STEM,
    About,
    WeightsLayout,
    encode_index,
    lay_out,
    runs_of,
    shard_name,
    single_name,
)
from terrazzo.checkpoint.formats.huggingface.replacing import Replacing, part_name, parts_of
from terrazzo.checkpoint.formats.huggingface.streamed import write_streamed
from terrazzo.checkpoint.formats.registry import check_is_found, import_all
from terrazzo.checkpoint.formats.table import tensor_entry
from terrazzo.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from terrazzo.checkpoint.native.root import TENSOR
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.run import messages
from terrazzo.checkpoint.storage import WriteResult
from terrazzo.checkpoint.stores import LocalStore, Place, Store, Upload
from terrazzo.checkpoint.torch_api.storages import RowWriter
from terrazzo.comm.control import DEFAULT_TIMEOUT, ControlPlane
from terrazzo.errors import CheckpointError, UnsupportedValueError


class HuggingFaceWriter(InFolder, RowWriter):
    """Writes a flat state dict of tensors as safetensors files.

    Args:
        path: The folder, its URL or its store.
        layout: Which tensor lies where; every rank gives the same. None: made on the coordinator, from what all save.
        make_layout: How, then.
        stem: What file names begin with.
        beside: Small files that belong to the checkpoint; they are put at the commit.
        always_index: Whether also one file is called a shard, and has an index.
        process_group: The ranks that save, if files have owners; default: all.
        overwrite: Whether a checkpoint that is there may be replaced.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Place | Store,
        layout: WeightsLayout | None = None,
        *,
        make_layout: Callable[[Mapping[str, About]], WeightsLayout] = lay_out,
        stem: str = STEM,
        beside: Mapping[str, bytes] | None = None,
        always_index: bool = False,
        process_group: Any = None,
        overwrite: bool = True,
    ) -> None:
        self._go_to(path if isinstance(path, Place) else Place(path))
        self.overwrite = overwrite
        self._given = layout
        self._make_layout = make_layout
        self._stem = stem
        self._beside = dict(beside or {})
        self._always_index = always_index
        self._group = process_group
        self._layout: WeightsLayout | None = None
        self._usual_names = False  # whether shards are called as everybody does
        self._bytes_written: list[int] = []
        self._last: Upload | None = None  # the only file, on its owner, until the commit
        self._own: set[str] = set()  # final names that this rank has made
        self._committed = False
        self._replacing: Replacing | None = None  # on the coordinator
        import_all()  # `check_is_found` needs them

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_replacing": None, "_last": None}  # these belong to a process

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._release()
        self._replacing = None
        if checkpoint_id is not None:
            self._go_to(Place(checkpoint_id))
        self._layout, self._last, self._committed = None, None, False
        self._own, self._bytes_written = set(), []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.store.prepare()
        self.save_id = uuid.uuid4().hex[:12]
        if is_coordinator:
            check_is_found(Place(self.store), "huggingface")
            self._replacing = Replacing(self.store, self._stem, [*self._beside], self.save_id, overwrite=self.overwrite)
            self._usual_names = self._replacing.usual_names

    def about(self, rows: Sequence[Row]) -> bytes:
        """The tensors that this rank has, if the layout is to be made of them."""
        for row in rows:
            if row.kind != TENSOR:
                raise UnsupportedValueError(f"{row.name} is not a tensor, and safetensors files hold nothing else")
        if self._given is not None:
            return b""
        return messages.encode({row.name: About(row.form.dtype, row.form.shape) for row in rows})

    def arranged(self, abouts: Sequence[bytes]) -> bytes:
        """On the coordinator: reserve the files; returns what all ranks need to know, and the layout if it was made."""
        layout = self._given
        if layout is None:
            tensors: dict[str, About] = {}
            for about in abouts:
                tensors.update(messages.decode(about, dict))
            layout = self._make_layout(tensors)
        if isinstance(self.store, LocalStore):  # before other ranks open them
            for number, file in enumerate(layout.files):
                self.store.reserve(self._part(number), file.size)
        return messages.encode((self.save_id, self._usual_names, len(abouts), layout if self._given is None else None))

    def write(self, rows: Sequence[Row], arranged: bytes, rank: int) -> _Written:
        self.save_id, self._usual_names, ranks, self._layout = messages.decode(arranged, tuple)
        layout = self._known_layout
        rows = [row for row in rows if not row.form.box.is_empty]
        for row in rows:
            if row.name not in layout.slots:
                raise CheckpointError(f"{row.name!r}: the plan has it, but the layout of the files does not")
        if isinstance(self.store, LocalStore):
            self._write_shared(self.store, layout, rows)
        else:
            self._write_streamed(layout, rows, ranks)
        results = _Written(layout.digest, self._bytes_written)
        results += [WriteResult(MetadataIndex(row.name, row.form.box.offsets), row.form.nbytes, None) for row in rows]
        return results

    def finish(self, metadata: Metadata, results: list[Sequence[WriteResult]]) -> None:
        written = [0] * len(self._known_layout.files)
        for rank, of_rank in enumerate(results):
            if not isinstance(of_rank, _Written):
                raise CheckpointError(f"the results of rank {rank} do not come from this writer's write_data")
            if of_rank.digest != self._known_layout.digest:
                raise CheckpointError(
                    f"rank {rank} has other tensors than the coordinator: names, shapes and dtypes of what is saved "
                    f"have to be the same on all ranks"
                )
            written = [one + other for one, other in zip(written, of_rank.per_file, strict=True)]
        if isinstance(self.store, LocalStore):
            self._check_whole(written)
        try:
            self._commit()
        except BaseException:
            if not self.may_abandon():
                self._release()
            raise
        self._describe(metadata)
        self._release()

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(self.store.location, self.save_id)

    def encode_results(self, results: Sequence[WriteResult]) -> bytes:
        if not isinstance(results, _Written):
            raise CheckpointError("these results do not come from this writer's write_data")
        return msgspec.msgpack.encode((results.digest, results.per_file))

    def decode_results(self, data: bytes) -> Sequence[WriteResult]:
        return _Written(*msgspec.msgpack.decode(data, type=tuple[int, list[int]]))

    def committed(self, metadata: Metadata) -> bytes:
        return b""

    def describe_committed(self, data: bytes) -> Metadata:
        metadata = Metadata({})
        self._describe(metadata)
        return metadata

    def may_abandon(self) -> bool:
        if self._committed or (self._replacing is not None and self._replacing.index.lost):
            return False  # of a save that is lost, names may be another's by now
        return self._replacing is None or self._replacing.index.is_absent()

    def abandon(self) -> None:
        if self._last is not None:
            self._last.abort()
        parts = parts_of(self.store, self.save_id)
        self.store.delete([*parts, *self._own])
        self._release()

    # -------------------------------------------------------------- names

    def _go_to(self, place: Place) -> None:
        # With the place's absolute path, and not as the user wrote it: the working directory may change.
        self.path, self.store = place.path, place.store

    @property
    def _known_layout(self) -> WeightsLayout:
        layout = self._layout or self._given
        if layout is None:
            raise CheckpointError("the plan has not passed through this writer's prepare_global_plan")
        return layout

    @property
    def _is_single(self) -> bool:
        return len(self._known_layout.files) == 1 and not self._always_index

    def _part(self, number: int) -> str:
        return part_name(self.save_id, number)

    def _final(self, number: int) -> str:
        if self._is_single:
            return single_name(self._stem)
        save_id = "" if self._usual_names else self.save_id
        return shard_name(number, len(self._known_layout.files), self._stem, save_id)

    # -------------------------------------------------------------- writing

    def _write_shared(self, store: LocalStore, layout: WeightsLayout, rows: Sequence[Row]) -> None:
        """Byte ranges of files that all ranks write to."""
        by_file: dict[int, list[Row]] = {}
        for row in rows:
            by_file.setdefault(layout.slots[row.name].file, []).append(row)
        self._bytes_written = [0] * len(layout.files)
        for number, file in enumerate(layout.files):
            if number not in by_file and self._replacing is None:
                continue
            try:
                upload = store.share(self._part(number))
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{store.location} has no {self._part(number)}, which the first rank has made there: it is not the "
                    f"same folder on all ranks"
                ) from error
            with upload:
                if self._replacing is not None:
                    upload.write(0, [memoryview(file.header)])
                for row in by_file.get(number, ()):
                    self._show_life()
                    for start, memory in runs_of(row.tensor().detach(), row.form.box, layout.slots[row.name]):
                        upload.write(start, [memory])
                        self._bytes_written[number] += len(memory)

    def _write_streamed(self, layout: WeightsLayout, rows: Sequence[Row], ranks: int) -> None:
        """Whole files by one rank each."""
        self._bytes_written = [0] * len(layout.files)

        def begin(number: int) -> Upload:
            return self.store.stream(self._final(number))

        def keep(number: int, upload: Upload) -> None:
            if self._is_single:  # it takes the place of another in the moment of the commit
                self._last = upload
                return
            self._own.add(self._final(number))
            upload.finish()

        alone = ranks == 1 or not (dist.is_available() and dist.is_initialized())
        if not alone and ranks != dist.get_world_size(self._group):
            raise CheckpointError(
                f"{ranks} ranks save, but the writer is for {dist.get_world_size(self._group)}: give it the same "
                f"process_group as save"
            )
        plane = (
            ControlPlane(None, (0,), 0, DEFAULT_TIMEOUT)
            if alone
            else ControlPlane.create(self._group, name="safetensors")
        )
        try:
            write_streamed(layout, rows, plane, begin, keep, self._show_life)
        finally:
            plane.close()

    # -------------------------------------------------------------- the commit

    def _check_whole(self, written: Sequence[int]) -> None:
        for number, file in enumerate(self._known_layout.files):
            expected = file.data_size
            if written[number] != expected or self.store.stat(self._part(number)).size != file.size:
                raise CheckpointError(
                    f"of the {expected} bytes of {self._final(number)}, with {', '.join(file.names[:3])} and more, the "
                    f"ranks have written {written[number]}: they have not the same model, or not the same folder"
                )

    def _commit(self) -> None:
        layout, replacing = self._known_layout, self._replacing
        if replacing is None:
            raise CheckpointError(
                "only the coordinator, which set_up_storage_writer made of this writer, finishes a save"
            )
        finals = [self._final(number) for number in range(len(layout.files))]
        with replacing.committing():
            check_is_found(Place(self.store), "huggingface")  # once more: a save in another format may have committed
            replacing.check_unchanged()
            replacing.check_alive([] if self._is_single or isinstance(self.store, LocalStore) else finals)
            for name, data in self._beside.items():
                self.store.put(name, data)
            index = None
            if self._is_single:
                if isinstance(self.store, LocalStore):
                    self.store.rename({self._part(0): single_name(self._stem)})
                elif self._last is not None:
                    self._last.finish()
                    self._last = None
            else:
                if isinstance(self.store, LocalStore):
                    self._own.update(finals)
                    self.store.rename({self._part(number): name for number, name in enumerate(finals)})
                weight_map = {name: finals[slot.file] for name, slot in layout.slots.items()}
                content = encode_index(weight_map, layout.total_size)
                index = replacing.index.put(content)
            self._committed = True  # what fails from now on leaves the new checkpoint there
            replacing.remove_replaced(finals, index)
            check_is_found(Place(self.store), "huggingface")  # even between the two

    def _show_life(self) -> None:
        if self._replacing is not None:
            self._replacing.index.renew()

    def _release(self) -> None:
        if self._replacing is not None:
            self._replacing.index.release()

    def _describe(self, metadata: Metadata) -> None:
        """Make `metadata` say what has been stored."""
        slots = self._known_layout.slots.items()
        metadata.state_dict_metadata = {name: tensor_entry(slot.dtype, slot.shape) for name, slot in slots}
        metadata.storage_meta = self.storage_meta()


class _Written(list[WriteResult]):
    """What a rank has written: its bytes of each file, of which layout."""

    def __init__(self, digest: int, per_file: Sequence[int]) -> None:
        super().__init__()
        self.digest = digest
        self.per_file = tuple(per_file)
