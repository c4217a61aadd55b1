"""Checkpoints in object stores: S3 and services with its API, Google Cloud Storage, Azure Blob Storage.

Requests are made by `obstore`, which signs them, retries those that failed on the way, and releases the interpreter's
lock while it waits.

Why it works as it does:
- a data file is sent by one request when it is complete. So a killed rank leaves whole files, which a later save finds
  by their names and removes, and no half-sent uploads, which only a rule of the bucket could remove;
- therefore data files are kept small here, and several are sent at once;
- only a file that has to be large (of `torch.save` or DeepSpeed) is sent in parts, from 64 MiB on;
- the root is put on condition that the present one has not changed. If the store reports a change, the reply to an
  earlier try may have been lost: so the root is read back, and if it is the one that was put, the commit succeeded;
- an upload to S3 carries a SHA-256, which the server compares with what has arrived, of each part, too;
- a lease has ended if the newest file of its save is older than `lease_seconds`, by the store's clock.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

import numpy as np
import obstore
from obstore import exceptions
from obstore.store import from_url

from terrazzo._threads import results_of
from terrazzo.checkpoint.stores.base import (
    ABSENT,
    LARGEST,
    LEASE_SECONDS,
    Absent,
    Capabilities,
    Entry,
    GrowingUpload,
    Request,
    ScatteredUpload,
    Store,
    Upload,
    Version,
    check_size,
)
from terrazzo.errors import CheckpointIOError, CheckpointValueError, ConflictError

_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_PART: Final = 32 << 20  # of a file that is sent in parts, of which there may be 10,000
_CHUNK: Final = 256 << 10  # of an answer, copied at once while it is in the cache
_LARGE_COPY: Final = 64 << 10
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")  # S3, Azure, Google Cloud
_TRIES: Final = 5  # beside those that the client makes
T = TypeVar("T")


class ObjectStore(Store):
    """A prefix of a bucket.

    Args:
        url: `s3://bucket/prefix`, `gs://...`, `az://...`.
        lease_seconds: a save that has written nothing for so long counts as ended.
        settings: what `obstore.store.from_url` takes, beyond what the usual environment variables say
            (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, ...): `endpoint`, `access_key_id`, `client_options`,
            `retry_config`, `credential_provider`, ...

    >>> ObjectStore("s3://bucket/run/step-100", region="eu-west-1").location
    's3://bucket/run/step-100'
    """

    caps = Capabilities(in_place=False, file_bytes=16 << 20, request_bytes=20 << 20, gap=512 << 10, depth=8, readers=8)

    def __init__(self, url: str, *, lease_seconds: float = LEASE_SECONDS, **settings: Any) -> None:
        self._url = url.rstrip("/")
        self._settings = settings
        self.lease_seconds = lease_seconds
        parts = urlsplit(self._url)
        self._prefix = parts.path.strip("/")
        try:
            self._client: Any = _client(f"{parts.scheme}://{parts.netloc}", settings)
        except exceptions.BaseError as error:
            raise CheckpointValueError(f"{url!r} with these settings is no object store: {_short(error)}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ObjectStore, lease_seconds=self.lease_seconds, **self._settings), (self._url,)

    @property
    def location(self) -> str:
        return self._url

    @property
    def _bucket(self) -> Any:
        """The bucket's client, for a request."""
        _check_not_forked(self._url)
        return self._client

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def beneath(self, name: str) -> ObjectStore:
        store = copy.copy(self)  # with the same client
        store._url = f"{self._url}/{name}"
        store._prefix = self._path(name)
        return store

    def folders(self) -> Sequence[str]:
        return [path.rstrip("/").rpartition("/")[2] for path in self._listing()["common_prefixes"]]

    def stream(self, key: str) -> Upload:
        return GrowingUpload(lambda data: self.put(key, data), lambda: _Parts(self, key))

    def upload(self, key: str, size: int) -> Upload:
        def send(data: Sequence[memoryview]) -> None:
            try:
                ObjectStore.put(self, key, data, only_if=ABSENT)  # one that overrides it takes bytes, as of any store
            except ConflictError as error:
                raise FileExistsError(f"{self._url}/{key} exists already") from error

        return ScatteredUpload(send)

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            if request.size:
                self._tried(request.key, partial(self._fill, request))
            yield request

    def _fill(self, request: Request) -> None:
        """Carry out one request; bytes are copied to their destination as they arrive."""
        options = {"range": (request.start, request.start + request.size)}
        answer = iter(self._bucket.get(self._path(request.key), options=options).stream(min_chunk_size=_CHUNK))
        arrived, position = memoryview(b""), request.start
        for buffer in request.buffers:
            left = buffer
            while left:
                if not arrived:
                    arrived = memoryview(next(answer, b""))
                    if not arrived:
                        raise EOFError(f"{self._url}/{request.key} ends at byte {position}; more was expected")
                nbytes = min(len(left), len(arrived))
                _copy(left[:nbytes], arrived[:nbytes])
                left, arrived, position = left[nbytes:], arrived[nbytes:], position + nbytes

    def get(self, key: str, most: int = LARGEST) -> tuple[bytes, Version]:
        def read() -> tuple[bytes, Version]:
            found = self._bucket.get(self._path(key))
            check_size(self, key, found.meta["size"], most)
            return bytes(found.bytes()), _version(found.meta)

        return self._tried(key, read)

    def put(
        self, key: str, data: bytes | memoryview | Sequence[memoryview], *, only_if: Absent | Version | None = None
    ) -> Version:
        if only_if is None:
            mode: Any = "overwrite"
        else:
            mode = "create" if isinstance(only_if, Absent) else json.loads(only_if)
        for attempt in range(_TRIES):
            try:
                return _version(self._bucket.put(self._path(key), data, mode=mode, use_multipart=False))
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError) as error:
                self._check_bucket(error, certain=not isinstance(only_if, str))
                there: Absent | Version = ABSENT
                with suppress(FileNotFoundError):
                    found, there = self.get(key)
                    if found == _joined(data):
                        return there
                if only_if is not None and there != only_if:
                    raise self.conflict(key) from error
                if attempt == _TRIES - 1:
                    self._fail(key, error)
            except exceptions.BaseError as error:
                self._fail(key, error)
            time.sleep(0.1 * 2**attempt)  # another conditional put was under way
        raise AssertionError

    def list(self, prefix: str = "") -> list[Entry]:
        start = len(self._path(""))
        entries = [_entry(meta["path"][start:], meta) for meta in self._listing()["objects"]]
        return [entry for entry in entries if entry.key and entry.key.startswith(prefix)]

    def _listing(self) -> Any:
        with suppress(FileNotFoundError):
            return self._tried("", partial(self._bucket.list_with_delimiter, self._prefix or None))
        return {"objects": [], "common_prefixes": []}

    def stat(self, key: str) -> Entry:
        return _entry(key, self._tried(key, partial(self._bucket.head, self._path(key))))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        # A large checkpoint has very many small files.
        results_of([partial(self._delete, key) for key in wanted], self.caps.depth, "terrazzo-delete")

    def _delete(self, key: str) -> None:
        with suppress(FileNotFoundError), self._failing(key):
            self._bucket.delete(self._path(key))

    def adopt(self, other: Store, key: str, name: str) -> str | None:
        """Copy within one bucket, by the store itself."""
        if not isinstance(other, ObjectStore):
            return None
        here, there = urlsplit(self._url), urlsplit(other._url)
        if (here.scheme, here.netloc, self._settings) != (there.scheme, there.netloc, other._settings):
            return None
        if self._prefix == other._prefix:  # no save removes a file of the checkpoint that is valid now
            return key
        try:
            obstore.copy(self._bucket, other._path(key), self._path(name))
        except (FileNotFoundError, exceptions.BaseError):  # S3 copies up to 5 GB by one request: it is written again
            return None
        return name

    def _tried(self, key: str, read: Callable[[], T]) -> T:
        """The result of `read`, repeated if a reply breaks off while it is read: the client does not retry that."""
        for attempt in range(_TRIES):
            try:
                return read()
            except (exceptions.BaseError, FileNotFoundError) as error:
                self._check_bucket(error)
                if isinstance(error, FileNotFoundError):
                    raise
                text = str(error) if isinstance(error, exceptions.GenericError) else ""
                if "416 Range" in text:
                    raise EOFError(f"{self._url}/{key} ends before the first byte of the requested range") from error
                if attempt == _TRIES - 1 or "response body error" not in text:
                    self._fail(key, error)
            time.sleep(0.05 * 2**attempt)
        raise AssertionError

    def _check_bucket(self, error: Exception, *, certain: bool = False) -> None:
        """Raise if the bucket is what was not found: then a file is not absent, and no other save has removed it.

        `certain`: the request creates the file, so nothing else can be missing.
        """
        missing = certain and isinstance(error, FileNotFoundError)
        if missing or any(text in str(error) for text in _NO_BUCKET):
            raise CheckpointIOError(
                f"{self._url}: there is no bucket or container {urlsplit(self._url).netloc!r}: create it, or correct "
                "the URL"
            ) from error

    @contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        """Raise the client's errors of what is done with a key as `_fail` does."""
        try:
            yield
        except exceptions.BaseError as error:
            self._fail(key, error)

    def _fail(self, key: str, error: Exception) -> NoReturn:
        """Raise an error of the client as an `OSError`, which the rest of the library handles."""
        if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
            raise PermissionError(f"{self._url}/{key}: {_short(error)}") from error
        raise OSError(f"{self._url}/{key}: {_short(error)}") from error


class _Parts(Upload):
    """An object that is sent in parts; it exists when the last one has been sent."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._key = key
        path = store._path(key)
        with store._failing(key):
            self._writer: Any = obstore.open_writer(store._bucket, path, buffer_size=_PART, max_concurrency=3)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._store._failing(self._key):
            for data in buffers:  # each is copied, because the client sends this memory later
                self._writer.write(bytes(data))

    def finish(self) -> None:
        with self._store._failing(self._key):
            self._writer.close()

    def abort(self) -> None:
        self._writer = None  # closing it would complete an object from the parts that were sent


def _joined(data: bytes | memoryview | Sequence[memoryview]) -> bytes | memoryview:
    return data if isinstance(data, (bytes, memoryview)) else b"".join(data)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes; large ones with NumPy, which releases the interpreter's lock."""
    if len(source) < _LARGE_COPY:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _client(url: str, settings: dict[str, Any]) -> Any:
    """The client of a bucket; stores with the same settings share one, with its connections.

    Making a client takes 10 ms, during which no other thread runs Python.
    """
    with suppress(TypeError):  # of functions, for example, which cannot be compared
        text = json.dumps(settings, sort_keys=True)
        if json.loads(text) == settings:
            return _known_client(url, text, frozenset(os.environ.items()))
    return _made_client(url, settings)


@lru_cache(maxsize=8)
def _known_client(url: str, settings: str, environment: frozenset[tuple[str, str]]) -> Any:
    return _made_client(url, json.loads(settings))


def _made_client(url: str, settings: dict[str, Any]) -> Any:
    return from_url(url, **_with_checksums(url, _with_plain_http(settings)))


_process: int | None = None  # the first one that has made a request


def _check_not_forked(url: str) -> None:
    """Raise in a forked process, which lacks the threads of its parent that wait for replies: it would wait forever."""
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise CheckpointIOError(
            f"{url} cannot be used in a process that was forked from one that has used an object store: start it with "
            f"'spawn', as by torch.multiprocessing.get_context('spawn') or DataLoader(multiprocessing_context='spawn')"
        )


def _with_checksums(url: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with a checksum in each upload to S3, unless another one is set; None sends none."""
    names = {"checksum_algorithm", "aws_checksum_algorithm"}
    if any(name.lower() in names for name in (*settings, *settings.get("config", {}))):
        return {name: value for name, value in settings.items() if value is not None or name.lower() not in names}
    if not url.startswith(("s3://", "s3a://")) or os.environ.get("AWS_CHECKSUM_ALGORITHM"):
        return settings
    return settings | {"checksum_algorithm": "SHA256"}  # which the client computes for the signature, too


def _with_plain_http(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with plain HTTP allowed if the endpoint is given as `http://`."""
    endpoint = settings.get("endpoint") or next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
    if not str(endpoint).startswith("http://"):
        return settings
    return settings | {"client_options": {"allow_http": True} | settings.get("client_options", {})}


def _short(error: Exception) -> str:
    """The client's error message, without the debugging details that it appends."""
    return str(error).partition("\n\nDebug source")[0]


def _version(meta: Any) -> Version:
    """What identifies a version of an object; which of these a conditional put needs depends on the store."""
    return Version(json.dumps({name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}))


def _entry(key: str, meta: Any) -> Entry:
    return Entry(key, meta["size"], meta["last_modified"].timestamp())
