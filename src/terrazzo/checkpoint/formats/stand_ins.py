"""Stand-ins for names in pickles: they build plain data, and pickles cannot change them.

NumPy's own `__setstate__` trusts what it is given; a crafted dtype can make it read memory that is not there. Its
arrays, scalars and dtypes are rebuilt from their raw bytes, and only dtypes without fields and without Python objects
are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, Final

import numpy as np

from terrazzo.errors import CheckpointCorruptError, UnsafePickleError

_SIMPLE = re.compile(r"[<>|=]?([biufcSU]\d+|\?)")


class Call:
    """A function that a pickle may call, but not change."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsafePickleError("a pickle tries to change a function")


class Pickled:
    """An instance of a class, read as the arguments and the state in the pickle.

    There is a subclass for each class that a pickle may have (`pickled`); `finish` makes the value from arguments and
    state.
    """

    __slots__ = ("args", "state")
    made_of: ClassVar[str] = ""

    def __new__(cls, *args: Any) -> Pickled:
        made = super().__new__(cls)
        made.args = args
        made.state = None
        return made

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        # Called on the class itself, `self` would be the state, and the argument missing, which raises a TypeError.
        if not isinstance(self, Pickled):
            raise UnsafePickleError("a pickle tries to change a class")
        self.state = state

    def finish(self) -> Any:
        """The value; the instance itself unless a subclass overrides this."""
        return self

    @property
    def fields(self) -> dict[str, Any]:
        """The state as a dict of attributes."""
        if not isinstance(self.state, dict):
            raise CheckpointCorruptError(f"a pickled {type(self).made_of or type(self).__name__} has no fields")
        return self.state


def pickled(made_of: str, finish: Callable[[Any], Any]) -> type[Pickled]:
    """A class of instances, from which `finish` makes values; `made_of` is their class in the pickle, for messages.

    >>> point = pickled("a.Point", lambda self: complex(self.fields["x"], self.fields["y"]))()
    >>> point.__setstate__({"x": 1, "y": 2})
    >>> point.finish()
    (1+2j)
    """
    return type(made_of, (Pickled,), {"__slots__": (), "made_of": made_of, "finish": finish})


def _dtype(self: Pickled) -> np.dtype[Any]:
    code = self.args[0] if self.args else None
    if not isinstance(code, str) or _SIMPLE.fullmatch(code) is None:
        raise UnsafePickleError(f"a pickle holds a NumPy value of type {code!r}; only plain numbers are read")
    order: Any = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "|"
    dtype = np.dtype(code)
    return dtype.newbyteorder(order) if order in ("<", ">") else dtype


def _filled(self: Pickled) -> Any:
    """An array as `numpy._core.multiarray._reconstruct` begins it and its state fills it."""
    if not isinstance(self.state, tuple) or len(self.state) != 5:
        raise CheckpointCorruptError("a pickled NumPy array has no contents")
    _, shape, dtype, in_columns, data = self.state
    return _array(data, dtype, shape, "F" if in_columns else "C")


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if not isinstance(dtype, np.dtype) or not isinstance(data, (bytes, bytearray)):
        raise UnsafePickleError("a pickled NumPy array holds objects, or has its data outside of the pickle")
    return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order=order)


_ARRAY: Final = pickled("numpy.ndarray", _filled)
_SCALAR: Final = pickled("a NumPy scalar", lambda self: _array(self.args[1], self.args[0], (), "C")[()])
_FROM_BUFFER: Final = pickled("numpy.ndarray", lambda self: _array(*self.args))  # as protocol 5 has it
_CORES: Final = ("numpy.core", "numpy._core")
NUMPY_NAMES: Final[dict[tuple[str, str], Any]] = {
    ("numpy", "dtype"): pickled("numpy.dtype", _dtype),
    ("numpy", "ndarray"): _ARRAY,
    **{(f"{core}.multiarray", "_reconstruct"): Call(lambda *_: _ARRAY()) for core in _CORES},
    **{(f"{core}.multiarray", "scalar"): _SCALAR for core in _CORES},
    **{(f"{core}.numeric", "_frombuffer"): _FROM_BUFFER for core in _CORES},
}
