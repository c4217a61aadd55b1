"""One process plays one rank of a large job, also on a device that this machine does not have."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from ranks import fresh_values
from terrazzo.comm import ControlPlane, axis_of
from terrazzo.errors import CommError
from terrazzo.fsdp import fully_shard, report
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, randn
from terrazzo.tensor.debug import CommDebugMode


def play(rank: int, world: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def check_layouts_devices_and_bytes() -> None:
    """On a kind of device that is not here: every tensor that an operation makes has to be on it, or torch raises."""
    play(rank=5, world=8)
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    with FakeTensorMode(), torch.no_grad(), CommDebugMode() as seen:
        batch = DTensor.from_local(torch.empty(4, 16, 64, device="cuda"), mesh, [Shard(0), Replicate()])
        up = distribute_tensor(torch.empty(64, 256, device="cuda"), mesh, [Replicate(), Shard(1)])
        down = DTensor.from_local(torch.empty(64, 64, device="cuda"), mesh, [Replicate(), Shard(0)])
        hidden = F.dropout(F.gelu(batch @ up), 0.1)
        assert (hidden.shape, hidden.to_local().shape) == ((8, 16, 256), (4, 16, 64))
        terms = hidden @ down
        assert terms.placements == (Shard(0), Partial())
        out = terms.redistribute(mesh, [Shard(0), Shard(1)]) + batch
        chances = torch.softmax(out.redistribute(mesh, [Shard(0), Shard(2)]), -1)
        assert chances.to_local().shape == (4, 16, 16)
        noise = randn(12, 8, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        results = [hidden, terms, out, chances, noise, torch.linalg.vector_norm(chances)]
        results += [noise.t(), noise.exp().sum(0), noise.amax(1), noise.softmax(0), noise * 2 + noise, noise.mean()]
        for result in results:
            assert result.to_local().device.type == "cuda"
            assert tuple(result.to_local().shape) == result._layout.local_shape
    assert seen.get_comm_counts()["reduce_scatter"] == 1
    assert randn(3, 3, device_mesh=init_device_mesh("cpu", (8,)), placements=[Replicate()]).to_local().std() > 0


def check_a_training_step() -> None:
    play(rank=37, world=64)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with CommDebugMode() as together:  # small groups share their messages
        model(torch.randn(2, 64)).sum().backward()
    assert together.get_comm_counts() == {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1}
    model.set_coalesce_bytes(0)
    with CommDebugMode() as seen:
        model(torch.randn(2, 64)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    counts = seen.get_comm_counts()
    assert counts == {"all_gather": 8, "reduce_scatter": 4, "all_reduce": 4}  # in which order they run is not known yet
    assert all(p.to_local().numel() * 8 == p.numel() for p in model.parameters())
    whole = 4 * (64 * 64 + 64)
    flags = 4 * 2  # which parameters have a gradient, to each rank
    gathered, scattered = 2 * 7 * whole // 8, 7 * (whole + 8 * flags) // 8
    reduced = 2 * 7 * (whole // 8 + flags) // 8
    last = gathered // 2  # backward begins with this group, which is not gathered again
    assert report(model).moved == 4 * (gathered + scattered + reduced) - last


def check_messages() -> None:
    play(rank=2, world=4)
    mesh = init_device_mesh("cpu", (4,))
    plane = ControlPlane.for_group(axis_of(mesh, 0).group)
    assert plane.all_gather(b"here") == [b"here"] * 4
    assert plane.gather(b"here", dst=2) == [b"here"] * 4
    assert plane.gather(b"here", dst=0) is None
    assert plane.broadcast(b"all", src=2) == b"all"
    assert plane.scatter([b"0", b"1", b"2", b"3"], src=2) == b"2"
    with pytest.raises(CommError, match="position 0 is simulated"):
        plane.broadcast(None, src=0)
    with pytest.raises(CommError, match="position 1 is simulated"):
        plane.scatter(None, src=1)


def check_the_example_of_the_documentation() -> None:
    dist.destroy_process_group()
    page = (Path(__file__).resolve().parent.parent / "docs" / "tensor.md").read_text()
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "fake" in code]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {})
    assert printed.getvalue().strip() == example.rsplit("# ", 1)[1].strip()


@pytest.mark.parametrize(
    "check",
    [
        check_layouts_devices_and_bytes,
        check_a_training_step,
        check_messages,
        check_the_example_of_the_documentation,
    ],
)
def test_one_rank_of_many(check):
    fresh_values(1, check, timeout=120)
