"""What is done with whole checkpoints: they are listed, opened, compared, verified and sealed."""

from __future__ import annotations

import os

from terrazzo.checkpoint.formats.registry import located
from terrazzo.checkpoint.listing import Listing
from terrazzo.checkpoint.stores import Store


def listing_of(path: str | os.PathLike[str] | Store) -> Listing:
    """The table of contents of the checkpoint at a path, a URL or in a store, of any format.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.zeros(3, 4), "step": 7}, checkpoint_id=path)
    >>> found = listing_of(path)
    >>> found.entries["w"].shape, found.value("step")
    ((3, 4), 7)
    """
    format, place = located(path)
    listing = format.listing(place)
    if listing is not None:
        return listing
    from terrazzo.checkpoint.tools.lazy import Checkpoint, ReaderListing  # imports PyTorch, as readers do

    return ReaderListing(Checkpoint(format.reader(place)))
