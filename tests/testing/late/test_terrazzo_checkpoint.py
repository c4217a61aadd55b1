"""Checkpoints and published weights on the device: what is stored is what was computed, whatever ran when."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo.checkpoint as checkpoint
from late_ranks import run_late
from terrazzo.checkpoint import CheckpointManager, DefaultStager, StagingOptions
from terrazzo.publish import Publisher, Receiver
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
from terrazzo.testing import late

pytestmark = pytest.mark.long

SIZE = 300_000
STEPS = 10


def shared_folder():
    """One folder for all ranks."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def remove(folder):
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def queued(x):
    """Work of which the value depends, and which has not run yet."""
    for _ in range(STEPS):
        x.add_(1.0)
    return x


def places(device):
    """Devices and streams on which tensors are: the current ones and others."""
    other = torch.device("late", (device.index + 2) % 4)
    for where in (device, other):
        for own in (False, True):
            yield where, torch.late.Stream(where) if own else None


def on(stream, device):
    """The stream is current, and still the rank's own device is."""
    if stream is None:
        return nullcontext()
    stream.wait_stream(torch.late.current_stream(stream.device_index))
    block = torch.late.stream(stream)
    return block


def save(device, where, stream, size=SIZE):
    folder, start, mine = shared_folder(), torch.arange(float(size)) + dist.get_rank(), f"x{dist.get_rank()}"
    with on(stream, where):
        torch.late.set_device(device)
        x = queued(start.to(where))
        # Strided as well: its bytes are copied through buffers.
        checkpoint.save({mine: x, f"{mine} strided": x.view(-1, 1000).t()}, checkpoint_id=folder)
    loaded = {mine: torch.zeros(size), f"{mine} strided": torch.zeros(1000, size // 1000)}
    checkpoint.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded[mine], start + STEPS), (where, stream)
    assert torch.equal(loaded[f"{mine} strided"], (start + STEPS).view(-1, 1000).t()), (where, stream)
    remove(folder)


def check_saving(device):
    save(device, device, None)
    save(device, device, torch.late.Stream(device))


def check_saving_through_buffers(device):
    """A tensor that is larger than a buffer is copied through two of them in turn."""
    save(device, device, None, size=3_000_000)


def check_saving_from_another_device(device):
    for where, stream in places(device):
        if where != device:
            save(device, where, stream)


def check_saving_in_the_background(device):
    for where, stream in places(device):
        folder, start, mine = shared_folder(), torch.arange(float(SIZE)), f"x{dist.get_rank()}"
        with on(stream, where):
            torch.late.set_device(device)
            x, here = queued(start.to(where)), torch.ones(10)
            future = checkpoint.async_save({mine: x, f"{mine} here": here}, checkpoint_id=folder)
            x.zero_()  # training goes on
            here.zero_()
            for _ in range(3):
                torch.ones(SIZE, device=where)
        future.result()
        loaded = {mine: torch.zeros(SIZE), f"{mine} here": torch.zeros(10)}
        checkpoint.load(loaded, checkpoint_id=folder)
        assert torch.equal(loaded[mine], start + STEPS) and loaded[f"{mine} here"].sum() == 10
        remove(folder)


def check_stagers(device):
    folder, mine = shared_folder(), f"x{dist.get_rank()}"
    x, stager = queued(torch.arange(float(SIZE)).to(device)), DefaultStager(StagingOptions())
    future = checkpoint.async_save({mine: x}, checkpoint_id=folder, async_stager=stager)
    if hasattr(future, "staging_completion"):
        future.staging_completion.result()
    x.zero_()
    (future.upload_completion if hasattr(future, "upload_completion") else future).result()
    stager.close()
    loaded = {mine: torch.zeros(SIZE)}
    checkpoint.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded[mine], torch.arange(float(SIZE)) + STEPS)
    remove(folder)


def check_loading(device):
    for where, stream in places(device):
        folder, mine, want = shared_folder(), f"x{dist.get_rank()}", torch.arange(float(SIZE)).mul(3)
        checkpoint.save({mine: want}, checkpoint_id=folder)
        with on(stream, where):
            torch.late.set_device(device)
            x = queued(torch.zeros(SIZE).to(where))
            before = x * 2
            checkpoint.load({mine: x}, checkpoint_id=folder)
            after = (x * 2).cpu()
            assert torch.equal(after, want * 2) and before.sum().item() == 2 * STEPS * SIZE
        remove(folder)


def check_managers(device):
    mesh, folder = init_device_mesh("late", (dist.get_world_size(),)), shared_folder()
    x = distribute_tensor(torch.arange(4000.0, device=device).view(1000, 4), mesh, [Shard(0)])
    manager = CheckpointManager(folder, keep=2)
    for step in (1, 2, 3):
        x.add_(1.0)
        manager.save(step, {"x": x})
    y = {"x": distribute_tensor(torch.zeros(1000, 4, device=device), mesh, [Shard(1)])}
    manager.restore("latest", y)
    manager.close()
    assert torch.equal(y["x"].full_tensor().cpu(), torch.arange(4000.0).view(1000, 4) + 3)
    remove(folder)


def check_publishing(device):
    for where, stream in places(device):
        folder = shared_folder()
        with on(stream, where):
            torch.late.set_device(device)
            torch.manual_seed(0)
            source, copy = nn.Linear(64, 64).to(where), nn.Linear(64, 64).to(where)
            publisher, receiver = Publisher(folder, source), Receiver(folder, copy)
            for step in range(2):
                with torch.no_grad():
                    queued(source.weight)
                    want = source.weight.clone()
                    publisher.publish(step)
                    source.weight.mul_(1.5)
                    publisher.wait()
                    before = copy.weight * 2
                    receiver.poll()
                    receiver.apply()
                    assert torch.equal((copy.weight * 2).cpu(), (want * 2).cpu()), (where, stream)
                    del before
            publisher.close()
        remove(folder)


CHECKS = (
    check_saving,
    check_saving_through_buffers,
    check_saving_from_another_device,
    check_saving_in_the_background,
    check_stagers,
    check_loading,
    check_managers,
    check_publishing,
)


@pytest.mark.parametrize("check", CHECKS)
def test_stored_values_are_right_and_nothing_races(check):
    run_late(2, check, modes=("needed",))


@pytest.mark.parametrize("check", CHECKS)
def test_stored_values_are_right_in_every_mode(check):
    run_late(2, check, modes=late.MODES)
