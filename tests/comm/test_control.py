"""The control plane: bytes arrive as sent, one rank's failure is everybody's, and nothing waits for ever."""

import os
import pickle
import resource
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from ranks import fresh_values, run_fresh, run_ranks
from terrazzo.comm.control import ControlPlane
from terrazzo.errors import CommError, CommTimeout, RankError, RankFailure, TerrazzoError

LENGTHS = (0, 1, 247, 248, 249, 5000, 300_000)  # around what a frame holds, and well beyond it


def message(sender: int, receiver: int, length: int) -> bytes:
    return bytes((sender * 7 + receiver * 3 + i) % 256 for i in range(length))


def exchange_bytes(plane: ControlPlane) -> None:
    n, me = plane.size, plane.index
    for shift in range(len(LENGTHS)):
        lengths = [LENGTHS[(i + shift) % len(LENGTHS)] for i in range(n)]
        assert plane.all_gather(message(me, 0, lengths[me])) == [message(i, 0, lengths[i]) for i in range(n)]
        for root in {0, n - 1}:
            data = message(root, 0, lengths[root])
            assert plane.broadcast(data if me == root else None, root) == data
            gathered = plane.gather(message(me, root, lengths[me]), root)
            assert gathered == ([message(i, root, lengths[i]) for i in range(n)] if me == root else None)
            parts = [message(root, i, lengths[i]) for i in range(n)]
            assert plane.scatter(parts if me == root else None, root) == parts[me]
    plane.barrier()


def on_all_ranks() -> None:
    plane = ControlPlane.for_group()
    assert plane.ranks == tuple(range(dist.get_world_size())) and plane.index == dist.get_rank()
    exchange_bytes(plane)
    again = ControlPlane.for_group(dist.group.WORLD, timeout=timedelta(seconds=5))
    assert again._link is plane._link and again.timeout != plane.timeout
    own = ControlPlane.create(timeout=timedelta(seconds=20))
    assert own.size == 1 or own._link is not plane._link
    exchange_bytes(own)
    own.close()
    if own.size > 1:
        with pytest.raises(CommError, match="it was closed"):
            own.barrier()
    plane.barrier()


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_bytes_arrive(world: int) -> None:
    run_ranks(world, on_all_ranks)


def test_without_a_process_group() -> None:
    plane = ControlPlane.for_group()
    assert (plane.size, plane.index, plane.ranks) == (1, 0, (0,))
    exchange_bytes(plane)
    with pytest.raises(RankError, match="rank 0: KeyError"):
        plane.agree(KeyError("x"))
    plane.close()


def on_sub_groups() -> tuple[int, ...]:
    # Groups that overlap, and of which ranks are in different numbers, in another order than that of the ranks.
    groups = [dist.new_group([0, 2, 3]), dist.new_group([1, 2])]
    for group, members in zip(groups, ([0, 2, 3], [1, 2]), strict=True):
        if dist.get_rank() in members:
            plane = ControlPlane.for_group(group)
            assert plane.ranks == tuple(members) and plane.index == members.index(dist.get_rank())
            exchange_bytes(plane)
            with pytest.raises(RankError) as caught:
                plane.agree(ValueError("mine") if plane.index == 1 else None)
            assert [failure.rank for failure in caught.value.failures] == [members[1]]
        else:
            with pytest.raises(CommError, match="not in the process group"):
                ControlPlane.for_group(group)
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_sub_groups() -> None:
    run_ranks(4, on_sub_groups)


def disagree() -> list[tuple[str, ...]]:
    plane = ControlPlane.for_group()
    plane.agree(None)
    rank = dist.get_rank()
    raised = []
    for failing in ([1], [0, 3], [0, 1, 2, 3]):
        mine = OSError(28, f"no space on rank {rank}") if rank in failing else None
        with pytest.raises(RankError) as caught:
            plane.agree(mine, "saving step 3")
        assert caught.value.__cause__ is mine
        assert caught.value.failures == tuple(
            RankFailure(i, "OSError", f"[Errno 28] no space on rank {i}") for i in failing
        )
        raised.append(str(caught.value))
    return raised


def test_a_failure_is_the_same_everywhere() -> None:
    first, *others = run_ranks(4, disagree)
    assert all(other == first for other in others)
    assert first[0] == "saving step 3 failed on 1 rank:\n  rank 1: OSError: [Errno 28] no space on rank 1"
    assert "failed on 2 ranks:" in first[1]


def work_together() -> None:
    plane = ControlPlane.for_group()
    rank = dist.get_rank()
    assert plane.run_together(lambda: rank * 10) == rank * 10

    def fail_on_rank_1() -> None:
        if rank == 1:
            raise RuntimeError("x" * 10_000)

    with pytest.raises(RankError) as caught:
        plane.run_together(fail_on_rank_1)
    (failure,) = caught.value.failures
    assert failure.type == "RuntimeError" and 1000 < len(failure.message) < 10_000

    def interrupt_on_rank_0() -> None:
        if rank == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if rank == 0 else RankError):
        plane.run_together(interrupt_on_rank_0)
    plane.barrier()


def test_run_together() -> None:
    run_ranks(2, work_together)


def test_errors_survive_pickling() -> None:
    error = RankError((RankFailure(2, "OSError", "full"),), "saving")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.failures == error.failures
    assert isinstance(CommTimeout("late"), TimeoutError) and isinstance(error, (RuntimeError, TerrazzoError))


def outlive_a_death() -> tuple[str, tuple[int, ...], float]:
    plane = ControlPlane.create(timeout=timedelta(seconds=20))
    plane.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        plane.agree(None)
    with pytest.raises(CommError, match="is not possible: all_gather failed before"):
        plane.barrier()
    return str(caught.value), caught.value.missing, time.monotonic() - started


def test_a_rank_that_dies_is_named() -> None:
    outcomes = run_fresh(4, outlive_a_death, timeout=40)
    assert outcomes[1].exitcode == 3
    survivors = [outcome.value for outcome in outcomes if outcome.rank != 1]
    for text, missing, seconds in survivors:
        assert missing == (1,) and "ranks [1] died" in text
        assert seconds < 20  # a death is noticed, not waited for
    assert len({text for text, _, _ in survivors}) == 1


def wait_for_a_late_rank() -> tuple[str, tuple[int, ...], float]:
    plane = ControlPlane.create(timeout=timedelta(seconds=0.8))
    if dist.get_rank() == 2:
        time.sleep(3.5)  # longer than the time limit and the roll call
    started = time.monotonic()
    with pytest.raises(CommTimeout) as caught:
        plane.agree(None)
    return str(caught.value), caught.value.missing, time.monotonic() - started


def test_a_rank_that_comes_late_is_named_and_told() -> None:
    for text, missing, waited in fresh_values(4, wait_for_a_late_rank, timeout=40):
        assert missing == (2,) and "no answer from ranks [2]: still running" in text  # the same on rank 2 itself
        assert "0.8 s" in text and waited < 10


def never_connect() -> tuple[int, ...]:
    if dist.get_rank() == 1:
        time.sleep(2)
        return ()
    with pytest.raises(CommTimeout, match="connecting among ranks") as caught:
        ControlPlane.for_group(timeout=timedelta(seconds=0.8))
    return caught.value.missing


def test_a_rank_that_never_connects_is_named() -> None:
    outcomes = run_fresh(2, never_connect, timeout=40)
    assert [outcome.value for outcome in outcomes] == [(1,), ()]


def run_out_of_files() -> str:
    dist.barrier()
    if dist.get_rank() == 1:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), most))
    with pytest.raises(CommError) as caught:
        ControlPlane.create(timeout=timedelta(seconds=10))
    return str(caught.value)


def test_a_rank_that_may_open_no_more_files_is_named() -> None:
    outcomes = run_fresh(2, run_out_of_files, timeout=60)
    assert all("rank 1 gave up (Too many open files)" in outcome.value for outcome in outcomes), outcomes


def come_too_late(connected: bool) -> tuple[str, str, float]:
    """Ranks 0 and 1 give up before rank 2 has begun what they began, because of rank 3; then all but that try again."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=60))
    plane = ControlPlane.for_group(timeout=timedelta(seconds=60)) if connected else None
    if rank == 3:
        os._exit(3)
    store, limit = dist.distributed_c10d._get_default_store(), timedelta(seconds=1)
    if rank == 2:
        store.wait(["given up 0", "given up 1"], timedelta(seconds=60))
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        (plane.renewed(limit) if plane is not None else ControlPlane.for_group(timeout=limit)).barrier()
    waited = time.monotonic() - started
    store.set(f"given up {rank}", "")
    ControlPlane.for_group(group).barrier()
    with pytest.raises(CommError) as again:  # not the old failure once more: new connections are tried
        ControlPlane.for_group(timeout=limit).renewed().barrier()
    assert "connecting among ranks" in str(again.value)
    return type(caught.value).__name__, str(caught.value), waited


@pytest.mark.parametrize("connected", [True, pytest.param(False, marks=pytest.mark.long)])
def test_who_begins_when_others_have_given_up_hears_the_same(connected: bool) -> None:
    outcomes = run_fresh(4, come_too_late, connected, timeout=60)
    assert all(outcome.ok for outcome in outcomes[:3]), "\n".join(map(str, outcomes))
    told = [outcome.value for outcome in outcomes[:3]]
    assert len({text for _, text, _ in told}) == len({kind for kind, _, _ in told}) == 1, told
    missing = "ranks [3] died" if connected else "no answer from ranks [2, 3]"  # who never came cannot be looked up
    assert missing in told[0][1] and told[2][2] < 30


def recover() -> None:
    plane = ControlPlane.for_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(CommTimeout):
            plane.barrier()
    else:
        time.sleep(2)
        with pytest.raises(CommError):
            plane.barrier()
    again = ControlPlane.for_group(timeout=timedelta(seconds=20))
    exchange_bytes(again)


def test_a_group_gets_new_connections_after_a_failure() -> None:
    fresh_values(2, recover, timeout=60)


def misuse() -> None:
    plane = ControlPlane.for_group()
    rank = dist.get_rank()
    with pytest.raises(CommError, match="no position 2"):
        plane.broadcast(b"", 2)
    with pytest.raises(CommError, match="position 0 must pass the data"):
        plane.broadcast(None if rank == 0 else b"x", 0)
    with pytest.raises(CommError, match="one part per rank" if rank == 0 else "position 0 must pass"):
        plane.scatter([b""], 0)
    plane.barrier()


def test_misuse_is_refused_before_anything_is_sent() -> None:
    run_ranks(2, misuse)
