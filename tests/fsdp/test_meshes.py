"""Parameters with meshes of their own, and models that are DTensors on all of a mesh, trained as PyTorch does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_common as theirs

import terrazzo.fsdp as our_fsdp
import terrazzo.tensor as our_tensor
from fsdp.compare import apart, checked
from ranks import device_type, run_ranks
from terrazzo.errors import FSDPValueError
from terrazzo.fsdp import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult, fully_shard
from terrazzo.tensor import DTensor, Replicate, Shard, init_device_mesh

pytestmark = pytest.mark.on_late(both=True)


class Experts(nn.Module):
    """Two halves of two ranks each have an expert each; what all compute with is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 7)
        self.expert = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.relu(self.shared(x)))


def check_experts(replicate: bool) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "edp"))
    everyone = init_device_mesh(device_type(), (4,))
    half = mesh["edp"]
    info: Any = FSDPMeshInfo(half)
    if replicate:
        info = HSDPMeshInfo(init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard")))
    torch.manual_seed(0)
    experts = [Experts() for _ in range(2)]
    experts[1].shared.load_state_dict(experts[0].shared.state_dict())
    references = copy.deepcopy(experts)
    which = 0 if replicate else rank // 2
    model: Any = experts[which]
    own = set(model.expert.parameters())
    # PyTorch's own result, as a program has it that imports that from its private module, does as well.
    result = theirs.ShardPlacementResult if replicate else ShardPlacementResult
    fully_shard(model, mesh=everyone, shard_placement_fn=lambda p: result(None, info) if p in own else None)
    assert model.expert.weight.device_mesh == info.mesh and model.shared.weight.device_mesh == everyone
    ours = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in references]
    with checked(apart(model)):
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 3, 6, generator=generator)  # a part for each rank
            model.set_requires_gradient_sync(step % 2 == 1)
            model(x[rank]).square().mean().backward()
            for part in range(4):
                references[0 if replicate else part // 2](x[part]).square().mean().backward()
            if step % 2 == 0:
                continue
            for parameters in zip(*[m.shared.parameters() for m in references], strict=True):
                total = sum(p.grad for p in parameters if p.grad is not None)
                for p in parameters:
                    p.grad = total / 4
            for reference in references:
                for p in reference.expert.parameters():
                    if p.grad is not None:
                        p.grad /= 4 if replicate else 2
            for optimizer in (ours, *optimizers):
                optimizer.step()
                optimizer.zero_grad()
    for (name, p), wanted in zip(model.named_parameters(), references[which].parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), wanted, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("replicate", [False, True])
def test_experts_have_a_mesh_of_their_own(replicate):
    run_ranks(4, check_experts, replicate)


def check_experts_alone() -> None:
    """As many experts as ranks: an expert's mesh is its rank, in a group with parameters on all of them."""
    rank = dist.get_rank()
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("ep", "edp"))
    torch.manual_seed(0)
    experts = [Experts() for _ in range(2)]
    experts[1].shared.load_state_dict(experts[0].shared.state_dict())
    references = copy.deepcopy(experts)
    model: Any = experts[rank]
    own = set(model.expert.parameters())
    info = FSDPMeshInfo(mesh["edp"])
    fully_shard(
        model, mesh=mesh["ep"], shard_placement_fn=lambda p: ShardPlacementResult(None, info) if p in own else None
    )
    for step in range(2):  # gradients accumulate
        x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(step))
        model(x[rank]).square().mean().backward()
        for part in range(2):
            references[part](x[part]).square().mean().backward()
    for name, p in model.expert.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), references[rank].expert.get_parameter(name).grad)
    for name, p in model.shared.named_parameters():
        total = sum(reference.shared.get_parameter(name).grad for reference in references)
        torch.testing.assert_close(p.grad.full_tensor(), total / 2)


def test_experts_alone():
    run_ranks(2, check_experts_alone)


# ------------------------------------------------------------------ on all of a mesh


def program(fsdp: Any, tensor: Any, mesh: Any, factor: float | None) -> list[Any]:
    """Everything is a DTensor on the whole mesh; only where it imports from differs."""
    torch.manual_seed(0)
    names = mesh.mesh_dim_names
    first, second = nn.Linear(6, 8), nn.Linear(8, 4)
    tensor_parallel = names.index("tp") if "tp" in names else None
    data = [i for i, name in enumerate(names) if name != "tp"]
    for linear, dim in ((first, 0), (second, 1)):
        for name, parameter in list(linear.named_parameters()):
            placements = [tensor.Replicate() for _ in names]
            if tensor_parallel is not None and not (name == "bias" and dim == 1):
                placements[tensor_parallel] = tensor.Shard(dim)
            setattr(linear, name, nn.Parameter(tensor.distribute_tensor(parameter.detach(), mesh, placements)))
    model: Any = nn.Sequential(first, nn.ReLU(), second)
    replicated = [name for name in names if name.startswith("replicate")]
    sharded = [name for name in names if name.startswith("shard")]
    dims = fsdp.DataParallelMeshDims(
        shard=None if not sharded else sharded[0] if len(sharded) == 1 else tuple(sharded),
        replicate=replicated[0] if replicated else None,
    )
    for each in (first, second):
        fsdp.fully_shard(each, mesh=mesh, dp_mesh_dims=dims)
        if factor is not None:
            each.set_gradient_divide_factor(factor)
            each.set_force_sum_reduction_for_comms(True)  # gloo has nothing else for PyTorch to use
    fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[Any] = []
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        placements = [tensor.Shard(0) if i in data else tensor.Replicate() for i in range(len(names))]
        out = model(tensor.distribute_tensor(x, mesh, placements))
        seen = first.weight
        loss = out.full_tensor().square().mean()
        loss.backward()
        results += [loss.detach(), *[p.grad.full_tensor() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    model.reshard()
    assert seen.shape == (8, 6)
    return [*results, *[p.detach().full_tensor() for p in model.parameters()]]


def check_whole() -> None:
    def mesh_of(*names: str) -> Any:
        return init_device_mesh(device_type(), (2, 2), mesh_dim_names=names)

    with_tp = mesh_of("shard", "tp")
    ways = [
        (with_tp, None),
        (with_tp, 1.0),
        (mesh_of("replicate", "shard"), None),
        (mesh_of("shard_a", "shard_b"), None),
    ]
    for mesh, factor in ways:
        wanted = program(torch_fsdp, torch_tensor, mesh, factor)
        found = program(our_fsdp, our_tensor, mesh, factor)
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=f"{mesh} {factor} {i}")
    wanted = program(our_fsdp, our_tensor, with_tp, None)
    for mesh in (mesh_of("replicate", "tp"), mesh_of("tp", "shard")):
        found = program(our_fsdp, our_tensor, mesh, None)
        for a, b in zip(found, wanted, strict=True):  # shards or replicas, before or behind: the numbers are the same
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_model_of_dtensors_on_all_of_the_mesh():
    run_ranks(4, check_whole)


def check_wrong_meshes() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    dims = our_fsdp.DataParallelMeshDims(shard="dp")
    with pytest.raises(FSDPValueError, match="'weight' is a plain tensor: with dp_mesh_dims"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=dims)
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(our_tensor.distribute_tensor(linear.weight.detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(FSDPValueError, match=r"'weight' is Shard\(dim=0\) on the data-parallel dim 'dp'"):
        fully_shard(linear, mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(FSDPValueError, match="names the dim 'data', but the dims of fully_shard.s mesh are 'dp', 'tp'"):
        fully_shard(linear, mesh=mesh, dp_mesh_dims=our_fsdp.DataParallelMeshDims(shard="data"))
    with pytest.raises(FSDPValueError, match="needs a dim"):
        our_fsdp.DataParallelMeshDims()
    linear.weight = nn.Parameter(our_tensor.distribute_tensor(torch.ones(4, 4), mesh["tp"], [Replicate()]))
    with pytest.raises(FSDPValueError, match="it must be on fully_shard.s mesh"):
        fully_shard(linear, mesh=mesh, dp_mesh_dims=dims)
    info = FSDPMeshInfo(mesh, 0)
    with pytest.raises(FSDPValueError, match="a 2-D mesh replicates on dim 0 and shards on dim 1"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: ShardPlacementResult(None, info))
    assert isinstance(linear.weight, DTensor)


def test_meshes_that_do_not_fit():
    run_ranks(4, check_wrong_meshes)
