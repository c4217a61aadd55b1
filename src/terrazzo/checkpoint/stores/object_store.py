"""Checkpoints in object stores: S3 and what speaks its language, Google Cloud Storage, Azure Blob Storage.

Requests are made by `obstore`, which signs them, tries again what failed on the way, and waits without holding the
interpreter.

What each step is there for:
- a data file is sent by one request when it is complete.  A killed rank leaves whole files under names of its save,
  which a later save removes, and no half-sent ones, which only a rule of the bucket could remove;
- that is why data files are kept small here, and why several are under way at once;
- the root is put on condition that the one that is there has not changed.  If the store says that it has, the reply to
  an earlier try may have been lost: so it is read back, and if it is ours, all is well;
- leases are judged by the age of the newest file of their save, by the store's clock.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import from_url

from terrazzo.checkpoint.stores.base import (
    ABSENT,
    LEASE_SECONDS,
    Absent,
    Capabilities,
    Entry,
    MemoryUpload,
    Request,
    Store,
    Upload,
    Version,
)
from terrazzo.errors import ConflictError

SCHEMES: Final = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_TRIES: Final = 5  # beside those that the client makes
T = TypeVar("T")


class ObjectStore(Store):
    """A prefix of a bucket.

    Args:
        url: `s3://bucket/prefix`, `gs://...`, `az://...`.
        lease_seconds: a save that has written nothing for so long is dead.
        settings: what `obstore.store.from_url` takes, beyond what the usual environment variables say
            (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, ...): `endpoint`, `access_key_id`, `client_options`,
            `retry_config`, `credential_provider`, ...

    >>> ObjectStore("s3://bucket/run/step-100", region="eu-west-1").location
    's3://bucket/run/step-100'
    """

    caps = Capabilities(in_place=False, file_bytes=16 << 20, request_bytes=4 << 20, gap=512 << 10, depth=8)

    def __init__(self, url: str, *, lease_seconds: float = LEASE_SECONDS, **settings: Any) -> None:
        self._url = url.rstrip("/")
        self._settings = settings
        self._lease_seconds = lease_seconds
        self._store: Any = from_url(self._url, **_with_plain_http(settings))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._url, self._lease_seconds, self._settings)

    @property
    def location(self) -> str:
        return self._url

    def upload(self, key: str, size: int) -> Upload:
        def send(data: memoryview) -> None:
            try:
                self.put(key, data, only_if=ABSENT)
            except ConflictError as error:
                raise FileExistsError(f"{self._url}/{key} exists already") from error

        return MemoryUpload(size, send)

    def read(self, requests: Iterable[Request], *, in_flight_bytes: int = 64 << 20) -> Iterator[Request]:
        under_way: deque[tuple[Request, Future[None]]] = deque()
        held = 0
        depth = self.caps.depth if in_flight_bytes > 0 else 1
        pool = ThreadPoolExecutor(depth, thread_name_prefix="terrazzo-read")
        try:
            for request in requests:
                while under_way and (len(under_way) >= depth or held + request.size > in_flight_bytes):
                    done, future = under_way.popleft()
                    future.result()
                    held -= done.size
                    yield done
                held += request.size
                under_way.append((request, pool.submit(self._fetch, request)))
            while under_way:
                done, future = under_way.popleft()
                future.result()
                yield done
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, request: Request) -> None:
        size = request.size
        if size == 0:
            return
        read = partial(self._store.get_range, request.key, start=request.start, length=size)
        data = memoryview(self._tried(request.key, read))
        if len(data) < size:
            raise EOFError(f"{self._url}/{request.key} ends at byte {request.start + len(data)}; more was expected")
        position = 0
        for buffer in request.buffers:
            buffer[:] = data[position : position + len(buffer)]
            position += len(buffer)

    def get(self, key: str) -> tuple[bytes, Version]:
        def read() -> tuple[bytes, Version]:
            found = self._store.get(key)
            return bytes(found.bytes()), _version(found.meta)

        return self._tried(key, read)

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        if only_if is None:
            mode: Any = "overwrite"
        else:
            mode = "create" if isinstance(only_if, Absent) else json.loads(only_if)
        for attempt in range(_TRIES):
            try:
                return _version(self._store.put(key, data, mode=mode, use_multipart=False))
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError) as error:
                written = self._version_if_ours(key, data)
                if written is None:
                    raise ConflictError(
                        f"{self._url}/{key} has been replaced by somebody else since this save began; what they wrote "
                        f"stays. Have one job save to one place, or save again"
                    ) from error
                return written
            except exceptions.BaseError as error:
                if only_if is None or "409 Conflict" not in str(error) or attempt == _TRIES - 1:
                    self._fail(key, error)
            time.sleep(0.1 * 2**attempt)  # another conditional put was under way
        raise AssertionError

    def _version_if_ours(self, key: str, data: bytes | memoryview) -> Version | None:
        try:
            present, version = self.get(key)
        except FileNotFoundError:
            return None
        return version if present == data else None

    def list(self, prefix: str = "") -> list[Entry]:
        try:
            found = self._tried(prefix, self._store.list_with_delimiter)["objects"]
        except FileNotFoundError:
            return []
        return [_entry(meta) for meta in found if meta["path"] and meta["path"].startswith(prefix)]

    def stat(self, key: str) -> Entry:
        return _entry(self._tried(key, partial(self._store.head, key)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                self._store.delete(key)
            except FileNotFoundError:
                pass
            except exceptions.BaseError as error:
                self._fail(key, error)

    def adopt(self, other: Store, key: str) -> bool:
        """By a copy that the store makes itself, within one bucket."""
        if not isinstance(other, ObjectStore):
            return False
        here, there = urlsplit(self._url), urlsplit(other._url)
        if (here.scheme, here.netloc, self._settings) != (there.scheme, there.netloc, other._settings):
            return False
        if here.path != there.path:
            bucket = from_url(f"{here.scheme}://{here.netloc}", **_with_plain_http(self._settings))
            try:
                obstore.copy(bucket, f"{there.path.strip('/')}/{key}", f"{here.path.strip('/')}/{key}")
            except exceptions.BaseError as error:
                self._fail(key, error)
        return True

    def lease_ended(self, key: str, last_sign: float) -> bool:
        return time.time() - last_sign > self._lease_seconds

    def _tried(self, key: str, read: Callable[[], T]) -> T:
        """Something that can be done again: a reply may also break off when the client has begun to read it."""
        for attempt in range(_TRIES):
            try:
                return read()
            except exceptions.GenericError as error:
                if "416 Range" in str(error):
                    raise EOFError(f"{self._url}/{key} ends before the first byte that was asked for") from error
                if attempt == _TRIES - 1 or "response body error" not in str(error):
                    self._fail(key, error)
            except exceptions.BaseError as error:
                self._fail(key, error)
            time.sleep(0.05 * 2**attempt)
        raise AssertionError

    def _fail(self, key: str, error: Exception) -> NoReturn:
        """Raise what the rest of the library knows."""
        if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
            raise PermissionError(f"{self._url}/{key}: {_short(error)}") from error
        raise OSError(f"{self._url}/{key}: {_short(error)}") from error


def _rebuilt(url: str, lease_seconds: float, settings: dict[str, Any]) -> ObjectStore:
    return ObjectStore(url, lease_seconds=lease_seconds, **settings)


def _with_plain_http(settings: dict[str, Any]) -> dict[str, Any]:
    """Whoever names an endpoint without encryption means it."""
    endpoint = settings.get("endpoint") or next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
    if not str(endpoint).startswith("http://"):
        return settings
    return settings | {"client_options": {"allow_http": True} | settings.get("client_options", {})}


def _short(error: Exception) -> str:
    """What a client says, without the insides of the client that it adds."""
    return str(error).partition("\n\nDebug source")[0]


def _version(meta: Any) -> Version:
    """The marks by which a store knows an object's version; which of them it wants back depends on the store."""
    return Version(json.dumps({name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}))


def _entry(meta: Any) -> Entry:
    return Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())
