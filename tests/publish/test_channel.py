"""From a trainer to receivers directly: two groups of ranks that were started apart."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from publish import worlds
from ranks import device_type, run_fresh, run_ranks
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.comm import serving
from terrazzo.comm.serving import Client
from terrazzo.errors import CommError, CommTimeout, PublishValueError
from terrazzo.publish import Channel, Publisher, Receiver, Version
from terrazzo.publish.by_channel import ChannelSender, ChannelSource, PublisherListing
from terrazzo.publish.channel import SECRET, AskedBox, Board
from terrazzo.tensor import DTensor, Shard, distribute_tensor

pytestmark = pytest.mark.on_late

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
                while not taken(publisher) and torch.distributed.get_rank() == 0:
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
    meshes = [DeviceMesh(device_type(), ranks) for ranks in ([0, 1], [2, 3])]
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


def taken(publisher: Publisher) -> bool:
    """Whether a group of receivers has received a version."""
    return any(group.taken for group in list(publisher._sender._groups.values()))


def die_in_the_middle(owner, name, rank):
    """Have a rank killed at its third message of a transfer."""
    plain, count = getattr(owner, name), 0

    def dying(self, *arguments):
        nonlocal count
        count += 1
        if torch.distributed.get_rank() == rank and count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *arguments)

    setattr(owner, name, dying)


def train_and_die(address):
    model = worlds.trainer()
    limit = timedelta(seconds=10)  # the others wait so long for receivers that the dead rank leaves without its part
    publisher = Publisher(Channel(address, bucket_bytes=1 << 10), model, timeout=limit)
    publisher.publish(0)
    while not taken(publisher) and torch.distributed.get_rank() == 0:
        time.sleep(0.01)  # until it has been received
    torch.distributed.barrier()
    die_in_the_middle(ChannelSender, "read", 2)
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
    board = Channel(address).serve()  # outlives them
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
    board.close()


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


def wait_for_a_receiver_that_does_not_come(address):
    own = torch.distributed.new_group([0])
    publisher = Publisher(Channel(address), {"w": torch.arange(8.0)}, timeout=timedelta(seconds=2))
    publisher.publish(0)
    publisher.wait()
    if torch.distributed.get_rank() == 0:
        receiver = Receiver(Channel(address), {"w": torch.zeros(8)}, process_group=own)
        assert receiver.poll() == 0
    torch.distributed.barrier()
    publisher.publish(1)
    with pytest.raises(CommTimeout, match="rank 0: CommTimeout: 1 of 1 groups of receivers did not get the last"):
        publisher.wait()
    publisher.close()  # with a warning
    if torch.distributed.get_rank() == 0:
        receiver.close()


def test_all_ranks_hear_of_a_receiver_that_does_not_come(address):
    """The time limit is also the one of the ranks that wait for the first, which waits for the receiver."""
    run_ranks(2, wait_for_a_receiver_that_does_not_come, address)


def ask_a_publisher_that_lets_nobody_have_a_version(address):
    own = torch.distributed.new_group([0])
    if torch.distributed.get_rank() == 0:
        publisher = Publisher(Channel(address), {"w": torch.arange(8.0)}, process_group=own)
        publisher.publish(0)
        publisher.wait()
    torch.distributed.barrier()
    receiver = Receiver(Channel(address), {"w": torch.zeros(8)}, timeout=timedelta(seconds=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChannelSender, "hold", lambda *_: None)
        with pytest.raises(CommTimeout, match="rank 0: CommTimeout: the publisher at .* did not let this group have"):
            receiver.poll()
    assert receiver.poll() == 0
    receiver.close()
    if torch.distributed.get_rank() == 0:
        publisher.close()


def test_all_ranks_hear_of_a_publisher_that_lets_nobody_have_a_version(address):
    run_ranks(2, ask_a_publisher_that_lets_nobody_have_a_version, address)


def receive_and_die(address):
    begin_receiver(address, torch.float32, 1 << 10, limit=SHORT)  # the other waits so long for the dead
    die_in_the_middle(ChannelSource, "receive", 1)
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


def test_a_publisher_may_end_when_its_version_has_been_taken(address, monkeypatch):
    plain = ChannelSender.release

    def release(sender: ChannelSender, group: str, taken: bool) -> None:
        plain(sender, group, taken)
        if taken and first:
            sender.close()  # and so does not answer

    monkeypatch.setattr(ChannelSender, "release", release)
    monkeypatch.setattr(serving, "_LAST_SECONDS", 0.0)  # as when its process ends
    model, served = nn.Linear(3, 2), nn.Linear(3, 2)
    first = [Publisher(Channel(address), model, timeout=SHORT)]
    receiver = Receiver(Channel(address), served, timeout=SHORT)
    first[0].publish(1)
    assert (receiver.poll(), receiver.apply()) == (1, 1)
    assert served.weight.equal(model.weight)
    assert receiver.poll() is None and receiver.version == 1
    first.pop().close()
    with Publisher(Channel(address), nn.Linear(3, 2), timeout=SHORT) as second:
        second.publish(2)
        assert (receiver.poll(), receiver.apply()) == (2, 2)


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
        with pytest.raises(CommError, match="did not ask for a secret"):
            Publisher(channel, {"w": torch.zeros(2)}, timeout=timedelta(seconds=1))


# ------------------------------------------------------------------ receivers that do what they should not


class Slow:
    """Receives half of its messages, and the others when it may go on."""

    def __init__(self, monkeypatch):
        self.reached, self.may_go_on = threading.Event(), threading.Event()
        plain = ChannelSource._receive_from

        def receive(source, messages, sequence):
            if self.reached.is_set():
                return plain(source, messages, sequence)
            plain(source, messages[: len(messages) // 2], sequence)
            self.reached.set()
            assert self.may_go_on.wait(60)
            return plain(source, messages[len(messages) // 2 :], sequence)

        monkeypatch.setattr(ChannelSource, "_receive_from", receive)


def test_a_slow_receiver_gets_its_version_while_others_are_published(address, monkeypatch):
    slow = Slow(monkeypatch)
    state = {"w": torch.zeros(16 << 20)}  # more than connections buffer
    first, second = {"w": torch.zeros(16 << 20)}, {"w": torch.zeros(16 << 20)}
    publisher = Publisher(Channel(address, bucket_bytes=4 << 20), state)
    receiver, other = (Receiver(Channel(address, bucket_bytes=4 << 20), each) for each in (first, second))
    publisher.publish(0)
    with ThreadPoolExecutor(2) as pool:
        polled = pool.submit(receiver.poll)
        assert slow.reached.wait(60)
        for version in range(1, 5):
            state["w"].fill_(version)
            publisher.publish(version)
            assert held_versions(publisher) == {1}  # it is still with the first
        later = pool.submit(other.poll)
        assert later.result() == 4  # it does not wait for the slow one
        slow.may_go_on.set()
        assert polled.result() == 0
    receiver.apply()
    other.apply()
    assert first["w"].eq(0).all() and second["w"].eq(4).all()
    assert receiver.poll() == 4
    assert len(publisher._snapshots) == 2  # no more memory, however many versions
    publisher.close()


def held_versions(publisher: Publisher) -> set[int]:
    """Which versions are held, by their numbers in sequence."""
    return {group.sequence for group in publisher._sender._groups.values() if group.snapshot is not None}


def connect(address: str) -> tuple[Board, Client]:
    """The board, and the server of a publisher's first rank."""
    board = Channel(address).connect(SHORT)
    where, *_ = msgspec.msgpack.decode(board.value("listing"), type=PublisherListing).servers
    return board, Channel(address).client(SHORT, where)


def test_what_bad_receivers_ask_for_is_refused_and_the_trainer_goes_on(address, caplog):
    state, served = {"w": torch.arange(4.0)}, {"w": torch.zeros(4)}
    publisher = Publisher(Channel(address), state, timeout=SHORT)
    receiver = Receiver(Channel(address), served, timeout=SHORT)
    board, bad = connect(address)
    wrong = [
        AskedBox(1, (0,), (2,), "float32"),
        AskedBox(-1, (0,), (2,), "float32"),
        AskedBox(0, (3,), (2,), "float32"),
        AskedBox(0, (-1,), (2,), "float32"),
        AskedBox(0, (0, 0), (2, 2), "float32"),
        AskedBox(0, (0,), (1 << 62,), "float32"),
        AskedBox(0, (0,), (2, 2), "float32"),
        AskedBox(0, (0,), (0,), "float32"),
        AskedBox(0, (0,), (2,), "no dtype"),
        "junk",
    ]
    bad.call("join", "bad")
    for step in range(2):
        for operation, *arguments in (
            ("read", "unknown", 1, []),
            ("read", "bad", 99, []),
            ("hold", "unknown", None),
            ("release", "unknown", True),
            ("join", ""),
            ("join", "bad"),
            ("join", 7),
            ("exec", "ls"),
        ):
            with pytest.raises(OSError, match="PublishError"):
                bad.call(operation, *arguments)
        with pytest.raises(CommError, match="there is no operation put"):
            board.put("other", b"x")
        for port in (int(address.partition(":")[2]), bad.address.port):
            with socket.create_connection(("127.0.0.1", port)) as junk:
                junk.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        for version in (10 * step, 10 * step + 1):
            state["w"] += 1
            publisher.publish(version)
            assert (receiver.poll(), receiver.apply()) == (version, version)
            assert served["w"].equal(state["w"])
        offer = bad.call("hold", "bad", None)
        for asked in wrong:
            with pytest.raises(OSError, match="PublishError|ValidationError"):
                bad.call("read", "bad", offer["place"], [asked])
        bad.call("release", "bad", False)
    assert publisher._sender._groups.keys() == {receiver._source._group, "bad"}
    assert "a request of a receiver was refused" in caplog.text and "which does not fit" in caplog.text
    bad.close()
    board.close()
    publisher.close()


def test_receivers_that_never_read_hold_up_neither_the_trainer_nor_others(address, caplog, monkeypatch):
    monkeypatch.setattr("terrazzo.publish.by_channel._PATIENCE", 0.1)
    state, served = {"w": torch.zeros(4)}, {"w": torch.zeros(4)}
    publisher = Publisher(Channel(address), state, timeout=timedelta(seconds=100))
    receiver = Receiver(Channel(address), served, timeout=timedelta(seconds=100))
    board, bad = connect(address)
    for version in range(3):  # each version is held by one that never reads
        state["w"].fill_(version)
        publisher.publish(version)
        if version < 2:
            assert receiver.poll() == receiver.apply() == version
            assert served["w"].eq(version).all()
        else:
            publisher._side.outcome()
        bad.call("join", f"bad {version}")
        assert msgspec.convert(bad.call("hold", f"bad {version}", None), Version).number == version
    for version in range(3, 6):
        publisher.publish(version)
        publisher._side.outcome()
    assert held_versions(publisher) == {1, 2, 3}
    assert len(publisher._snapshots) == 4  # no more memory, however many versions
    assert bad.call("hold", "bad 0", None) is None, "a fourth cannot be held"
    with caplog.at_level(logging.WARNING, "terrazzo.publish"):
        publisher.close()
    assert "4 of 4 groups of receivers did not get the last version" in caplog.text
    receiver.close()
    bad.close()
    board.close()


def test_a_receiver_that_is_late_holds_nothing_any_more(address, caplog):
    state = {"w": torch.zeros(4)}
    publisher = Publisher(Channel(address), state, timeout=timedelta(seconds=0.2))
    board, bad = connect(address)
    publisher.publish(0)
    publisher._side.outcome()
    bad.call("join", "late")
    sequence = bad.call("hold", "late", None)["place"]
    asked = [AskedBox(0, (1,), (2,), "float32")]
    received = torch.empty(8, dtype=torch.uint8)
    bad.call("read", "late", sequence, asked, into=memoryview(received.numpy()))
    assert received.view(torch.float32).eq(0).all()
    while publisher._sender.reads(publisher._snapshots[0]):
        time.sleep(0.01)
    with pytest.raises(OSError, match="does not hold version 1: it was late"):
        bad.call("read", "late", sequence, asked)
    assert "group late of receivers was late for version 1" in caplog.text
    bad.call("hold", "late", None)
    assert publisher._sender.reads(publisher._snapshots[0])
    bad.close()  # as if it were killed
    while publisher._sender._groups:
        time.sleep(0.01)
    assert not publisher._sender.reads(publisher._snapshots[0])
    board.close()
    publisher.close()


def test_memory_for_the_next_full_version_is_used_again(address, tmp_path):
    for to in (Channel(address), tmp_path):
        served = {"w": torch.zeros(5), "b": torch.zeros(3, dtype=torch.int64)}
        receiver = Receiver(to, served, timeout=SHORT)
        places = []
        for number in range(3):
            state = {"w": torch.full((5,), float(number)), "b": torch.full((3,), number)}
            with Publisher(to, state, anchor_every=1, timeout=SHORT) as publisher:  # a new one, so all is new
                publisher.publish(number)
                while receiver.poll() is None:
                    time.sleep(0.01)
                assert receiver.apply() == number
            assert served["w"].eq(number).all() and served["b"].eq(number).all()
            places.append([slot.data.data_ptr() for slot in receiver._source.host_copy.slots])
        assert places[0] == places[1] == places[2]


# ------------------------------------------------------------------ who can connect


def listening():
    """The addresses at which this process listens, as the kernel says, without ports."""
    own = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            own.add(os.readlink(each))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return sorted(found)


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.parametrize("secret", [None, "between us"])
def test_at_a_loopback_address_only_this_host_can_connect(address, secret, monkeypatch):
    for _, interface in socket.if_nameindex():
        if not interface.startswith("lo"):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)  # where gloo would listen by itself
    before = listening()
    state, served = {"w": torch.arange(4.0)}, {"w": torch.zeros(4)}
    name = address.replace("127.0.0.1", "localhost")
    with Publisher(Channel(name, secret=secret), state, timeout=SHORT) as publisher:
        receiver = Receiver(Channel(address, secret=secret), served, timeout=SHORT)
        publisher.publish(0)
        assert (receiver.poll(), receiver.apply()) == (0, 0)
        now = listening()
        for each in before:
            now.remove(each)
        assert now and set(now) <= LOOPBACK, now
    assert served["w"].equal(state["w"])


def test_an_address_that_others_reach_needs_a_secret(address, monkeypatch, caplog):
    anywhere = address.replace("127.0.0.1", "0.0.0.0")
    monkeypatch.delenv(SECRET, raising=False)
    for wrong in (anywhere, "10.0.0.1:29600", "trainer:29600", "[2001:db8::1]:29600"):
        with pytest.raises(PublishValueError, match=f"a secret is required: set {SECRET}, or pass secret="):
            Channel(wrong)
    monkeypatch.setenv(SECRET, "between us")
    state, served = {"w": torch.arange(4.0)}, {"w": torch.zeros(4)}
    publisher = Publisher(Channel(anywhere), state, timeout=SHORT)
    assert "between us" not in repr(Channel(anywhere)) + str(Channel(anywhere))
    publisher.publish(0)
    other = Receiver(Channel(anywhere, secret="another"), {"w": torch.zeros(4)}, timeout=SHORT)
    with pytest.raises(CommError, match=f"has another secret.*{SECRET}"):
        other.poll()
    with pytest.raises(CommError, match="has another secret"):  # without one
        Channel(address, secret="").connect(timedelta(seconds=1)).value("name")
    with pytest.raises(CommError, match="did not ask for a secret"):  # another server
        with socket.create_server(("127.0.0.1", 0)) as silent:
            Channel(f"127.0.0.1:{silent.getsockname()[1]}", secret="s").connect(timedelta(seconds=1)).value("name")
    with socket.create_connection(tuple(address.split(":"))) as junk:
        junk.sendall(b"junk" * 100)
        with suppress(ConnectionError):
            while junk.recv(1000):
                pass
    assert "was refused: it does not have the secret" in caplog.text
    idle = [socket.create_connection(tuple(address.split(":"))) for _ in range(20)]
    receiver = Receiver(Channel(anywhere, secret="between us"), served, timeout=SHORT)
    for version in range(1, 3):
        publisher.publish(version)
        assert (receiver.poll(), receiver.apply()) == (version, version)
    assert served["w"].equal(state["w"])
    for each in idle:
        each.close()
    publisher.close()
    del publisher
    socket.create_server(("127.0.0.1", int(address.partition(":")[2]))).close()  # nobody listens any more


def test_a_store_that_another_process_serves(address):
    store = Channel(address, secret="s").serve()
    for number in range(2):
        state, served = {"w": torch.full((4,), number + 1.0)}, {"w": torch.zeros(4)}
        with Publisher(Channel(address, secret="s"), state, timeout=SHORT) as publisher:
            receiver = Receiver(Channel(address, secret="s"), served, timeout=SHORT)
            publisher.publish(number)
            assert (receiver.poll(), receiver.apply()) == (number, number)
            assert served["w"].equal(state["w"])
    store.close()
