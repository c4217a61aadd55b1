"""All ranks in one process: the same numbers as one device, and errors where processes would hang."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from terrazzo.checkpoint import load, save
from terrazzo.comm.in_process import _VARIABLES
from terrazzo.deepspeed.utils import groups
from terrazzo.errors import CommError, DivergedRanksError
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, randn
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.testing import Ranked, all_ranks


@pytest.fixture(scope="module")
def world() -> Any:
    with all_ranks(4) as found:
        yield found


def rank() -> int:
    return dist.get_rank()


def test_tensors_are_distributed_redistributed_and_computed_with(world: Any) -> None:
    mesh = world.run(init_device_mesh, "cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = torch.arange(30.0).reshape(5, 6)
    x = world.run(distribute_tensor, plain, mesh, [Shard(0), Shard(1)])
    parts = [part for rows in plain.split(3) for part in rows.split(3, 1)]
    for found, expected in zip(world.local(x), parts, strict=True):
        assert torch.equal(found, expected)
    assert x.placements == (Shard(0), Shard(1)) and x.shape == plain.shape and type(x.grad) is type(None)
    w = torch.linspace(-1, 1, 24).reshape(6, 4)
    for placed in ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(1), Shard(0)]):
        y = torch.relu(x @ world.run(distribute_tensor, w, mesh, placed))[1:] - 2
        whole = y.redistribute(placements=[Replicate(), Replicate()])
        for found in world.local(whole):
            torch.testing.assert_close(found, torch.relu(plain @ w)[1:] - 2)
    terms = world.run(
        lambda mesh: DTensor.from_local(torch.full((3,), rank() + 1.0), mesh, [Partial(), Partial()]), mesh
    )
    assert [found.tolist() for found in world.local(terms.full_tensor())] == [[10.0] * 3] * 4


def test_backward(world: Any) -> None:
    mesh = world.run(init_device_mesh, "cpu", (4,))
    data, weight = torch.randn(6, 3), torch.randn(3, 5, requires_grad=True)
    F.cross_entropy(data @ weight, torch.arange(6) % 5).backward()
    x = world.run(distribute_tensor, data, mesh, [Shard(0)])
    w = world.run(lambda w, mesh: distribute_tensor(w, mesh, [Replicate()]).requires_grad_(), weight.detach(), mesh)
    labels = world.run(distribute_tensor, torch.arange(6) % 5, mesh, [Shard(0)])
    F.cross_entropy(x @ w, labels).backward()
    for found in world.values(w.grad.full_tensor()):
        torch.testing.assert_close(found, weight.grad)
    with torch.no_grad():
        w -= w.grad
        assert not (w * 2).requires_grad
    assert (w * 2).requires_grad
    for found in world.values(w.detach().full_tensor()):
        torch.testing.assert_close(found, (weight - weight.grad).detach())


def test_fully_shard_trains_and_is_saved_as_on_one_device(world: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    data = torch.randn(3, 8, 6)
    model = world.run(fully_shard, plain, mesh=world.run(init_device_mesh, "cpu", (4,)))
    assert type(plain[0].weight) is nn.Parameter, "ranks have copies"
    optimizer = world.run(torch.optim.AdamW, model.parameters(), lr=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for batch in data:
        reference.zero_grad()
        plain(batch).square().mean().backward()
        reference.step()
        optimizer.zero_grad()
        model(world.run(lambda batch: batch.chunk(4)[rank()], batch)).square().mean().backward()
        optimizer.step()
    for name, values in world.run(lambda m: {k: v.full_tensor() for k, v in m.state_dict().items()}, model).items():
        for found in world.values(values):
            torch.testing.assert_close(found, plain.state_dict()[name])
    world.run(lambda m: save(m.state_dict(), checkpoint_id=tmp_path), model)
    alone = copy.deepcopy(plain.state_dict())
    for value in alone.values():
        value.zero_()
    load(alone, checkpoint_id=tmp_path, no_dist=True)
    for name, value in alone.items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_collectives_of_torch(world: Any) -> None:
    """Each against what its documentation says, of ranks that hold their own number."""

    def check() -> None:
        me, mine = rank(), torch.full((2,), float(rank()))
        for op, expected in ((dist.ReduceOp.SUM, 6.0), (dist.ReduceOp.MAX, 3.0), (dist.ReduceOp.AVG, 1.5)):
            x = mine.clone()
            dist.all_reduce(x, op)
            assert x.tolist() == [expected] * 2
        bits = torch.tensor([1 << me])
        dist.all_reduce(bits, dist.ReduceOp.BOR)
        assert bits.item() == 15
        outs = [torch.empty(2) for _ in range(4)]
        dist.all_gather(outs, mine)
        assert [out.tolist() for out in outs] == [[float(n)] * 2 for n in range(4)]
        dist.reduce_scatter(mine.clone(), [torch.ones(2) * n for n in range(4)])
        found = torch.empty(2)
        dist.scatter(found, [torch.ones(2) * n for n in range(4)] if me == 1 else None, src=1)
        assert found.tolist() == [me] * 2
        dist.gather(mine, outs if me == 2 else None, dst=2)
        dist.broadcast(found, 3)
        assert found.tolist() == [3.0] * 2
        dist.all_to_all_single(received := torch.empty(4), torch.arange(4.0) + 10 * me)
        assert received.tolist() == [10.0 * n + me for n in range(4)]
        objects: list[Any] = [None] * 4
        dist.all_gather_object(objects, {"rank": me})
        assert objects == [{"rank": n} for n in range(4)]
        ring = [dist.irecv(found, (me - 1) % 4), dist.isend(mine, (me + 1) % 4)]
        for work in ring:
            work.wait()
        assert found.tolist() == [(me - 1) % 4] * 2
        pair = dist.new_group([1, 3])
        if me in (1, 3):
            dist.all_reduce(mine, group=pair)
            assert mine.tolist() == [4.0] * 2
        dist.barrier()
        group = dist.group.WORLD.group_name
        native = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group)
        assert torch.ops._c10d_functional.wait_tensor(native).tolist() == [4.0] * 2

    world.run(check)


def test_an_error_of_this_process_is_shown_without_a_rank() -> None:
    before = sys.excepthook
    with all_ranks(2):
        assert sys.excepthook is before


def test_each_rank_has_what_a_process_has_once(world: Any) -> None:
    """Seeds, generators, observers, process groups; those of this process stay as they are."""

    def draws() -> tuple[Any, ...]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        found = []
        for _ in range(3):
            found.append((torch.rand(1).item(), random.random(), float(np.random.rand())))
            dist.barrier()
        with CommDebugMode() as seen:
            init = init_device_mesh("cpu", (4,))
            distribute_tensor(torch.ones(4), init, [Shard(0)], src_data_rank=None).full_tensor()
        return tuple(found), seen.get_total_counts()

    torch.manual_seed(8)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), dist.is_initialized()
    numbers, count = world.run(draws)
    assert isinstance(numbers[0][0], float) and count == 1, "equal on all ranks"
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist(), dist.is_initialized())
    torch.manual_seed(3)
    assert numbers[0][0] == torch.rand(1).item()
    mesh = world.run(init_device_mesh, "cpu", (4,))
    noise = world.run(randn, 8, device_mesh=mesh, placements=[Shard(0)])
    assert len({tuple(part.tolist()) for part in world.local(noise)}) == 4
    world.run(groups._create_expert_and_data_parallel, 2)
    places = world.run(lambda: (groups._get_expert_parallel_rank("ep_size_2"), rank()))
    assert world.values(places[0]) == [0, 1, 0, 1] and world.values(places[1]) == [0, 1, 2, 3]
    for module, names in _VARIABLES.items():
        for name, first in names.items():
            assert hasattr(__import__(module, fromlist=["_"]), name), (module, name, first)


def test_arguments_are_copies_that_refer_to_each_other(world: Any) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> tuple[bool, float]:
        model(torch.ones(1, 1)).sum().mul(rank()).backward()
        optimizer.step()
        return weights[0] is model.weight, model.weight.item()

    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    same, weights = world.run(train, model, torch.optim.SGD(model.parameters(), lr=1.0), [model.weight])
    assert same is True and world.values(weights) == [0.0, -1.0, -2.0, -3.0]
    assert model.weight.item() == 0.0, "the original"


def test_a_rank_may_ask_again_and_again_whether_a_collective_has_ended(world: Any) -> None:
    def asks() -> float:
        x = torch.ones(1)
        work = dist.all_reduce(x, async_op=True)
        assert any(work.is_completed() for _ in range(100))
        return x.item()

    assert world.run(asks) == 4.0


def test_what_is_seen(world: Any) -> None:
    mesh = world.run(init_device_mesh, "cpu", (4,))
    x = world.run(distribute_tensor, torch.arange(4), mesh, [Shard(0)])
    lines = [f"  rank {n}: tensor([{n}])" for n in range(4)]
    assert repr(x) == "\n".join(["DTensor of shape [4], placed [Shard(dim=0)], on 4 ranks", *lines])
    whole = x.redistribute(placements=[Replicate()])
    assert repr(whole).endswith("\n  ranks 0-3: tensor([0, 1, 2, 3])")
    drawn = x._repr_html_()
    assert drawn.count("<caption") == 1  # the picture's
    assert all(f"cpu {n}<" in drawn and f">rank {n}</th>" in drawn for n in range(4))
    assert ">ranks 0-3</th>" in world.run(torch.zeros, 2)._repr_html_()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        world.run(lambda: print("a\nb", rank()))
    assert out.getvalue() == "".join(f"[rank {n}] a\n[rank {n}] b {n}\n" for n in range(4))
    assert world.run(rank).__repr__() == "\n".join(["int on 4 ranks", *(f"  rank {n}: {n}" for n in range(4))])
    assert (world.run(lambda: 7), world.run(lambda: ("a", None))) == (7, ("a", None))
    assert bool(world.run(torch.ones, 1) > 0) and f"{world.run(torch.ones, 1).sum():.2f}" == "1.00"
    with pytest.raises(CommError, match="not the same on all ranks, so it cannot decide"):
        bool(world.run(rank))
    model = world.run(nn.Linear, 2, 2)
    model.weight.requires_grad = False
    assert model.weight.requires_grad is False and len(world.run(torch.ones, 3)) == 3
    assert [isinstance(p, Ranked) for p in model.parameters()] == [True, True]


def test_ranks_that_do_not_meet_raise_at_once_and_go_on_afterwards(world: Any) -> None:
    def reduce(*without: int) -> None:
        if rank() not in without:
            dist.all_reduce(torch.ones(3))

    with pytest.raises(DivergedRanksError) as missing:
        world.run(reduce, 0)
    place = "in all_reduce(SUM) of 3 x float32, without rank 0"
    assert str(missing.value) == f"no rank can go on:\n  rank 0: returned\n  ranks 1-3: {place}"
    with pytest.raises(DivergedRanksError, match=r"rank 2 calls barrier, where ranks 0-1 called all_reduce\(SUM\)"):
        world.run(lambda: dist.barrier() if rank() == 2 else reduce())
    with pytest.raises(DivergedRanksError, match="rank 1: in receive of 1 x float32 from rank 0"):
        world.run(lambda: dist.recv(torch.ones(1), 0) if rank() == 1 else None)
    with pytest.raises(KeyError, match="wrong") as own:
        world.run(lambda: {}["wrong"] if rank() == 3 else reduce())
    assert own.value.__notes__ == ["raised on rank 3"]
    with pytest.raises(ZeroDivisionError) as everywhere:
        world.run(lambda: 1 / 0)
    assert everywhere.value.__notes__ == ["raised on ranks 0-3"]

    def mixed() -> None:
        raise ValueError(f"of {'even' if rank() % 2 == 0 else 'odd'}")

    with pytest.raises(ValueError, match="of even") as several:
        world.run(mixed)
    assert several.value.__notes__ == ["raised on ranks 0, 2\nranks 1, 3 raised ValueError: of odd"]
    with pytest.raises(CommError, match="a rank expects 1 elements where another sends 2") as unlike:
        world.run(lambda: dist.all_to_all_single(torch.empty(4), torch.empty(5), [1] * 4, [2, 1, 1, 1]))
    assert unlike.value.__notes__ == ["raised on rank 3"]
    x = world.run(torch.ones, 2)
    with pytest.raises(CommError, match="pass values of all ranks as arguments"):
        world.run(lambda: x + 1)
    with all_ranks(1) as other, pytest.raises(CommError, match="ranks of another"):
        other.values(x)
    with pytest.raises(CommError, match="the ranks have ended"):
        other.run(rank)
    with pytest.raises(ValueError, match="ranks must be at least 1, not 0"), all_ranks(0):
        pass
    world.run(reduce)


def test_an_interrupt_ends_ranks_that_never_end(world: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored

    def runs_on() -> None:
        if rank() == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while True:
                time.sleep(0.01)
        dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        world.run(runs_on)
    signal.signal(signal.SIGINT, before)
    assert world.run(rank) is not None and world.run(dist.barrier) is None
