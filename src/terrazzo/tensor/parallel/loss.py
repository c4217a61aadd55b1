"""`loss_parallel`: cross entropy of logits that are sharded over the classes, with plain targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from terrazzo.tensor.ops.cross_entropy import parallel_loss


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside this block, `cross_entropy` of logits sharded over the classes runs without gathering them.

    >>> import torch
    >>> from terrazzo.tensor import Shard, init_device_mesh, randn
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> logits = randn(2, 8, device_mesh=mesh, placements=[Shard(1)], requires_grad=True)  # a rank has some classes
    >>> with loss_parallel():
    ...     loss = torch.nn.functional.cross_entropy(logits, torch.tensor([3, 5]))
    >>> loss.backward()
    >>> logits.grad.placements
    (Shard(dim=1),)

    All of `cross_entropy` works: class indices or probabilities, weights, `ignore_index`, label smoothing, every
    reduction, further dims, logits that other mesh dimensions shard over the batch. `target` and `weight` may be plain
    tensors that are the same on every rank. Backward may run inside or outside the block, and so may what activation
    checkpointing recomputes.
    """
    with parallel_loss.entered(True):
        yield
