"""NumPy arrays, scalars and dtypes in pickles, rebuilt from their raw bytes.

NumPy's own `__setstate__` trusts what it is given; a crafted dtype can make it read memory that is not there. Only
dtypes without fields and without Python objects are accepted here.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from terrazzo.checkpoint.formats.stand_ins import Call, Record
from terrazzo.errors import CheckpointCorruptError, UnsafePickleError

_SIMPLE = re.compile(r"[<>|=]?([biufcSU]\d+|\?)")


class _Dtype(Record):
    __slots__ = ()
    made_of = "numpy.dtype"

    def finish(self) -> np.dtype[Any]:
        code = self.args[0] if self.args else None
        if not isinstance(code, str) or _SIMPLE.fullmatch(code) is None:
            raise UnsafePickleError(f"a pickle holds a NumPy value of type {code!r}; only plain numbers are read")
        order: Any = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "|"
        dtype = np.dtype(code)
        return dtype.newbyteorder(order) if order in ("<", ">") else dtype


class _Array(Record):
    """As `numpy._core.multiarray._reconstruct` begins it and its state fills it."""

    __slots__ = ()
    made_of = "numpy.ndarray"

    def finish(self) -> Any:
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise CheckpointCorruptError("a pickled NumPy array has no contents")
        _, shape, dtype, in_columns, data = self.state
        return _array(data, dtype, shape, "F" if in_columns else "C")


class _FromBuffer(Record):
    """As protocol 5 has it."""

    __slots__ = ()
    made_of = "numpy.ndarray"

    def finish(self) -> Any:
        return _array(*self.args)


class _Scalar(Record):
    __slots__ = ()
    made_of = "a NumPy scalar"

    def finish(self) -> Any:
        dtype, data = self.args
        return _array(data, dtype, (), "C")[()]


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if not isinstance(dtype, np.dtype) or not isinstance(data, (bytes, bytearray)):
        raise UnsafePickleError("a pickled NumPy array holds objects, or has its data outside of the pickle")
    return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order=order)


def _begin_array(*_: Any) -> _Array:
    return _Array()


_CORES: Final = ("numpy.core", "numpy._core")
NAMES: Final[dict[tuple[str, str], Any]] = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    **{(f"{core}.multiarray", "_reconstruct"): Call(_begin_array) for core in _CORES},
    **{(f"{core}.multiarray", "scalar"): _Scalar for core in _CORES},
    **{(f"{core}.numeric", "_frombuffer"): _FromBuffer for core in _CORES},
}
