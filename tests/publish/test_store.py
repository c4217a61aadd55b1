"""From a trainer to receivers through a store: what arrives is what was published, bit for bit."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from publish import worlds
from ranks import run_ranks
from terrazzo.checkpoint import save, verify
from terrazzo.checkpoint.plan.sharded import ChunkedTensor
from terrazzo.checkpoint.stores import LocalStore, MemoryStore, Place
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointException,
    CheckpointFormatError,
    CheckpointMismatchError,
    ConflictError,
    DivergentValueError,
    PublishError,
    PublishValueError,
)
from terrazzo.integrations.huggingface import Rename, Rule
from terrazzo.layout import Box
from terrazzo.publish import Publisher, Receiver
from terrazzo.publish.versions import Versions

pytestmark = pytest.mark.on_late


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert worlds.digest({"x": found[name]}) == worlds.digest({"x": value}), name


@pytest.mark.parametrize("sparse", [True, False])
def test_from_fully_shard_on_4_to_tensor_parallel_on_2(tmp_path, sparse):
    settings = {"anchor_every": 4, "dtype": torch.bfloat16, "sparse": sparse}
    run_ranks(4, begin, tmp_path, settings)
    run_ranks(2, worlds.begin_receiver, tmp_path, torch.bfloat16)
    assert run_ranks(2, worlds.receive)[0][0] is None
    full = []
    for step in range(10):
        expected, version = run_ranks(4, worlds.publish, step, 0.02)[0]
        full.append(version.is_full)
        assert version.number == step
        if step in (3, 6, 7):  # these it does not see
            continue
        for number, found, _ in run_ranks(2, worlds.receive):
            assert number == step
            same(found, expected)
        assert run_ranks(2, worlds.receive)[0][0] is None
    # A window has all of a tensor here, so with checksums alone all is written, and the version is full.
    assert full == ([step % 4 == 0 for step in range(10)] if sparse else [True] * 10)
    run_ranks(4, worlds.end_trainer)
    run_ranks(2, worlds.end_receiver)


def begin(to, settings):
    worlds.begin_trainer(to, **settings)


def test_versions_have_what_has_changed(tmp_path):
    run_ranks(4, begin, tmp_path, {"anchor_every": 100})
    run_ranks(2, worlds.begin_receiver, tmp_path, torch.float32)
    run_ranks(4, worlds.publish, 0, 1.0)
    _, version = run_ranks(4, worlds.publish, 1, 1.0)[0]
    assert version.is_full  # since more than half has changed
    run_ranks(2, worlds.receive)
    _, version = run_ranks(4, worlds.publish, 2, 0.01)[0]
    assert not version.is_full and version.nbytes < 0.1 * version.total
    nothing, version = run_ranks(4, worlds.publish, 3, 0.0)[0]
    assert not version.is_full and version.nbytes <= 20  # the buffer
    for number, found, _ in run_ranks(2, worlds.receive):
        assert number == 3
        same(found, nothing)
    run_ranks(4, worlds.end_trainer)
    run_ranks(2, worlds.end_receiver)


@pytest.mark.on_late
def test_a_receiver_reads_its_part():
    """Rows of a large tensor; of changes, only where its rows are."""
    store = MemoryStore()
    tensor = torch.randn(3000, 1000)
    rows = torch.zeros(250, 1000)
    box = Box((500, 0), (250, 1000))
    part = ChunkedTensor(tensor.shape, tensor.dtype, {box.offsets: (box, rows)}, None)
    publisher, receiver = Publisher(store, {"w": tensor}), Receiver(store, {"w": part})
    everything = torch.zeros(3000, 1000)
    other = Receiver(store, {"w": everything})
    publisher.publish()
    publisher.wait()
    receiver.poll(), receiver.apply(), other.poll(), other.apply()
    assert rows.equal(tensor[500:750])
    assert rows.nbytes <= receiver.bytes_read < 1.7 * rows.nbytes
    for row in (2900, 600):
        before = receiver.bytes_read
        tensor[row] += 1
        publisher.publish()
        assert publisher.wait().nbytes < 10_000
        receiver.poll(), receiver.apply(), other.poll(), other.apply()
        assert rows.equal(tensor[500:750]) and everything.equal(tensor)
        assert receiver.bytes_read - before < (4000 if row == 2900 else 11_000)
    tensor[:] = 0
    publisher.publish()
    assert publisher.wait().is_full
    receiver.poll(), receiver.apply()
    assert rows.equal(tensor[500:750])


@pytest.mark.parametrize(
    ("count", "wait"),
    [(30, True), pytest.param(100, True, marks=pytest.mark.long), pytest.param(100, False, marks=pytest.mark.long)],
)
def test_many_versions_while_receivers_take_what_they_can(tmp_path, count, wait):
    settings = {"dtype": torch.bfloat16, "anchor_every": 7, "keep": 1}
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(run_ranks, 2, receive_all, tmp_path, count - 1, wait)
        published = run_ranks(4, train_all, tmp_path, count, settings)[0]
        seen = receiving.result()
    assert seen[0] == seen[1] and count - 1 in seen[0]
    assert all(published[number] == digest for number, digest in seen[0].items())
    kept = [name for name in os.listdir(tmp_path) if name.startswith("global_step")]
    assert len(kept) <= 7 + 2, kept


def train_all(to, count, settings):
    return worlds.train_many(to, count, 0.03, **settings)


def receive_all(source, last, wait):
    return worlds.receive_until(source, last, torch.bfloat16, wait=wait)


def test_layouts_of_all_kinds(tmp_path):
    """From two ranks to one and back; plain to plain, and untied receivers of a tied weight."""
    run_ranks(2, begin, tmp_path / "a", {})
    expected, _ = run_ranks(2, worlds.publish, 5, 0.5)[0]
    run_ranks(2, worlds.end_trainer)
    run_ranks(1, worlds.begin_receiver, tmp_path / "a", torch.float32)
    same(run_ranks(1, worlds.receive)[0][1], expected)
    run_ranks(1, worlds.end_receiver)
    run_ranks(4, begin_untied, tmp_path / "a")
    for _, found, _ in run_ranks(4, worlds.receive):
        same(found, expected)
    run_ranks(4, worlds.end_receiver)


def begin_untied(source):
    worlds.begin_receiver(source, torch.float32, tied=False)


# ------------------------------------------------------------------ in one process


def pair(store=None, **settings):
    torch.manual_seed(0)
    store = store or MemoryStore()
    model, served = nn.Linear(6, 5), nn.Linear(6, 5)
    return model, served, Publisher(store, model, **settings), Receiver(store, served)


@pytest.mark.on_late
def test_numbers_may_go_back_and_publishers_follow_one_another():
    store = MemoryStore()
    model, served, publisher, receiver = pair(store)
    publisher.publish(10)
    publisher.publish()
    publisher.close()
    assert receiver.poll() == 11
    with torch.no_grad():
        model.weight.mul_(2)
    with Publisher(store, model) as publisher:
        publisher.publish(3)
        assert publisher.wait().is_full
    assert (receiver.poll(), receiver.apply(), receiver.version) == (3, 3, 3)
    assert served.weight.equal(model.weight)


@pytest.mark.on_late
def test_bits_that_are_no_numbers_arrive():
    model, served, publisher, receiver = pair()
    publisher.publish()
    publisher.wait()
    receiver.poll(), receiver.apply()
    for change in ({(2, 2): 0.0}, {(2, 2): -0.0}, {(0, 0): float("nan")}, {}):  # the second is equal, as a number
        with torch.no_grad():
            for place, value in change.items():
                model.weight[place] = value
        publisher.publish()
        written = publisher.wait()
        assert not written.is_full and (written.nbytes > 0) == bool(change)
        receiver.poll(), receiver.apply()
        assert served.weight.view(torch.int32).equal(model.weight.view(torch.int32))


def test_of_two_publishers_the_later_one_counts():
    store = MemoryStore()
    model, served, first, receiver = pair(store)
    first.publish(1)
    first.wait()
    second = Publisher(store, nn.Linear(6, 5))
    first.publish(2)
    with pytest.raises(ConflictError, match="another publisher"):
        first.wait()
    second.publish(3)
    second.wait()
    assert receiver.poll() == 3


def test_a_lost_reply_to_the_list_stops_no_publisher(monkeypatch):
    store = MemoryStore()
    _, _, publisher, receiver = pair(store)
    put = MemoryStore.put

    def loses_the_reply(self, key, data, **options):
        version = put(self, key, data, **options)
        if key == "published.json":
            raise TimeoutError(110, "the reply was lost")
        return version

    for number in (1, 2):
        monkeypatch.setattr(MemoryStore, "put", loses_the_reply)
        publisher.publish(number)
        publisher.wait()
        monkeypatch.setattr(MemoryStore, "put", put)
        assert receiver.poll() == number
        receiver.apply()


def test_checkpoints_of_a_run_are_not_removed(tmp_path):
    for step in (1, 2):
        save({"w": torch.ones(3)}, checkpoint_id=tmp_path / f"global_step{step}", no_dist=True)
    with pytest.raises(PublishValueError, match="folder of its own"):
        Publisher(tmp_path, nn.Linear(6, 5))
    with Publisher(tmp_path / "weights", nn.Linear(6, 5), keep=1, anchor_every=1) as publisher:
        save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "weights" / "global_step7", no_dist=True)
        for number in range(3):
            publisher.publish(number)
            publisher.wait()
    assert sorted(os.listdir(tmp_path / "weights")) == ["global_step10", "global_step7", "published.json"]
    assert verify(tmp_path / "weights" / "global_step7") == [] == verify(tmp_path / "global_step1")


def test_what_a_receiver_reads_is_not_removed():
    store = MemoryStore()
    model, served, publisher, receiver = pair(store, anchor_every=1, keep=1)
    for number in range(3):
        publisher.publish(number)
        publisher.wait()
        if number == 0:
            holding = receiver._source._versions.hold_needed(None)
            held = holding.__enter__()
    assert [version.number for version in held] == [0]
    assert sorted(store.folders()) == ["global_step0", "global_step2"]
    holding.__exit__(None, None, None)
    publisher.publish(3)
    publisher.wait()
    assert sorted(store.folders()) == ["global_step3"]


def test_only_versions_are_removed(tmp_path, caplog):
    """A run's steps are in the same folder, one behind a link, one of which this release cannot read."""
    model, served, publisher, receiver = pair(LocalStore(tmp_path / "run"), anchor_every=1, keep=1)
    for name in ("run/global_step1", "run/global_step3", "shared"):
        save({"w": torch.ones(3)}, checkpoint_id=tmp_path / name)
    with Publisher(tmp_path / "others", nn.Linear(6, 5)) as another:
        another.publish()
    os.rename(tmp_path / "others" / "global_step0", tmp_path / "version")
    for link, there in (("global_step2", "shared"), ("global_step4", "version")):
        (tmp_path / "run" / link).symlink_to(tmp_path / there)
    (tmp_path / "run" / "global_step3" / "manifest.terrazzo").write_bytes(b"of another release")
    before = [sorted(os.listdir(tmp_path / "run" / f"global_step{step}")) for step in (1, 2, 3, 4)]
    for number in range(3):
        publisher.publish(number)
        publisher.wait()
    publisher.close()
    assert receiver.poll() == 2
    assert sorted(os.listdir(tmp_path / "run")) == [
        *(f"global_step{step}" for step in (1, 2, 3, 4, 7)),
        "published.json",
    ]
    assert [sorted(os.listdir(tmp_path / "run" / f"global_step{step}")) for step in (1, 2, 3, 4)] == before
    assert caplog.text.count("global_step1 is not a published version") == 1
    assert "global_step3 could not be removed" in caplog.text and "global_step4 is a link" in caplog.text


@pytest.mark.parametrize("base", [0, 1, 2])
def test_a_list_of_versions_without_an_end_is_refused(tmp_path, base):
    versions = [
        {"number": n, "place": n, "id": "a", "base": b, "nbytes": 8, "total": 8} for n, b in ((0, 1), (1, base))
    ]
    (tmp_path / "published.json").write_text(json.dumps({"versions": versions}))
    published = Versions(Place(tmp_path)).read()
    with pytest.raises(CheckpointFormatError, match="does not list the version on which version . is based"):
        published.needed_for(published.newest)


def test_damage_is_found_and_the_model_keeps_what_it_has(tmp_path):
    model, served, publisher, receiver = pair(tmp_path, anchor_every=3)
    publisher.publish()
    publisher.wait()
    receiver.poll(), receiver.apply()
    with torch.no_grad():
        model.weight[0] += 1
    before = served.weight.clone()
    publisher.publish()
    publisher.wait()
    (file,) = (tmp_path / "global_step1").glob("data-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for _ in range(2):
        with pytest.raises(CheckpointCorruptError):
            receiver.poll()
        with pytest.raises(PublishError, match="nothing to apply"):
            receiver.apply()
    assert served.weight.equal(before) and receiver.version == 0
    publisher.publish()
    publisher.wait()
    with pytest.raises(CheckpointCorruptError):
        receiver.poll()
    publisher.publish()  # a full one
    publisher.wait()
    assert (receiver.poll(), receiver.apply()) == (3, 3)
    assert served.weight.equal(model.weight)


@pytest.mark.on_late
def test_rename_maps_on_either_side():
    """Three projections of the trainer are one of the receiver."""
    torch.manual_seed(0)
    store = MemoryStore()
    names = [f"{letter}.weight" for letter in "qkv"]
    model = nn.ModuleDict(
        {letter: nn.Linear(4, size, bias=False) for letter, size in zip("qkv", (6, 2, 2), strict=True)}
    )
    served = nn.ModuleDict({"qkv": nn.Linear(4, 10, bias=False)})
    rename = Rename([Rule("qkv.weight", names, sizes=(6, 2, 2))])
    publisher, receiver = Publisher(store, model), Receiver(store, served, rename=rename)
    for _ in range(3):
        with torch.no_grad():
            model["k"].weight[0, 0] += 1
        publisher.publish()
        publisher.wait()
        receiver.poll(), receiver.apply()
        assert served["qkv"].weight.equal(torch.cat([model[letter].weight for letter in "qkv"]))
    back = nn.ModuleDict(
        {letter: nn.Linear(4, size, bias=False) for letter, size in zip("qkv", (6, 2, 2), strict=True)}
    )
    store = MemoryStore()
    with Publisher(store, served, rename=rename) as publisher:
        publisher.publish()
    receiver = Receiver(store, back)
    receiver.poll(), receiver.apply()
    assert all(back[letter].weight.equal(model[letter].weight) for letter in "qkv")


@pytest.mark.on_late
def test_a_model_that_has_moved_gets_what_is_new():
    model, served, publisher, receiver = pair()
    publisher.publish()
    publisher.wait()
    receiver.poll(), receiver.apply()
    served.weight = nn.Parameter(torch.zeros(5, 6))  # as after `to` another device and back
    with torch.no_grad():
        model.bias[0] += 1
    publisher.publish()
    publisher.wait()
    receiver.poll(), receiver.apply()
    assert served.weight.equal(model.weight) and served.bias.equal(model.bias)
    served.weight = nn.Parameter(torch.zeros(6, 5))
    publisher.publish()
    publisher.wait()
    receiver.poll()
    with pytest.raises(PublishError, match="another Receiver"):
        receiver.apply()


@pytest.mark.on_late
def test_what_does_not_fit_is_refused():
    store = MemoryStore()
    model, served, publisher, receiver = pair(store)
    publisher.publish()
    publisher.wait()
    with pytest.raises(CheckpointMismatchError, match="extra: not published"):
        Receiver(store, {"extra": torch.zeros(2)}).poll()
    assert Receiver(store, {"extra": torch.zeros(2)}, strict=False).poll() == 0
    with pytest.raises(CheckpointMismatchError, match=r"published shape is \[5, 6\], the receiver.s \[6, 5\]"):
        Receiver(store, {"weight": torch.zeros(6, 5)}).poll()
    with pytest.raises(CheckpointMismatchError, match="publish with dtype=torch.bfloat16"):
        Receiver(store, {"weight": torch.zeros(5, 6, dtype=torch.bfloat16)}).poll()
    rounded = torch.zeros(5, 6, dtype=torch.bfloat16)
    receiver = Receiver(store, {"weight": rounded}, allow_lossy_dtype=True)
    receiver.poll(), receiver.apply()
    assert rounded.equal(model.weight.to(torch.bfloat16))
    wide = torch.zeros(5, 6, dtype=torch.float64)
    receiver = Receiver(store, {"weight": wide})
    receiver.poll(), receiver.apply()
    assert wide.equal(model.weight.double())
    with pytest.raises(PublishValueError):
        Publisher(store, model, keep=0)
    with pytest.raises(PublishError, match="closed"):
        publisher.close()
        publisher.publish()


def publish_differently(folder):
    rank = torch.distributed.get_rank()
    with pytest.raises(DivergentValueError, match="weight"):
        Publisher(folder, nn.Linear(3, 3), timeout=worlds.LIMIT).publish(rank * 0)
    torch.manual_seed(0)
    publisher = Publisher(folder, nn.Linear(3, 3), timeout=worlds.LIMIT)
    with pytest.raises(CheckpointException, match="different versions"):
        publisher.publish(rank)
    publisher.publish(1)
    publisher.close()


def test_ranks_that_differ_are_told(tmp_path):
    run_ranks(2, seeded_differently, tmp_path)


def seeded_differently(folder):
    torch.manual_seed(torch.distributed.get_rank())
    publish_differently(folder)
