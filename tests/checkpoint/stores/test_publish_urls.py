"""Publishing through a bucket."""

from __future__ import annotations

import os
import uuid

import pytest
import torch

from ranks import run_ranks
from s3_server import BUCKET, S3Server
from terrazzo.errors import ConflictError
from terrazzo.publish import Publisher, Receiver
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh


def live(url: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(66, 40)
    rows, columns = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(whole, mesh, [Shard(1)])
    receiver = Receiver(url, {"w": columns})
    assert receiver.poll() is None
    first = Publisher(url, {"w": rows}, anchor_every=3, keep=1)
    full = []
    for number in range(7):
        whole[number * 9] += 1
        rows.to_local().copy_(distribute_tensor(whole, mesh, [Shard(0)]).to_local())
        first.publish(number)
        full.append(first.wait().is_full)
        if number % 3 != 1:
            assert (receiver.poll(), receiver.apply()) == (number, number)
            assert columns.full_tensor().equal(whole)
    assert full == [number % 3 == 0 for number in range(7)]
    # The server may list a folder for a while after its last object is gone.
    store = first._sender._versions._catalog.root.store
    assert [name for name in store.folders() if store.beneath(name).exists("manifest.terrazzo")] == ["global_step6"]
    with Publisher(url, {"w": rows}) as second:
        second.publish(7)
    first.publish(8)
    with pytest.raises(ConflictError):
        first.wait()
    assert receiver.poll() == 7


def test_versions_in_a_bucket(s3: S3Server) -> None:
    run_ranks(2, live, f"s3://{BUCKET}/{uuid.uuid4().hex}", s3.environment())
