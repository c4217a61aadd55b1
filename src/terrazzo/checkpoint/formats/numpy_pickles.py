"""NumPy arrays, scalars and dtypes in pickles, rebuilt from their raw bytes.

NumPy's own `__setstate__` trusts what it is given; a crafted dtype can make it read memory that is not there. Only
dtypes without fields and without Python objects are accepted here.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from terrazzo.checkpoint.formats.stand_ins import Call, Record, record
from terrazzo.errors import CheckpointCorruptError, UnsafePickleError

_SIMPLE = re.compile(r"[<>|=]?([biufcSU]\d+|\?)")


def _dtype(self: Record) -> np.dtype[Any]:
    code = self.args[0] if self.args else None
    if not isinstance(code, str) or _SIMPLE.fullmatch(code) is None:
        raise UnsafePickleError(f"a pickle holds a NumPy value of type {code!r}; only plain numbers are read")
    order: Any = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "|"
    dtype = np.dtype(code)
    return dtype.newbyteorder(order) if order in ("<", ">") else dtype


def _filled(self: Record) -> Any:
    """An array as `numpy._core.multiarray._reconstruct` begins it and its state fills it."""
    if not isinstance(self.state, tuple) or len(self.state) != 5:
        raise CheckpointCorruptError("a pickled NumPy array has no contents")
    _, shape, dtype, in_columns, data = self.state
    return _array(data, dtype, shape, "F" if in_columns else "C")


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if not isinstance(dtype, np.dtype) or not isinstance(data, (bytes, bytearray)):
        raise UnsafePickleError("a pickled NumPy array holds objects, or has its data outside of the pickle")
    return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order=order)


_ARRAY: Final = record("numpy.ndarray", _filled)
_SCALAR: Final = record("a NumPy scalar", lambda self: _array(self.args[1], self.args[0], (), "C")[()])
_FROM_BUFFER: Final = record("numpy.ndarray", lambda self: _array(*self.args))  # as protocol 5 has it
_CORES: Final = ("numpy.core", "numpy._core")
NAMES: Final[dict[tuple[str, str], Any]] = {
    ("numpy", "dtype"): record("numpy.dtype", _dtype),
    ("numpy", "ndarray"): _ARRAY,
    **{(f"{core}.multiarray", "_reconstruct"): Call(lambda *_: _ARRAY()) for core in _CORES},
    **{(f"{core}.multiarray", "scalar"): _SCALAR for core in _CORES},
    **{(f"{core}.numeric", "_frombuffer"): _FROM_BUFFER for core in _CORES},
}
