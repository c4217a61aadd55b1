"""What nobody uses any more is freed: classes that programs make, meshes whose process group was destroyed."""

from __future__ import annotations

import gc
import time
import weakref
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import fresh_values, run_ranks
from terrazzo.comm import axis_of, axis_over
from terrazzo.comm.mesh import canonical_mesh
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.ops import autograd


def make_function(factor: float):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * factor

    def backward(ctx, grad):
        assert ctx.saved_tensors[0].shape == grad.shape
        return grad * factor

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"Times{factor}", (torch.autograd.Function,), members)


def functions_that_are_made() -> None:
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    known = len(autograd._bridges)
    made, outputs = [], []
    for factor in (2.0, 3.0):
        function = make_function(factor)
        made.append(weakref.ref(function))
        out = function.apply(x)
        assert type(out.grad_fn).__name__ == f"Times{factor}Backward"
        outputs.append(out.sum())
    del function, out
    gc.collect()
    assert all(ref() is not None for ref in made), "a graph needs the backward of its functions"
    sum(outputs).backward()
    assert x.grad.full_tensor().tolist() == [5.0] * 4
    del outputs
    gc.collect()
    assert [ref() for ref in made] == [None, None]
    assert len(autograd._bridges) == known


def test_autograd_functions_are_freed_with_their_graphs():
    run_ranks(1, functions_that_are_made)


class _Copies(TorchDispatchMode):
    """Counts the copies that are made."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
        return func(*args, **(kwargs or {}))


def redistributed() -> None:
    """What is left of the input once the result has been received; and a write to the result does not reach it."""
    mesh = init_device_mesh("cpu", (2,))
    for source, target in product((Shard(0), Shard(1), Replicate(), Partial(), Partial("max")), repeat=2):
        if source == target:
            continue
        for async_op in (False, True):
            x = DTensor.from_local(torch.ones(4, 6), mesh, [source])
            own, before = weakref.ref(x._local), x._local.clone()
            with _Copies() as copies:
                y = x.redistribute(placements=[target], async_op=async_op)
                y.to_local().add_(1)
            assert torch.equal(x._local, before), (source, target, async_op)
            if source == Replicate() and target.is_shard():
                assert copies.count == 1, (target, async_op)
            del x
            gc.collect()
            deadline = time.monotonic() + 20  # the backend's thread holds what it sent a moment longer
            while own() is not None and time.monotonic() < deadline:
                time.sleep(0.001)
            assert own() is None and y.to_local().numel(), (source, target, async_op)


def test_a_redistribution_lets_go_of_its_input():
    run_ranks(2, redistributed)


def module_classes_that_are_made() -> None:
    made = type("Made", (nn.Linear,), {})
    model = fully_shard(made(2, 2))
    assert type(fully_shard(made(2, 2))) is type(model)
    model(torch.ones(1, 2)).sum().backward()
    alive = weakref.ref(made), weakref.ref(type(model))
    del made, model
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_classes_of_sharded_modules_are_freed():
    run_ranks(1, module_classes_that_are_made)


def play(rank: int, world: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def use(mesh) -> None:
    """What leaves something in every cache: plans, transitions, transfers, axes of several dims and of none."""
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)], src_data_rank=None).requires_grad_()
    y = (x @ x.t()).relu()[1:3].sum()
    y.redistribute(placements=[Replicate(), Replicate()]).backward()
    axis_of(mesh, (1, 0))
    axis_over(tuple(reversed(range(dist.get_world_size()))), "cpu")
    other = init_device_mesh("cpu", (8,))
    x.detach().redistribute(other, [Shard(0)])
    torch.nn.utils.clip_grad_norm_([x], 1.0)
    fully_shard(nn.Linear(8, 8), mesh=other)


def meshes_of_a_group_that_is_destroyed() -> None:
    dist.destroy_process_group()
    for _ in range(2):
        play(rank=3, world=8)
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        use(mesh)
        assert canonical_mesh(mesh) is mesh
        alive = weakref.ref(mesh), weakref.ref(dist.group.WORLD)
        del mesh
        dist.destroy_process_group()
        gc.collect()
        assert [ref() for ref in alive] == [None, None]


def a_group_of_a_mesh_that_is_destroyed() -> None:
    dist.destroy_process_group()
    play(rank=0, world=8)
    kept, lost = init_device_mesh("cpu", (8,)), init_device_mesh("cpu", (2, 4))
    axes = axis_of(kept, 0), axis_over((0, 2, 1), "cpu")
    x = distribute_tensor(torch.ones(8, 8), kept, [Shard(0)], src_data_rank=None)
    use(lost)
    dist.destroy_process_group(lost.get_group(1))
    assert canonical_mesh(kept) is kept and (axis_of(kept, 0), axis_over((0, 2, 1), "cpu")) == axes
    y = distribute_tensor(torch.ones(8, 8), init_device_mesh("cpu", (8,)), [Shard(0)], src_data_rank=None)
    assert (x + y).device_mesh is x.device_mesh is y.device_mesh
    alive = weakref.ref(lost)
    del lost
    gc.collect()
    assert alive() is None


def test_meshes_are_freed_when_their_group_is_destroyed():
    for check in (meshes_of_a_group_that_is_destroyed, a_group_of_a_mesh_that_is_destroyed):
        fresh_values(1, check)
