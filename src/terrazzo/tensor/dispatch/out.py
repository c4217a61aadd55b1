"""`out=`: the result is computed, then written to the given tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terrazzo.errors import DTensorError, MixedTensorError, TerrazzoError
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dispatch.plain import replicated
from terrazzo.tensor.dispatch.structure import map_tensors, of_one_element
from terrazzo.tensor.dtensor import DTensor, become


def with_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` without its `out`, write the result to `out`, and return it."""
    name, out = canonical_name(func)[0], kwargs["out"]
    try:
        result = func(*args, **{k: v for k, v in kwargs.items() if k != "out"})
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if not isinstance(error, TerrazzoError) or error.__cause__ is not None:  # PyTorch's, perhaps with more words
            func(*map_tensors(tuple(args), of_one_element), **map_tensors(dict(kwargs), of_one_element))  # out is first
        raise
    outs, results = (out, result) if isinstance(out, (tuple, list)) else ((out,), (result,))
    makes_anew = not any(isinstance(a, torch.Tensor) for a in args)  # torch.eye and the like
    for target, value in zip(outs, results, strict=True):
        if makes_anew and isinstance(target, DTensor) and type(value) is torch.Tensor:
            value = replicated(value, target._layout)
        if not isinstance(target, DTensor) or not isinstance(value, DTensor):
            raise MixedTensorError(
                f"{name}: out= and the inputs must all be DTensors, but out is a {type(target).__name__} and the "
                f"result a {type(value).__name__}"
            )
        if value.dtype != target.dtype and target is out:
            _ask_cpp(func, args, kwargs, value.dtype)
        _write(name, target, value)
    return out


def _ask_cpp(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], type_of_result: torch.dtype) -> None:
    """Raise PyTorch's error for an `out` of another dtype: most functions do not cast to it, some cast to any."""
    given: list[Any] = map_tensors(list(args), of_one_element)
    named: dict[str, Any] = map_tensors(dict(kwargs), of_one_element)
    try:
        func(*given, **(named | {"out": named["out"].to(type_of_result)}))
    except Exception:
        return  # the function does not work on one element, so nothing is known
    func(*given, **named)


def _write(name: str, target: DTensor, value: DTensor) -> None:
    if torch.is_grad_enabled() and (target.requires_grad or value.requires_grad):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    if not torch.can_cast(value.dtype, target.dtype):
        raise DTensorError(f"{name}: a result of {value.dtype} cannot be cast to out's {target.dtype}")
    if target.shape == value.shape:
        target.copy_(value)
    elif target.numel():
        raise DTensorError(f"{name}: out has shape {tuple(target.shape)}, but the result has {tuple(value.shape)}")
    else:
        converted = value.to(target.dtype)
        assert isinstance(converted, DTensor)
        become(target, converted)
