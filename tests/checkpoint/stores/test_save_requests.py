"""What a save asks of a store: nothing before `async_save` returns, and few small requests around its data."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from terrazzo.checkpoint import Checkpoint, NativeReader, NativeWriter, async_save, save
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.stores import LARGEST, Absent, Entry, MemoryStore, Version
from terrazzo.errors import ConflictError


class Counted(MemoryStore):
    """Keeps the names of its requests, and which thread made them; `before` is called with each."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []
        self.threads: set[int] = set()
        self.before: Any = lambda request: None

    def _request(self, what: str, key: str) -> None:
        kind = key.partition("-")[0] if key.endswith(".safetensors") else key.rpartition(".")[2]
        request = f"{what} {'root' if key == MANIFEST else kind}".strip()
        self.threads.add(threading.get_ident())
        self.before(request)
        self.requests.append(request)

    def get(self, key: str, most: int = LARGEST) -> tuple[bytes, Version]:
        self._request("get", key)
        return super().get(key, most)

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        self._request("put", key)
        return super().put(key, data, only_if=only_if)

    def list(self, prefix: str = "") -> list[Entry]:
        self._request("list", prefix)
        return super().list(prefix)

    def stat(self, key: str) -> Entry:
        self._request("stat", key)
        for entry in super().list(key):
            return entry
        raise FileNotFoundError(key)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._request("delete", key)
            super().delete([key])

    def seen(self) -> list[str]:
        found, self.requests = self.requests, []
        return found


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "step": 1}


def values_in(store: Counted) -> set[float]:
    return set(Checkpoint(NativeReader(store))["w"][...].tolist())


def test_async_save_makes_no_request_before_it_returns() -> None:
    """Neither on the thread of the caller, nor on another that the caller would wait for."""
    store, returned = Counted(), threading.Event()
    store.before = lambda request: returned.wait(30) or pytest.fail(f"{request} before async_save returned")
    for value in (1.0, 2.0):  # of the second one, the first is in the way
        returned.clear()
        state = state_of(value)
        saving = async_save(state, storage_writer=NativeWriter(store), no_dist=True)
        assert store.seen() == []
        returned.set()
        state["w"].zero_()
        saving.result(30)
        assert threading.get_ident() not in store.threads
        assert store.seen()
        assert values_in(store) == {value}
        store.seen()
        store.threads.clear()


FIRST = ["get root", "list", "put lease", "put data", "list", "put root", "stat lease", "delete lease"]
AGAIN = [*FIRST[:-1], "get root", "delete data", "delete lease"]


def test_the_requests_of_a_save() -> None:
    store = Counted()
    save(state_of(1.0), storage_writer=NativeWriter(store), no_dist=True)
    assert store.seen() == FIRST
    save(state_of(2.0), storage_writer=NativeWriter(store), no_dist=True)
    assert store.seen() == AGAIN
    assert values_in(store) == {2.0}
    assert [entry.key.partition("-")[0] for entry in MemoryStore.list(store)].count("data") == 1


def leave_a_killed_save(store: Counted, value: float) -> bytes:
    """The files and the lease, which has expired, of a save that was killed before its commit; returns its root."""
    put, roots = store.put, []

    def dies(key: str, data: Any, **how: Any) -> Version:
        if key == MANIFEST:
            roots.append(bytes(data))
            raise KeyboardInterrupt
        return put(key, data, **how)

    store.put = dies  # type: ignore[method-assign]
    store.delete = lambda keys: None  # type: ignore[method-assign]  # a killed process removes nothing
    with pytest.raises(KeyboardInterrupt):
        save(state_of(value), storage_writer=NativeWriter(store), no_dist=True)
    del store.put, store.delete
    store.lease_seconds = -1.0
    store.seen()
    return roots[0]


def test_what_a_killed_save_left_is_removed() -> None:
    store = Counted()
    save(state_of(1.0), storage_writer=NativeWriter(store), no_dist=True)
    leave_a_killed_save(store, 2.0)
    assert len(store.list()) == 4  # the root and its file, the file and the lease of the killed save
    store.seen()
    save(state_of(3.0), storage_writer=NativeWriter(store), no_dist=True)
    # The fence, then the lease, and a last look before its files.
    fence = ["put root", "delete lease", "get root"]
    assert store.seen()[:8] == ["get root", "list", "get root", *fence, "delete lease", "delete data"]
    assert values_in(store) == {3.0} and len(store.list()) == 2


def test_what_a_root_names_that_was_committed_after_the_list_is_not_removed() -> None:
    store = Counted()
    save(state_of(1.0), storage_writer=NativeWriter(store), no_dist=True)
    root = leave_a_killed_save(store, 2.0)

    def commits(request: str) -> None:  # it was not killed, but suspended
        if store.requests[-1:] == ["list"]:
            MemoryStore.put(store, MANIFEST, root)

    store.before = commits
    with pytest.raises(ConflictError):
        save(state_of(3.0), storage_writer=NativeWriter(store), no_dist=True)
    store.before = lambda request: None
    assert values_in(store) == {2.0}
