"""Pickles are read as plain data: what is known comes back, everything else is refused and nothing is run."""

from __future__ import annotations

import argparse
import builtins
import collections
import copyreg
import datetime
import enum
import importlib
import io
import os
import pathlib
import pickle
import random
import struct
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.checkpoint.formats.deepspeed.files import NAMES
from terrazzo.checkpoint.formats.torch_archive import TORCH_NAMES
from terrazzo.checkpoint.formats.unpickle import OUTSIDE, PLAIN, load, loads
from terrazzo.errors import CheckpointCorruptError, CheckpointError, UnsafePickleError

# ------------------------------------------------------------------ plain data

VALUES: dict[str, Any] = {
    "numbers": [0, -(2**70), 1.5, True, None, 1j],
    "text": "grüße",
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab\xff"),
    "set": {1, 2},
    "frozenset": frozenset({1}),
    "range": range(1, 5),
    "slice": slice(1, None, 2),
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("aab"),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "size": torch.Size([2, 3]),
    "namespace": argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=[1])),
    "rng": random.Random(0).getstate(),
    "timedelta": datetime.timedelta(-1, 2, 3),
    "dates": [datetime.date(2024, 2, 29), datetime.date.max, datetime.datetime(2024, 2, 29, 1, 2, 3, 4)],
    "zones": [datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=h))) for h in (-3, 0)],
    "deque": collections.deque([1, 2], maxlen=3),
    "deque of scalars": collections.deque([np.float32(1.5), collections.deque([pathlib.Path("a")])]),
    "sets of paths": [{pathlib.Path("a")}, {frozenset({pathlib.Path("b")}): np.int64(3)}],
    "slice of scalars": slice(np.int64(1), np.int64(2)),
    "namespace of a set": types.SimpleNamespace(a={np.int64(3)}, b=collections.deque([np.float32(1)])),
    "date of NumPy": [np.datetime64("2024-02-29"), np.timedelta64(3, "s"), np.timedelta64(3)],
    "void of NumPy": np.void(b"ab"),
    **{
        f"default {made and made.__name__}": collections.defaultdict(made, a=1)
        for made in (None, bool, int, complex, bytes, tuple, set, collections.OrderedDict, collections.Counter)
    },
}


def parts(value: Any) -> Any:
    """The types of a value and of all that it holds, and what a dict makes for a missing name."""
    if isinstance(value, dict):
        inside: Any = [(parts(key), parts(item)) for key, item in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        inside = [parts(item) for item in value]
    elif isinstance(value, slice):
        inside = parts((value.start, value.stop, value.step))
    else:
        inside = parts(vars(value)) if isinstance(value, (argparse.Namespace, types.SimpleNamespace)) else None
    return type(value), inside, getattr(value, "default_factory", None), getattr(value, "maxlen", None)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    back = loads(pickle.dumps(value, protocol), "test")
    assert back == value and parts(back) == parts(value)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.random.default_rng(0).random((3, 2))),
        np.array(2.5),
        np.array([], dtype=np.float16),
        np.array(["ab", "c"]),
        np.float32(1.5),
        np.bool_(True),
        np.random.RandomState(0).get_state()[1],
    ],
)
def test_numpy_values_come_back(value: Any, protocol: int) -> None:
    back = loads(pickle.dumps({"x": [value]}, protocol), "test")["x"][0]
    assert type(back) is type(value) and back.dtype == value.dtype
    assert np.array_equal(back, value)
    if isinstance(value, np.ndarray):
        assert back.flags.f_contiguous == value.flags.f_contiguous and back.flags.writeable


def test_values_with_other_equality_come_back() -> None:
    value = {
        "path": pathlib.Path("/a/b"),
        "relative": [pathlib.PurePosixPath("c")],
        "version": torch.__version__,
        "default": collections.defaultdict(list, a=[1]),
    }
    back = loads(pickle.dumps(value), "test")
    assert back["path"] == pathlib.Path("/a/b") and back["relative"] == [pathlib.PurePosixPath("c")]
    assert type(back["path"]) is type(pathlib.Path()) and type(back["relative"][0]) is pathlib.PurePosixPath
    assert back["version"] == str(torch.__version__) and type(back["version"]) is str
    assert back["default"]["new"] == [] and back["default"]["a"] == [1]


class Kind(enum.Enum):
    A = (1, "x")

    @classmethod
    def _missing_(cls, value: object) -> Kind:
        raise AssertionError("code of the enum was run")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_members_of_enums_that_are_imported_come_back(protocol: int) -> None:
    assert loads(pickle.dumps([Kind.A, {Kind.A: 1}], protocol), "test") == [Kind.A, {Kind.A: 1}]
    for value in (7, [1]):
        data = pickle.dumps([Kind.A], protocol)
        other = pickle.PROTO + bytes([2]) + op_global(__name__, "Kind") + pickle.dumps((value,), 2)[2:-1] + b"R."
        with pytest.raises(UnsafePickleError, match="member of Kind that this does not have"):
            loads(other, "test")
    with pytest.raises(UnsafePickleError, match="not known to be plain data"):
        loads(data.replace(b"Kind", b"Kine"), "test")


def test_an_object_that_contains_itself_comes_back() -> None:
    value: dict[str, Any] = {"list": []}
    value["list"].append(value["list"])
    back = loads(pickle.dumps(value), "test")
    assert back["list"][0] is back["list"]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(plain, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_any_plain_value_comes_back(value: Any, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol), "test") == value


# ------------------------------------------------------------------ malice


class Runs:
    """Whatever a reduction may call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def op_global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


TOUCH = "touch {marker}"


def malicious(marker: Path) -> dict[str, bytes]:
    command = TOUCH.format(marker=marker)
    python = f"open({str(marker)!r}, 'w')"
    return {
        "os.system": pickle.dumps(Runs(os.system, command)),
        "eval": pickle.dumps(Runs(eval, python)),
        "exec": pickle.dumps(Runs(exec, python), protocol=2),
        "open": pickle.dumps(Runs(open, str(marker), "w")),
        "Popen": pickle.dumps(Runs(subprocess.Popen, ["touch", str(marker)])),
        "import": pickle.dumps(Runs(builtins.__import__, "os")),
        "getattr": pickle.dumps(Runs(getattr, [], "append")),
        "inside data": pickle.dumps({"step": 3, "x": [(Runs(os.system, command),)]}),
        "as a key": b"\x80\x02}" + op_global("os", "system") + text(command) + b"\x85RK\x01s.",
        "dotted name": b"\x80\x04" + text("collections") + text("OrderedDict.fromkeys") + b"\x93.",
        "method of a known class": b"\x80\x04" + text("argparse") + text("Namespace.__init__.__globals__") + b"\x93.",
        "inst": f"(S'{command}'\nios\nsystem\n.".encode(),
        "obj": b"(" + op_global("os", "system") + text(command) + b"o.",
        "newobj": b"\x80\x02" + op_global("subprocess", "Popen") + text(command) + b"\x85\x81.",
        "newobj_ex": b"\x80\x04" + op_global("subprocess", "Popen") + b")}\x92.",
        "torch.load": pickle.dumps(Runs(torch.load, str(marker))),
        "torch attribute": b"\x80\x02" + op_global("torch", "hub.load") + b".",
        "copyreg": b"\x80\x02" + op_global("copyreg", "_reconstructor") + b".",
        "a class of ours": b"\x80\x02" + op_global("terrazzo.checkpoint.formats.unpickle", "load") + b".",
    }


@pytest.mark.parametrize("kind", malicious(Path("x")).keys())
@pytest.mark.parametrize("names", [PLAIN, TORCH_NAMES], ids=["plain", "torch"])
def test_malice_raises_and_runs_nothing(kind: str, names: Any, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(UnsafePickleError, match="test: the pickle refers to"):
        loads(malicious(marker)[kind], "test", names=names)
    assert not marker.exists()


def test_extension_codes_are_refused(tmp_path: Path) -> None:
    copyreg.add_extension("os", "system", 240)
    copyreg._extension_cache[240] = os.system  # type: ignore[attr-defined]  # as if a pickle with it had been loaded
    try:
        with pytest.raises(UnsafePickleError, match="refers to something"):
            loads(b"\x80\x02\x82\xf0" + text(f"touch {tmp_path / 'marker'}") + b"\x85R.", "test")
    finally:
        copyreg.remove_extension("os", "system", 240)
    assert not (tmp_path / "marker").exists()


CHANGES = {
    "attributes of a class": op_global("argparse", "Namespace") + b"}" + text("finish") + b"K\x01sb.",
    "slots of a class": op_global("argparse", "Namespace") + b"N}" + text("finish") + b"K\x01s\x86b.",
    "slots of a function": op_global("_codecs", "encode") + b"N}" + text("_function") + b"K\x01s\x86b.",
    "attributes of a function": op_global("_codecs", "encode") + b"}" + text("_function") + b"K\x01sb.",
    "attributes of a built-in class": op_global("collections", "OrderedDict") + b"}" + text("keys") + b"K\x01sb.",
    "slots of a built-in class": op_global("collections", "OrderedDict") + b"N}" + text("keys") + b"K\x01s\x86b.",
    "a storage type": op_global("torch", "FloatStorage") + b"]" + op_global("torch", "int8") + b"ab.",
    "a dtype": op_global("torch", "float32") + b"N}" + text("itemsize") + b"K\x01s\x86b.",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_names_stand_for_cannot_be_changed(change: bytes) -> None:
    def attributes() -> dict[Any, dict[str, Any]]:
        return {name: vars(value).copy() for name, value in TORCH_NAMES.items() if hasattr(value, "__dict__")}

    before = attributes()
    with pytest.raises(UnsafePickleError, match="tries to change"):
        loads(b"\x80\x02" + change, "test", names=TORCH_NAMES)
    assert attributes() == before
    assert TORCH_NAMES["torch", "FloatStorage"] is torch.float32


@pytest.mark.parametrize("name", [("collections", "OrderedDict"), ("argparse", "Namespace")])
@pytest.mark.parametrize("attribute", ["__eq__", "items", "_get_kwargs"])
def test_attributes_do_not_hide_methods(name: tuple[str, str], attribute: str) -> None:
    data = b"\x80\x02" + op_global(*name) + b")R}" + text(attribute) + b"K\x01sb."
    try:
        assert getattr(loads(data, "test"), attribute) == 1
    except UnsafePickleError as error:
        assert "methods" in str(error)
    else:
        assert not hasattr(getattr(importlib.import_module(name[0]), name[1]), attribute)


@pytest.mark.parametrize("state", (b"}X\x01\x00\x00\x00aK\x01s", b"N}X\x01\x00\x00\x00aK\x01s\x86", b"N"))
@pytest.mark.parametrize("name", (("_codecs", "encode"), ("torch", "Tensor")))
def test_a_pickle_that_changes_a_function_is_called_unsafe(name: tuple[str, str], state: bytes) -> None:
    with pytest.raises(UnsafePickleError, match="tries to change"):
        loads(b"\x80\x02" + op_global(*name) + state + b"b.", "test", names=NAMES)


EXTRAVAGANT = {
    "set of a range": op_global("builtins", "set")
    + op_global("builtins", "range")
    + b"\x8a\x06\0\0\0\0\0\x01\x85R\x85R.",
    "list of a range": op_global("builtins", "list")
    + op_global("builtins", "range")
    + b"\x8a\x06\0\0\0\0\0\x01\x85R\x85R.",
    "bytearray of a size": op_global("builtins", "bytearray") + b"\x8a\x06\0\0\0\0\0\x01\x85R.",
    "size of a range": op_global("torch", "Size")
    + op_global("builtins", "range")
    + b"\x8a\x06\0\0\0\0\0\x01\x85R\x85R.",
}


@pytest.mark.parametrize("data", EXTRAVAGANT.values(), ids=EXTRAVAGANT.keys())
def test_no_memory_is_asked_for_that_is_not_in_the_file(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        loads(b"\x80\x02" + data, "test")


def test_numpy_objects_and_structures_are_refused() -> None:
    for value in (np.array([object], dtype=object), np.zeros(2, dtype=[("a", "i4")])):
        with pytest.raises(CheckpointError):
            loads(pickle.dumps(value), "test")


def test_references_to_outside_data_need_somebody_to_answer() -> None:
    class Outside(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return "there" if value == "here" else None

    file = io.BytesIO()
    Outside(file).dump(["here"])
    with pytest.raises(UnsafePickleError, match="outside of itself"):
        loads(file.getvalue(), "test")
    file.seek(0)
    assert load(file, "test", {**PLAIN, OUTSIDE: str.upper}) == ["THERE"]


def test_the_message_names_what_was_refused_and_the_way_out() -> None:
    with pytest.raises(UnsafePickleError, match=r"x\.pt: .*collections\.UserDict.*torch\.load"):
        loads(pickle.dumps(collections.UserDict()), "x.pt")
    assert issubclass(UnsafePickleError, pickle.UnpicklingError)


# ------------------------------------------------------------------ damage


def test_damaged_pickles_raise_typed_errors() -> None:
    whole = pickle.dumps(VALUES, protocol=4)
    for length in range(len(whole) - 1):
        with pytest.raises(CheckpointCorruptError):
            loads(whole[:length], "test")
    generator = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(whole)
        position = generator.randrange(len(whole))
        damaged[position] ^= 1 << generator.randrange(8)
        try:
            loads(bytes(damaged), "test")
        except CheckpointError:
            pass


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_noise_raises_typed_errors(data: bytes) -> None:
    try:
        loads(b"\x80\x04" + data, "test", names=TORCH_NAMES)
    except CheckpointError:
        pass
