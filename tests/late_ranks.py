"""Checks on the device `late`, on ranks of their own, as a process that has the device cannot lose it again.

`run_late` runs checks that are written for the device:

    def check_copy(device):                      # at module level
        assert torch.ones(2, device=device).sum().item() == 2

    def test_copies():
        run_late(2, check_copy)

Tests marked `on_late` run on it beside the CPU: `ranks.run_ranks` sends their checks to `run_on`.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from torch._C._autograd import _get_sequence_nr as sequence_nr
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

from terrazzo.errors import DeviceBuildError
from terrazzo.fsdp import group
from terrazzo.tensor import DTensor
from terrazzo.testing import Outcome, RanksFailed, late, run_fresh
from terrazzo.testing.late import build
from terrazzo.testing.pool import World
from terrazzo.testing.process import Request


@functools.cache
def _problem() -> str:
    """Why the device cannot be compiled here; empty if it is. Processes of the session compile it once.

    What a compiler that is there refuses is an error.
    """
    try:
        build.built()
    except DeviceBuildError as error:
        if "could not be compiled" in str(error):
            raise
        return str(error).partition("\n")[0]
    return ""


def skip_without_late() -> None:
    """Skip the test where the device cannot be compiled."""
    if problem := _problem():
        pytest.skip(problem)


def run_late(
    world: int,
    *checks: Callable[..., Any],
    modes: tuple[str, ...] = ("needed",),
    seeds: tuple[int, ...] = (0,),
    backend_name: str = "late",
    timeout: float = 400,
) -> list[list[Any]]:
    """Call each check with this rank's device, in each mode and with each seed; a race fails it.

    Returns for each call what it returned on each rank. Where the device cannot be compiled, the test is skipped.
    """
    __tracebackhide__ = True
    skip_without_late()
    outcomes = run_fresh(world, _run, checks, modes, seeds, backend_name, timeout=timeout)
    bad = [str(outcome) for outcome in outcomes if not outcome.ok]
    if bad:
        pytest.fail("\n".join(bad), pytrace=False)
    return [list(values) for values in zip(*(outcome.value for outcome in outcomes), strict=True)]


def _run(checks: Any, modes: Any, seeds: Any, backend_name: str) -> list[Any]:
    device = _start(backend_name)
    values = []
    for check in checks:
        for mode in modes:
            for seed in seeds:
                with late.checked(mode, seed):
                    values.append(check(device))
    return values


def _start(backend_name: str) -> torch.device:
    late.init(backend_name=backend_name)
    late.init_process_group()
    device = torch.device("late", torch.distributed.get_rank())
    torch.accelerator.set_device_index(device.index)
    return device


# ------------------------------------------------------------------ checks of tests marked `on_late`


@dataclass(frozen=True)
class Way:
    """How a check runs on the device. What differs between two ways must not change a bit of what it computes."""

    mode: str
    backend_name: str  # "nccl" averages in the collective, "late" sums and divides
    in_thread: bool  # in a thread that the check's process has started
    coalesces: bool  # whether fully_shard's small groups go together
    elsewhere: bool  # with another current device than that of the tensors, in tests that allow it


WAYS = {
    "late-eager": Way("eager", "late", in_thread=False, coalesces=True, elsewhere=False),
    "late-lazy": Way("needed", "nccl", in_thread=True, coalesces=False, elsewhere=True),
}
_worlds: dict[tuple[int, str], World] = {}
_bits: dict[str, dict[str, list[Any]]] = {}  # by test and way, by function: what each call compared on each rank
_test, _name, _way = "", "", WAYS["late-eager"]  # of the present test


def begin_test(test: str, way: str, elsewhere: bool, coalesces: bool) -> None:
    """Called before each test that runs on the device, with what its marks say."""
    global _test, _way, _name
    skip_without_late()
    _test, _name = test, way
    usual = WAYS[way]
    _way = replace(usual, elsewhere=elsewhere and usual.elsewhere, coalesces=coalesces or usual.coalesces)
    _bits[test + way] = {}


def run_on(world: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
    """Call `fn(*args)` on each of `world` ranks, as `ranks.run_ranks` does, where new tensors are on the device.

    A race fails it, and so does a bit of what it compares that differs from the test's other way.
    """
    __tracebackhide__ = True
    request = Request.of(_call, (Request.of(fn, args), _way))
    key = world, _way.backend_name
    if key in _worlds and _worlds[key].is_worn and _worlds[key].last_test != _test:
        _worlds.pop(key).close()
    if key not in _worlds:
        _worlds[key] = World(world, request)
    _worlds[key].last_test = _test
    intact = False
    try:
        outcomes = _worlds[key].call(request, timeout, grace=10.0)
        intact = all(outcome.ok for outcome in outcomes)
    finally:
        if not intact:
            _worlds.pop(key).close()
    if not intact:
        raise RanksFailed("\n".join([f"{fn.__qualname__} failed on the device `late`", *map(str, outcomes)]))
    values, bits = zip(*(outcome.value for outcome in outcomes), strict=True)
    _compare(fn.__qualname__, bits)
    return list(values)


def fresh_on(world: int, fn: Callable[..., Any], args: tuple[Any, ...], **more: Any) -> list[Outcome]:
    """The same on new ranks, as `run_fresh` does."""
    outcomes = run_fresh(world, _call, Request.of(fn, args), _way, **more)
    return [replace(outcome, value=outcome.value[0]) if outcome.ok else outcome for outcome in outcomes]


def _compare(function: str, bits: Any) -> None:
    mine = _bits[_test + _name].setdefault(function, [])
    mine.append(bits)
    for other in WAYS:
        calls = _bits.get(_test + other, {}).get(function, [])
        if len(calls) >= len(mine) and calls[len(mine) - 1] != bits:
            raise AssertionError(f"what {function} compares in call {len(mine)} has other bits in the way {other!r}")


def close_all() -> None:
    """End all ranks that were kept."""
    while _worlds:
        _worlds.popitem()[1].close()


_device: torch.device | None = None


def _call(request: Request, way: Way) -> Any:
    """What the check returns, and the bits that it compared."""
    global _device
    if _device is None:
        _device = _start(way.backend_name)
    on_device = functools.partial(_on, _device, request, way.elsewhere)
    known = group.COALESCE_BYTES
    group.COALESCE_BYTES = known if way.coalesces else 0
    try:
        with _recorded() as bits, late.checked(way.mode):
            value = _in_thread(on_device) if way.in_thread else on_device()
            value = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, value)
    finally:
        group.COALESCE_BYTES = known
    return value, bits


def _on(device: torch.device, request: Request, elsewhere: bool) -> Any:
    _count_alike(device)
    with OnDevice(device):
        torch.accelerator.set_device_index((device.index + 2) % 4 if elsewhere else device.index)
        torch.manual_seed(1234)
        return request.call()


def _count_alike(device: torch.device) -> None:
    """Let this thread, and autograd's thread of the device, have recorded equally many nodes.

    Backward first runs the nodes that were recorded last, by a count of each thread's. Gradients of gradients have
    nodes of both threads, so that the order of their sums, and so the last bits, depended on what had run before.
    """
    counts: list[int] = []
    x = torch.ones(1, device=device, requires_grad=True)
    record = torch.ones(1, requires_grad=True)

    def record_nodes(count: int) -> None:
        with torch.enable_grad():
            for _ in range(count):
                record.view(1)

    def there(gradient: torch.Tensor) -> None:
        behind = counts[0] - sequence_nr()
        record_nodes(behind)
        counts.append(-behind)

    y = x * 1
    y.register_hook(there)
    counts.append(sequence_nr())
    y.backward()
    record_nodes(counts[1])


def _in_thread(call: Callable[[], Any]) -> Any:
    done: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            done.append((call(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    value, error = done[0]
    if error is not None:
        raise error
    return value


class OnDevice(DeviceContext):
    """New tensors are on the device. Those that a generator of the CPU draws are drawn there, as on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn_by = kwargs.get("generator")
        if drawn_by is not None and drawn_by.device.type == "cpu" and func in _device_constructors():
            if kwargs.get("device") is None:
                return func(*args, **{**kwargs, "device": "cpu"}).to(self.device)
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def _recorded() -> Iterator[list[str]]:
    """Digests of what is given to `torch.testing.assert_close`."""
    bits: list[str] = []
    testing: Any = torch.testing
    known = testing.assert_close

    def assert_close(actual: Any, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        known(actual, *args, **kwargs)
        bits.extend(_digest(leaf) for leaf in tree_leaves(actual) if isinstance(leaf, torch.Tensor))

    testing.assert_close = assert_close
    try:
        yield bits
    finally:
        testing.assert_close = known


def _digest(tensor: torch.Tensor) -> str:
    local = tensor.detach()
    if isinstance(local, DTensor | torch.distributed.tensor.DTensor):
        local = local.to_local()
    if local.is_sparse or local.is_quantized:
        return ""
    local = local.cpu().contiguous().resolve_conj().resolve_neg().flatten()
    return hashlib.sha256(local.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
