"""PyTorch's order of arguments before `checkpoint_id`, in which the storage is the second."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def storage_may_be_second(
    keyword: str,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Allow the keyword-only argument `keyword` of a function to be passed as its second one, with a warning."""

    def accept(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def either_way(*args: Any, **kwargs: Any) -> Result:
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
