"""Names of files that a checkpoint's own bytes give."""

from __future__ import annotations


def is_plain_name(name: str) -> bool:
    """Whether a name, of folders too, stays within the folder that it is looked up in, if no link leads out of it.

    >>> is_plain_name("shards/0.bin"), is_plain_name("../secret"), is_plain_name("/etc/passwd"), is_plain_name("a\\0")
    (True, False, False, False)
    """
    parts = name.split("/")
    return (
        "\0" not in name and ".." not in parts and "" not in parts and all(len(part.encode()) < 256 for part in parts)
    )
