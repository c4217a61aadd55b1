"""Random bits by position: a 32-bit word for each element of a tensor is a hash of a key and the element's index.

An element's index is its row-major position in the global tensor, so its bits depend neither on placements nor on the
number of ranks. The hash works on int32 tensors in place, in pieces that stay in a cache: for a local tensor of any
size, what it needs beside its result is bounded (`PIECE` elements, 12 bytes each). On CUDA and ROCm it is one kernel.

Four rounds of multiplication are needed (odd constants of C. Wellons' `triple32` and of MurmurHash3); each adds a key
word and folds the upper bits into the lower ones. With them, flipping any bit of the index, or of the key words up to
the second, flips every bit of the result in half of the cases. The index is added once more at the end: without it,
equal words would never occur within one tensor. torch's right shift keeps the sign and it has no fast mask, so the
folds include copies of the sign bit; the last fold is an addition, so that the top bit depends on the index enough.

The key words come from SplitMix64 (Steele, Lea and Flood 2014) applied to the drawn key, the upper 32 bits of the
index, and the number of the word (some distributions take several words per element).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from terrazzo._torch.dispatching import under_fake_tensors
from terrazzo._torch.kernels import elementwise
from terrazzo.comm.captured import capturing
from terrazzo.layout import Box

PIECE = 1 << 16
"""Elements that each thread of a CPU processes at a time; other devices take 64 times as many."""

_GAMMA = 0x9E3779B97F4A7C15
_WHOLE = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int32 with the lower 32 bits of `value`."""
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


_MULTIPLIERS = tuple(_signed(m) for m in (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB, 0x85EBCA6B))
_FOLDS = (16, 15, 14, 15)
# Tensors instead of numbers: converting a number at each call takes longer than shifting a small piece. Captured graphs
# use the numbers.
_FOLD_TENSORS = tuple(torch.tensor(bits, dtype=torch.int32, device="cpu") for bits in _FOLDS)
_FOLD: tuple[Any, ...] = (*[torch.Tensor.bitwise_xor_] * 3, torch.Tensor.add_)
# NumPy processes arrays without dims in half the time of Python numbers.
_MULTIPLIER_ARRAYS = tuple(np.array(m, dtype=np.int32) for m in _MULTIPLIERS)
_FOLD_ARRAYS = tuple(np.array(bits, dtype=np.int32) for bits in _FOLDS)
_INDEX_AGAIN = _signed(0x9E3779B1)
# `Words.word` in one kernel: the same steps, in arithmetic without signs where it wraps around.
_KERNEL = elementwise(
    f"""
    template <typename T> T random_word(T index, T key0, T key1, T key2, T key3) {{
        unsigned z = (unsigned)index * {_MULTIPLIERS[0] & 0xFFFFFFFF}u + (unsigned)key0;
        z ^= (unsigned)((int)z >> {_FOLDS[0]});
        z = z * {_MULTIPLIERS[1] & 0xFFFFFFFF}u + (unsigned)key1;
        z ^= (unsigned)((int)z >> {_FOLDS[1]});
        z = z * {_MULTIPLIERS[2] & 0xFFFFFFFF}u + (unsigned)key2;
        z ^= (unsigned)((int)z >> {_FOLDS[2]});
        z = z * {_MULTIPLIERS[3] & 0xFFFFFFFF}u + (unsigned)key3;
        z += (unsigned)((int)z >> {_FOLDS[3]});
        return (T)(z + (unsigned)index * {_INDEX_AGAIN & 0xFFFFFFFF}u);
    }}
    """,
    "key0", "key1", "key2", "key3",
)  # fmt: skip


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WHOLE
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WHOLE
    return z ^ (z >> 31)


def key_words(key: int, upper: int, number: int) -> tuple[int, ...]:
    """Four int32 words for the `number`th random word (at most the 4th) of elements with these upper index bits."""
    return tuple(_signed(pair >> shift) for pair in _key_pairs(key, upper, number) for shift in (0, 32))


def _key_pairs(key: int, upper: int, number: int) -> tuple[int, int]:
    state = _mixed((key + _GAMMA * (4 * upper + number + 1)) & _WHOLE)
    return _mixed((state + _GAMMA) & _WHOLE), _mixed((state + 2 * _GAMMA) & _WHOLE)


def _mixed_tensor(z: torch.Tensor) -> torch.Tensor:
    for bits, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = z ^ (z >> bits & (1 << 64 - bits) - 1)  # masked, because torch's shift keeps the sign
        z = z * (multiplier - (1 << 64) if multiplier > 1 else 1)
    return z


def key_words_of(key: torch.Tensor, upper: int, number: int) -> tuple[torch.Tensor, ...]:
    """`key_words` for a key that is an input of a captured graph."""

    def step(times: int) -> int:
        return (_GAMMA * times + (1 << 63) & _WHOLE) - (1 << 63)

    state = _mixed_tensor(key + step(4 * upper + number + 1))
    pairs = [_mixed_tensor(state + step(i)) for i in (1, 2)]
    return tuple((pair >> shift).to(torch.int32) for pair in pairs for shift in (0, 32))


class Indices(NamedTuple):
    """A strided set of element indices: `first`, plus for each dim a multiple of its stride below its length."""

    first: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last(self) -> int:
        return self.first + sum((n - 1) * stride for n, stride in zip(self.lengths, self.strides, strict=True))


def indices_of(box: Box, shape: Sequence[int]) -> Indices:
    """The indices of a box in a tensor of `shape`, in as few dims as possible; the box is not empty."""
    first, stride = 0, 1
    lengths: list[int] = []
    strides: list[int] = []
    for offset, length, size in zip(reversed(box.offsets), reversed(box.lengths), reversed(shape), strict=True):
        first += offset * stride
        if length > 1:
            if lengths and stride == lengths[0] * strides[0]:
                lengths[0] *= length
            else:
                lengths.insert(0, length)
                strides.insert(0, stride)
        stride *= size
    return Indices(first, tuple(lengths) or (1,), tuple(strides) or (1,))


def is_one_piece(run: Indices, device: torch.device | str) -> bool:
    """Whether the elements are few enough to be processed at once, or have no values (fake tensors)."""
    if under_fake_tensors():
        return True  # fake tensors take no memory
    return prod(run.lengths) <= piece_limit(device) and run.first >> 32 == run.last >> 32


def pieces_of(run: Indices, limit: int, starts: tuple[int, ...] = ()) -> Iterator[tuple[tuple[slice, ...], Indices]]:
    """The indices in pieces of at most `limit` elements with common upper 32 bits, and where each piece lies."""
    starts = starts or (0,) * len(run.lengths)
    count = prod(run.lengths)
    if count <= limit and run.first >> 32 == run.last >> 32:
        yield tuple(slice(start, start + n) for start, n in zip(starts, run.lengths, strict=True)), run
        return
    d = next(d for d, n in enumerate(run.lengths) if n > 1)
    length = run.lengths[d]
    step = max(1, limit * length // count) if count > limit else -(-length // 2)
    for begin in range(0, length, step):
        lengths = (*run.lengths[:d], min(step, length - begin), *run.lengths[d + 1 :])
        part = Indices(run.first + begin * run.strides[d], lengths, run.strides)
        yield from pieces_of(part, limit, (*starts[:d], starts[d] + begin, *starts[d + 1 :]))


class Words:
    """The random words of a piece; the result of `word(number)` is overwritten by the next call."""

    __slots__ = ("_buffers", "_index", "_key", "_keys", "_run")

    def __init__(self, run: Indices, key: int | torch.Tensor, index: torch.Tensor) -> None:
        self._key = key
        self._keys: dict[int, tuple[torch.Tensor, ...]] = {}
        self._run = run
        self._index = index
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def move(self, run: Indices) -> None:
        """Switch to another piece of the same lengths and strides."""
        if run.first >> 32 != self._run.first >> 32:
            self._keys = {}
        self._index.add_(_signed(run.first - self._run.first))
        self._run = run

    def word(self, number: int = 0) -> torch.Tensor:
        """A random int32 for each element."""
        if _KERNEL is not None and self._index.is_cuda and type(self._key) is int and not under_fake_tensors():
            words = key_words(self._key, self._run.first >> 32, number)
            return _KERNEL(self._index, key0=words[0], key1=words[1], key2=words[2], key3=words[3])
        if self._buffers is None:
            self._buffers = torch.empty_like(self._index), torch.empty_like(self._index)
        z, folded, previous = *self._buffers, self._index
        folds: tuple[Any, ...] = _FOLDS if under_fake_tensors() else _FOLD_TENSORS
        for key, multiplier, bits, fold in zip(self._key_words(number), _MULTIPLIERS, folds, _FOLD, strict=True):
            torch.add(key, previous, alpha=multiplier, out=z)
            fold(z, torch.bitwise_right_shift(z, bits, out=folded))
            previous = z
        return z.add_(self._index, alpha=_INDEX_AGAIN)

    def _key_words(self, number: int) -> tuple[torch.Tensor, ...]:
        found = self._keys.get(number)
        if found is None:
            key, upper = self._key, self._run.first >> 32
            if isinstance(key, torch.Tensor):
                found = key_words_of(key, upper, number)
            else:
                found = torch.tensor(key_words(key, upper, number), dtype=torch.int32, device="cpu").unbind()
            self._keys[number] = found
        return found


class Few(NamedTuple):
    """For few elements on a CPU: their index before the first round, what is added at the end, and the common upper
    32 bits of the index."""

    first: Any
    again: Any
    upper: int

    @staticmethod
    def of(run: Indices, shape: Sequence[int]) -> Few:
        """For the elements of a box that is not 0-d."""
        index = lower_index(run, "cpu").reshape(tuple(shape)).numpy()
        return Few(index * _MULTIPLIER_ARRAYS[0], index * np.int32(_INDEX_AGAIN), run.first >> 32)

    def words(self, key: int, number: int = 0) -> Any:
        """A NumPy array of the `number`th word of each element."""
        first, again, upper = self
        added = np.array(_key_pairs(key, upper, number), dtype="<u8").view("<i4")
        z = np.add(first, added[:1])
        folded = np.right_shift(z, _FOLD_ARRAYS[0])
        np.bitwise_xor(z, folded, z)
        for i in (1, 2):
            np.multiply(z, _MULTIPLIER_ARRAYS[i], z)
            np.add(z, added[i : i + 1], z)
            np.right_shift(z, _FOLD_ARRAYS[i], folded)
            np.bitwise_xor(z, folded, z)
        np.multiply(z, _MULTIPLIER_ARRAYS[3], z)
        np.add(z, added[3:], z)
        np.right_shift(z, _FOLD_ARRAYS[3], folded)
        np.add(z, folded, z)
        return np.add(z, again, z)


class FewWords:
    """The words of few elements on a CPU, computed with NumPy, which needs a third of the time for each step."""

    __slots__ = ("_few", "_key")

    def __init__(self, few: Few, key: int) -> None:
        self._few, self._key = few, key

    def word(self, number: int = 0) -> torch.Tensor:
        return torch.from_numpy(self._few.words(self._key, number))


AnyWords: TypeAlias = Words | FewWords


def lower_index(run: Indices, device: torch.device | str) -> torch.Tensor:
    """The lower 32 bits of the index of each element."""
    index: torch.Tensor | None = None
    for d, (length, stride) in enumerate(zip(reversed(run.lengths), reversed(run.strides), strict=True)):
        along = torch.arange(length, dtype=torch.int32, device=device)
        if stride != 1:
            along.mul_(_signed(stride))
        index = along if index is None else along.reshape(-1, *(1,) * d) + index
    assert index is not None  # there is at least one dim
    return index.add_(_signed(run.first)) if run.first else index


def words_of(
    run: Indices, key: int | torch.Tensor, device: torch.device | str
) -> Iterator[tuple[tuple[slice, ...], Words]]:
    """The words of the elements, piece by piece, and where each piece lies in a tensor of the given lengths."""
    words: Words | None = None
    lengths: tuple[int, ...] = ()
    for at, piece in pieces_of(run, piece_limit(device)):
        if words is None or piece.lengths != lengths:
            words, lengths = None, piece.lengths  # free the last piece's buffers before the next ones are allocated
            words = Words(piece, key, lower_index(piece, device))
        else:
            words.move(piece)
        yield at, words


def piece_limit(device: torch.device | str) -> int:
    """How many elements are processed at a time."""
    if capturing():
        return 1 << 30  # a compiler splits the work itself
    return PIECE * (torch.get_num_threads() if torch.device(device).type == "cpu" else 64)
