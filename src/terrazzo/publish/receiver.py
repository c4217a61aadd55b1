"""`Receiver`: a model that takes the weights that a `Publisher` publishes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.distributed import ProcessGroup

from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import PublishError
from terrazzo.publish.channel import TRANSFER_LIMIT, Channel
from terrazzo.publish.from_channel import ChannelSource
from terrazzo.publish.from_store import StoreSource
from terrazzo.publish.parts import About, RenameLike, parts_of
from terrazzo.publish.shadow import Shadow, sources_of
from terrazzo.publish.versions import Version, Versions
from terrazzo.publish.working import Side, all_say, told


class Receiver:
    """Keeps a model at the newest version that a `Publisher` has published, whatever the layout of either side.

    All ranks of the model make one with the same arguments and call its methods together.  `poll` looks for a newer
    version and brings it into a second copy of this rank's part, in host memory, checked; `apply` copies it into the
    model, between two forward passes.  So the model has one version or the other on all ranks, never parts of two.

    Each rank reads the bytes of its own part: all of it the first time, later what has changed, if what it has is still
    in the list.

    Memory: this rank's part once more on the host, and 64 MB.

    Args:
        source: Where the versions are: a folder, a URL or a store; or the publisher's `Channel`.
        model: The model, or tensors by name; of any layout.  Its memory is filled where it is.
        rename: The published names, where they are others: as `terrazzo.integrations.huggingface.Rename` gives them.
        strict: Whether every tensor of the model has to be published.  What is published beside that is left.
        allow_lossy_dtype: Round floating-point numbers to the model's dtype, where it is shorter than the published.
        process_group: The ranks that have the model; default: all.
        timeout: How long a rank waits for the slowest one; default: as long as the process group's collectives do.  Of
            a channel also how long the publisher is waited for; default: 2 minutes.

    >>> import tempfile
    >>> receiver = Receiver(tempfile.mkdtemp(), nn.Linear(2, 1))
    >>> receiver.poll() is None, receiver.version
    (True, None)
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Store | Channel,
        model: nn.Module | Mapping[str, torch.Tensor],
        *,
        rename: RenameLike | None = None,
        strict: bool = True,
        allow_lossy_dtype: bool = False,
        process_group: ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._model = model
        self._rename = rename
        self._strict = strict
        self._lossy = allow_lossy_dtype
        self._source: StoreSource | ChannelSource
        if isinstance(source, Channel):
            self._source = ChannelSource(source, self._match, timeout or TRANSFER_LIMIT)
        else:
            self._source = StoreSource(Versions(Place(source)), self._match)
        self._side: Side[Version | None] = Side(process_group, timeout, self._source.doing)
        self._ready: Version | None = None  # here, and not applied
        self._applied: Version | None = None
        self._open = True

    def _match(self, published: Mapping[str, About], aliases: Mapping[str, str]) -> Shadow:
        parts = parts_of(self._model, self._rename)
        sources = sources_of(parts, published, aliases, strict=self._strict, allow_lossy_dtype=self._lossy)
        return Shadow(parts, sources)

    @property
    def version(self) -> int | None:
        """The number of the version that the model has; None before the first."""
        return None if self._applied is None else self._applied.number

    @property
    def bytes_read(self) -> int:
        """How many bytes this rank has read so far."""
        return self._source.bytes_read

    def poll(self, *, wait: bool = True) -> int | None:
        """Look for a newer version than the model has; returns its number when it is here, whole and checked, on every
        rank, and can be applied.

        If reading fails, on whatever rank, every rank raises the same error, the model keeps what it has, and the next
        call tries again.

        Args:
            wait: Read it in this call.  False: begin to read in the background, and say None; a later call says when it
                is here.  All ranks pass the same.
        """
        self._check_open()
        with told():
            place = self._side.place()
            if self._side.running is None:
                if not wait and self._ready is not None:
                    return self._ready.number
                beside = self._side.place_beside()
                self._side.start(lambda: self._source.fetch(beside))
            running = self._side.running
            if not wait and running is not None and not all_say(place, running.done()):
                return None
        self._ready = None
        fetched, error = self._side.outcome()
        if error is not None:
            raise error
        self._ready = fetched if fetched != self._applied else None
        return None if self._ready is None else self._ready.number

    def apply(self) -> int:
        """Copy what `poll` said is here into the model, and return its number.  No forward pass may be under way.

        It asks no other rank for anything, so call it on all ranks before the same forward pass.
        """
        self._check_open()
        shadow = self._source.shadow
        if self._ready is None or shadow is None or self._side.running is not None:
            raise PublishError("there is nothing to apply: call poll first, on all ranks, until it returns a version")
        shadow.follow(parts_of(self._model, self._rename))
        ready, self._ready, self._applied = self._ready, None, None
        shadow.apply()
        self._applied = ready
        return ready.number

    def close(self) -> None:
        """End, when what is under way in the background has ended."""
        if self._open:
            self._open = False
            self._side.outcome()
            self._source.close()
            self._side.close()

    def _check_open(self) -> None:
        if not self._open:
            raise PublishError("this Receiver has been closed; make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
