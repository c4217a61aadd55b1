"""Kills ranks of a publisher or of a receiver: a program, so that ranks are forked from a process without threads.

    python publish_lab.py FOLDER EVERY

Some versions are in FOLDER/before.  Two ranks publish one more, or receive the newest, of which one is killed at one
file operation: at every EVERY-th, of either rank.  Prints a line of JSON for each, which says how the two ended.

Through a channel one process publishes to two receivers, of which one is killed or stopped at one of its messages. It
is left so until all versions have been published; the line then says how the publisher, that receiver and the other one
ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

from crash_lab import MANY, RAISED, SUCCEEDED, _end_of, fork_ranks
from faults import FaultySystem

from terrazzo.checkpoint.stores import LocalStore
from terrazzo.comm import link
from terrazzo.comm.serving import Client
from terrazzo.errors import TerrazzoError
from terrazzo.publish import Channel, Publisher, Receiver, by_channel
from terrazzo.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

SETTINGS = {"anchor_every": 3, "keep": 1}
LIMIT = timedelta(seconds=20)


def numbers(version: int) -> dict[str, torch.Tensor]:
    """What a version has: a little of it changes each time."""
    found = {"w": torch.arange(2400, dtype=torch.float32).view(60, 40), "b": torch.ones(7)}
    for each in range(version + 1):
        found["w"][each % 60, 3] += 1 + each
        found["b"][each % 7] -= each
    return found


def spread(state: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    """The same on two ranks, one tensor of it sharded."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        "w": distribute_tensor(state["w"], mesh, [Shard(dim)]),
        "b": distribute_tensor(state["b"], mesh, [Replicate()]),
    }


def take_part(rank: int, path: Path, role: str, victim: int, at: int) -> None:
    """One rank of a publisher or a receiver; ends the process."""
    link._REPORTS_SECONDS = 0.2  # on one machine, who is alive answers at once
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2)
    system = FaultySystem(at if rank == victim else MANY, "kill")
    store = LocalStore(path, system)
    try:
        if role == "receive":
            state = spread(numbers(-1), 1)
            receiver = Receiver(store, state, timeout=LIMIT)
            receiver.poll()
            receiver.apply()
            receiver.close()
        else:
            state = spread(numbers(-1), 0)
            with Publisher(store, state, timeout=LIMIT, **SETTINGS) as publisher:
                for version in (5, 6):
                    for name, value in spread(numbers(version), 0).items():
                        state[name].to_local().copy_(value.to_local())
                    publisher.publish(version)
    except TerrazzoError:
        os._exit(RAISED)
    Path(f"{path}.count{rank}").write_text(str(system.count))
    os._exit(SUCCEEDED)


def trial(folder: Path, name: str, role: str, victim: int, at: int) -> list[int]:
    """One publication or reception with one death, and how each rank ended."""
    path = folder / name
    shutil.copytree(folder / "before", path, symlinks=True)
    return fork_ranks(lambda rank: take_part(rank, path, role, victim, at))


# ------------------------------------------------------------------ through a channel

VERSIONS = 10
LONG = timedelta(seconds=100)  # longer than a trial may take: nobody may wait for the victim


def tick_at(at: int, how: int) -> list[int]:
    """Have this process killed or stopped at one of its messages; counts them."""
    count = [0]

    def tick() -> None:
        count[0] += 1
        if count[0] == at:
            os.kill(os.getpid(), how)

    def counted(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def call(*args, **kwargs):
            tick()
            return plain(*args, **kwargs)

        setattr(owner, name, call)

    counted(Client, "call")
    counted(Client, "_greet")
    return count


def receive_versions(address: str, path: Path, at: int, how: int) -> None:
    """Receive until the last version; ends the process."""
    count = tick_at(at, how)
    state = numbers(-1)
    receiver = Receiver(Channel(address, bucket_bytes=1 << 12), state, timeout=LONG)
    while receiver.version != VERSIONS - 1:
        if receiver.poll() is None:
            time.sleep(0.005)
            continue
        expected = numbers(receiver.apply())
        assert all(state[name].equal(expected[name]) for name in expected)
    receiver.close()
    Path(f"{path}.count").write_text(str(count[0]))
    os._exit(SUCCEEDED)


def publish_versions(address: str, path: Path) -> None:
    """Publish some versions; ends the process."""
    by_channel._PATIENCE = 5.0  # both receivers poll all the time, as far as the machine lets them
    state = numbers(-1)
    with Publisher(Channel(address, bucket_bytes=1 << 12), state, timeout=LONG) as publisher:
        for version in range(VERSIONS):
            for name, value in numbers(version).items():
                state[name].copy_(value)
            publisher.publish(version)
            time.sleep(0.02)
        Path(f"{path}.published").touch()
    os._exit(SUCCEEDED)


def channel_trial(folder: Path, name: str, at: int, how: int) -> list[int]:
    """Versions that are published to two receivers, one of which dies or stops; how the three processes ended."""
    path = folder / name
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    children = []
    for run in (
        lambda: publish_versions(address, path),
        lambda: receive_versions(address, path, at, how),
        lambda: receive_versions(address, folder / "other", MANY, how),
    ):
        child = os.fork()
        if child == 0:
            try:
                run()
            finally:
                os._exit(1)
        children.append(child)
    deadline = time.monotonic() + 30
    while at != MANY and not Path(f"{path}.published").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    if at != MANY:
        with suppress(ProcessLookupError):
            os.kill(children[1], signal.SIGKILL)
    return [_end_of(child, deadline) for child in children]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    for role in ("publish", "receive"):
        trial(folder, f"{role}-count", role, -1, MANY)
        for victim in range(2):
            count = int((folder / f"{role}-count.count{victim}").read_text())
            for at in range(victim, count, every):
                name = f"{role}-{victim}-{at}"
                ends = trial(folder, name, role, victim, at)
                print(json.dumps({"name": name, "role": role, "victim": victim, "ends": ends}), flush=True)
    assert channel_trial(folder, "channel-count", MANY, signal.SIGKILL) == [SUCCEEDED] * 3
    count = int((folder / "channel-count.count").read_text())
    for at in range(1, count, every):
        both = [signal.SIGSTOP, signal.SIGKILL]
        for how in both if every == 1 else [both[at // every % 2]]:
            name = f"channel-{how.name}-{at}"
            ends = channel_trial(folder, name, at, how)
            print(json.dumps({"name": name, "role": "channel", "ends": ends}), flush=True)
