"""From ranks that train to ranks that serve, in one process group: between layouts, from device to device."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from publish import worlds
from ranks import device_type, run_fresh, run_ranks
from terrazzo.errors import CheckpointMismatchError, CommError, PublishError
from terrazzo.fsdp import fully_shard
from terrazzo.integrations.huggingface import Rename, Rule
from terrazzo.publish import Transfer, join
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.on_late(elsewhere=True)

TRAIN, SERVE = (0, 1), (2, 3)
LIMIT = timedelta(seconds=30)


class NothingCrosses(TorchDispatchMode):
    """A block in which no operation copies more than a few numbers between the device and the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        used = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor) and x.numel() > 8]
        assert len({x.device for x in used}) <= 1, f"{func} of {[x.device for x in used]}"
        return out


def values(step: int) -> dict[str, torch.Tensor]:
    """The values that the trainer has at a step, which every rank can compute."""
    torch.manual_seed(step)
    with torch.device("cpu"):
        state = worlds.Net().state_dict()
    state["seen"].fill_(step)
    return {name: value.to(torch.get_default_device()) for name, value in state.items()}


def trained(mesh: DeviceMesh) -> nn.Module:
    """A model under fully_shard on the ranks that train."""
    model = worlds.Net()
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh)
    return model


def served(mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """A tensor-parallel model on the ranks that serve."""
    model = worlds.Net(tied=False).to(dtype)
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def set_values(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if isinstance(value, DTensor):
                placed = distribute_tensor(values(step)[name], value.device_mesh, value.placements, src_data_rank=None)
                value.to_local().copy_(placed.to_local())
            else:
                value.copy_(values(step)[name])


def check_layouts(dtype: torch.dtype) -> int:
    trains = dist.get_rank() in TRAIN
    meshes = [DeviceMesh(device_type(), ranks) for ranks in (TRAIN, SERVE)]
    model = trained(meshes[0]) if trains else served(meshes[1], dtype)
    if trains:
        transfer = Transfer(send=model, dtype=dtype, bucket_bytes=1 << 11)
    else:
        transfer = Transfer(receive=model, bucket_bytes=1 << 11)
    assert transfer.plan.rounds > 1
    for step in range(2):
        if trains:
            set_values(model, step)
        if device_type() == "cpu":
            transfer.run()
        else:
            with NothingCrosses():
                transfer.run()
        if not trains:
            for name, value in model.state_dict().items():
                expected = values(step)[name]
                expected = expected.to(dtype) if expected.is_floating_point() else expected
                torch.testing.assert_close(whole(value), expected, rtol=0, atol=0)
    # Each element comes once, that of the tied weight too, and in the dtype that is sent.
    local = {n: x.to_local() if isinstance(x, DTensor) else x for n, x in model.state_dict().items()}
    came = [asked for messages in transfer.plan.receives for message in messages for asked in message.asked]
    assert sum(asked.box.numel for asked in came) == sum(
        not trains and x.numel() for n, x in local.items() if n != "head.weight"
    )
    assert {asked.dtype for asked in came} <= {str(dtype).removeprefix("torch."), "int64"}
    return transfer.plan.bytes_sent - transfer.plan.bytes_received


def test_from_fully_shard_to_tensor_parallel():
    for dtype in (torch.float32, torch.bfloat16):
        assert sum(run_ranks(4, check_layouts, dtype)) == 0


def check_other_degree_and_fused_names() -> None:
    """Tensor parallelism of 3 ranks to that of 2, of which one is in both; and three projections into one."""
    rank = dist.get_rank()
    device = device_type()
    three, two = (DeviceMesh(device, ranks) for ranks in ((0, 1, 2), (2, 3)))
    qkv = {f"{x}.weight": torch.arange(n * 5.0).view(n, 5) + 100 * n for x, n in (("q", 8), ("k", 3), ("v", 3))}
    qkv["v.weight"] += 500
    send = receive = None
    if rank < 3:
        send = {name: distribute_tensor(x, three, [Shard(0)], src_data_rank=None) for name, x in qkv.items()}
        send["same"] = distribute_tensor(torch.arange(7.0), three, [Replicate()], src_data_rank=None)
    if rank > 1:
        fused = DTensor.from_local(torch.zeros(7, 5), two, [Shard(0)])
        receive = {"qkv.weight": fused, "same": torch.zeros(7), "scale": torch.full((2,), 3.0)}
    rename = Rename([Rule("qkv.weight", ["q.weight", "k.weight", "v.weight"], sizes=(8, 3, 3))])
    arguments = {"send": send, "receive": receive, "receive_rename": rename}
    if device == "cpu":
        with pytest.raises(CheckpointMismatchError, match="scale: not published"):
            Transfer(**arguments)
        with pytest.raises(PublishError, match="no rank of the process group has passed a model to receive"):
            Transfer(send=send)
    transfer = Transfer(**arguments, strict=False)
    transfer.run()
    if receive is not None:
        expected = torch.cat(list(qkv.values()))
        torch.testing.assert_close(receive["qkv.weight"].full_tensor(), expected, rtol=0, atol=0)
        torch.testing.assert_close(receive["same"], torch.arange(7.0), rtol=0, atol=0)
        assert receive["scale"].eq(3).all()
    if device == "cpu":
        if rank == 3:
            receive["same"] = torch.zeros(7, dtype=torch.float64)
        with pytest.raises(
            PublishError, match="rank 3: PublishError: the model's tensors, dtypes or layout have chang"
        ):
            transfer.run()


def test_other_degrees_names_and_mistakes():
    run_ranks(4, check_other_degree_and_fused_names)


def train(address: str) -> list[float]:
    group = join(address, dist.get_rank(), 3, timeout=LIMIT)
    mesh = DeviceMesh(device_type(), (0, 1))
    weight = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)])
    transfer = Transfer(send={"w": weight}, process_group=group)
    transfer.run()
    weight.to_local().add_(1)
    transfer.run()
    dist.destroy_process_group(group)
    return weight.full_tensor().flatten().tolist()


def serve(address: str) -> list[float]:
    group = join(address, 2, 3, timeout=LIMIT)
    weight = torch.zeros(7, 5)
    transfer = Transfer(receive={"w": weight}, process_group=group)
    transfer.run()
    assert weight.equal(torch.arange(35.0).view(7, 5))
    transfer.run()
    dist.destroy_process_group(group)
    return weight.flatten().tolist()


@pytest.mark.cpu_only("two worlds at once on the device are two sets of ranks of one kind")
def test_two_jobs_join():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with ThreadPoolExecutor(2) as pool:
        serving = pool.submit(run_ranks, 1, serve, address, timeout=60)
        trained = run_ranks(2, train, address)
    assert trained[0] == serving.result()[0] == [x + 1.0 for x in range(35)]


def test_nobody_is_there():
    with pytest.raises(CommError, match="rank 1 of 2 could not join the others at .* within 1 s"):
        join("127.0.0.1:1", 1, 2, timeout=timedelta(seconds=1))


def die_in_between() -> str:
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", TRAIN)
    transfer = (
        Transfer(send={"weight": distribute_tensor(torch.ones(4), mesh, [Shard(0)])})
        if rank in TRAIN
        else Transfer(receive={"weight": torch.zeros(4)})
    )
    if rank == 3:
        transfer._targets = lambda parts: os._exit(0)  # after all ranks have begun
    with pytest.raises(CommError, match="a transfer of weights ended while this rank sent or received weight") as error:
        transfer.run()
    return str(error.value)


@pytest.mark.cpu_only("a rank ends")
def test_a_rank_ends_during_a_transfer():
    ended = run_fresh(4, die_in_between, timeout=60)
    assert [each.ok for each in ended] == [True, True, True, False], ended
