"""Damaged and hostile checkpoints of every format: `python -m tests.checkpoint.fuzz --cases 1000 [--seed 1]`.

Files of real checkpoints are changed at random, and all that reads is tried on them.  Whatever the bytes are, it ends
in a value or in one of terrazzo's exceptions, within a second of work and 256 MB of memory, and the process lives.
Nothing that was read is compared with anything: formats without checksums cannot tell.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from checkpoint.formats.deepspeed.made import (
    elastic,
    plain,
    with_gaps,
    write,
    write_experts,
    write_pipeline,
    write_universal,
)
from terrazzo.checkpoint import Checkpoint, FileSystemWriter, LazyTensor, load, save, seal, verify
from terrazzo.checkpoint.formats import HuggingFaceWriter
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.formats.huggingface.layout import lay_out
from terrazzo.checkpoint.native.format import MAGIC, MANIFEST, checksum
from terrazzo.checkpoint.native.root import _PREAMBLE as PREAMBLE
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.tools.compare import compare
from terrazzo.errors import TerrazzoError

MEMORY = 256 << 20
SECONDS = 1.0
_PATIENCE = 20.0  # until what hangs is interrupted
LARGEST = (2**63 - 1, 2**63, 2**64 - 1, 2**31, 2**32 - 1, 2**40, 0, 1)


def small_state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(24.0).reshape(6, 4), "half": torch.ones(3, dtype=torch.bfloat16)},
        "step": 3,
        "object": {"betas": (0.9, 0.99), "names": ["a", "b"], "t": (torch.ones(2), torch.nn.Parameter(torch.ones(1)))},
    }


def seeds(folder: Path) -> dict[str, Path]:
    """A small checkpoint of each format."""
    import torch.distributed.checkpoint as dcp

    state = small_state()
    save(state, checkpoint_id=folder / "native", no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    shutil.copytree(folder / "dcp", folder / "sealed")
    seal(folder / "sealed")
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    write(folder / "stage2", 2)
    write(folder / "stage3", 3)
    write_universal(folder / "universal", 2)
    write(folder / "elastic", 2)
    elastic(folder / "elastic" / "tag")
    write(folder / "gaps", 2, 1)
    with_gaps(folder / "gaps" / "tag", [[1, 0, 2], [1]])
    write_experts(folder / "experts", False)
    (folder / "pipeline").mkdir()
    write_pipeline(folder / "pipeline")
    save(
        {"model": {"w": torch.arange(24.0).reshape(6, 4), "long": torch.arange(5000.0)}, "step": 3, "object": None},
        storage_writer=FileSystemWriter(folder / "compressed", compression=True),
        no_dist=True,
    )
    # The index is a file, and so is a value that is not a tensor.
    many = {"model": {f"w{number}": torch.ones(2, 2) for number in range(220)} | state["model"]}
    save(state | many | {"object": list(range(5000))}, checkpoint_id=folder / "indexed", no_dist=True)
    weights = {f"model.{name}": value for name, value in state["model"].items()}
    small = partial(lay_out, max_shard_size=64)
    save(weights, storage_writer=HuggingFaceWriter(folder / "huggingface", make_layout=small), no_dist=True)
    run = folder / "run"
    save(state, checkpoint_id=run / "global_step3", no_dist=True)
    (run / "latest").write_text("global_step3")
    return {
        "native": folder / "native",
        "dcp": folder / "dcp",
        "sealed": folder / "sealed",
        "zip": folder / "zip.pt",
        "legacy": folder / "legacy.pt",
        "stage2": folder / "stage2" / "tag",
        "stage3": folder / "stage3" / "tag",
        "universal": folder / "universal" / "tag",
        "elastic": folder / "elastic" / "tag",
        "gaps": folder / "gaps" / "tag",
        "experts": folder / "experts",
        "pipeline": folder / "pipeline" / "tag",
        "run": run,
        "compressed": folder / "compressed",
        "indexed": folder / "indexed",
        "huggingface": folder / "huggingface",
        "safetensors": next((folder / "huggingface").glob("*.safetensors")),
    }


# ------------------------------------------------------------------ damage


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes, changed in one to four ways."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        size = len(changed)
        at = rng.randrange(size) if size else 0
        kind = rng.randrange(8)
        if kind == 0 and size:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            changed[at] = rng.randrange(256)
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.randrange(64)]
        elif kind == 4:
            del changed[at : at + rng.randrange(32)]
        elif kind == 5 and size >= 8:
            where = rng.randrange(size - 7)
            changed[where : where + 8] = struct.pack("<Q", rng.choice(LARGEST))
        elif kind == 6 and size >= 4:
            where = rng.randrange(size - 3)
            changed[where : where + 4] = struct.pack("<I", rng.choice(LARGEST) & 0xFFFFFFFF)
        else:
            changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(9)))
    return bytes(changed)


ODD: tuple[Any, ...] = (
    *(*LARGEST, -1, -(2**62), 1.5, float("nan"), True, None, b"", [], {}, [2**31] * 3, {"a": {0: [1]}}, "", "float4"),
    *("../../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000, "\x1b[31m"),
)


def with_another_value(tree: Any, rng: random.Random, odd: tuple[Any, ...] = ODD) -> Any:
    """Plain values within each other with one of them removed or replaced, by one of its type or not."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if not keys:
        return rng.choice(odd)
    items = dict(tree) if isinstance(tree, dict) else dict(enumerate(tree))
    key = rng.choice(keys)
    if isinstance(items[key], dict | list | tuple) and rng.random() < 0.8:
        items[key] = with_another_value(items[key], rng, odd)
    elif rng.random() < 0.1:
        del items[key]
    else:
        items[key] = rng.choice([*odd, *keys, *items.values()])
    return (
        items if isinstance(tree, dict) else list(items.values()) if isinstance(tree, list) else tuple(items.values())
    )


def with_another_pickle(file: Path, rng: random.Random) -> bytes:
    """A file of `torch.save` whose value has another value in it."""
    try:
        value = plain(file)
    except TerrazzoError:  # another kind of file
        return behind_checksums(file.read_bytes(), rng)
    tensors = (torch.zeros(0), torch.ones(()), torch.ones(7), torch.ones(2, 3, dtype=torch.bfloat16))
    out = io.BytesIO()
    torch.save(with_another_value(value, rng, ODD + tensors) if isinstance(value, dict) else rng.choice(ODD), out)
    return out.getvalue()


def behind_checksums(data: bytes, rng: random.Random) -> bytes:
    """The bytes of a file with what its checksums protect changed, and the checksums too: malice, not damage."""
    if data[:8] == MAGIC:
        fields = list(PREAMBLE.unpack_from(data))
        head = data[PREAMBLE.size :]
        kind = rng.random()
        if kind < 0.6:
            head = msgspec.msgpack.encode(with_another_value(msgspec.msgpack.decode(head), rng))
        elif kind < 0.9:
            head = mutated(head, rng)
        else:
            fields[rng.choice((2, 6, 7))] = rng.choice((1, 2**31))
        fields[3:6] = [len(head), PREAMBLE.size + len(head), checksum(head)]
        preamble = PREAMBLE.pack(*fields)[:-8]
        return preamble + checksum(preamble).to_bytes(8, "little") + head
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        names = archive.namelist()
    except Exception:  # no archive, or a damaged one
        return mutated(data, rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for name in names:
            content = archive.read(name)
            target.writestr(name, mutated(content, rng) if name.endswith("data.pkl") else content)
    return out.getvalue()


def with_another_index(root: bytes, name: str, index: bytes | None, rng: random.Random) -> tuple[bytes, bytes]:
    """A root, and the index of the part whose index is in this file (none: in the root), changed to fit together."""
    fields = list(PREAMBLE.unpack_from(root))
    head = msgspec.msgpack.decode(root[PREAMBLE.size :])
    part = next(part for part in head["parts"] if part[1] == name)
    changed = mutated(part[4] if index is None else index, rng)
    part[2:4] = [len(changed), checksum(changed)]
    if index is None:
        part[4] = changed
    packed = msgspec.msgpack.encode(head)
    fields[3:6] = [len(packed), PREAMBLE.size + len(packed), checksum(packed)]
    preamble = PREAMBLE.pack(*fields)[:-8]
    return preamble + checksum(preamble).to_bytes(8, "little") + packed, changed


def damage_index(path: Path, rng: random.Random) -> str | None:
    """Change the index of a checkpoint of the native format behind its checksums; None if it has none."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return None
    file = next(path.glob("index-*"), None)
    root, index = with_another_index(
        manifest.read_bytes(), file.name if file else "", file.read_bytes() if file else None, rng
    )
    manifest.write_bytes(root)
    if file is not None:
        file.write_bytes(index)
    return "changed the index behind its checksums"


def damage(path: Path, rng: random.Random) -> str:
    """Change one file of a checkpoint, or put something else in its place; what was done."""
    if rng.random() < 0.2 and (done := damage_index(path, rng)) is not None:
        return done
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    small = [file for file in files if file.suffix != ".distcp"] or files
    victim = rng.choice(small if rng.random() < 0.6 else files)
    kind = rng.random()
    if kind < 0.5:
        if victim.suffix == ".pt" and rng.random() < 0.7:
            victim.write_bytes(with_another_pickle(victim, rng))
        else:
            victim.write_bytes(behind_checksums(victim.read_bytes(), rng))
        return f"changed {victim.name} behind its checksums"
    if kind < 0.86:
        victim.write_bytes(mutated(victim.read_bytes(), rng))
        return f"changed {victim.name}"
    if kind < 0.9 and len(files) > 1:
        other = rng.choice(files)
        victim.write_bytes(other.read_bytes())
        return f"put {other.name} in the place of {victim.name}"
    victim.unlink()
    if kind < 0.93:
        victim.mkdir()
        return f"put a folder in the place of {victim.name}"
    if kind < 0.96:
        os.mkfifo(victim)
        return f"put a pipe in the place of {victim.name}"
    if kind < 0.98:
        victim.write_bytes(b"")
        return f"emptied {victim.name}"
    return f"removed {victim.name}"


# ------------------------------------------------------------------ what somebody made by hand


def safetensors(path: Path, metadata: Any = None, name: str = "w", **files: Any) -> None:
    """A folder with a tensor of 4 numbers in `model-...`, and other files: their text, or how many zeros."""
    path.mkdir()
    header = {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    text = json.dumps(header if metadata is None else {"__metadata__": metadata, **header}).encode()
    (path / "model-00001-of-00001.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    for other, content in files.items():
        with (path / f"{other.replace('__', '.')}.json").open("w") as file:
            file.truncate(content) if isinstance(content, int) else file.write(content)


def index(name: str, file: str = "model-00001-of-00001.safetensors") -> dict[str, Any]:
    return {"model__safetensors__index": json.dumps({"weight_map": {name: file}})}


def link_to_itself(path: Path, name: str) -> None:
    path.mkdir()
    (path / name).symlink_to(path / name)


def data_linked_to_itself(path: Path) -> None:
    save({"w": torch.ones(4)}, checkpoint_id=path, no_dist=True)
    data = next(path.glob("data-*"))
    data.unlink()
    data.symlink_to(data)


def large_metadata(path: Path) -> None:
    path.mkdir()
    with (path / ".metadata").open("wb") as file:
        file.truncate(3 << 30)


def large_manifest(path: Path) -> None:
    path.mkdir()
    with (path / MANIFEST).open("wb") as file:
        file.truncate(8 << 30)


def large_marker(path: Path) -> None:
    """A checkpoint of terrazzo, and where `install()` leaves a line, 8 GB."""
    save({"w": torch.ones(4)}, checkpoint_id=path, no_dist=True)
    with (path / ".metadata").open("wb") as file:
        file.truncate(8 << 30)
    os.utime(path / ".metadata", (0, 0))


def planner_data(path: Path, change: Callable[[Any], Any]) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(4), "l": [1, {"a": 2}]}, checkpoint_id=str(path), no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = change(metadata.planner_data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def pickled_tensor(path: Path, size: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """A file of `torch.save` with a tensor of this size and a storage of 4 numbers."""

    class Storage:
        pass

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), 0, size, strides, False, None)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if isinstance(value, Storage) else None

    pickled = io.BytesIO()
    Pickler(pickled, 2).dump({"w": Tensor()})
    torch.save({"w": torch.ones(4)}, path)
    made = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    with zipfile.ZipFile(path, "w") as target:
        for name in made.namelist():
            target.writestr(name, pickled.getvalue() if name.endswith("data.pkl") else made.read(name))


def zipped(pickled: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """What `torch.save` writes, with this pickle and a storage of 4 numbers."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as target:
        for name, content in (
            ("data.pkl", pickled),
            ("byteorder", b"little"),
            ("data/0", bytes(16)),
            ("version", b"3"),
        ):
            target.writestr(f"archive/{name}", content)
    return made.getvalue()


def called(module: str, name: str, arguments: bytes) -> bytes:
    """A pickle that calls a function with arguments, which are pickled without their ends."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + arguments + b"R."


def value_in_dcp(path: Path, data: bytes) -> None:
    """A DCP checkpoint with a value whose bytes are these."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(small_state() | {"object": io.BytesIO(data)}, checkpoint_id=path, no_dist=True)


_STORED = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORED + b"K\x00J\x00\x00\xf0\x00\x85K\x00\x85\x89NtR"  # of 60 MB
_3_GB = b"\x8a\x05" + (3 << 30).to_bytes(5, "little")
_SIZE = b"\x8a\x08" + (1 << 60).to_bytes(8, "little")
_SPARSE = (  # of 2^60 rows, none of which is there
    b"ctorch.serialization\n_get_layout\nX\x10\x00\x00\x00torch.sparse_coo\x85R("
    + b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORED.replace(b"Float", b"Long").replace(b"K\x04", b"K\x00")
    + b"K\x00K\x01K\x00\x86K\x01K\x01\x86\x89NtR"
    + b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORED + b"K\x00K\x00\x85K\x01\x85\x89NtR"
    + b"ctorch\nSize\n(" + _SIZE + b"t\x85Rt\x86"
)  # fmt: skip
VALUES = {
    "bytes that ask for 3 GB": called("builtins", "bytearray", _3_GB + b"\x85"),
    "a value that asks for 3 GB": zipped(called("builtins", "bytearray", _3_GB + b"\x85")),
    "a value of a quantised tensor of 2^60": zipped(called("torch._utils", "_rebuild_qtensor", _SIZE + b"\x85")),
    "a value that is deflated": zipped(pickle.dumps(bytes(300 << 20)), zipfile.ZIP_DEFLATED),
    "a value of 40 tensors of 60 MB in 16 bytes": zipped(b"\x80\x02(" + _TENSOR * 40 + b"l."),
    "a value of a sparse tensor of 2^60": zipped(called("torch._utils", "_rebuild_sparse_tensor", _SPARSE)),
}

NO_TEXT = "w\ud800"
HOSTILE: dict[str, Callable[[Path], object]] = {
    "metadata is a list": lambda path: safetensors(path, [1]),
    "metadata is a text": lambda path: safetensors(path, "x"),
    "sharding is a number": lambda path: safetensors(path, {"DCP_SHARDING_INFO": 5}),
    "sharding is a list": lambda path: safetensors(path, {"DCP_SHARDING_INFO": "[1]"}),
    "offset of 10^9": lambda path: safetensors(path, {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [1000000000]}}'}),
    "name is no text": lambda path: safetensors(path, name=NO_TEXT),
    "name in an index is no text": lambda path: safetensors(path, **index(NO_TEXT)),
    "file in an index is no text": lambda path: safetensors(path, **index("w", f"{NO_TEXT}.safetensors")),
    "index of 3 GB": lambda path: safetensors(path, model__safetensors__index=3 << 30),
    "config of 3 GB": lambda path: safetensors(path, config=3 << 30),
    "deep config": lambda path: safetensors(path, config="[" * 100_000),
    "metadata of 3 GB": large_metadata,
    "manifest of 8 GB": large_manifest,
    "marker of 8 GB": large_marker,
    "pickled name is no text": lambda path: torch.save({NO_TEXT: torch.ones(4), "x": NO_TEXT}, path),
    "link to itself": lambda path: path.symlink_to(path),
    "data linked to itself": data_linked_to_itself,
    **{
        f"{name} linked to itself": partial(link_to_itself, name=name)
        for name in (
            "manifest.terrazzo",
            "latest",
            ".metadata",
            "model.safetensors",
            "model.safetensors.index.json",
            "mp_rank_00_model_states.pt",
        )
    },
    "planner data is a list": lambda path: planner_data(path, lambda data: [1, 2]),
    "planner data is a text": lambda path: planner_data(path, lambda data: "abc"),
    "paths are numbers": lambda path: planner_data(path, lambda data: dict.fromkeys(data, 5)),
    "paths have lists": lambda path: planner_data(path, lambda data: dict.fromkeys(data, ([1],))),
    "paths are empty": lambda path: planner_data(path, lambda data: dict.fromkeys(data, ())),
    "size overflows": lambda path: pickled_tensor(path, (1 << 40, 1 << 40), (0, 0)),
    "size of nothing overflows": lambda path: pickled_tensor(path, (1 << 59, 1 << 59, 0), (1, 1, 1)),
    "strides overflow": lambda path: pickled_tensor(path, (1, 1), (1 << 59, 1 << 59)),
    **{name: partial(value_in_dcp, data=data) for name, data in VALUES.items()},
    "4 numbers as 2^30": lambda path: pickled_tensor(path, (1 << 30,), (0,)),
}


# ------------------------------------------------------------------ what reads


def read_all(path: Path, scratch: Path) -> None:
    with Checkpoint(path) as opened:
        for name in opened:
            value = opened[name]
            if isinstance(value, LazyTensor):
                value[...]


def load_some(path: Path, scratch: Path) -> None:
    load({"model": {"w": torch.zeros(6, 4)}, "step": 0, "object": None}, checkpoint_id=path, no_dist=True)


def verify_it(path: Path, scratch: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # not everything has checksums
        verify(path)


def compare_it(path: Path, scratch: Path) -> None:
    list(compare(Checkpoint(path), Checkpoint(path)))


def to_native(path: Path, scratch: Path) -> None:
    convert(path, scratch / "native", "native")


def to_torch(path: Path, scratch: Path) -> None:
    convert(path, scratch / "file.pt", "torch_save")


def command(*names: str) -> Callable[[Path, Path], None]:
    def run(path: Path, scratch: Path) -> None:
        from terrazzo.cli import app

        arguments = [name.format(path=path, scratch=scratch) for name in names]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                app(arguments, standalone_mode=False)
            except Exception as error:
                if type(error).__name__ not in ("Exit", "BadParameter"):
                    raise
        text = out.getvalue()
        assert not any(c < " " and c != "\n" or "\x7f" <= c < "\xa0" for c in text), f"control characters: {text!r}"

    return run


READERS: dict[str, Callable[[Path, Path], None]] = {
    "read": read_all,
    "load": load_some,
    "verify": verify_it,
    "compare": compare_it,
    "native": to_native,
    "torch_save": to_torch,
    "ls": command("ls", "{path}"),
    "show": command("show", "{path}", "step"),
    "show tensor": command("show", "{path}", "model.w"),
}


class Hangs(BaseException):
    """A case took too long."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Within the memory and the time that a hostile file may cost."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))

    def stop(*_: Any) -> None:
        raise Hangs

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def asked_for_too_much(error: BaseException | None) -> bool:
    """Whether an error comes from one that says that there is no memory: elsewhere it is taken."""
    if "read a part of it" in str(error):  # a tensor of a size that `ls` shows, all of which was asked for
        return False
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False


def outcome(run: Callable[[], None]) -> str | None:
    """What is wrong with how this ended; None if nothing."""
    start = time.process_time()
    try:
        with bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except TerrazzoError as error:
        if asked_for_too_much(error):
            return f"asks for more memory: {error!r}"
    except Hangs:
        return f"hangs after {time.process_time() - start:.1f} s of work"
    except BaseException:  # noqa: B036  # all that should not come out
        return traceback.format_exc()
    took = time.process_time() - start
    return f"took {took:.2f} s" if took > SECONDS else None


def run_case(number: int, made: dict[str, Path], scratch: Path) -> str | None:
    """One case, the same for the same number."""
    rng = random.Random(number)
    name = rng.choice(sorted(made))
    source = made[name]
    target = scratch / source.name
    if source.is_file():
        shutil.copy(source, target)
    else:
        shutil.copytree(source, target)
    what = damage(target, rng)
    reader = rng.choice(sorted(READERS))
    wrong = outcome(lambda: READERS[reader](target, scratch / "out"))
    return f"case {number}: {reader} of {name}, {what}: {wrong}" if wrong else None


def run_hostile(name: str, scratch: Path) -> list[str]:
    """All readers on what somebody made by hand."""
    path = scratch / "hostile"
    HOSTILE[name](path)
    wrong = []
    for reader, read in {**READERS, "ls --json": command("ls", "{path}", "--json")}.items():
        found = outcome(lambda read=read: read(path, scratch / "out"))  # type: ignore[misc]  # its type is known
        wrong += [f"{reader} where {name}: {found}"] if found else []
        shutil.rmtree(scratch / "out", ignore_errors=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", help="the name of one of the checkpoints")
    parser.add_argument("--hostile", action="store_true", help="also what was made by hand")
    arguments = parser.parse_args()
    faulthandler.enable()
    LOGGER.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        made = seeds(Path(folder))
        made = {name: path for name, path in made.items() if arguments.only in (None, name)}
        for reader in READERS.values():  # imports what it needs, which is no part of any case
            for name, path in made.items():
                with contextlib.suppress(TerrazzoError):
                    reader(path, Path(folder) / f"warm-{name}")
                shutil.rmtree(Path(folder) / f"warm-{name}", ignore_errors=True)
        for name in HOSTILE if arguments.hostile else ():
            scratch = Path(folder) / "case"
            scratch.mkdir()
            for line in run_hostile(name, scratch):
                wrong += 1
                print(line, flush=True)
            shutil.rmtree(scratch)
        for number in range(arguments.seed, arguments.seed + arguments.cases):
            print(f"\r{number} ", end="", file=sys.stderr, flush=True)
            scratch = Path(folder) / "case"
            scratch.mkdir()
            found = run_case(number, made, scratch)
            shutil.rmtree(scratch)
            if found:
                wrong += 1
                print(found, flush=True)
    print(f"{arguments.cases} cases, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
