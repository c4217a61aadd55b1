"""The life of a run's checkpoints in a bucket."""

from __future__ import annotations

import os
import uuid

import pytest
import torch

from ranks import run_ranks
from s3_server import BUCKET, S3Server
from terrazzo.checkpoint import CheckpointManager
from terrazzo.errors import CheckpointNotFoundError


def state(step: int) -> dict:
    return {"w": torch.full((64, 8), float(step)), "step": step}


def live(url: str, environment: dict[str, str]) -> tuple:
    os.environ.update(environment)
    with CheckpointManager(url, save=2, keep=1, best="loss") as manager:
        for step in range(1, 7):
            manager.save(step, state(step), {"loss": abs(step - 2)})
            if step == 5:
                manager.wait()
                held = manager.hold(4)
                held.__enter__()
        for which, step in (("latest", 6), ("best", 2), (4, 4)):
            target = state(-1)
            assert manager.restore(which, target) == target["step"] == step and target["w"].eq(step).all()
        held.__exit__(None, None, None)
        manager.save(8, state(8))
        manager.wait()
        with pytest.raises(CheckpointNotFoundError, match="it has 2, 8"):
            manager.restore(4, state(-1))
    store = manager._tiers.root.root.store
    # The server may list a folder for a while after its last object is gone.
    left = [name for name in store.folders() if store.beneath(name).list()]
    return manager.steps(), sorted(left), bytes(store.get("latest")[0])


def test_a_bucket(s3: S3Server):
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/run"
    for found in run_ranks(2, live, url, s3.environment()):
        assert found == ([2, 8], ["global_step2", "global_step8"], b"global_step8")
