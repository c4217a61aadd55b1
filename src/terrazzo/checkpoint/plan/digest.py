"""Digests of tensors' values, to compare the values of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.native.memory import bytes_of

_WINDOW = 4 << 20
# An odd multiplier makes i -> i * _ODD a permutation of the 64-bit integers.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def digests_of_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`digest_of_tensor` of each; the host waits once for each device."""
    on_devices: dict[torch.device, list[int]] = {}
    digests: list[int | torch.Tensor] = []
    for i, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            digests.append(_digest_on_host(tensor))
        else:
            digests.append(_digest_on_device(tensor))
            on_devices.setdefault(tensor.device, []).append(i)
    for places in on_devices.values():
        values = torch.stack([digests[i] for i in places]).tolist()  # type: ignore[misc]
        for i, value in zip(places, values, strict=True):
            digests[i] = value & 0xFFFFFFFFFFFFFFFF
    return digests  # type: ignore[return-value]


def digest_of_tensor(tensor: torch.Tensor) -> int:
    """64 bits that depend on every element. Digests can be compared only if made on the same type of device.

    >>> digest_of_tensor(torch.arange(6).reshape(2, 3).T) == digest_of_tensor(torch.tensor([[0, 3], [1, 4], [2, 5]]))
    True
    """
    return digests_of_tensors([tensor])[0]


def _digest_on_host(tensor: torch.Tensor) -> int:
    state = xxhash.xxh3_64()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        state.update(bytes_of(tensor))
    else:
        for box in row_major_windows(tensor.shape, _WINDOW // tensor.dtype.itemsize):
            window = tensor[box.slices()].resolve_conj().resolve_neg().contiguous()
            state.update(bytes_of(window))
    return state.intdigest()


def _digest_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Without copying the data to the host: a sum of the bytes, each times a number that depends on its position."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for box in row_major_windows(tensor.shape, _WINDOW // tensor.dtype.itemsize):
        window = tensor[box.slices()].resolve_conj().resolve_neg().contiguous()
        data = window.reshape(-1).view(torch.uint8).to(torch.int64)
        place = torch.arange(1, data.numel() + 1, device=tensor.device, dtype=torch.int64) * _ODD
        total = total * 31 + ((data + 1) * (place ^ (place >> 29))).sum()  # int64 arithmetic wraps around
    return total
