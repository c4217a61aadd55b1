"""Checkpoints and published weights on the device: what is stored is what was computed, whatever ran when."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo.checkpoint as checkpoint
from device_ranks import run_on_devices
from late_ranks import run_late
from terrazzo.checkpoint import CheckpointManager, DefaultStager, StagingOptions
from terrazzo.checkpoint.plan.ownership import digests_of_tensors
from terrazzo.publish import Channel, Publisher, Receiver
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
from terrazzo.testing import late

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
    other = torch.device(device.type, (device.index + 1) % torch.accelerator.device_count())
    for where in dict.fromkeys((device, other)):
        for own in (False, True):
            yield where, torch.Stream(device=where) if own else None


def on(stream, device):
    """The stream is current, and still the rank's own device is."""
    if stream is None:
        return nullcontext()
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    return stream


def save(device, where, stream, size=SIZE):
    folder, start, mine = shared_folder(), torch.arange(float(size)) + dist.get_rank(), f"x{dist.get_rank()}"
    with on(stream, where):
        torch.accelerator.set_device_index(device.index)
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
    save(device, device, torch.Stream(device=device))


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
            torch.accelerator.set_device_index(device.index)
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
            torch.accelerator.set_device_index(device.index)
            x = queued(torch.zeros(SIZE).to(where))
            before = x * 2
            checkpoint.load({mine: x}, checkpoint_id=folder)
            after = (x * 2).cpu()
            assert torch.equal(after, want * 2) and before.sum().item() == 2 * STEPS * SIZE
        remove(folder)


def check_managers(device):
    mesh, folder = init_device_mesh(device.type, (dist.get_world_size(),)), shared_folder()
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
            torch.accelerator.set_device_index(device.index)
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


def alone():
    """A group of this rank: else ranks compare what they both have, and the host waits for that."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def meet():
    """All ranks, without a wait for the device."""
    dist.all_reduce(torch.ones(1))


def publish_thrice(device, where, to, dtype=torch.float32):
    """From the first rank to the last, which waits for the device only where publishing does."""
    group, rank = alone(), dist.get_rank()
    want = {"all": torch.arange(4096.0).view(64, 64), "some": torch.arange(4096.0).view(64, 64)}
    source = {name: x.to(where) for name, x in want.items()}
    copy = {name: torch.zeros(64, 64, dtype=dtype, device=where) for name in want}
    publisher = receiver = None
    if rank == 0:
        publisher = Publisher(to, source, process_group=group, dtype=dtype)
    meet()
    if rank == dist.get_world_size() - 1:
        receiver = Receiver(to, copy, process_group=group)
        receiver.poll()  # from now on the publisher knows it
    meet()
    with torch.no_grad():
        for step in range(3):
            want["all"] = (want["all"] * 1.5 if step else want["all"]) + STEPS
            want["some"][step] += 1
            if publisher is not None:
                queued(source["all"])
                source["some"][step] += 1
                publisher.publish(step)
                source["all"].mul_(1.5)  # training goes on
            if receiver is not None:
                while receiver.poll() != step:
                    time.sleep(0.001)
                queued(copy["all"])  # so that what is copied into it is late
                receiver.apply()
            if publisher is not None:
                publisher.wait()
            meet()
    if publisher is not None:
        publisher.close()
    if receiver is not None:
        for name, x in want.items():
            assert torch.equal(copy[name].cpu(), x.to(dtype)), (name, where)
    meet()


def check_publishing_again_at_once(device):
    for where, stream in places(device):
        folder = shared_folder()
        with on(stream, where):
            torch.accelerator.set_device_index(device.index)
            publish_thrice(device, where, folder)
        remove(folder)


def check_publishing_in_bfloat16(device):
    folder = shared_folder()
    publish_thrice(device, device, folder, torch.bfloat16)
    remove(folder)


def check_publishing_through_a_channel(device):
    address = [None]
    if dist.get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address[0] = f"127.0.0.1:{probe.getsockname()[1]}"
    dist.broadcast_object_list(address, src=0)
    publish_thrice(device, device, Channel(address[0]))


CHECKS = (
    check_saving,
    check_saving_through_buffers,
    check_saving_from_another_device,
    check_saving_in_the_background,
    check_stagers,
    check_loading,
    check_managers,
    check_publishing,
    check_publishing_again_at_once,
    check_publishing_in_bfloat16,
    check_publishing_through_a_channel,
)


def check_digests(device):
    """Replicated values are compared by digests: for all of them the host waits once."""
    tensors = [torch.arange(3, device=device), torch.arange(2_500_000.0, device=device), torch.ones(0, device=device)]
    waits = late.host_waits()
    found = digests_of_tensors(tensors)
    assert late.host_waits() == waits + 1
    odd, digest = 0x9E3779B97F4A7C15, 0
    for position, byte in enumerate(torch.arange(3).view(torch.uint8).tolist(), start=1):
        place = (position * odd + (1 << 63)) % (1 << 64) - (1 << 63)
        digest += (byte + 1) * (place ^ (place >> 29))
    assert found[0] == digest % (1 << 64) and found[2] == 0
    tensors[1][2_000_000] += 1
    again = digests_of_tensors(tensors)
    assert again[0] == found[0] and again[1] != found[1]


@pytest.mark.long
def test_the_host_waits_once_to_compare_values():
    run_late(1, check_digests)


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS)
def test_stored_values_are_right_in_every_mode(check):
    run_late(2, check, modes=late.MODES)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_values_of_accelerators_are_stored(check):
    run_on_devices(check)
