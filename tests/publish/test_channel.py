"""From a trainer to receivers directly: two groups of ranks that were started apart."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.device_mesh import DeviceMesh

from publish import worlds
from ranks import run_fresh, run_ranks
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.errors import CommError, CommTimeout, PublishValueError
from terrazzo.publish import Channel, Publisher, Receiver
from terrazzo.publish.exchange import Connections
from terrazzo.tensor import DTensor, Shard, distribute_tensor

SHORT = timedelta(seconds=20)


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert worlds.digest({"x": found[name]}) == worlds.digest({"x": value}), name


def begin_trainer(address, dtype, bucket, limit=worlds.LIMIT):
    worlds.begin_trainer(Channel(address, bucket_bytes=bucket), dtype=dtype, limit=limit)


def begin_receiver(address, dtype, bucket, lossy=False, limit=worlds.LIMIT):
    worlds.begin_receiver(Channel(address, bucket_bytes=bucket), dtype, allow_lossy_dtype=lossy, limit=limit)


@pytest.mark.parametrize("published", [torch.bfloat16, torch.float32])
def test_from_fully_shard_on_4_to_tensor_parallel_on_2(address, published):
    bucket = 1 << 10  # many messages
    run_ranks(2, begin_receiver, address, torch.bfloat16, bucket, True)
    assert run_ranks(2, worlds.receive)[0][0] is None  # nobody is there
    run_ranks(4, begin_trainer, address, published, bucket)
    assert run_ranks(2, worlds.receive)[0][0] is None  # nothing has been published
    before = [0, 0]
    for step in range(3):
        expected, _ = run_ranks(4, worlds.publish, step, 0.5, False)[0]
        expected = {n: v.to(torch.bfloat16) if v.is_floating_point() else v for n, v in expected.items()}
        answers = run_ranks(2, worlds.receive)
        for number, found, _ in answers:
            assert number == step
            same(found, expected)
        assert run_ranks(2, worlds.receive)[0][0] is None
        sharded, all_of_it = 2 * (70 * 10 * 2 + 70), 2 * sum(v.numel() for v in expected.values())
        for rank, (_, _, read) in enumerate(answers):
            assert read - before[rank] < all_of_it - sharded / 2 + 1000
            before[rank] = read
    run_ranks(2, worlds.end_receiver)
    run_ranks(4, worlds.end_trainer)


@pytest.mark.parametrize("count", [30, pytest.param(100, marks=pytest.mark.long)])
def test_many_versions_while_receivers_take_what_they_can(address, count):
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(run_ranks, 2, receive_all, address, count - 1)
        published = run_ranks(4, train_all, address, count)[0]
        seen = receiving.result()
    assert seen[0] == seen[1] and count - 1 in seen[0]
    assert all(published[number] == digest for number, digest in seen[0].items())


def train_all(address, count):
    """The last version stays until the receivers have it: they have come before, and `close` waits for them."""
    with Publisher(Channel(address), model := worlds.trainer(), timeout=worlds.LIMIT) as publisher:
        expected = {}
        for step in range(count):
            worlds.change(model, step, 0.03)
            publisher.publish(step)
            expected[step] = worlds.digest(worlds.numbers(model, torch.float32))
            if step == 0:
                while not any(publisher._sender._taken.values()) and torch.distributed.get_rank() == 0:
                    time.sleep(0.01)
        return expected


def receive_all(address, last):
    return worlds.receive_until(Channel(address), last, torch.float32, wait=True)


def test_two_groups_of_one_job(address, tmp_path):
    for to in (Channel(address), tmp_path):
        run_ranks(4, both_sides, to)


def both_sides(to):
    """Ranks 2 and 3 publish, ranks 0 and 1 receive."""
    rank = torch.distributed.get_rank()
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    for step in range(3):
        whole = torch.arange(35.0).view(7, 5) + step
        if rank < 2:
            if step == 0:
                served = DTensor.from_local(
                    torch.zeros(7, 3 - rank), meshes[0], [Shard(1)], shape=(7, 5), stride=(5, 1)
                )
                receiver = Receiver(to, {"w": served}, process_group=groups[0], timeout=SHORT)
            while receiver.poll() != step:
                time.sleep(0.01)
            receiver.apply()
            assert served.full_tensor().equal(whole)
        else:
            if step == 0:
                state = {"w": distribute_tensor(whole, meshes[1], [Shard(0)])}
                publisher = Publisher(to, state, process_group=groups[1], timeout=SHORT)
            state["w"].to_local().copy_(distribute_tensor(whole, meshes[1], [Shard(0)]).to_local())
            publisher.publish()
            publisher.wait()
        torch.distributed.barrier()
    if rank < 2:
        receiver.close()
    torch.distributed.barrier()
    if rank >= 2:
        publisher.close()


# ------------------------------------------------------------------ deaths


def die_in_the_middle_of(name, rank):
    """Have a rank killed after its part of a transfer has begun."""
    plain = getattr(Connections, name)

    def dying(self, messages, *rest):
        if torch.distributed.get_rank() == rank:
            plain(self, messages[: len(messages) // 2], *rest)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, messages, *rest)

    setattr(Connections, name, dying)


def train_and_die(address):
    model = worlds.trainer()
    limit = timedelta(seconds=10)  # the others wait so long for receivers that the dead rank leaves without its part
    publisher = Publisher(Channel(address, bucket_bytes=1 << 10), model, timeout=limit)
    publisher.publish(0)
    while not any(publisher._sender._taken.values()) and torch.distributed.get_rank() == 0:
        time.sleep(0.01)  # until it has been received
    torch.distributed.barrier()
    die_in_the_middle_of("send", 2)
    worlds.change(model, 1, 1.0)
    publisher.publish(1)
    try:
        publisher.wait()
        publisher.publish(2)
        publisher.close()
    except Exception as error:
        return str(error)


def receive_first(address):
    begin_receiver(address, torch.float32, 1 << 10)
    while worlds.receive()[0] is None:
        time.sleep(0.01)


def receive_failing():
    model, receiver = worlds.KEPT["receiver"]
    before = worlds.numbers(model, torch.float32)
    with pytest.raises(CommError):
        while receiver.poll() is None:
            time.sleep(0.01)
    assert receiver.version == 0
    same(worlds.numbers(model, torch.float32), before)


def test_a_publisher_dies_and_another_goes_on(address):
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)  # outlives them
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(run_fresh, 4, train_and_die, address)
        run_ranks(2, receive_first, address)
        run_ranks(2, receive_failing)
        outcomes = training.result()
    assert outcomes[2].signal == signal.SIGKILL
    assert all(outcome.ok for rank, outcome in enumerate(outcomes) if rank != 2), outcomes
    run_ranks(4, begin_trainer, address, torch.float32, 1 << 10)
    expected, _ = run_ranks(4, worlds.publish, 7, 1.0, False)[0]
    for number, found, _ in run_ranks(2, worlds.receive):
        assert number == 7
        same(found, expected)
    run_ranks(2, worlds.end_receiver)
    run_ranks(4, worlds.end_trainer)
    del store


class LateTeam(Team):
    """Its rank goes on late after each step."""

    def reduce(self, *args, **kwargs):
        found = super().reduce(*args, **kwargs)
        time.sleep(0.5)
        return found


def close_late(address):
    begin_trainer(address, torch.float32, 1 << 10, limit=timedelta(seconds=10))
    worlds.publish(0, 1.0, wait=False)
    publisher = worlds.KEPT["trainer"][1]
    team = publisher._side.team()
    if team.rank > 0:
        publisher._side.team = lambda: LateTeam(team.rank, team.ranks, team.plane, team.doing)
    worlds.end_trainer()


def test_ranks_that_close_after_the_first_has_stopped_sending(address):
    run_ranks(2, close_late, address)


def receive_and_die(address):
    begin_receiver(address, torch.float32, 1 << 10, limit=SHORT)  # the other waits so long for the dead
    die_in_the_middle_of("receive", 1)
    try:
        worlds.receive()
    except CommError as error:
        return type(error).__name__


@pytest.mark.long
def test_receivers_die_and_others_come(address):
    run_ranks(4, begin_trainer, address, torch.float32, 1 << 10, SHORT)  # the dead are waited for so long
    run_ranks(4, worlds.publish, 0, 1.0, False)
    dead, alive = run_fresh(2, receive_and_die, address)[::-1]
    assert dead.signal == signal.SIGKILL
    run_ranks(2, begin_receiver, address, torch.float32, 1 << 10)
    expected, _ = run_ranks(4, worlds.publish, 1, 1.0, False)[0]
    for number, found, _ in run_ranks(2, worlds.receive):
        assert number == 1
        same(found, expected)
    run_ranks(4, worlds.publish, 2, 1.0, False)
    run_ranks(2, worlds.end_receiver)
    run_ranks(4, worlds.end_trainer)  # nobody is waited for


# ------------------------------------------------------------------ in one process


def test_a_receiver_that_does_not_come_is_waited_for_so_long(address):
    model, served = nn.Linear(3, 2), nn.Linear(3, 2)
    publisher = Publisher(Channel(address), model, timeout=timedelta(seconds=1))
    receiver = Receiver(Channel(address), served)
    assert publisher.wait() is None
    publisher.publish()
    assert publisher.wait() is not None  # nobody has come
    assert (receiver.poll(), receiver.apply()) == (0, 0)
    assert 32 <= publisher.wait().nbytes < 64  # 8 numbers, each tensor at a multiple of 16 bytes
    publisher.publish()
    with pytest.raises(CommTimeout, match="1 of 1 groups of receivers"):
        publisher.wait()
    assert receiver.poll(wait=False) is None
    while receiver.poll(wait=False) is None:
        time.sleep(0.01)
    assert receiver.apply() == 1
    publisher.close()
    assert receiver.poll() is None


def test_of_two_publishers_the_later_one_counts(address):
    model, served = nn.Linear(3, 2), nn.Linear(3, 2)
    first = Publisher(Channel(address), nn.Linear(3, 2), timeout=SHORT)
    receiver = Receiver(Channel(address), served, timeout=SHORT)
    first.publish(1)
    assert receiver.poll() == 1
    second = Publisher(Channel(address), model, timeout=SHORT)
    with pytest.raises(CommError, match="another publisher"):
        first.publish(2)
    second.publish(3)
    assert (receiver.poll(), receiver.apply()) == (3, 3)
    assert served.weight.equal(model.weight)
    second.close()
    first.close()


def test_publishers_follow_one_another_at_an_address_of_their_own(address):
    model, served = nn.Linear(3, 2), nn.Linear(3, 2)
    receiver = Receiver(Channel(address), served, timeout=SHORT)
    for number in range(3):
        with torch.no_grad():
            model.weight += 1
        publisher = Publisher(Channel(address), model, timeout=SHORT)
        publisher.publish(number)
        assert (receiver.poll(), receiver.apply()) == (number, number)
        assert served.weight.equal(model.weight)
        publisher.close()
        del publisher
        assert receiver.poll() is None  # nobody is there
        assert receiver.version == number


def test_addresses():
    for wrong in ("host", "host:", ":1", "host:no", "host:70000"):
        with pytest.raises(PublishValueError):
            Channel(wrong)
    with pytest.raises(PublishValueError):
        Channel("host:1", bucket_bytes=1)
    with socket.socket() as other:  # a server of another kind
        other.bind(("127.0.0.1", 0))
        other.listen()
        channel = Channel(f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(CommError, match="the store at .* failed"):
            Publisher(channel, {"w": torch.zeros(2)}, timeout=timedelta(seconds=1))
