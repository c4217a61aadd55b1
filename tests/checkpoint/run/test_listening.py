"""Who listens: saving processes, and the store by which they meet, are reached from this host alone."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.checkpoint import AsyncCheckpointerType, async_save
from terrazzo.checkpoint.run.background import background_of

LISTENS = "0A"  # the state of a socket in /proc/net/tcp
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listeners(process: int) -> set[tuple[str, str]]:
    """The addresses and ports on which a process listens, as /proc writes them."""
    inodes = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes.add(os.readlink(file))
        except OSError:  # closed meanwhile
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, port))
    return found


def listening(path: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    before = listeners(os.getpid())
    kind = AsyncCheckpointerType.PROCESS
    async_save(
        {"w": torch.ones(2)}, checkpoint_id=path, async_checkpointer_type=kind, timeout=timedelta(seconds=60)
    ).result()
    dist.barrier()
    own = listeners(os.getpid()) - before
    process = background_of(None, False)._process
    assert process is not None
    theirs = listeners(process._process.pid)
    dist.barrier()
    background_of(None, False).close()
    return own, theirs


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="the system does not say who listens")
def test_saving_processes_listen_on_loopback_only(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)):  # what is looked for can be seen
        assert "00000000" in {address for address, _ in listeners(os.getpid())}
    told = run_ranks(2, listening, str(tmp_path))
    for own, theirs in told:
        assert {address for address, _ in own | theirs} <= LOOPBACK, told
    assert told[0][0] and all(theirs for _, theirs in told), "the store, and the processes' own connections"
