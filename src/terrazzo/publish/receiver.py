"""`Receiver`: updates a model with the weights that a `Publisher` publishes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Self

import torch
from torch import nn
from torch.distributed import ProcessGroup

from terrazzo.checkpoint.run.background import BackgroundWork
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import PublishError
from terrazzo.layout.drawing import ShownAsCall
from terrazzo.publish.by_channel import ChannelSource
from terrazzo.publish.by_store import StoreSource
from terrazzo.publish.channel import TRANSFER_LIMIT, Channel
from terrazzo.publish.host_copy import HostCopy, sources_of
from terrazzo.publish.parts import RenameLike, TensorInfo, parts_of
from terrazzo.publish.versions import Version, Versions


class Receiver(ShownAsCall):
    """Updates a model to the newest version that a `Publisher` has published, whatever the layouts of the two sides.

    All ranks of the model construct one with the same arguments and call its methods together. `poll` looks for a newer
    version and reads it into a second copy of this rank's part in host memory, with its checksums verified; `apply`
    copies it into the model, between two forward passes. So all ranks' models have the same version.

    Each rank reads the bytes that it needs: everything the first time, and later the changes, if the version that it
    has is still listed.

    Host memory: a copy of this rank's part of the model, and 64 MB.

    Args:
        source: Where the versions are: a folder, a URL or a store; or the publisher's `Channel`.
        model: The model, or tensors by name; of any layout. They are updated in place.
        rename: The published names, if they differ from the model's: a `terrazzo.integrations.huggingface.Rename`.
        strict: Whether every tensor of the model must be published. Published tensors that it lacks are not read.
        allow_lossy_dtype: Round floating-point numbers if the model's dtype has fewer bits than the published one.
        process_group: The ranks that have the model; default: all.
        timeout: How long a rank waits for the others; default: the process group's time limit. With a channel it is
            also how long to wait for the publisher; default: 2 minutes.

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
        self._side: BackgroundWork[Version | None] = BackgroundWork(process_group, timeout, self._source.doing)
        self._ready: Version | None = None  # complete in host memory, and not applied yet
        self._applied: Version | None = None
        self._open = True

    def _match(self, published: Mapping[str, TensorInfo], aliases: Mapping[str, str]) -> HostCopy:
        parts = parts_of(self._model, self._rename)
        sources = sources_of(parts, published, aliases, strict=self._strict, allow_lossy_dtype=self._lossy)
        before, self._source.host_copy = self._source.host_copy, None
        return HostCopy(parts, sources, before)

    @property
    def version(self) -> int | None:
        """The number of the version that was applied last; None before the first."""
        return None if self._applied is None else self._applied.number

    @property
    def bytes_read(self) -> int:
        """The number of bytes that this rank has read so far."""
        return self._source.bytes_read

    def poll(self, *, wait: bool = True) -> int | None:
        """Read a version that is newer than the model's, if there is one. Returns its number when all ranks have read
        and verified it, so that it can be applied.

        If reading fails on a rank, every rank raises the same error and the model stays as it is; the next call tries
        again.

        Args:
            wait: Read it in this call. False: begin to read in the background, and return None; a later call returns
                the number. All ranks must pass the same.
        """
        self._check_open()
        team = self._side.team()
        if self._side.running is None:
            if not wait and self._ready is not None:
                return self._ready.number
            beside = self._side.team_in_background()
            self._side.start(lambda: self._source.fetch(beside))
        running = self._side.running
        if not wait and running is not None and not team.all_true(running.done()):
            return None
        self._ready = None
        fetched, error = self._side.outcome()
        if error is not None:
            raise error
        self._ready = fetched if fetched != self._applied else None
        return None if self._ready is None else self._ready.number

    def apply(self) -> int:
        """Copy the version that `poll` returned into the model, and return its number. No forward pass may be running.

        It does not communicate, so call it on all ranks before the same forward pass.
        """
        self._check_open()
        host_copy = self._source.host_copy
        if self._ready is None or host_copy is None or self._side.running is not None:
            raise PublishError("there is nothing to apply: call poll on all ranks until it returns a version")
        host_copy.follow(parts_of(self._model, self._rename))
        ready, self._ready, self._applied = self._ready, None, None
        host_copy.apply()
        self._applied = ready
        return ready.number

    def close(self) -> None:
        """Wait for what is being read in the background, then close the connections."""
        if self._open:
            self._open = False
            self._side.outcome()
            self._source.close()
            self._side.close()

    def _check_open(self) -> None:
        if not self._open:
            raise PublishError("this Receiver has been closed: construct another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
