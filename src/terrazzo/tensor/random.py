"""Random numbers that depend on the global tensor only.

Each random operation draws one 62-bit key from a PyTorch generator (the default one follows `torch.manual_seed`, and
activation checkpointing saves and restores its state). The value of an element is computed from the key and the
element's index in the global tensor (`counter`), so it does not depend on placements or on the number of ranks, and a
rank computes only what it holds. The result is written piece by piece.

This needs generators in the same state on all ranks; `generator_check` raises an error if they are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from terrazzo._torch.dispatching import under_fake_tensors
from terrazzo.comm import captured
from terrazzo.comm.simulated import real_values
from terrazzo.errors import DTensorError
from terrazzo.layout import Box, Layout
from terrazzo.tensor.counter import (
    AnyWords,
    Few,
    FewWords,
    Indices,
    Words,
    indices_of,
    is_one_piece,
    lower_index,
    words_of,
)
from terrazzo.tensor.generator_check import check_generators
from terrazzo.tensor.redistribute import boxes_of, redistribute_local

Make = Callable[..., torch.Tensor]


def draw_key(layout: Layout, generator: torch.Generator | None = None) -> int | torch.Tensor:
    """The key of one random operation; every rank of the mesh draws the same.

    While `terrazzo.compile` captures a program it is a 0-d tensor, an input of the graph.
    """
    recorder = captured.recorder()
    if recorder is not None:
        return recorder.draw(layout.mesh, generator)
    _check_not_captured(layout.mesh.device_type)
    number = next_number(generator)
    check_generators(layout.mesh, number, tuple(layout.shape), generator)
    return number


def _check_not_captured(device_type: str) -> None:
    """Raise if a graph of an accelerator (CUDA graph) is being captured: the key would be part of it."""
    if device_type == "cpu":
        return
    module = torch.get_device_module(device_type)
    captures = getattr(module, "is_current_stream_capturing", None)
    if captures is not None and module.is_initialized() and captures():
        raise DTensorError(
            "a random operation on a DTensor cannot be captured in a CUDA graph: every replay would have the same "
            "random numbers, one dropout mask for all steps. Leave it out of the captured part, or use "
            "terrazzo.compile, whose graphs get new random numbers at each call"
        )


def draw_number(mesh: Any, generator: torch.Generator | None = None) -> int:
    """The next number of a generator that has the same state on all ranks of the mesh."""
    number = next_number(generator)
    check_generators(mesh, number, (), generator)
    return number


def next_number(generator: torch.Generator | None = None) -> int:
    """The next number of a generator, independent of other ranks."""
    if under_fake_tensors():
        with real_values():
            return next_number(generator)
    if generator is None or generator.device.type == "cpu":
        return int(torch.randint(0, 1 << 62, (), dtype=torch.int64, generator=generator, device="cpu"))
    return _key_without_waiting(generator)


def _key_without_waiting(generator: torch.Generator) -> int:
    """Made from the seed and offset of a device's generator: drawing a number there would wait for the device."""
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + 4)  # the smallest step of one draw; offsets are multiples of 4
    source = torch.Generator().manual_seed((seed ^ (offset * 0x9E3779B97F4A7C15)) & ((1 << 63) - 1))
    return int(torch.randint(0, 1 << 62, (), dtype=torch.int64, generator=source, device="cpu"))


# For each layout the indices of this rank's elements, and those of their real and imaginary parts.
_runs: WeakKeyDictionary[Layout, tuple[Indices, Indices] | None] = WeakKeyDictionary()


def _run(layout: Layout, dtype: torch.dtype) -> Indices | None:
    """The global indices of this rank's elements; None if it has none."""
    if layout not in _runs:
        box, shape = layout.box(), tuple(layout.shape)
        parts = Box((*box.offsets, 0), (*box.lengths, 2))
        nothing = layout.coord is None or box.is_empty
        _runs[layout] = None if nothing else (indices_of(box, shape), indices_of(parts, (*shape, 2)))
    runs = _runs[layout]
    return None if runs is None else runs[dtype.is_complex]


# For layouts of few elements on a CPU, which are processed in one piece.
_few: WeakKeyDictionary[Layout, Few] = WeakKeyDictionary()
_MOST = 4096


def drawn(
    layout: Layout, dtype: torch.dtype, generator: torch.Generator | None, make: Make, *aligned: torch.Tensor
) -> torch.Tensor:
    """A new local tensor; `make(words, *pieces of aligned)` computes each piece from its random words.

    Numbers are drawn for boxes, which `aligned` are, too; terms, and what is cut in pieces, are made from these.
    """
    if layout.packed or layout.dual is not layout:
        plain = boxes_of(layout)
        return redistribute_local(drawn(plain, dtype, generator, make, *aligned), plain, layout)
    key = draw_key(layout, generator)
    if type(key) is int and not dtype.is_complex and not under_fake_tensors():
        few = _few.get(layout) or _few_of(layout)
        if few is not None:
            local = make(FewWords(few, key), *aligned)
            return local if local.dtype is dtype else local.to(dtype)
    run, device = _run(layout, dtype), layout.mesh.device_type
    if run is not None and not dtype.is_complex and is_one_piece(run, device):
        words = Words(run, key, lower_index(run, device))
        local = make(words, *[tensor.reshape(run.lengths) for tensor in aligned])
        return local.to(dtype).view(layout.local_shape)
    out = torch.empty(tuple(layout.local_shape), dtype=dtype, device=device)
    return out if run is None else _fill(out, run, key, make, aligned)


def _few_of(layout: Layout) -> Few | None:
    shape, device = layout.local_shape, layout.mesh.device_type
    run = _run(layout, torch.float32)
    if device != "cpu" or not shape or shape.numel() > _MOST or run is None or not is_one_piece(run, device):
        return None
    few = _few[layout] = Few.of(run, shape)
    return few


def fill(
    out: torch.Tensor, layout: Layout, generator: torch.Generator | None, make: Make, *aligned: torch.Tensor
) -> torch.Tensor:
    """`drawn`, written to the contiguous `out`."""
    key, run = draw_key(layout, generator), _run(layout, out.dtype)
    return out.zero_() if run is None else _fill(out, run, key, make, aligned)  # zero_ counts as a write on every rank


def _fill(
    out: torch.Tensor, run: Indices, key: int | torch.Tensor, make: Make, aligned: Sequence[torch.Tensor]
) -> torch.Tensor:
    target = (torch.view_as_real(out) if out.is_complex() else out).view(run.lengths)
    beside = [tensor.reshape(run.lengths) for tensor in aligned]
    for at, words in words_of(run, key, out.device):
        _piece(target, at).copy_(make(words, *[_piece(tensor, at) for tensor in beside]))
    return out


def _piece(tensor: torch.Tensor, at: Sequence[slice]) -> torch.Tensor:
    """`tensor[at]`, which `__getitem__` cannot do for fake tensors of a device that does not exist here."""
    for d, span in enumerate(at):
        tensor = tensor.narrow(d, span.start, span.stop - span.start)
    return tensor


def is_double(dtype: torch.dtype) -> bool:
    """Whether one 32-bit word is not enough for an element of this dtype."""
    return dtype in (torch.float64, torch.complex128)


def centred_uniform(words: AnyWords, dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    """Uniform in (-0.5, 0.5), never 0: an odd multiple of 2**-33, exact near 0, from word number `first`; for doubles
    an odd multiple of 2**-65, from words `first` and `first + 1`."""
    if not is_double(dtype):
        return words.word(first).to(torch.float32).add_(0.5).mul_(2.0**-32)
    low = words.word(first).to(torch.float64).add_(0.5).add_(2.0**31).mul_(2.0**-64)
    return low.add_(words.word(first + 1).to(torch.float64), alpha=2.0**-32)


def standard_uniform(words: AnyWords, dtype: torch.dtype) -> torch.Tensor:
    """Uniform in [0, 1): all multiples of 2**-24 (float64: 2**-53, float16: 2**-11, bfloat16: 2**-8)."""
    if is_double(dtype):
        low = words.word(1).bitwise_right_shift_(6).to(torch.float64).add_(2.0**25).mul_(2.0**-53)
        return low.add_(words.word(0).bitwise_right_shift_(5).to(torch.float64), alpha=2.0**-27).add_(0.5)
    digits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
    return words.word().bitwise_right_shift_(32 - digits).to(torch.float32).mul_(2.0**-digits).add_(0.5)


def standard_normal(words: AnyWords, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal (Box and Muller); always finite, because the argument of the logarithm is never 0."""
    radius = centred_uniform(words, dtype).abs_().mul_(2).log_().mul_(-2).sqrt_()
    return radius.mul_(centred_uniform(words, dtype, 2 if is_double(dtype) else 1).mul_(2 * math.pi).cos_())


def standard_exponential(words: AnyWords, dtype: torch.dtype) -> torch.Tensor:
    """Exponential with mean 1; never 0, although the smallest value would round to it."""
    smallest = {torch.float64: 2.0**-55, torch.float16: 2.0**-24}.get(dtype, 2.0**-26)
    return centred_uniform(words, dtype).abs_().mul_(2).log_().neg_().clamp_min_(smallest)


def bits64(words: AnyWords) -> torch.Tensor:
    """64 random bits, as an int64."""
    return words.word(0).to(torch.int64).mul_(1 << 32).add_(words.word(1))


def true_with(words: AnyWords, p: float) -> torch.Tensor:
    """True with probability `p`, to 2**-33."""
    threshold = _threshold(p)
    word = words.word()
    return torch.ones_like(word, dtype=torch.bool) if threshold >> 31 > 0 else word < threshold


def _threshold(p: float) -> int:
    return round(p * 2.0**32) - (1 << 31)


def uniform(layout: Layout, dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """Local values of a uniform tensor in [0, 1)."""
    return drawn(layout, dtype, generator, lambda words: standard_uniform(words, dtype))


def normal(layout: Layout, dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """Local values of a standard normal tensor; of a complex one, both parts have half the variance."""
    scale = math.sqrt(0.5) if dtype.is_complex else 1.0
    return drawn(layout, dtype, generator, lambda words: standard_normal(words, dtype).mul_(scale))


def keep_mask(layout: Layout, p: float, generator: torch.Generator | None = None) -> torch.Tensor:
    """A local mask, True with probability `p`."""
    return drawn(layout, torch.bool, generator, lambda words: true_with(words, p))


def keep_factors(layout: Layout, p: float) -> Callable[[], torch.Tensor | None]:
    """A function that makes the mask of `keep_mask` as float32 factors 0 and 1 / p.

    None unless the elements are few, on a CPU, and no graph is captured. Such a dropout then takes one multiplication.
    """
    threshold = _threshold(p)
    limit, factor = np.array(min(threshold, (1 << 31) - 1), dtype=np.int32), np.float32(1 / p)

    def make() -> torch.Tensor | None:
        if threshold >> 31 > 0 or captured.recorder() is not None or under_fake_tensors():
            return None
        few = _few.get(layout) or _few_of(layout)
        if few is None:
            return None
        key = draw_key(layout)
        assert isinstance(key, int)
        return torch.from_numpy(np.multiply(np.less(few.words(key), limit), factor))

    return make
