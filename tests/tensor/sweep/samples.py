"""What the sweep runs: the entries of PyTorch's op database, and a few of each entry's own sample inputs.

The database sizes its samples by module constants (`S` is 5, `M` 10, `L` 20).  Setting these anew while samples are
made gives tensors that four ranks share evenly, unevenly, or so that some hold nothing.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

SIZES: dict[str, dict[str, int]] = {
    "even": {"XS": 4, "S": 4, "M": 8, "L": 20},
    "uneven": {"XS": 3, "S": 7, "M": 10, "L": 20},
    "empty": {},  # the database's own: 5 over four ranks is 2, 2, 1, 0
}
# Their samples hold numbers that fit the database's own sizes only; with others they read past the end of memory.
_OWN_SIZES = {"_segment_reduce.lengths", "_segment_reduce.offsets"}
DTYPES = ("float32", "float16", "bfloat16", "complex64", "int64", "bool")
_LARGE = 6000  # elements; larger samples are taken only where there are no others


@lru_cache(maxsize=1)
def entries() -> dict[str, Any]:
    """All entries that take one of the dtypes on the CPU, by name (with the variant's, where there is one)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    _let_seeds_alone()
    found = {}
    for op in op_db:
        if dtypes_of(op):
            name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
            assert name not in found, f"two entries {name}"
            found[name] = op
    return found


def dtypes_of(op: Any) -> list[str]:
    """Which of the dtypes an entry has samples for."""
    supported = op.supported_dtypes("cpu")
    return [d for d in DTYPES if getattr(torch, d) in supported]


def differentiable(op: Any, dtype: str) -> bool:
    return op.supports_autograd and getattr(torch, dtype) in op.supported_backward_dtypes("cpu")


def _let_seeds_alone() -> None:
    """Entries that draw random numbers fix the seed inside; here the sweep does, or it could not tell them from
    others."""
    for module in _database():
        if hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _database() -> list[Any]:
    prefixes = ("torch.testing._internal.opinfo", "torch.testing._internal.common_methods_invocations")
    return [m for n, m in sys.modules.items() if n.startswith(prefixes)]


def samples(name: str, size: str, count: int, dtype: str = "float32") -> list[Any]:
    """At most `count` of the entry's samples, spread over the list that the database makes.

    The same on every rank: the database draws from PyTorch's, Python's and numpy's generators, which are seeded here.
    """
    op = entries()[name]
    with _sizes({} if name in _OWN_SIZES else SIZES[size]):
        try:
            made = _make(op, dtype)
        except (RuntimeError, IndexError, ValueError):
            made = None  # a few entries only work with the database's own sizes
    if made is None:
        made = _make(op, dtype)
    fitting = [s for s in made if sum(t.numel() for t in tensors_of(s)) <= _LARGE] or made[:1]
    if len(fitting) <= count:
        return fitting
    step = (len(fitting) - 1) / max(count - 1, 1)
    return [fitting[round(i * step)] for i in range(count)]


def tensors_of(sample: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for v in value:
                walk(v)
        elif isinstance(value, dict):
            walk(list(value.values()))

    walk([sample.input, sample.args, sample.kwargs])
    return found


def _make(op: Any, dtype: str) -> list[Any]:
    import random

    import numpy as np

    torch.default_generator.manual_seed(7)  # torch.manual_seed keeps the stack of every call, for other devices
    random.seed(7)
    np.random.seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What `op.sample_inputs` adds is a seed before, and a look at the stack for, every sample.
        return list(op.sample_inputs_func(op, "cpu", getattr(torch, dtype), differentiable(op, dtype)))


@contextlib.contextmanager
def _sizes(values: dict[str, int]) -> Iterator[None]:
    before: list[tuple[Any, str, int]] = []
    for module in _database():
        for key, value in values.items():
            if isinstance(getattr(module, key, None), int):
                before.append((module, key, getattr(module, key)))
                setattr(module, key, value)
    try:
        yield
    finally:
        for module, key, value in before:
            setattr(module, key, value)
