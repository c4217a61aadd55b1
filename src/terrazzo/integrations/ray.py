"""Ray Train: checkpoints that Ray knows of, written by all workers straight to where Ray keeps them.

Within the function of a `ray.train.torch.TorchTrainer`, where Ray has made the process group:

    def train(config):
        engine = terrazzo.engine.initialize(model, training_data=data, config=config["engine"])
        ray_train.resume(engine)
        for batch in engine.training_dataloader:
            ...
            engine.step()
            if engine.global_steps % 100 == 0:
                ray_train.report(engine, {"loss": loss.item()})

Ray registers such a checkpoint without copying it.  Workers that come after a failure go on from it, as many as there
are then, and so do those of a later run of the same name.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from terrazzo.engine.saving import find_checkpoint
from terrazzo.errors import EngineError

if TYPE_CHECKING:
    from terrazzo.engine import Engine

# pyarrow's names of file systems, and how their URLs begin.
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "az://"}


def report(engine: Engine, metrics: Mapping[str, Any], client_state: Mapping[str, Any] | None = None) -> None:
    """Save, and report the checkpoint with the metrics; all workers together.

    Args:
        metrics: the first worker's are kept by Ray.
        client_state: as for `save_checkpoint`; `resume` returns it.
    """
    from ray import train
    from ray.train import CheckpointUploadMode

    context = train.get_context()
    storage = context.get_storage()
    folder, tag = storage.experiment_fs_path, f"global_step{engine.global_steps}"
    engine.save_checkpoint(_url(storage.storage_filesystem, folder), tag, client_state)
    checkpoint = None
    if context.get_world_rank() == 0:
        checkpoint = train.Checkpoint(posixpath.join(folder, tag), filesystem=storage.storage_filesystem)
    train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def resume(engine: Engine) -> dict[str, Any] | None:
    """Go on from the run's last checkpoint, and return its client state; None if there is none yet.

    A worker can die before Ray has heard of a checkpoint that is whole: the last one in the run's folder counts.  A run
    that has none yet begins with what Ray hands it, of another run.
    """
    from ray import train

    storage = train.get_context().get_storage()
    own = _url(storage.storage_filesystem, storage.experiment_fs_path)
    found = [find_checkpoint(own, None) is not None] if not dist.is_initialized() or dist.get_rank() == 0 else [False]
    if dist.is_initialized():  # one rank looks: a folder may show it to some before others
        dist.broadcast_object_list(found, src=0)
    if found[0]:
        return engine.load_checkpoint(own)[1]
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return None
    folder, tag = posixpath.split(checkpoint.path.rstrip("/"))
    return engine.load_checkpoint(_url(checkpoint.filesystem, folder), tag)[1]


def _url(filesystem: Any, path: str) -> str:
    """How terrazzo names a folder of one of pyarrow's file systems."""
    kind = filesystem.type_name
    if kind not in _SCHEMES:
        known = ", ".join(_SCHEMES)
        raise EngineError(f"Ray keeps this run's files in a file system {kind!r}; checkpoints are written to {known}")
    return _SCHEMES[kind] + path
