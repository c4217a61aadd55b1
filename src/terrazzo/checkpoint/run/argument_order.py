"""PyTorch's order of arguments before `checkpoint_id`, in which the storage is the second."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from terrazzo.checkpoint.stores import Store
from terrazzo.errors import UnsupportedValueError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def check_is_no_place(keyword: str, storage: Any) -> None:
    """Raise if a path or a store was passed as `storage_writer` or `storage_reader`."""
    if isinstance(storage, (str, os.PathLike, Store)):
        right = "store" if isinstance(storage, Store) else "checkpoint_id"
        raise UnsupportedValueError(
            f"`{keyword}` must be a storage writer or reader, not {storage!r}: pass {right}= by name"
        )


def storage_may_be_second(
    keyword: str,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Allow the keyword-only argument `keyword` of a function to be passed as its second one, with a warning."""

    def accept(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def either_way(*args: Any, **kwargs: Any) -> Result:
            for storage in (*args[1:2], kwargs.get(keyword)):
                check_is_no_place(keyword, storage)
            if len(args) != 2:
                return function(*args, **kwargs)
            warnings.warn(
                f"{function.__name__}(state_dict, {keyword}) is deprecated: pass {keyword}= by name",
                FutureWarning,
                stacklevel=2,
            )
            state_dict, storage = args
            given: Any = {keyword: storage, **kwargs}
            return function(*[state_dict], **given)

        return either_way

    return accept
