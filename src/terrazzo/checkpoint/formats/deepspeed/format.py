"""DeepSpeed's checkpoints, as one of the formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from terrazzo.checkpoint.formats.checking import check_file
from terrazzo.checkpoint.formats.deepspeed.from_checkpoint import write_deepspeed
from terrazzo.checkpoint.formats.deepspeed.reader import DeepSpeedReader, tag_folder
from terrazzo.checkpoint.formats.deepspeed.universal import FOLDER, is_universal
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.native.names import LATEST
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place


class DeepSpeed(Format):
    """The folder of a tag; or of a run, whose `latest` or `latest_universal` names one."""

    name = "deepspeed"
    options = frozenset({"stage", "ranks"})
    replaces = False

    def find(self, found: Found) -> Place | None:
        if _is_tag(found.names):
            return found.place
        named = found.latest if found.names.intersection(LATEST) else []
        # The run's folder, not the tag's: the reader says which tag is missing, and which one it reads.
        return found.place if any(folder.is_dir() and _is_tag(folder.names()) for folder in named) else None

    def reader(self, place: Place) -> StorageReader:
        return DeepSpeedReader(place)

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        checked, folder = Checked(), tag_folder(place)
        folders = [folder]
        if is_universal(folder):
            zero = folder / FOLDER
            folders += [zero, *(zero / name for name in zero.store.folders())]
        for each in folders:
            for entry in each.store.list():
                if entry.key.endswith(".pt"):
                    check_file(checked, each.store, entry.key, progress)
        if not checked.damage:
            DeepSpeedReader(place).read_metadata()  # are all files there?
        return checked

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        write_deepspeed(Source(reader), target, how.stage, how.ranks, how.progress)


def _is_tag(names: Iterable[str]) -> bool:
    """Whether files of these names are those of a tag."""
    return any(name.endswith(("_model_states.pt", "-model_states.pt", "_optim_states.pt")) for name in names)
