"""What `terrazzo.integrations.ray` does on its ranks, with a stand-in for Ray's context."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.engine import initialize, saving
from terrazzo.errors import CheckpointException
from terrazzo.integrations import ray as ray_train


def check_resume(folder: str) -> None:
    storage = SimpleNamespace(storage_filesystem=SimpleNamespace(type_name="local"), experiment_fs_path=folder)
    train = ModuleType("ray.train")
    train.get_context = lambda: SimpleNamespace(get_storage=lambda: storage)
    train.get_checkpoint = lambda: None
    ray = ModuleType("ray")
    ray.train = train

    def fails(*_: object) -> None:
        raise PermissionError("the folder cannot be listed")

    engine = initialize(
        torch.nn.Linear(2, 2), config={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", ray)
        patch.setitem(sys.modules, "ray.train", train)
        assert ray_train.resume(engine) is None
        engine.save_checkpoint(folder, client_state={"epoch": 1})
        assert ray_train.resume(engine) == {"epoch": 1}
        if dist.get_rank() == 0:
            patch.setattr(saving, "named_by_latest", fails)
        with pytest.raises(CheckpointException, match="rank 0: PermissionError"):
            ray_train.resume(engine)


def test_an_error_of_the_rank_that_looks_for_a_checkpoint_is_one_on_all(tmp_path):
    run_ranks(2, check_resume, str(tmp_path))
