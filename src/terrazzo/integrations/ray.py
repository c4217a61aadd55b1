"""Ray Train: checkpoints that Ray knows, written by all workers directly to Ray's storage.

In the function of a `ray.train.torch.TorchTrainer`, where Ray has created the process group:

    def train(config):
        engine = terrazzo.engine.initialize(model, training_data=data, config=config["engine"])
        ray_train.resume(engine)
        for batch in engine.training_dataloader:
            ...
            engine.step()
            if engine.global_steps % 100 == 0:
                ray_train.report(engine, {"loss": loss.item()})

Ray registers such a checkpoint without copying it. Workers that are started after a failure resume from it, on any
number of them, and so does a later run of the same name.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from terrazzo.engine.saving import find_to_load
from terrazzo.errors import EngineError

if TYPE_CHECKING:
    from terrazzo.engine import Engine

# pyarrow's names of file systems, and the prefixes of their URLs.
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "az://"}


def report(engine: Engine, metrics: Mapping[str, Any], client_state: Mapping[str, Any] | None = None) -> None:
    """Save, and report the checkpoint with the metrics to Ray; called by all workers together.

    Args:
        metrics: Ray keeps those of the first worker.
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
    """Resume from the run's last checkpoint, and return its client state; None if there is none yet.

    A worker may die after a checkpoint is committed and before it is reported to Ray, so the last one in the run's
    folder is used. A run without one starts from the checkpoint that Ray passes, of another run.
    """
    from ray import train

    storage = train.get_context().get_storage()
    own = _url(storage.storage_filesystem, storage.experiment_fs_path)
    if find_to_load(own, None) is not None:
        return engine.load_checkpoint(own)[1]
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return None
    folder, tag = posixpath.split(checkpoint.path.rstrip("/"))
    return engine.load_checkpoint(_url(checkpoint.filesystem, folder), tag)[1]


def _url(filesystem: Any, path: str) -> str:
    """The URL or path of a folder in one of pyarrow's file systems."""
    kind = filesystem.type_name
    if kind not in _SCHEMES:
        known = ", ".join(_SCHEMES)
        raise EngineError(
            f"Ray's storage for this run is a file system {kind!r}; checkpoints can be written to {known}"
        )
    return _SCHEMES[kind] + path
