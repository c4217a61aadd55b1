"""A run that is saved to a URL and resumed from it: on ranks, in the background, in DeepSpeed's layout."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
import torch

from engine.runs import engine_of, make_model, train, weights
from ranks import run_ranks
from s3_server import BUCKET, S3Server
from terrazzo.checkpoint import Checkpoint, verify
from terrazzo.checkpoint.stores import store_at
from terrazzo.checkpoint.tools.compare import compare
from terrazzo.errors import CheckpointExistsError, CheckpointNotFoundError


def save_and_resume(url: str, environment: dict[str, str], local: str) -> dict[str, torch.Tensor]:
    os.environ.update(environment)
    engine = engine_of(2)
    assert engine.load_checkpoint(url) == (None, {})
    train(engine, 1)
    engine.save_checkpoint(url, client_state={"mine": 5})
    train(engine, 1, start=1)
    engine.save_checkpoint(url, "second", async_op=True).result()
    engine.save_checkpoint(local, "second")
    engine.save_checkpoint(f"{url}/deepspeed", "tag", layout="deepspeed")
    with pytest.raises(CheckpointExistsError):
        engine.save_checkpoint(f"{url}/deepspeed", "tag", layout="deepspeed")
    engine.save_checkpoint(f"{local}/deepspeed", "tag", layout="deepspeed")
    with pytest.raises(CheckpointNotFoundError, match="global_step1, second"):
        engine.load_checkpoint(url, "third")
    expected = weights(engine)
    for where in (url, f"{url}/deepspeed"):
        other = engine_of(3, make_model(seed=5))
        path, client = other.load_checkpoint(where)
        assert path == f"{where}/{'second' if where == url else 'tag'}" and other.global_steps == 2 and client == {}
        found = weights(other)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    path, client = engine.load_checkpoint(url, "global_step1")
    assert path == f"{url}/global_step1" and client == {"mine": 5} and engine.global_steps == 1
    return expected


def test_urls_of_runs(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/run"
    run_ranks(2, save_and_resume, url, s3.environment(), str(tmp_path))
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    assert bytes(store_at(url).get("latest")[0]) == b"second"
    assert verify(f"{url}/second") == [] and Checkpoint(url)["global_steps"] == 2
    for inner in ("second", "deepspeed"):
        one, other = Checkpoint(f"{url}/{inner}"), Checkpoint(tmp_path / inner)
        assert [found for found in compare(one, other) if not found.name.startswith("rng@")] == []
