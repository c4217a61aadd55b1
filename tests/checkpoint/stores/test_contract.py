"""What every store promises, whatever is behind it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from s3_server import BUCKET
from terrazzo.checkpoint import load, save
from terrazzo.checkpoint.stores import ABSENT, LocalStore, MemoryStore, Place, Request, Store
from terrazzo.checkpoint.stores.fsspec_store import FsspecStore
from terrazzo.checkpoint.stores.object_store import ObjectStore
from terrazzo.errors import CheckpointCorruptError, CheckpointNotFoundError, ConflictError


@pytest.fixture(params=["local", "memory", "s3", "fsspec", "documented"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    if request.param == "local":
        made = LocalStore(tmp_path / "made" / "here")
    elif request.param == "memory":
        made = MemoryStore()
    elif request.param == "s3":
        made = ObjectStore(f"s3://{BUCKET}/contract/{uuid.uuid4().hex}", **request.getfixturevalue("s3").settings())
    elif request.param == "documented":
        made = documented_store()(str(tmp_path / "checkpoint.db"))
    else:
        made = FsspecStore(f"memory://contract/{uuid.uuid4().hex}")
    made.prepare()
    yield made


ROOT = Path(__file__).parents[3]


def documented_code() -> str:
    """The example of docs/stores.md."""
    text = (ROOT / "docs" / "stores.md").read_text()
    return text.partition("## A store of one's own")[2].partition("```python\n")[2].partition("```")[0]


def documented_store() -> Callable[[str], Store]:
    names: dict[str, Any] = {}
    exec(documented_code(), names)
    return names["SQLiteStore"]


@pytest.mark.long
def test_the_store_of_the_documentation_has_types(tmp_path: Path) -> None:
    (tmp_path / "sqlite_store.py").write_text(documented_code())
    command = [sys.executable, "-m", "mypy", "--config-file", "tests/typed.ini", "--cache-dir", ".mypy_cache/user"]
    ended = subprocess.run(
        [*command, tmp_path / "sqlite_store.py"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout


def test_a_checkpoint_in_the_store_of_the_documentation(tmp_path: Path) -> None:
    store = documented_store()(str(tmp_path / "checkpoint.db"))
    for fill in (1.0, 2.0):
        save({"w": torch.full((2000, 3000), fill), "step": fill}, store=store, no_dist=True)
    state = {"w": torch.zeros(2000, 3000), "step": 0.0}
    load(state, store=store, no_dist=True)
    assert state["w"].eq(2).all() and state["step"] == 2.0


def keys(store: Store, prefix: str = "") -> list[str]:
    return sorted(entry.key for entry in store.list(prefix))


def view(data: bytes | bytearray) -> memoryview:
    return memoryview(data)


def test_what_is_uploaded_can_be_read_in_ranges(store: Store) -> None:
    upload = store.upload("data-1", 10)
    upload.write(4, [view(b"4567"), view(b"89")])
    upload.write(0, [view(b"01"), view(b"23")])
    upload.finish()
    upload.abort()  # nothing, after finish
    store.put("other", b"abcdef")
    a, b, c = bytearray(3), bytearray(4), bytearray(2)
    requests = [
        Request("data-1", 2, [view(a), view(b)], "first"),
        Request("other", 1, [view(c)], "second"),
        Request("data-1", 10, [], "nothing"),
    ]
    done = list(store.read(requests))
    assert sorted(request.owner for request in done) == ["first", "nothing", "second"]
    assert (bytes(a), bytes(b), bytes(c)) == (b"234", b"5678", b"bc")
    assert store.stat("data-1").size == 10
    assert bytes(store.get("data-1")[0]) == b"0123456789"
    store.read_at("data-1", 5, view(c), view(a))
    assert (bytes(c), bytes(a)) == (b"56", b"789")


def test_many_requests(store: Store) -> None:
    data = bytes(range(256)) * 1024
    store.put("big", data)
    buffers = [bytearray(1000) for _ in range(200)]
    requests = (Request("big", 1000 * number, [view(buffer)]) for number, buffer in enumerate(buffers))
    assert len(list(store.read(requests))) == 200
    assert b"".join(buffers) == data[:200_000]


def test_what_arrives_in_steps_is_there(store: Store) -> None:
    """A store may read a request in steps, and say after each how much is there: no less, and in order."""
    data = bytes(range(256)) * 3000
    store.put("big", data)
    buffers = [memoryview(bytearray(size)) for size in (10, 0, 300_000, 200_000, 7, 140_000)]
    total = sum(map(len, buffers))
    seen = [0]

    def arrived(nbytes: int) -> None:
        assert b"".join(buffers)[:nbytes] == data[5 : 5 + nbytes]
        seen.append(nbytes)

    list(store.read([Request("big", 5, buffers, arrived=arrived)]))
    assert b"".join(buffers) == data[5 : 5 + total]
    assert seen == sorted(set(seen))
    assert seen[-1] == (total if isinstance(store, LocalStore) else 0)


def test_an_aborted_upload_leaves_nothing(store: Store) -> None:
    upload = store.upload("data-1", 4)
    upload.write(0, [view(b"01")])
    upload.abort()
    assert keys(store) == []
    upload = store.upload("data-1", 4)
    upload.write(0, [view(b"0123")])
    upload.finish()
    with pytest.raises(FileExistsError):
        store.upload("data-1", 4).finish()


def test_what_is_not_there(store: Store) -> None:
    store.put("short", b"abc")
    for missing in (
        lambda: store.get("no"),
        lambda: store.stat("no"),
        lambda: store.read_at("no", 0, view(bytearray(1))),
    ):
        with pytest.raises(FileNotFoundError):
            missing()
    with pytest.raises(FileNotFoundError):
        list(store.read([Request("no", 0, [view(bytearray(1))])]))
    for start in (1, 5):
        with pytest.raises(EOFError):
            list(store.read([Request("short", start, [view(bytearray(3))])]))
    assert store.exists("short") and not store.exists("shor")
    store.delete(["no", "short"])
    assert keys(store) == []


def test_a_file_that_is_larger_than_allowed_is_not_read(store: Store) -> None:
    version = store.put("key", b"four")
    assert store.get("key", 4) == (b"four", version)
    with pytest.raises(CheckpointCorruptError, match=re.escape(f"{store.location}/key has 4 bytes, more than the 3 ")):
        store.get("key", most=3)
    with pytest.raises(FileNotFoundError):
        store.get("absent", 3)


def test_conditional_puts(store: Store) -> None:
    first = store.put("root", b"1", only_if=ABSENT)
    assert store.get("root") == (b"1", first)
    with pytest.raises(ConflictError):
        store.put("root", b"x", only_if=ABSENT)
    second = store.put("root", b"2", only_if=first)
    assert second != first
    with pytest.raises(ConflictError):
        store.put("root", b"x", only_if=first)
    assert store.get("root") == (b"2", second)
    store.delete(["root"])
    with pytest.raises(ConflictError):
        store.put("root", b"x", only_if=second)
    store.put("root", b"3")
    assert keys(store) == ["root"]


def test_conditional_removals(store: Store) -> None:
    old = store.put("root", b"1")
    new = store.put("root", b"2")
    with pytest.raises(ConflictError):
        store.delete_if("root", old)
    assert bytes(store.get("root")[0]) == b"2"
    store.delete_if("root", new)
    assert not store.exists("root")
    with pytest.raises(ConflictError):
        store.delete_if("root", new)
    assert store.list() == []


def test_of_many_writers_from_one_version_one_wins(store: Store) -> None:
    if isinstance(store, FsspecStore):
        pytest.skip("fsspec has no conditional writes")
    before = store.put("root", b"old")
    won, lost = [], []

    def write(number: int) -> None:
        try:
            store.put("root", b"new %d" % number, only_if=before)
            won.append(number)
        except ConflictError:
            lost.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 11
    assert bytes(store.get("root")[0]) == b"new %d" % won[0]
    assert keys(store) == ["root"]


def test_a_reader_gets_one_version_whole(store: Store) -> None:
    """Also of another size, while others replace it."""
    versions = [b"a" * 10, b"b" * 70_000, b"c" * 300]
    store.put("root", versions[0])
    ended = threading.Event()

    def replace() -> None:
        try:
            for number in range(150):
                store.put("root", versions[number % 3])
        finally:
            ended.set()

    writer = threading.Thread(target=replace)
    writer.start()
    seen = set()
    while not ended.is_set():
        seen.add(bytes(store.get("root")[0]))
    writer.join()
    assert seen <= set(versions), [len(each) for each in seen]


def test_leases_and_lists(store: Store) -> None:
    lease = store.lease("save-1.lease")
    store.put("data-1", b"12")
    store.put("data-2", b"")
    assert keys(store, "data") == ["data-1", "data-2"]
    entry = store.stat("save-1.lease")
    assert not store.lease_ended("save-1.lease", entry.modified) and store.now() >= entry.modified
    lease.release()
    assert keys(store) == ["data-1", "data-2"]


def test_streams_and_folders(store: Store) -> None:
    store.prepare()
    version = store.put("file", b"old")
    for pieces in ([b"ab", b"", b"cde"], [bytes(5 << 20)] * 14):  # 70 MiB: more than is sent at once
        abandoned = store.stream("file")
        abandoned.write(0, [memoryview(b"x")])
        file, position = store.stream("file"), 0
        for piece in pieces:
            file.write(position, [memoryview(piece)])
            position += len(piece)
        assert store.get("file")[1] == version
        file.finish()
        abandoned.abort()
        data, version = store.get("file")
        assert bytes(data) == b"".join(pieces)
    assert [entry.key for entry in store.list()] == ["file"] and store.folders() == []
    try:
        inner = store.beneath("inner")
    except OSError:
        return  # flat, as a store may be
    assert inner.list() == [] and inner.location.endswith("inner") or isinstance(inner, MemoryStore)
    inner.prepare()
    inner.put("one", b"1")
    assert store.folders() == ["inner"] and [entry.key for entry in store.list()] == ["file"]
    assert store.beneath("inner").get("one")[0] == b"1" and (Place(store) / "inner" / "one").is_file()
    assert sorted(Place(store).names()) == ["file", "inner"] and (Place(store) / "inner").is_dir()
    assert not (Place(store) / "file").is_dir() and not (Place(store) / "other").exists()


def test_folders_are_removed_when_they_are_empty(store: Store) -> None:
    try:
        inner = store.beneath("inner")
    except OSError:  # it has none
        return
    inner.prepare()
    inner.put("file", b"x")
    store.remove_folder("inner")
    assert inner.exists("file") and "inner" in store.folders(), "something is in it"
    inner.delete(["file"])
    inner.sync()
    store.remove_folder("inner")
    store.remove_folder("inner")
    assert not inner.list()
    if isinstance(store, LocalStore):
        assert not (store.path / "inner").exists()


def test_what_a_store_cannot_find_out_is_no_missing_file() -> None:
    class Gone(MemoryStore):
        def exists(self, key: str) -> bool:
            raise CheckpointNotFoundError("there is no such bucket")

    assert not Place(MemoryStore()).is_file() and not (Place(MemoryStore()) / "x").is_file()
    with pytest.raises(CheckpointNotFoundError, match="no such bucket"):
        (Place(Gone()) / "x").is_file()
