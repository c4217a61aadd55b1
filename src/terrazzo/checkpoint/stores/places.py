"""From a path or a URL to the store of what lies there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from terrazzo.checkpoint.stores.base import Store
from terrazzo.checkpoint.stores.local import LocalStore

_OBJECT_SCHEMES: Final = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether this names something behind a URL, rather than a path of this machine.

    >>> is_url("s3://bucket/run"), is_url("/runs/1")
    (True, False)
    """
    return "://" in os.fspath(path)


def store_at(path: str | os.PathLike[str], *, durable: bool = True, **settings: Any) -> Store:
    """The store of a folder, or of a URL: `s3://`, `gs://`, `az://`, `file://`, or whatever `fsspec` knows.

    `settings` are for the store's client; without them, the usual environment variables count.

    >>> store_at("/runs/1").location, store_at("s3://bucket/run", region="eu-west-1").location
    ('/runs/1', 's3://bucket/run')
    """
    text = os.fspath(path)
    scheme, mark, rest = text.partition("://")
    if not mark or scheme == "file":
        return LocalStore(rest if mark else text, durable=durable)
    if scheme in _OBJECT_SCHEMES:
        from terrazzo.checkpoint.stores.object_store import ObjectStore  # its client is loaded when it is asked for

        return ObjectStore(text, **settings)
    from terrazzo.checkpoint.stores.fsspec_store import FsspecStore

    return FsspecStore(text, **settings)


def beneath(path: str | os.PathLike[str], name: str) -> str | Path:
    """Something in a folder, or under a URL.

    >>> beneath("s3://bucket/run", "step-1"), beneath("/runs", "1")
    ('s3://bucket/run/step-1', PosixPath('/runs/1'))
    """
    return f"{os.fspath(path).rstrip('/')}/{name}" if is_url(path) else Path(path) / name
