"""Ray Train: a worker dies, and fewer go on from the checkpoint that Ray was told of, which is where it was saved."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ranks import fresh_values
from terrazzo.checkpoint import verify

pytest.importorskip("ray.train")

HERE = Path(__file__).parent
CLUSTERS = HERE.parents[1] / "examples" / "clusters"
STEPS, DIES_AT = 4, 3


def check_ray(folder: str) -> tuple[str, dict, list[float]]:
    os.environ |= {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}
    sys.path[:0] = [str(CLUSTERS), str(HERE)]
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    import ray
    import ray_train as example
    from regression_runs import losses_alone

    workers = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local",
        num_cpus=3,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": workers},
    )
    config = {"steps": STEPS, "notes": f"{folder}/notes.jsonl", "backend": "gloo"}
    try:
        with pytest.raises(ray.train.TrainingFailedError):
            example.run(folder, workers=2, failures=0, dies_at=DIES_AT, **config)
        result = example.run(folder, workers=1, **config)
    finally:
        ray.shutdown()
    assert result.error is None, result.error
    return result.checkpoint.path, result.metrics, losses_alone(STEPS)


@pytest.mark.long
def test_a_worker_dies_and_fewer_go_on(tmp_path):
    [(path, metrics, expected)] = fresh_values(1, check_ray, str(tmp_path), timeout=900)
    # Two workers lost step 3, which the one then did again.
    notes = [tuple(json.loads(line)) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert [note[:2] for note in notes] == [(2, 1), (2, 2), (2, 3), (1, 3), (1, 4)]
    assert [loss for _, _, loss in notes] == pytest.approx([expected[step - 1] for _, step, _ in notes], rel=1e-5)
    assert metrics["step"] == STEPS and metrics["loss"] == notes[-1][2]
    # What Ray has is the very folder that the ranks wrote, and there is no other.
    assert Path(path) == tmp_path / "regression" / f"global_step{STEPS}" and verify(path) == []
    folders = [file.parent.name for file in tmp_path.rglob("manifest.terrazzo")]
    assert sorted(folders) == ["global_step1", "global_step2", "global_step3", "global_step4"]
