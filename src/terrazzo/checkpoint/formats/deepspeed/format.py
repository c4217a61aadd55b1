"""DeepSpeed's checkpoints, as one of the formats."""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.checkpoint.formats.deepspeed.from_checkpoint import write_deepspeed
from terrazzo.checkpoint.formats.deepspeed.reader import DeepSpeedReader
from terrazzo.checkpoint.formats.format import Format, Found, Writing
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

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        write_deepspeed(Source(reader), target, how.stage, how.ranks, how.progress)


def _is_tag(names: Iterable[str]) -> bool:
    """Whether files of these names are those of a tag."""
    return any(name.endswith(("_model_states.pt", "-model_states.pt", "_optim_states.pt")) for name in names)
