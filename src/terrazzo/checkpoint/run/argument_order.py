"""The order of arguments that PyTorch had before `checkpoint_id`: the storage came second."""

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
    """Let a function whose second argument would have to be `keyword=` also take it without saying so."""

    def accept(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def either_way(*args: Any, **kwargs: Any) -> Result:
            if len(args) != 2:
                return function(*args, **kwargs)
            warnings.warn(
                f"{function.__name__}(state_dict, {keyword}) is an order of arguments that is no more; say {keyword}=",
                FutureWarning,
                stacklevel=2,
            )
            state_dict, storage = args
            given: Any = {keyword: storage, **kwargs}
            return function(*[state_dict], **given)

        return either_way

    return accept
