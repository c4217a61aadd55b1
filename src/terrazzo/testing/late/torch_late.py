"""The module `torch.late`, as `torch.cuda` is for CUDA: torch's own code and programs look for these names in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from terrazzo.testing.late import build

_C: Any = build.load()
_initialized = True  # activation checkpointing restores random states only if this is set
Device = torch.device | str | int | None


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


# ------------------------------------------------------------------ devices


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def device_count() -> int:
    return int(_C.device_count())


def current_device() -> int:
    return int(_C.current_device())


def set_device(device: Device) -> None:
    _C.set_device(_index(device))


def synchronize(device: Device = None) -> None:
    _C.synchronize(_index(device))


def get_device_name(device: Device = None) -> str:
    return "late"


class device(AbstractContextManager[None]):
    """A block in which this device is the current one."""

    def __init__(self, device: Device) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        _C.set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _C.set_device(self.prev_idx)


# ------------------------------------------------------------------ streams and events


class Stream(torch.Stream):
    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("late", _index(device)), priority=priority)

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, "late", enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)


def _stream(number: int, device: Device) -> Stream:
    kind = torch.Stream(device=torch.device("late", 0)).device_type
    return Stream(stream_id=number, device_index=_index(device), device_type=kind)


def current_stream(device: Device = None) -> Stream:
    return _stream(_C.current_stream(_index(device)), device)


def default_stream(device: Device = None) -> Stream:
    return _stream(0, device)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        _C.set_device(stream.device_index)
        _C.set_stream(stream.stream_id, stream.device_index)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """A block in which this stream is the current one, and its device the current one."""
    if stream is None:
        yield
        return
    device, before = current_device(), _C.current_stream(stream.device_index)
    set_stream(stream)
    try:
        yield
    finally:
        _C.set_stream(before, stream.device_index)
        _C.set_device(device)


# ------------------------------------------------------------------ random numbers

default_generators: tuple[torch.Generator, ...] = ()


def _make_generators() -> None:
    global default_generators
    default_generators = tuple(_C.default_generator(index) for index in range(device_count()))


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> int:
    return default_generators[current_device()].seed()


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: Device = None) -> Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: Tensor, device: Device = None) -> None:
    default_generators[_index(device)].set_state(state)


def get_rng_state_all() -> list[Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states: list[Tensor]) -> None:
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)


# ------------------------------------------------------------------ memory


def memory_allocated(device: Device = None) -> int:
    return int(_C.memory_stats(_index(device))["allocated"])


def max_memory_allocated(device: Device = None) -> int:
    return int(_C.memory_stats(_index(device))["peak"])


def memory_reserved(device: Device = None) -> int:
    return int(_C.memory_stats(_index(device))["reserved"])


max_memory_reserved = memory_reserved


def reset_peak_memory_stats(device: Device = None) -> None:
    _C.reset_peak(_index(device))


def empty_cache() -> None:
    _C.empty_cache()


# ------------------------------------------------------------------ what torch asks of every accelerator


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_call(call: Callable[[], Any], **_: Any) -> None:
    call()


def register(devices: int, register_module: Callable[[str, Any], None]) -> None:
    """Start the device, and make this module `torch.late`."""
    torch.utils.rename_privateuse1_backend("late")
    _C.start(devices)
    _make_generators()
    register_module("late", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
