"""Stand-ins for names in pickles: they build plain data, and pickles cannot change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from terrazzo.errors import CheckpointCorruptError, UnsafePickleError


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


class Record:
    """An instance of a class, read as the arguments and the state in the pickle.

    There is a subclass for each class that a pickle may have (`record`); `finish` makes the value from arguments and
    state.
    """

    __slots__ = ("args", "state")
    made_of: ClassVar[str] = ""

    def __new__(cls, *args: Any) -> Record:
        record = super().__new__(cls)
        record.args = args
        record.state = None
        return record

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        # Called on the class itself, `self` would be the state, and the argument missing, which raises a TypeError.
        if not isinstance(self, Record):
            raise UnsafePickleError("a pickle tries to change a class")
        self.state = state

    def finish(self) -> Any:
        """The value; the record itself unless a subclass overrides this."""
        return self

    @property
    def fields(self) -> dict[str, Any]:
        """The state as a dict of attributes."""
        if not isinstance(self.state, dict):
            raise CheckpointCorruptError(f"a pickled {type(self).made_of or type(self).__name__} has no fields")
        return self.state


def record(made_of: str, finish: Callable[[Any], Any]) -> type[Record]:
    """A class of records, from which `finish` makes values; `made_of` is their class in the pickle, for messages.

    >>> point = record("a.Point", lambda self: complex(self.fields["x"], self.fields["y"]))()
    >>> point.__setstate__({"x": 1, "y": 2})
    >>> point.finish()
    (1+2j)
    """
    return type(made_of, (Record,), {"__slots__": (), "made_of": made_of, "finish": finish})
