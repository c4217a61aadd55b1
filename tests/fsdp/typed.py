"""What `fully_shard` returns has PyTorch's types: `make types` reads this file, and nobody runs it.

A `type: ignore` that is not needed is an error there.
"""

from torch import nn

from terrazzo.fsdp import FSDPModule, fully_shard

model = fully_shard(nn.Linear(2, 2))
model.set_requires_gradient_sync(False)
model.set_reshard_after_backward(False, recurse=False)
parameters = list(model.parameters())
handle = model.unshard(async_op=True)
if handle is not None:
    handle.wait()
several = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
several[0].set_is_last_backward(True)
one: FSDPModule = several[1]
wrong: int = fully_shard(nn.Linear(2, 2))  # type: ignore[assignment]  # what it returns is known
