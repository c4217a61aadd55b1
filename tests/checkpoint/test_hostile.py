"""Files that somebody made to do harm, or that are not what they seem: a typed error, soon, and nothing else.

`fuzz.py` changes real files at random; here are the tricks that a random change does not find.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import terrazzo
from checkpoint.formats.deepspeed.made import FROZEN, SHAPES, state_of
from checkpoint.fuzz import asked_for_too_much, bounded
from terrazzo.checkpoint import (
    Checkpoint,
    CheckpointManager,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    load,
    save,
    verify,
)
from terrazzo.checkpoint.formats import DCPWriter, HuggingFaceWriter, detect
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.formats.dcp_metadata import parse
from terrazzo.checkpoint.formats.torch_archive import TORCH_NAMES
from terrazzo.checkpoint.formats.unpickle import load_tree, loads
from terrazzo.checkpoint.manager.records import KEPT, read_reasons
from terrazzo.checkpoint.metadata import MetadataIndex
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.root import Root, encode_root
from terrazzo.checkpoint.plan.flatten import set_element
from terrazzo.checkpoint.planner import SavePlan
from terrazzo.checkpoint.run.messages import decode, encode
from terrazzo.checkpoint.stores import Place
from terrazzo.cli import app
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    TerrazzoError,
    UnsafePickleError,
    UnsupportedValueError,
)
from terrazzo.publish import Publisher, Receiver

STOP = b"."


@pytest.mark.parametrize("cases", [30, pytest.param(500, marks=pytest.mark.long)])
def test_files_made_by_hand_or_changed_at_random_give_typed_errors(cases: int) -> None:
    source = Path(terrazzo.__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.checkpoint.fuzz",
            "--hostile",
            "--cases",
            str(cases),
            "--seed",
            str(int(time.time())),
        ],
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# ------------------------------------------------------------------ pickles


def shared_lists(levels: int) -> bytes:
    """Lists that hold the one before twice."""
    data = b"\x80\x02]q\x00"
    for level in range(1, levels):
        data += b"]q" + bytes([level]) + b"(h" + bytes([level - 1]) + b"h" + bytes([level - 1]) + b"e"
    return data + STOP


def shared_tuples_as_key(levels: int) -> bytes:
    data = b"\x80\x02}K\x01q\x00"
    for level in range(1, levels):
        data += b"0h" + bytes([level - 1]) + b"h" + bytes([level - 1]) + b"\x86q" + bytes([level])
    return data + b"Ns" + STOP


def called(module: str, name: str, *arguments: bytes) -> bytes:
    """A pickle that calls a function with what these opcodes make."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR."


# A list whose text has 2^60 parts.
ENDLESS = b"]q\x00" + b"".join(b"0]q%c(h%ch%ce" % (level, level - 1, level - 1) for level in range(1, 60))
DEEP_KEY = b")" + b"\x85" * 200_000
TEXT = b"X\x01\x00\x00\x00a"
NAME = b"X\x07\x00\x00\x00storage"

EXHAUSTING = {
    "a deep tuple as a key": b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "shared tuples as a key": shared_tuples_as_key(60),
    "text of 2^60 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
    "bytes of 2^60": b"\x80\x05\x8e" + struct.pack("<Q", 2**60) + b"x.",
    "a frame of 2^60": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"x.",
    "a bytearray of 2^60": b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b"x.",
    "a deep tuple in a set": b"\x80\x04\x8f(" + DEEP_KEY + b"\x90.",
    "a deep tuple in a frozenset": b"\x80\x04(" + DEEP_KEY + b"\x91.",
    "a deep tuple in a dict of protocol 0": b"(" + DEEP_KEY + b"Nd.",
    "a deep tuple as one of some keys": b"\x80\x02}(" + DEEP_KEY + b"Nu.",
    **{
        f"a deep tuple for {name}": called(module, name, b"](" + DEEP_KEY + b"e")
        for module, name in (("builtins", "set"), ("builtins", "frozenset"), ("collections", "Counter"))
    },
    "a deep tuple for OrderedDict": called("collections", "OrderedDict", b"](" + DEEP_KEY + b"N\x86e"),
    "a long key, often": b"\x80\x02}((" + b"K\x01" * 20_000 + b"tq\x00N" + b"h\x00N" * 20_000 + b"u.",
    "an unknown encoding": called("_codecs", "encode", TEXT, ENDLESS),
    "an unknown layout": called("torch.serialization", "_get_layout", ENDLESS),
    "an unknown dtype": b"\x80\x02cnumpy\ndtype\n" + ENDLESS + b"\x85RNb.",
    "a Namespace with such a name": b"\x80\x02cargparse\nNamespace\n)R}" + ENDLESS + b"\x85Nsb.",
    "parts of a path": called("pathlib", "PosixPath", ENDLESS),
    "a reference to data": b"\x80\x02" + ENDLESS + b"Q.",
    "a reference to an unknown kind of data": b"\x80\x02(" + ENDLESS + b"NNNNtQ.",
    "a key of a storage": b"\x80\x02(" + NAME + b"ctorch\nFloatStorage\n" + ENDLESS + b"NK\x01tQ.",
    "a mark of a tensor": called(
        "torch._utils",
        "_rebuild_tensor_v2",
        b"(",
        NAME,
        b"ctorch\nFloatStorage\n",
        TEXT,
        b"NNtQK\x00))NN]",
        ENDLESS,
        b"a",
    ),
    "an object without a state": b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00f4\x85R.",
    "an object in its own state": b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00f4\x85Rq\x00h\x00b.",
    "an unknown opcode": b"\x80\x02\xff.",
    "nothing": b"",
}


@pytest.mark.parametrize("data", EXHAUSTING.values(), ids=EXHAUSTING.keys())
def test_pickles_that_would_exhaust_the_unpickler(data: bytes) -> None:
    start = time.process_time()
    with bounded(), pytest.raises((CheckpointCorruptError, UnsafePickleError)) as raised:
        loads(data, "test", names=TORCH_NAMES)
    assert not asked_for_too_much(raised.value) and len(str(raised.value)) < 1000
    assert time.process_time() - start < 1


@pytest.mark.parametrize("place", [b"r\xff\xff\xff\xff", b"p999999999999\n"])
def test_the_places_of_a_memo_take_no_memory(place: bytes) -> None:
    with bounded():
        assert loads(b"\x80\x02N" + place + b"q\x00.", "test") is None


def of_metadata(name: str, **state: bytes) -> bytes:
    """A pickle with an object of PyTorch's metadata whose state these opcodes make."""
    fields = b"".join(b"X" + struct.pack("<I", len(key)) + key.encode() + value for key, value in state.items())
    return b"\x80\x02ctorch.distributed.checkpoint.metadata\n" + name.encode() + b"\n)\x81}(" + fields + b"ub."


@pytest.mark.parametrize(
    "data",
    [
        of_metadata("MetadataIndex", fqn=ENDLESS),
        of_metadata("MetadataIndex", fqn=TEXT, index=ENDLESS),
        of_metadata("TensorProperties", dtype=ENDLESS, layout=ENDLESS, requires_grad=b"N"),
        of_metadata("ChunkStorageMetadata", offsets=ENDLESS, sizes=ENDLESS),
        of_metadata(
            "Metadata", state_dict_metadata=b"}", storage_data=b"}", planner_data=b"}" + TEXT + ENDLESS + b"\x85s"
        ),
        of_metadata("MetadataIndex", fqn=TEXT)
        .replace(b".metadata\nMetadataIndex", b".filesystem\n_StorageInfo")
        .replace(
            b"\x03\x00\x00\x00fqn" + TEXT,
            b"\x0d\x00\x00\x00relative_path" + ENDLESS + b"X\x06\x00\x00\x00offsetK\x00X\x06\x00\x00\x00lengthK\x00",
        ),
    ],
)
def test_metadata_whose_values_have_no_end(data: bytes) -> None:
    start = time.process_time()
    with bounded(), pytest.raises(CheckpointError):
        parse(data, "test")
    assert time.process_time() - start < 1


def test_pickles_whose_values_have_no_end() -> None:
    start = time.process_time()
    with pytest.raises(CheckpointCorruptError, match="too often"):
        load_tree(io.BytesIO(shared_lists(60)), "test")
    namespace = b"\x80\x02]cargparse\nNamespace\n)R}" + TEXT + ENDLESS + b"sba."
    with pytest.raises(CheckpointCorruptError, match="too often"):
        load_tree(io.BytesIO(namespace), "test")
    with pytest.raises(UnsafePickleError, match="slice"):
        load_tree(io.BytesIO(called("builtins", "slice", ENDLESS)), "test")
    itself: list[Any] = []
    itself.append(itself)
    deep = b"\x80\x02" + b"]" * 900 + b"a" * 899 + STOP
    for data, what in ((pickle.dumps(itself), "contains itself"), (deep, "deeper")):
        with pytest.raises(CheckpointCorruptError, match=what):
            load_tree(io.BytesIO(data), "test")
    assert time.process_time() - start < 1
    shared = [1.0] * 10
    assert load_tree(io.BytesIO(pickle.dumps([shared] * 50)), "test") == [shared] * 50


def legacy(*pickles: bytes) -> bytes:
    head = [pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    return b"".join([*head, *pickles])


def test_a_list_of_storages_without_end(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(legacy(pickle.dumps({}, 2), pickle.dumps(range(10**15), 2)))
    with pytest.raises(CheckpointCorruptError, match="list of storages"):
        Checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("size", [range(10**12), (2**62, 4), (-1,), (2**63,), "ab", (1.5,)])
def test_sizes_that_no_tensor_has(size: Any, tmp_path: Path) -> None:
    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), 0, size, (1,) * 2, False, None)

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 1) if isinstance(value, Storage) else None

    out = io.BytesIO()
    Pickler(out, 2).dump({"w": Tensor()})
    (tmp_path / "x.pt").write_bytes(legacy(out.getvalue(), pickle.dumps(["0"], 2), struct.pack("<qf", 1, 1.0)))
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path / "x.pt")["w"][...]


def safetensors(path: Path, header: str) -> None:
    """A file with this header and 16 bytes of data."""
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))


DEEP = "[" * 100_000
ONE = '"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'


def with_offsets(text: str) -> str:
    """A header whose file has a part of a tensor, at these offsets."""
    return f'{{"__metadata__": {{"DCP_SHARDING_INFO": {json.dumps(text)}}}, {ONE}}}'


HEADERS = {
    "a header": (f'{{"w": {DEEP}', None),
    "an index": (f"{{{ONE}}}", f'{{"weight_map": {DEEP}'),
    "offsets": (with_offsets(DEEP), None),
    **{
        f"an offset of {offset}": (with_offsets(f'{{"w": {{"saved_offsets": [{offset}]}}}}'), None)
        for offset in ("Infinity", "1" + "0" * 30, str(2**62))
    },
}


@pytest.mark.parametrize(("header", "index"), HEADERS.values(), ids=HEADERS.keys())
def test_json_that_is_made_to_do_harm(header: str, index: str | None, tmp_path: Path) -> None:
    safetensors(tmp_path / "model-00001-of-00001.safetensors", header)
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path)["w"][...]


# ------------------------------------------------------------------ what is at a path


def test_a_safetensors_file_is_no_pickle(tmp_path: Path) -> None:
    for length in (0x0280, 0x0480, 0x80):
        text = json.dumps({"__metadata__": {}}).encode().ljust(length)
        (tmp_path / "x").write_bytes(struct.pack("<Q", length) + text)
        assert detect(tmp_path / "x") == "safetensors"
        (tmp_path / "x").write_bytes(struct.pack("<Q", length + 1) + text)
        assert detect(tmp_path / "x") is None
    for new in (True, False):
        for protocol in (2, 4):
            torch.save(
                {"w": torch.ones(1)}, tmp_path / "x", _use_new_zipfile_serialization=new, pickle_protocol=protocol
            )
            assert detect(tmp_path / "x") == "torch_save"


def test_pipes_and_folders_in_the_place_of_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointNotFoundError, match="neither a file nor a folder"):
        Checkpoint(tmp_path / "pipe")
    for make in (os.mkfifo, os.mkdir):
        path = tmp_path / make.__name__
        save({"w": torch.ones(3000)}, checkpoint_id=path)
        for victim in (next(path.glob("data-*")), path / "manifest.terrazzo"):
            victim.unlink()
            make(victim)
            with pytest.raises(TerrazzoError):
                Checkpoint(path)["w"][...]
            with pytest.raises(TerrazzoError):
                load({"w": torch.ones(3000)}, checkpoint_id=path)
            assert_refused_or_damaged(path)


def assert_refused_or_damaged(path: Path) -> None:
    try:
        assert verify(path)
    except CheckpointError:
        pass


@pytest.mark.parametrize("content", [b"\xff\xfe", b"../other", b"/etc", b"a\0b", b"", b"x" * 5000, b".."])
def test_a_latest_that_names_no_folder_beside_it(content: bytes, tmp_path: Path) -> None:
    save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "other")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_bytes(content)
    with pytest.raises(CheckpointFormatError, match="latest"):
        Checkpoint(tmp_path / "run")


def test_the_folder_of_a_run_is_its_latest_checkpoint(tmp_path: Path) -> None:
    for tag in ("one", " two "):
        save({"w": torch.ones(2), "tag": tag}, checkpoint_id=tmp_path / tag)
        (tmp_path / "latest").write_text(tag)
        assert Checkpoint(tmp_path)["tag"] == tag and verify(tmp_path) == []
        target = {"w": torch.zeros(2), "tag": ""}
        load(target, checkpoint_id=tmp_path)
        assert target["tag"] == tag and target["w"].eq(1).all()
    result = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert result.exit_code == 0 and "tag" in result.output
    result = CliRunner().invoke(app, ["convert", str(tmp_path), str(tmp_path / "x.pt"), "--to", "torch_save"])
    assert result.exit_code == 0 and torch.load(tmp_path / "x.pt")["tag"] == " two "
    result = CliRunner().invoke(app, ["convert", str(tmp_path), str(tmp_path / "x.pt"), "--to", "torch_save"])
    assert result.exit_code == 2 and "--overwrite" in result.output and "overwrite=True" not in result.output


def of_8_gb(path: Path) -> Path:
    """Make a file of zeros, which uses nothing of the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(8 << 30)
    return path


def hugging_face(folder: Path) -> None:
    save({"w": torch.ones(2)}, storage_writer=HuggingFaceWriter(folder), no_dist=True)


LARGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "load": ("manifest.terrazzo", lambda path: load({"w": torch.ones(2)}, checkpoint_id=path)),
    "save": ("manifest.terrazzo", lambda path: save({"w": torch.ones(2)}, checkpoint_id=path)),
    "base": (
        "base/manifest.terrazzo",
        lambda path: save({"w": torch.ones(2)}, checkpoint_id=path / "new", base=path / "base"),
    ),
    "manager": ("global_step7/manifest.terrazzo", lambda path: CheckpointManager(path).latest_step()),
    "save as DCP": (".metadata", lambda path: save({"w": torch.ones(2)}, storage_writer=DCPWriter(path), no_dist=True)),
    "save as Hugging Face": ("model.safetensors.index.json", hugging_face),
    "run": ("run.id", lambda path: CheckpointManager(path, local=path / "local")),
    "publish": ("published.json", lambda path: Publisher(path, {"w": torch.ones(2)})),
    "receive": ("published.json", lambda path: Receiver(path, {"w": torch.ones(2)}).poll()),
}


@pytest.mark.parametrize(("name", "use"), LARGE.values(), ids=LARGE.keys())
def test_a_file_that_is_read_whole_has_a_bounded_size(name: str, use: Callable[[Path], Any], tmp_path: Path) -> None:
    file = of_8_gb(tmp_path / "place" / name)
    said = rf"{file} has {8 << 30} bytes, more than the [0-9]{{9,10}} "
    with bounded(), pytest.raises(TerrazzoError, match=said):
        use(tmp_path / "place")
    assert file.stat().st_size == 8 << 30


def test_what_says_why_steps_are_kept_is_not_read_if_it_is_large(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=1) as manager:
        manager.save(1, {"w": torch.ones(2)})
    of_8_gb(tmp_path / KEPT)
    with bounded():
        assert read_reasons(Place(tmp_path)) == {}


@pytest.mark.parametrize("to", ["native", "dcp", "huggingface", "deepspeed", "torch_save", "safetensors"])
def test_a_folder_that_is_a_file(to: str, tmp_path: Path) -> None:
    state = state_of(SHAPES, FROZEN, stage=2) if to == "deepspeed" else {"w": torch.ones(2)}
    save(state, checkpoint_id=tmp_path / "from", no_dist=True)
    (tmp_path / "file").write_text("mine")
    folders = to not in ("torch_save", "safetensors")
    for name in (*(["file"] if folders else []), "file/below", "file/a/b"):
        for overwrite in (False, True):
            with pytest.raises(CheckpointExistsError, match=f"{tmp_path / 'file'} .*another name, or remove"):
                convert(tmp_path / "from", tmp_path / name, to, overwrite=overwrite)
    with pytest.raises(CheckpointExistsError, match="another name, or remove"):
        save(state, checkpoint_id=tmp_path / "file" / "below", no_dist=True)
    assert (tmp_path / "file").read_text() == "mine"


# ------------------------------------------------------------------ the terminal


def test_commands_print_what_is_there_and_steer_nothing(tmp_path: Path) -> None:
    bad = "a\x1b[31mb\x9b2J[bold]c[/bold]:smile:\u202e"
    save({bad: torch.ones(2), "text": bad, "list": [bad], "m": 1}, checkpoint_id=tmp_path / "a")
    save({bad: torch.zeros(2), "text": "x", "list": [], "m": 1}, checkpoint_id=tmp_path / "b")
    runs = [["ls"], ["ls", "--json"], ["show", "text"], ["show", "list"], ["show", bad], ["show", "\x1b[m"], ["diff"]]
    for command, *rest in runs:
        paths = [str(tmp_path / "a"), *([str(tmp_path / "b")] if command == "diff" else [])]
        output = CliRunner().invoke(app, [command, *paths, *rest]).output
        assert all(c.isprintable() or c == "\n" for c in output), (command, rest, output)
        if command != "show" or rest != ["\x1b[m"]:
            assert "[bold]c[/bold]:smile:" in output.replace("\n", ""), (command, rest, output)


# ------------------------------------------------------------------ messages between ranks


class Gadget:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_messages_run_nothing_and_name_what_cannot_travel() -> None:
    with pytest.raises(UnsupportedValueError, match="Gadget"):
        encode(SavePlan([], storage_data=Gadget()))
    for module, name in (("os", "system"), ("subprocess", "Popen"), ("tempfile", "TemporaryDirectory"), ("no", "no")):
        for tag in (4, 5, 6):
            import msgspec

            with pytest.raises(CheckpointCorruptError):
                decode(msgspec.msgpack.encode(([[module, name]], [tag, 0, "true"])), object)
    with pytest.raises(CheckpointCorruptError, match="not a .*SavePlan"):
        decode(encode([1]), SavePlan)
    plan = SavePlan([], storage_data={MetadataIndex("w", (0,)): torch.float32}, planner_data={("a", 1): None})
    assert decode(encode(plan), SavePlan) == plan


@given(st.binary(max_size=60))
def test_noise_is_no_message(data: bytes) -> None:
    with pytest.raises(CheckpointCorruptError):
        decode(data, SavePlan)


# ------------------------------------------------------------------ files of somebody else


def test_files_that_were_exchanged_are_refused_where_something_tells(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for name, shape, dtype in (("a", (4, 3), torch.float32), ("b", (3, 4), torch.float32), ("c", (4, 3), torch.int32)):
        dcp.save({"w": torch.ones(shape, dtype=dtype)}, checkpoint_id=tmp_path / name, no_dist=True)
    (data,) = (path.name for path in (tmp_path / "a").glob("*.distcp"))
    for other in ("b", "c"):
        (tmp_path / "a" / data).write_bytes((tmp_path / other / data).read_bytes())
        with pytest.raises(CheckpointError, match="w"):
            Checkpoint(tmp_path / "a")["w"][...]


def test_an_optimizer_of_another_step_is_refused(tmp_path: Path) -> None:
    for number, step in enumerate((3.0, 4.0)):
        folder = tmp_path / str(number)
        state = state_of(SHAPES, FROZEN, stage=2)
        for kept in state["optimizer"]["state"].values():
            kept["step"] = torch.tensor(step)
        save(state, checkpoint_id=folder / "native", no_dist=True)
        convert(folder / "native", folder / "tag", "deepspeed", stage=2, ranks=2)
    name = next(path.name for path in (tmp_path / "0" / "tag").glob("*rank_1_*optim_states.pt"))
    assert len(Checkpoint(tmp_path / "0" / "tag")) > 5
    (tmp_path / "0" / "tag" / name).write_bytes((tmp_path / "1" / "tag" / name).read_bytes())
    with pytest.raises(CheckpointCorruptError, match="another checkpoint"):
        Checkpoint(tmp_path / "0" / "tag")


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    old, held, other = (tmp_path / f".{name}.tmp" for name in ("x.pt.1", "x.pt.2", "y.pt.1"))
    for leftover in (old, held, other):
        leftover.write_bytes(b"half")
        os.utime(leftover, (0, 0))
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        convert(tmp_path / "a", tmp_path / "x.pt", "torch_save")
    assert not old.exists() and held.exists() and other.exists()
    assert torch.load(tmp_path / "x.pt")["w"].eq(1).all()


def test_planners_that_are_kept_do_not_keep_the_state(tmp_path: Path) -> None:
    saving, loading = DefaultSavePlanner(), DefaultLoadPlanner()
    for _ in range(2):
        state = {"w": torch.ones(3)}
        alive = weakref.ref(state["w"])
        save(state, checkpoint_id=tmp_path, planner=saving)
        load(state, checkpoint_id=tmp_path, planner=loading)
        del state
        assert alive() is None


@pytest.mark.parametrize(
    "paths", [(("a", 0), ("a", "x")), (("a", "x"), ("a", "x", "y")), (("a", -1),), (("a", 0), ("a", 0, 1))]
)
def test_paths_that_contradict_each_other(paths: tuple[tuple[Any, ...], ...]) -> None:
    root: dict[str, Any] = {}
    with pytest.raises(CheckpointError, match="contradict"):
        for path in paths:
            set_element(root, path, 5)


@pytest.mark.parametrize("kind", ["native", "dcp"])
def test_places_that_would_make_many_long_lists(kind: str, tmp_path: Path) -> None:
    count = 2000
    state = {str(number): number for number in range(count)}
    save(state, **({"checkpoint_id": tmp_path} if kind == "native" else {"storage_writer": DCPWriter(tmp_path)}))
    file = tmp_path / (MANIFEST if kind == "native" else ".metadata")
    found = Root(file.read_bytes(), "it").head if kind == "native" else pickle.loads(file.read_bytes())
    each_its_own = {name: (str(number), count - 1) for number, name in enumerate(state)}  # 4 million items
    few = {name: ("lists", number * 16 % count, 0) for number, name in enumerate(state)}  # as some were left out
    for paths in (few, each_its_own):
        if kind == "native":
            file.write_bytes(encode_root(msgspec.structs.replace(found, paths=paths)))
        else:
            found.planner_data = paths
            file.write_bytes(pickle.dumps(found))
        if paths is few:
            Checkpoint(tmp_path)
            continue
        with pytest.raises(CheckpointCorruptError, match="lists of 4000000 items"):
            Checkpoint(tmp_path)


def test_deep_configs_are_errors_that_say_so(tmp_path: Path) -> None:
    from terrazzo.cli.view import _is_trace
    from terrazzo.engine.config import as_mapping
    from terrazzo.errors import EngineConfigError, RunConfigError
    from terrazzo.integrations.huggingface.adapters import _check_config
    from terrazzo.launch.config import read_run
    from terrazzo.publish import Receiver

    for name, text in (("a.json", DEEP), ("a.toml", f"a = {DEEP}"), ("adapter_config.json", DEEP)):
        (tmp_path / name).write_text(text)
    for name in ("a.json", "a.toml"):
        with pytest.raises(RunConfigError, match="is not"):
            read_run(tmp_path / name)
    with pytest.raises(EngineConfigError, match="not valid JSON"):
        as_mapping(str(tmp_path / "a.json"))
    assert not _is_trace(str(tmp_path / "a.json"))
    with pytest.raises(CheckpointCorruptError, match="adapter_config.json is not valid JSON"):
        _check_config(Place(tmp_path), None)
    (tmp_path / "published.json").write_text(DEEP)
    with pytest.raises(CheckpointFormatError, match="published.json"):
        Receiver(tmp_path, torch.nn.Linear(2, 2)).poll()
