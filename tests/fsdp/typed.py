"""What `fully_shard` returns has PyTorch's types: `make types` reads this file, and nobody runs it.

A `type: ignore` that is not needed is an error there.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.fsdp import DataParallelMeshDims, FSDPMeshInfo, FSDPModule, ShardPlacementResult, fully_shard
from terrazzo.tensor import Shard

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


def apart(mesh: DeviceMesh, own: DeviceMesh) -> FSDPModule:
    """All arguments, as PyTorch types them."""

    def place(parameter: nn.Parameter) -> Shard | ShardPlacementResult | None:
        return ShardPlacementResult(Shard(1), FSDPMeshInfo(own)) if parameter.ndim > 1 else None

    placed = fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=place)
    placed.set_reduce_scatter_max_input_buffers(2)
    placed.set_symm_mem_for_comm("NCCL")
    placed.set_symm_mem_for_comm("GLOO")  # type: ignore[arg-type]  # there is no other
    return fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
