"""Typed objects: what goes in comes out, and nothing else can come out of any bytes."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import os
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.checkpoint import async_save, save
from terrazzo.checkpoint.native.objects import ObjectBytes, decode, encode
from terrazzo.checkpoint.native.tensors import dtype_from_name, dtype_name, is_lossless
from terrazzo.checkpoint.plan.flatten import flatten_state_dict
from terrazzo.checkpoint.plan.ownership import digests_of_tensors
from terrazzo.errors import CheckpointError, UnsupportedValueError

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    hashable | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.builds(bytearray, st.binary()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3).map(OrderedDict)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal, with equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@settings(max_examples=300, deadline=None)
@given(values)
def test_round_trip(value: Any) -> None:
    assert same(decode(encode(value)), value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_do_anything_but_decode_or_raise_ours(data: bytes) -> None:
    try:
        decode(data)
    except CheckpointError:
        pass


@settings(max_examples=300, deadline=None)
@given(st.integers(-5, 127), values)
def test_no_record_does_either(code: int, payload: Any) -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, encode(payload)))
    try:
        decode(data)
    except CheckpointError:
        pass


class Attack:
    def __reduce__(self):
        return os.mkdir, ("/tmp/terrazzo-was-attacked",)


def test_pickles_are_never_run_unasked() -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(127, pickle.dumps(Attack())))
    with pytest.raises(UnsupportedValueError, match="allow_pickle"):
        decode(data)
    assert not os.path.exists("/tmp/terrazzo-was-attacked")


def test_torch_and_numpy_values() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e5m2):
        tensor = torch.arange(6).reshape(2, 3).to(dtype).T
        loaded = decode(encode([tensor]))[0]
        assert loaded.dtype == dtype and torch.equal(loaded.float(), tensor.float())
    parameter = decode(encode(torch.nn.Parameter(torch.ones(2))))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    for dtype in (torch.float32, torch.complex64, torch.int64):
        for frozen in (torch.nn.Parameter(torch.ones(2, dtype=dtype), False), torch.ones(2, dtype=dtype)):
            back = decode(encode(frozen))
            assert type(back) is type(frozen) and not back.requires_grad
    wanting = decode(encode(torch.ones(2, requires_grad=True)))
    assert type(wanting) is torch.Tensor and wanting.requires_grad
    assert decode(encode(torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)))).requires_grad
    array = np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2]
    assert np.array_equal(decode(encode(array)), array) and decode(encode(array)).dtype == array.dtype
    assert math.isnan(decode(encode(float("nan"))))
    assert type(decode(encode(np.float64(3)))) is np.float64
    assert decode(encode(torch.__version__)) == str(torch.__version__)


FIELDS = np.zeros(2, dtype=[("a", "i4")])
LOSING = (
    FIELDS,
    FIELDS[0],
    FIELDS.view(np.recarray),
    np.ma.masked_array([1, 2], [0, 1]),
    np.bytes_(b"a\0"),
    np.str_("\0"),
)


class Kind(enum.Enum):
    A = 1
    ALSO_A = 1  # noqa: PIE796  # an alias, as enums may have


class Number(enum.IntEnum):
    ONE = 1


class Sides(enum.Flag):
    LEFT = 1
    RIGHT = 2


def test_values_of_the_standard_library() -> None:
    namespace = argparse.Namespace(lr=0.1, dtype=torch.bfloat16, inner=argparse.Namespace(path=Path("/a"), kind=Kind.A))
    for value in (
        namespace,
        SimpleNamespace(a=1, b=(2, {3: None})),
        Path("/a/b"),
        PurePosixPath("c"),
        PureWindowsPath("c:/d"),
        defaultdict(int, {1: 2}),
        defaultdict(None, {"a": [1]}),
        defaultdict(list, {None: [Kind.A]}),
        Counter("aab"),
        deque([1, (2,)], maxlen=3),
        deque(),
        datetime(2026, 1, 2, 3, 4, 5, 6, timezone(timedelta(hours=-5))),
        datetime(2026, 10, 25, 2, fold=1),
        date(2026, 1, 2),
        timedelta(days=-1, microseconds=5),
        Kind.A,
        Number.ONE,
        Sides.LEFT,
        {Kind.A: {Number.ONE, Number.ONE}, (1, b"x"): None},
    ):
        back = decode(encode({"v": value}))["v"]
        assert type(back) is type(value) and back == value and repr(back) == repr(value)
    assert decode(encode(defaultdict(list)))["new"] == [] and decode(encode(deque(maxlen=2))).maxlen == 2
    assert decode(encode(Kind.ALSO_A)) is Kind.A


def test_what_they_cannot_say_is_refused() -> None:
    class Inside(enum.Enum):
        A = 1

    @dataclasses.dataclass
    class Own:
        x: int = 1

    for value, said in (
        (Inside.A, "define it at the top of a module"),
        (Sides.LEFT | Sides.RIGHT, "has no name of its own"),
        (defaultdict(lambda: 0), "default_factory"),
        (datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")), "tzinfo is a ZoneInfo"),
        (argparse.Namespace(own=Own()), r"\['own'\] is a .*Own.*dataclasses.asdict"),
    ):
        with pytest.raises(UnsupportedValueError, match=said):
            encode(value)


def test_an_enum_is_looked_up_where_it_is_imported_and_nowhere_else(monkeypatch) -> None:
    def stored(*parts: Any) -> bytes:
        return msgspec.msgpack.encode(msgspec.msgpack.Ext(23, msgspec.msgpack.encode(parts)))

    assert decode(stored(__name__, "Kind", "A")) is Kind.A
    for parts in (
        (__name__, "Kind", "B"),
        (__name__, "Kind.__members__", "A"),
        (__name__, "Attack", "A"),
        (__name__, "os", "system"),
        ("antigravity", "Kind", "A"),
    ):
        with pytest.raises(UnsupportedValueError, match="no member 'B' any more|import it before you load"):
            decode(stored(*parts))
    assert "antigravity" not in sys.modules
    for parts in ((1, 2, 3), (__name__,), (__name__, "Kind", [])):
        with pytest.raises(CheckpointError):
            decode(stored(*parts))


def test_what_numpys_text_of_a_dtype_does_not_say_is_refused() -> None:
    texts = [np.array(["long " * 20], dtype=np.dtypes.StringDType())] if hasattr(np.dtypes, "StringDType") else []
    for value in (*LOSING, np.matrix([1]), *texts):
        with pytest.raises(UnsupportedValueError, match=r"numpy\..* of dtype "):
            encode(value)
    for kept in (np.array(b"\0", dtype="V1"), np.array(["a", ""]), np.bytes_(b"\0a"), np.datetime64("2020", "D")):
        found = decode(encode(kept))
        assert type(found) is type(kept) and found.dtype == kept.dtype and np.array_equal(found, kept)


def test_what_has_no_typed_form_is_refused_with_its_place() -> None:
    for value in (object(), lambda: 0, np.array([object()]), {"a": [1, {2: object}]}):
        with pytest.raises(UnsupportedValueError):
            encode(value)
    with pytest.raises(UnsupportedValueError, match=r"\['a'\]\[1\]\[2\]"):
        encode({"a": [1, {2: object()}]})
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        encode(loop)


def repeated(levels: int, value: Any) -> list[Any]:
    """A list that holds the one before twice, so often."""
    for _ in range(levels):
        value = [value, value]
    return value


def test_lists_that_share_themselves_without_end_are_refused(tmp_path: Path) -> None:
    """Soon, and not after 2^40 lists have been walked. A file of PyTorch's keeps them as they are."""
    for state in (repeated(40, 1), repeated(40, torch.ones(1)), {"t": (repeated(38, {2: 3}),)}):
        for store in (save, lambda *args, **given: async_save(*args, **given).result()):
            with pytest.raises(CheckpointError, match="in each other so often that they would be stored as .*e[+]1"):
                store({"x": state}, checkpoint_id=tmp_path)
    assert flatten_state_dict({"x": repeated(40, 1)})[1] == {"x": ("x",)}
    row = [1, 2.5]
    assert decode(encode([row] * 200_000)) == [row] * 200_000


def test_object_bytes_read_like_a_file_of_torch_save() -> None:
    value = {"a": torch.ones(2), "b": (1, 2)}
    assert torch.load(ObjectBytes(value))["b"] == (1, 2)
    assert ObjectBytes(value).getvalue() == ObjectBytes(value).getbuffer().tobytes()
    stream = ObjectBytes(value)
    assert stream.tell() == 0 and stream.read(2) == b"PK" and stream.seek(0) == 0


# ------------------------------------------------------------------ dtypes and digests

TORCH_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("source", TORCH_DTYPES, ids=str)
def test_lossless_is_what_a_round_trip_of_extreme_values_says(source: torch.dtype) -> None:
    if source == torch.bool:
        probes = torch.tensor([False, True])
    elif source.is_floating_point:
        info = torch.finfo(source)
        numbers = [0.0, 1.0, 1 + info.eps, info.max, info.min, info.smallest_normal, info.smallest_normal * info.eps]
        probes = torch.tensor(numbers, dtype=torch.float64).to(source)
    else:
        low, high = torch.iinfo(source).min, torch.iinfo(source).max
        probes = torch.tensor([0, 1, low, low + 1, high, high - 1], dtype=source)
    for target in TORCH_DTYPES:
        there = probes.to(target)
        back = there.to(source)
        kept = bool((back.double() == probes.double()).all()) and bool((there.double() == probes.double()).all())
        if source == torch.int64 and target.is_floating_point:
            kept = False  # the comparison in float64 cannot tell
        if is_lossless(source, target):
            assert kept, target
        elif source.itemsize > 1 and not kept:
            assert not is_lossless(source, target)
    assert is_lossless(source, source) and dtype_from_name(dtype_name(source)) == source


def test_digests_depend_on_every_element_and_not_on_strides() -> None:
    tensor = torch.randn(700, 1000)
    assert digests_of_tensors([tensor]) == digests_of_tensors([tensor.T.contiguous().T])
    changed = tensor.clone()
    changed[699, 999] += 1
    assert digests_of_tensors([tensor]) != digests_of_tensors([changed])
    conjugate = torch.randn(5, dtype=torch.complex64).conj()
    assert digests_of_tensors([conjugate]) == digests_of_tensors([conjugate.resolve_conj()])
