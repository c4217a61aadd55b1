"""Data loaders with DeepSpeed's order: `DistributedSampler` shuffles, and every pass is the same and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from terrazzo.layout.drawing import ShownAsCall

T = TypeVar("T")


class DeepSpeedDataLoader(DataLoader[Any]):
    """A `DataLoader` of one rank's micro-batches.

    Attributes:
        post_process_func: if it is set, it is applied to every batch.
    """

    post_process_func: Callable[[Any], Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator instead of DataLoader's iterator class
        for batch in super().__iter__():
            yield batch if self.post_process_func is None else self.post_process_func(batch)


class RepeatingLoader(ShownAsCall, Generic[T]):
    """A loader that starts again when it ends.

    >>> loader = RepeatingLoader([1, 2])
    >>> [next(loader) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def make_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    rank: int,
    ranks: int,
    shuffle: bool,
    drop_last: bool,
    pin_memory: bool,
    sampler: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    workers: int,
) -> DeepSpeedDataLoader:
    """A loader of this rank's part of a dataset; a dataset without a length is read in its own order."""
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=shuffle)
    return DeepSpeedDataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=workers,
        pin_memory=pin_memory,
        drop_last=drop_last,
    )
