"""Axes: who is on the line, in which order, over which process group."""

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranks import fresh_values, run_fresh, run_ranks
from terrazzo.comm import Axis, axis_of, axis_over
from terrazzo.comm.axis import axis_beside
from terrazzo.comm.collectives import all_gather
from terrazzo.errors import CommError


def ranks_heard(axis: Axis) -> tuple[int, ...]:
    """The global ranks in the order in which a gather on the axis brings them."""
    parts = all_gather(torch.tensor([dist.get_rank()]), axis, 0, (1,) * axis.size)
    return tuple(parts.tolist())


def lines_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    row, column = divmod(rank, 2)
    dp, tp = axis_of(mesh, 0), axis_of(mesh, 1)
    assert (dp.ranks, dp.index, dp.name) == ((column, column + 2), row, "dp")
    assert (tp.ranks, tp.index, tp.name) == ((row * 2, row * 2 + 1), column, "tp")
    assert dp.group is mesh.get_group(0) and dp.device_type == "cpu"
    both, turned = axis_of(mesh, (0, 1)), axis_of(mesh, (1, 0))
    assert (both.ranks, both.index, both.name) == ((0, 1, 2, 3), rank, "dp+tp")
    assert both.group is dist.group.WORLD
    assert (turned.ranks, turned.index, turned.name) == ((0, 2, 1, 3), column * 2 + row, "tp+dp")
    for axis in (dp, tp, both, turned):
        assert axis.size == len(axis.ranks) and ranks_heard(axis) == axis.ranks
    assert axis_of(mesh, 0) is dp and axis_of(mesh, (0,)) is dp and axis_of(mesh, (1, 0)) is turned
    assert repr(dp) == f"Axis('dp', ranks {list(dp.ranks)}, here {row})"
    for wrong in ((), 2, -1, (0, 0)):
        with pytest.raises(CommError, match="distinct dims"):
            axis_of(mesh, wrong)


def dims_of_one_rank() -> None:
    mesh = init_device_mesh("cpu", (1, 4, 1))
    rank = dist.get_rank()
    single = axis_of(mesh, 0)
    assert (single.group, single.size, single.index, single.ranks) == (None, 1, 0, (rank,))
    assert axis_of(mesh, (0, 2)).size == 1
    assert axis_of(mesh, (2, 1, 0)).group is axis_of(mesh, 1).group
    assert axis_of(mesh, 1).name == "dim1"


def meshes_in_any_order() -> None:
    # torch's own groups are sorted by rank; the order of an axis is that of the mesh.
    mesh = DeviceMesh("cpu", [3, 1, 0, 2])
    axis = axis_of(mesh, 0)
    assert axis.ranks == (3, 1, 0, 2) and ranks_heard(axis) == axis.ranks
    assert axis.index == axis.ranks.index(dist.get_rank())


def part_of_the_world() -> None:
    mesh = DeviceMesh("cpu", [[0, 2]])
    if dist.get_rank() in (0, 2):
        assert ranks_heard(axis_of(mesh, 1)) == (0, 2)
    else:
        with pytest.raises(CommError, match=f"rank {dist.get_rank()} is not part of the mesh"):
            axis_of(mesh, 1)


def groups_that_only_some_ranks_have() -> None:
    # Ranks that are in different numbers of groups still agree on the name of a new one.
    extra = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 1, 2))
    cube = axis_of(mesh, (2, 0))
    assert ranks_heard(cube) == (0, 2, 1, 3)
    again = init_device_mesh("cpu", (2, 1, 2))
    assert axis_of(again, (2, 0)) is not cube and axis_of(again, (2, 0)).group is cube.group
    dist.destroy_process_group(cube.group)
    another = axis_of(init_device_mesh("cpu", (2, 1, 2)), (2, 0))
    assert another.group is not cube.group and ranks_heard(another) == (0, 2, 1, 3)
    if dist.get_rank() in (0, 1):
        dist.destroy_process_group(extra)


def ranks_of_no_mesh() -> None:
    me = dist.get_rank()
    if me in (3, 0, 2):
        axis = axis_over((3, 0, 2), "cpu")
        assert ranks_heard(axis) == (3, 0, 2) and axis_over((3, 0, 2), "cpu") is axis and axis.name == "ranks 3,0,2"
    else:
        with pytest.raises(CommError, match="rank 1 asks for an axis of ranks"):
            axis_over((3, 0, 2), "cpu")
    assert axis_over((0, 1, 2, 3), "cpu").group is dist.group.WORLD
    assert axis_over((me,), "cpu").group is None


def meshes_go_away() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    axis = weakref.ref(axis_of(mesh, 0))
    assert axis() is not None
    del mesh
    gc.collect()
    assert axis() is None


@pytest.mark.parametrize(
    "check",
    [
        lines_of_a_mesh,
        dims_of_one_rank,
        meshes_in_any_order,
        part_of_the_world,
        groups_that_only_some_ranks_have,
        ranks_of_no_mesh,
        meshes_go_away,
    ],
)
def test_axes(check) -> None:
    run_ranks(4, check)


def threads_that_ask_at_once() -> None:
    threads = 4
    together = threading.Barrier(threads)

    def ask(thread: int) -> Axis:
        together.wait()
        return axis_over((1, 0), "cpu")

    with ThreadPoolExecutor(threads) as pool:
        axes = list(pool.map(ask, range(threads)))
    assert all(axis is axes[0] for axis in axes)
    assert ranks_heard(axes[0]) == (1, 0)


def threads_that_ask_in_another_order() -> None:
    # Each rank begins with another group, and waits in it for a rank that is busy with the other one.
    forth, back = axis_over((0, 1), "cpu"), axis_over((1, 0), "cpu")
    order = [forth, back] if dist.get_rank() == 0 else [back, forth]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(axis_beside, order[0])
        second = pool.submit(axis_beside, order[1])
        found = {axis.ranks: axis for axis in (first.result(), second.result())}
    assert {ranks_heard(found[ranks]) for ranks in ((0, 1), (1, 0))} == {(0, 1), (1, 0)}


def test_threads_that_ask_for_one_group_at_once_get_one():
    fresh_values(2, threads_that_ask_at_once)


def test_threads_that_ask_for_several_groups_do_not_wait_for_each_other():
    fresh_values(2, threads_that_ask_in_another_order)


def a_group_of_a_rank_that_has_ended(late: int) -> str:
    if dist.get_rank() == 1:
        os._exit(3)
    if dist.get_rank() == late:
        time.sleep(1.0)
    axis = Axis(dist.group.WORLD, 3, dist.get_rank(), (0, 1, 2), "all", "cpu")
    with pytest.raises(CommError) as caught:
        axis_beside(axis)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"named by {dist.get_rank()}", "")
    store.wait(["named by 0", "named by 2"], timedelta(minutes=5))
    return str(caught.value)


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_ended_before_a_group_is_made_is_named(late: int):
    """The store, through which groups are made, would wait for it until the time limit, and name nobody; and one that
    comes later would wait for a rank that has raised by then."""
    outcomes = run_fresh(3, a_group_of_a_rank_that_has_ended, late)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank]
        assert f"rank {rank}: rank 1 has ended" in outcomes[rank].value
