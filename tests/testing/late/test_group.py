"""Process groups do on the device what PyTorch documents for NCCL."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, _make_nccl_premul_sum

from late_ranks import run_late
from ranks import run_fresh
from terrazzo.errors import RaceError
from terrazzo.testing import late

pytestmark = pytest.mark.long

# ------------------------------------------------------------------ values


def mine(device, size=4, dtype=torch.float32):
    return (torch.arange(size, device=device) + 10 * dist.get_rank()).to(dtype)


def check_collectives(device):
    rank, world = dist.get_rank(), dist.get_world_size()
    alls = [torch.arange(4.0) + 10 * r for r in range(world)]
    total = torch.stack(alls).sum(0)

    def same(found, expected):
        assert found.device == device and torch.equal(found.cpu().to(expected.dtype), expected), (found, expected)

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8):
        x = mine(device, dtype=dtype)
        dist.all_reduce(x)
        same(x, total.to(dtype))
    for op, expected in (
        (dist.ReduceOp.AVG, total / world),
        (dist.ReduceOp.MAX, alls[-1]),
        (dist.ReduceOp.MIN, alls[0]),
        (dist.ReduceOp.PRODUCT, torch.stack(alls).prod(0)),
        (_make_nccl_premul_sum(0.5), total / 2),
        (_make_nccl_premul_sum(torch.tensor([0.25], device=device)), total / 4),
    ):
        x, out = mine(device), torch.empty(4 // world, device=device)
        dist.reduce_scatter_tensor(out, x.clone(), op=op)
        same(out, expected.chunk(world)[rank])
        dist.all_reduce(x, op=op)
        same(x, expected)
    flags = torch.tensor([rank == 0, False], device=device)
    dist.all_reduce(flags)
    assert flags.tolist() == [True, False]
    z = torch.complex(mine(device), mine(device))
    dist.all_reduce(z)
    same(z.imag, total)

    out = torch.empty(4 * world, device=device)
    dist.all_gather_into_tensor(out, mine(device))
    same(out, torch.cat(alls))
    dist.all_gather_into_tensor(out, out[4 * rank : 4 * rank + 4].mul_(2))  # in place
    same(out, torch.cat(alls) * 2)
    parts = [torch.empty(2 + r, device=device) for r in range(world)]  # of different sizes
    dist.all_gather(parts, mine(device, 2 + rank))
    for r, part in enumerate(parts):
        same(part, torch.arange(2.0 + r) + 10 * r)
    pieces = [mine(device, 1 + r) for r in range(world)]
    out = torch.empty(1 + rank, device=device)
    dist.reduce_scatter(out, pieces)
    same(out, total[: 1 + rank])
    half = torch.full((world,), 0.1, device=device, dtype=torch.bfloat16)
    out = torch.empty(1, device=device, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(out, half)
    same(out, (half[:1].float().cpu() * world).to(torch.bfloat16))

    x = mine(device)
    dist.broadcast(x, src=1)
    same(x, alls[1])
    x = mine(device)
    dist.reduce(x, dst=0)
    same(x, total if rank == 0 else alls[rank])
    gathered = [torch.empty(4, device=device) for _ in range(world)] if rank == 0 else None
    dist.gather(mine(device), gathered, dst=0)
    for r, part in enumerate(gathered or []):
        same(part, alls[r])
    x = torch.empty(4, device=device)
    dist.scatter(x, [mine(device) + r for r in range(world)] if rank == 0 else None, src=0)
    same(x, alls[0] + rank)

    rows = mine(device, 2 * world).view(world, 2)
    out = torch.empty_like(rows)
    dist.all_to_all_single(out, rows)
    same(out, torch.stack([torch.arange(2.0) + 2 * rank + 10 * r for r in range(world)]))
    inputs = [mine(device, 1 + r) for r in range(world)]
    outputs = [torch.empty(1 + rank, device=device) for _ in range(world)]
    dist.all_to_all(outputs, inputs)
    for r, part in enumerate(outputs):
        same(part, torch.arange(1.0 + rank) + 10 * r)

    things = [None] * world
    dist.all_gather_object(things, {"rank": rank})
    assert [thing["rank"] for thing in things] == list(range(world))
    dist.barrier()


def check_send_and_receive(device):
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    x, y = mine(device), torch.empty(4, device=device)
    if rank == 0:
        dist.send(x, other)
        dist.recv(y, other)
    else:
        dist.recv(y, other)
        dist.send(x, other)
    assert torch.equal(y.cpu(), torch.arange(4.0) + 10 * other)
    # Together they may be in any order, however large they are.
    x, y = mine(device, 1 << 18), torch.empty(1 << 18, device=device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]):
        work.wait()
    assert torch.equal(y.cpu(), torch.arange(float(1 << 18)) + 10 * other)


def check_coalesced(device):
    world = dist.get_world_size()
    xs = [mine(device, size) for size in (1, 2, 3)]
    with dist._coalescing_manager(device=device, async_ops=True) as together:
        for x in xs:
            dist.all_reduce(x)
    together.wait()
    outs = [torch.empty(size * world, device=device) for size in (1, 2)]
    with dist._coalescing_manager(device=device):
        for out in outs:
            dist.all_gather_into_tensor(out, mine(device, out.numel() // world))
    small = [torch.empty(1, device=device) for _ in range(2)]
    with dist._coalescing_manager(device=device):
        for out in small:
            dist.reduce_scatter_tensor(out, mine(device, world))
    for size, x in zip((1, 2, 3), xs, strict=True):
        assert torch.equal(x.cpu(), torch.stack([torch.arange(float(size)) + 10 * r for r in range(world)]).sum(0))
    assert outs[1].tolist() == [0, 1, 10, 11] and small[0].item() == 10 + 2 * dist.get_rank()


def test_values():
    run_late(2, check_collectives, check_send_and_receive, check_coalesced, modes=("needed", "random"))


# ------------------------------------------------------------------ streams


def check_wait_blocks_the_stream_and_not_the_host(device):
    x = mine(device)
    waits = late.host_waits()
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    work.wait()
    y = x + 1
    assert late.host_waits() == waits
    assert y.tolist() == [11.0, 13.0, 15.0, 17.0] and work.is_completed() and work.is_success()
    future = dist.all_reduce(x, async_op=True).get_future()
    assert late.host_waits() == waits + 1
    (value,) = future.wait()
    assert (value + 1).tolist() == [21.0, 25.0, 29.0, 33.0]


def check_asynchronous_collectives_have_a_stream_of_their_own(device):
    """The current stream has no order with them before a wait. Without async_op they are on the current stream."""
    x = mine(device)
    with pytest.raises(RaceError, match="all_reduce writes"):
        with late.checked("needed"):
            work = dist.all_reduce(x, async_op=True)
            x.mul_(2)
            work.wait()
    with late.checked("needed"):
        dist.all_reduce(x)
        x.mul_(2)
    side = torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with torch.late.stream(side):
        dist.all_reduce(x)
    with pytest.raises(RaceError, match=f"all_reduce writes .* on stream {side.stream_id} of"):
        with late.checked("needed"):
            with torch.late.stream(side):
                dist.all_reduce(x)
            x.mul_(2)
            torch.accelerator.synchronize()
    options = AllreduceOptions()
    options.asyncOp = False
    assert dist.group.WORLD.allreduce([x], options) is None  # there is nothing to wait for, as with NCCL


def check_one_collective_at_a_time(device):
    """In the order of the calls, on whatever streams: else ranks that run them in other orders would wait forever."""
    rank, x, y = dist.get_rank(), mine(device), mine(device)
    side = torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with torch.late.stream(side):
        dist.all_reduce(x)
    dist.all_reduce(y)
    # Each rank waits for another stream first, and runs only what that needs.
    (side if rank == 0 else torch.accelerator.current_stream()).synchronize()
    torch.accelerator.synchronize()
    assert torch.equal(x, y)


def check_memory_of_works(device):
    """A work keeps its tensors until it is waited for, so that their memory is not used again."""
    work = dist.all_reduce(mine(device), async_op=True)
    (result,) = work.result()
    other = torch.zeros(4, device=device)
    work.wait()
    assert (result + other).tolist() == [10.0, 12.0, 14.0, 16.0]


def test_streams():
    run_late(
        2,
        check_wait_blocks_the_stream_and_not_the_host,
        check_asynchronous_collectives_have_a_stream_of_their_own,
        check_one_collective_at_a_time,
        check_memory_of_works,
    )


# ------------------------------------------------------------------ what is refused, and what fails


def check_refusals(device):
    group = dist.new_group(backend="late")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2), group=group)
    with pytest.raises(ValueError, match="Tensors must be contiguous"):
        dist.all_reduce(torch.ones(4, 4, device=device)[:, ::2])
    with pytest.raises(ValueError, match="output tensor size must be equal to world_size times input tensor size"):
        dist.all_gather_into_tensor(torch.ones(5, device=device), torch.ones(2, device=device))
    with pytest.raises(ValueError, match="on one device, not on"):
        dist.all_gather_into_tensor(torch.ones(4, device="late:3"), torch.ones(2, device="late:2"))
    with pytest.raises(ValueError, match="GLOO"):
        dist.monitored_barrier(group)


def test_what_nccl_refuses_is_refused():
    run_late(2, check_refusals)


def check_time_limit() -> list[str]:
    """Rank 1 does not take part: the next synchronization of rank 0 raises, not the wait, and the group is lost."""
    late.schedule("needed")
    late.init_process_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1))  # gloo's: rank 0 comes here at the end
        return []
    x, texts = torch.ones(4, device="late:0"), []
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            torch.accelerator.synchronize()
        texts.append(str(raised.value).partition("\n")[0])
        dist.all_reduce(x)
    assert not work.is_success() and work.exception() is not None
    with pytest.raises(RuntimeError):
        torch.accelerator.synchronize()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        pass  # rank 1 has given up
    return texts


def test_a_time_limit_ends_the_group():
    outcome, _ = run_fresh(2, check_time_limit, awaited=[0], timeout=60)
    assert outcome.ok, str(outcome)
    for text in outcome.value:
        assert "all_reduce failed: all_reduce (number 1 of group" in text and "rank 0): " in text


def check_wait_with_a_limit() -> None:
    late.schedule("needed")
    late.init_process_group(timeout=timedelta(seconds=100))
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="was not done within 500 ms"):
            dist.all_reduce(torch.ones(4, device="late:0"), async_op=True).wait(timedelta(milliseconds=500))


def check_abort() -> None:
    late.schedule("needed")
    late.init_process_group(timeout=timedelta(seconds=100))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4, device="late:0"))
        late.schedule("eager")
        torch.ones(1, device="late:0")
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("late")).abort()
        with pytest.raises(RuntimeError, match="the group was aborted"):
            torch.accelerator.synchronize()


def check_a_wait_for_nothing() -> None:
    """The other rank never comes, and the group's limit is far away."""
    late.schedule("needed", hang_s=1)
    late.init_process_group(timeout=timedelta(seconds=1000))
    if dist.get_rank() == 0:
        x = torch.ones(4, device="late:0")
        dist.all_reduce(x)
        with pytest.raises(RuntimeError, match=r"(?s)nothing has run for 1 s; the streams are at:.*all_reduce"):
            x.cpu()


@pytest.mark.parametrize("check", [check_wait_with_a_limit, check_abort, check_a_wait_for_nothing])
def test_a_wait_ends_by_its_limit_or_an_abort(check):
    outcome, _ = run_fresh(2, check, awaited=[0], timeout=60)
    assert outcome.ok, str(outcome)


# ------------------------------------------------------------------ groups that are bound to a device


def check_splits() -> list[str]:
    """Two of three ranks make a group by themselves, which works only where groups are not splits of their parent."""
    rank, told = dist.get_rank(), []
    for bound in (False, True):
        late.init()
        device = torch.device("late", rank)
        late.init_process_group(timeout=timedelta(seconds=20), device_id=device if bound else None)
        group = dist.new_group([0, 1])  # all ranks call it
        x = torch.ones(1, device=device)
        if rank < 2:
            dist.all_reduce(x, group=group)
            assert x.item() == 2
        dist.barrier()
    late.init_process_group(timeout=timedelta(seconds=2), device_id=device)
    if rank < 2:
        with pytest.raises(dist.DistBackendError) as raised:
            dist.new_group([0, 1], use_local_synchronization=True)
        told.append(str(raised.value))
    return told


def test_groups_bound_to_a_device_are_split_by_all_ranks():
    outcomes = run_fresh(3, check_splits, awaited=[0, 1], timeout=100)
    for outcome in outcomes[:2]:
        assert outcome.ok, str(outcome)
        assert "all 3 ranks of the default group have to make" in outcome.value[0] and "only 2 did" in outcome.value[0]


def check_name(device):
    group = dist.group.WORLD
    assert group._get_backend(device).name() == "nccl" and group._get_backend(device).supports_splitting
    x = torch.ones(1, device=device)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.item() == 1


def test_the_backend_may_call_itself_nccl():
    run_late(2, check_name, backend_name="nccl")
