"""Checkpoints: saving and loading against `torch.distributed.checkpoint` and plain reads and writes of a file."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import terrazzo.checkpoint as ours
import terrazzo.tensor as our_tensor
from benchmarks import checkpoint_scale as scale
from benchmarks.async_blocks import async_blocks
from benchmarks.cases import Budget, Implementations, Prepared, Setting, case
from benchmarks.measure import extra_memory

State = dict[str, Any]
_PIECE = 16 << 20
_WINDOW = 1 << 20

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")


class _Job:
    """States of one shape in both libraries, and where they are saved."""

    def __init__(self, setting: Setting, tensors: int, shape: tuple[int, int]) -> None:
        self.setting = setting
        self.mesh: DeviceMesh = init_device_mesh(setting.device.type, (setting.world,))
        self.tensors, self.shape = tensors, shape

    def state(self, library: Any, dim: int, fill: float) -> State:
        local = list(self.shape)
        local[dim] //= self.setting.world
        return {
            f"layers.{number}.weight": library.DTensor.from_local(
                torch.full(local, fill, device=self.setting.device), self.mesh, [library.Shard(dim)]
            )
            for number in range(self.tensors)
        }

    def folder(self, name: str) -> Path:
        return self.setting.folder / name

    def emptied(self, name: str) -> Callable[[], None]:
        """Something that removes what the sample before has written."""

        def remove() -> None:
            if self.setting.rank == 0:
                shutil.rmtree(self.folder(name), ignore_errors=True)
                os.sync()
            dist.barrier()

        return remove

    @property
    def bytes_of_rank(self) -> int:
        return self.tensors * self.shape[0] * self.shape[1] * 4 // self.setting.world


def _large(setting: Setting) -> _Job:
    """1 GB in 32 tensors."""
    return _Job(setting, 32, (512, 512) if setting.quick else (4096, 2048))


def _small(setting: Setting) -> _Job:
    """4000 tensors of 64 x 64."""
    return _Job(setting, 400 if setting.quick else 4000, (64, 64))


def _raw_file(job: _Job) -> tuple[Path, memoryview]:
    job.folder("raw").mkdir(exist_ok=True)
    buffer = memoryview(bytearray(b"\1") * job.bytes_of_rank)
    return job.folder("raw") / str(job.setting.rank), buffer


def _raw_write(path: Path, data: memoryview) -> None:
    path.parent.mkdir(exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for start in range(0, len(data), _PIECE):
        os.pwrite(fd, data[start : start + _PIECE], start)
    os.fsync(fd)
    os.close(fd)


def _raw_read(path: Path, data: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    for start in range(0, len(data), _PIECE):
        os.preadv(fd, [data[start : start + _PIECE]], start)
    os.close(fd)


def _saves(job: _Job) -> dict[str, Any]:
    mine, theirs = job.state(our_tensor, 0, 1.0), job.state(torch_tensor, 0, 1.0)
    return {
        "terrazzo": Prepared(lambda: ours.save(mine, checkpoint_id=job.folder("ours")), job.emptied("ours")),
        "torch": Prepared(lambda: dcp.save(theirs, checkpoint_id=job.folder("torch")), job.emptied("torch")),
    }


def _loads(job: _Job, dim: int, *, verify: bool = True) -> dict[str, Any]:
    ours.save(job.state(our_tensor, 0, 1.0), checkpoint_id=job.folder("ours"))
    dcp.save(job.state(torch_tensor, 0, 1.0), checkpoint_id=job.folder("torch"))
    mine, theirs = job.state(our_tensor, dim, 0.0), job.state(torch_tensor, dim, 0.0)
    folder = job.folder("ours")
    return {
        "terrazzo": lambda: ours.load(mine, storage_reader=ours.FileSystemReader(folder, verify=verify)),
        "torch": lambda: dcp.load(theirs, checkpoint_id=job.folder("torch")),
    }


@case(world=2, repetitions=7, budget=Budget("speed", 1, "raw"), runs_on="both")
def save_large(setting: Setting) -> Implementations:
    job = _large(setting)
    path, data = _raw_file(job)
    return _saves(job) | {"raw": Prepared(lambda: _raw_write(path, data), job.emptied("raw"))}


def _load_large(setting: Setting, *, verify: bool) -> Implementations:
    job = _large(setting)
    path, data = _raw_file(job)
    _raw_write(path, data)
    return _loads(job, 0, verify=verify) | {"raw": lambda: _raw_read(path, data)}


@case(world=2, repetitions=7, budget=Budget("speed", 0.8, "raw"), runs_on="both")
def load_large(setting: Setting) -> Implementations:
    return _load_large(setting, verify=True)


@case(world=2, repetitions=7, budget=Budget("speed", 0.95, "raw"))
def load_large_unchecked(setting: Setting) -> Implementations:
    return _load_large(setting, verify=False)


def _raw_columns(job: _Job) -> Callable[[], None]:
    """Reads the rows of all tensors, a piece at a time, and copies this rank's columns of them."""
    path, data = _raw_file(job)
    _raw_write(path, data)
    dist.barrier()
    world, rank = job.setting.world, job.setting.rank
    height, width = job.shape
    own = slice(rank * width // world, (rank + 1) * width // world)
    targets = [torch.zeros(height, width // world) for _ in range(job.tensors)]
    rows = min(_WINDOW // (4 * width), height // world)
    window = bytearray(4 * width * rows)
    read = torch.frombuffer(window, dtype=torch.float32).view(rows, width)

    def load() -> None:
        for part in range(world):
            fd = os.open(path.parent / str(part), os.O_RDONLY)
            position = 0
            for target in targets:
                for piece in target.chunk(world)[part].split(rows):
                    os.preadv(fd, [window], position)
                    piece.copy_(read[:, own])
                    position += len(window)
            os.close(fd)

    return load


# Every rank needs some bytes of all pages, so that it has to read everything, and beside that there is little to do.
# PyTorch takes one of two times here, one more than twice the other: it reads each stored chunk into new memory, of
# which malloc either keeps the pages from chunk to chunk or gives them back, as its heap happens to be. Then every
# load has 262,144 page faults on each rank. MALLOC_MMAP_THRESHOLD_=1000000 forces the one, 1073741824 with
# MALLOC_TRIM_THRESHOLD_=17179869184 the other. Hence the plain read beside it, which takes one time.
@case(world=2, repetitions=15, budget=Budget("speed", 2), runs_on="both")
def load_large_other_dim(setting: Setting) -> Implementations:
    job = _large(setting)
    return _loads(job, 1) | {"raw": _raw_columns(job)}


@case(world=2, repetitions=5, budget=Budget("speed", 20), runs_on="both")
def save_small(setting: Setting) -> Implementations:
    return _saves(_small(setting))


@case(world=2, repetitions=5, budget=Budget("speed", 20), runs_on="both")
def load_small(setting: Setting) -> Implementations:
    return _loads(_small(setting), 0)


@case(world=2, repetitions=5, budget=Budget("speed", 20))
def load_small_other_dim(setting: Setting) -> Implementations:
    return _loads(_small(setting), 1)


@case(world=2, repetitions=9, budget=Budget("time", 1, "copy"), runs_on="both")
def async_save_blocks(setting: Setting) -> Implementations:
    """How long `async_save` holds training up, against one copy of the state in memory."""
    job = _large(setting)
    return async_blocks(job.state(our_tensor, 0, 1.0), job.folder("async"))


@case(world=2, repetitions=9, budget=Budget("time", 3, "copy"), runs_on="both")
def async_save_blocks_small(setting: Setting) -> Implementations:
    job = _small(setting)
    return async_blocks(job.state(our_tensor, 0, 1.0), job.folder("async"))


@case(repetitions=5, budget=Budget("time", 1.5, "waiting"))
def async_save_beside_work(setting: Setting) -> Implementations:
    """How much longer a save in the background takes while the main thread computes in Python than while it waits.

    It saves to memory, where there is a file system of it: how much a disk has still to write differs each time.
    """
    count = 8 if setting.quick else 256
    state = {f"w{number}": torch.ones(1 << 20) for number in range(count)}
    memory = Path("/dev/shm")
    place = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else setting.folder)  # until this process ends

    def save(meanwhile: Callable[[Future[Any]], object]) -> None:
        saving = ours.async_save(state, checkpoint_id=Path(place.name) / "beside", no_dist=True)
        meanwhile(saving)
        saving.result()

    def compute(saving: Future[Any]) -> None:
        number = 0
        while not saving.done():
            number = (number * 7 + 1) % 1_000_003

    return {"terrazzo": lambda: save(compute), "waiting": lambda: save(lambda saving: None)}


def _command(setting: Setting, *arguments: str) -> Implementations:
    """A command on 100,000 tensors of few elements, in a process of its own."""
    path = setting.folder / "many"
    count = 1000 if setting.quick else 100_000
    ours.save(
        {f"layers.{n}.weight": torch.full((4,), float(n)) for n in range(count)}, checkpoint_id=path, no_dist=True
    )
    command = [sys.executable, "-m", "terrazzo", *(str(path) if part == "PATH" else part for part in arguments)]

    def run() -> float:
        return _seconds(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))

    return {"terrazzo": run}


@case(unit="seconds", repetitions=3, budget=Budget("value", 1))
def command_ls(setting: Setting) -> Implementations:
    return _command(setting, "ls", "PATH")


@case(unit="seconds", repetitions=3, budget=Budget("value", 1))
def command_show(setting: Setting) -> Implementations:
    return _command(setting, "show", "PATH", "layers.7.weight")


@case(unit="seconds", repetitions=3, budget=Budget("value", 1))
def command_diff(setting: Setting) -> Implementations:
    return _command(setting, "diff", "PATH", "PATH")


@case(unit="seconds", repetitions=3, budget=Budget("value", 1))
def command_verify(setting: Setting) -> Implementations:
    return _command(setting, "verify", "PATH")


@case(world=2, unit="MB", repetitions=3, budget=Budget("value", 64))
def save_memory(setting: Setting) -> Implementations:
    job = _large(setting)
    state = job.state(our_tensor, 0, 1.0)
    return {"terrazzo": lambda: extra_memory(lambda: ours.save(state, checkpoint_id=job.folder("ours")))}


@case(world=2, unit="MB", repetitions=3, budget=Budget("value", 64))
def load_memory(setting: Setting) -> Implementations:
    job = _large(setting)
    ours.save(job.state(our_tensor, 0, 1.0), checkpoint_id=job.folder("ours"))
    state = job.state(our_tensor, 1, 0.0)
    return {"terrazzo": lambda: extra_memory(lambda: ours.load(state, checkpoint_id=job.folder("ours")))}


@case(world=2, unit="MB", repetitions=3, budget=Budget("value", 64))
def async_save_memory(setting: Setting) -> Implementations:
    """Beyond one copy of the state, which is kept from the first save on."""
    job = _large(setting)
    state = job.state(our_tensor, 0, 1.0)
    ours.async_save(state, checkpoint_id=job.folder("ours")).result()
    return {"terrazzo": lambda: extra_memory(lambda: ours.async_save(state, checkpoint_id=job.folder("ours")).result())}


def _training_state(dtype: torch.dtype, quick: bool) -> State:
    """What a model has after some steps of AdamW: weights in `dtype`, and float32 averages of real gradients."""
    torch.manual_seed(0)
    width, steps = (64, 5) if quick else (512, 20)
    layers = [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
    model = torch.nn.Sequential(torch.nn.Embedding(1000, width), *layers, torch.nn.Linear(width, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        tokens = torch.randint(0, 1000, (256,))
        loss = torch.nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 1000)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = {name: value.to(dtype) for name, value in model.state_dict().items()}
    averages = {
        str(number): {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        for number, state in enumerate(optimizer.state.values())
    }
    return {"model": weights, "optim": averages}


def _saved_by_compression(setting: Setting, state: State) -> Implementations:
    """Stored bytes over bytes of the tensors, with zstd and byte shuffle."""

    def save() -> float:
        folder = setting.folder / "compressed"
        ours.save(state, storage_writer=ours.FileSystemWriter(folder, compression=True), no_dist=True)
        opened = ours.Checkpoint(folder)
        return sum(file.stat().st_size for file in folder.iterdir()) / sum(map(opened.nbytes, opened))

    return {"terrazzo": save}


@case(unit="ratio", repetitions=1)
def compressed_bfloat16_weights(setting: Setting) -> Implementations:
    return _saved_by_compression(setting, _training_state(torch.bfloat16, setting.quick)["model"])


@case(unit="ratio", repetitions=1)
def compressed_float32_weights(setting: Setting) -> Implementations:
    return _saved_by_compression(setting, _training_state(torch.float32, setting.quick)["model"])


@case(unit="ratio", repetitions=1)
def compressed_adamw_averages(setting: Setting) -> Implementations:
    return _saved_by_compression(setting, _training_state(torch.float32, setting.quick)["optim"])


def _scale(setting: Setting, shapes: int = 50) -> scale.Job:
    """Ranks, and tensors that each of them has a shard of."""
    return scale.Job(64, 2000, min(shapes, 2000)) if setting.quick else scale.Job(1024, 100_000, shapes)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@case(unit="seconds", repetitions=5, budget=Budget("value", 2.0))
def plan_at_scale(setting: Setting) -> Implementations:
    """What one rank of 1024 does before it writes its part of 100 million chunks."""
    job = _scale(setting)
    state = scale.state_of(job.ranks // 2, job)
    return {"terrazzo": lambda: _seconds(lambda: scale.plan_save(job.ranks // 2, job, state))}


@case(unit="seconds", repetitions=1)
def merge_at_scale(setting: Setting) -> Implementations:
    """What the coordinator does with the parts of 1024 ranks."""
    parts = scale.parts_of(_scale(setting))
    return {"terrazzo": lambda: _seconds(lambda: scale.merge_parts(parts))}


@case(unit="MB", repetitions=1, budget=Budget("value", 64))
def root_at_scale(setting: Setting) -> Implementations:
    size = len(scale.merge_parts(scale.parts_of(_scale(setting))))
    return {"terrazzo": lambda: size / 1e6}


@case(unit="seconds", repetitions=5, budget=Budget("value", 2.0))
def read_at_scale(setting: Setting) -> Implementations:
    """What one rank of 1024 does to find its part of 100 million chunks."""
    return _read_at_scale(_scale(setting))


@case(unit="seconds", repetitions=5, budget=Budget("value", 2.0))
def read_at_scale_all_different(setting: Setting) -> Implementations:
    """The same where no two tensors have one shape."""
    return _read_at_scale(_scale(setting, 100_000))


def _read_at_scale(job: scale.Job) -> Implementations:
    rank = job.ranks // 2
    index = scale.index_of(rank, job)
    data = scale.with_index(scale.merge_parts(scale.parts_of(job)), rank, index)
    state = scale.state_of(rank, job)
    return {"terrazzo": lambda: _seconds(lambda: scale.read_part(data, index, state))}


@case(unit="ratio", repetitions=3, budget=Budget("value", 1.3))
def column_slice(setting: Setting) -> Implementations:
    """Bytes read over bytes wanted: an eighth of the columns of 64 MiB, in rows of 128 KiB."""
    wide = torch.zeros(512, 32768)
    ours.save({"w": wide}, checkpoint_id=setting.folder / "wide", no_dist=True)

    def read() -> float:
        checkpoint = ours.Checkpoint(setting.folder / "wide")
        part = checkpoint["w"][:, 4096:8192]
        return checkpoint.bytes_read / part.nbytes

    return {"terrazzo": read}
