"""The device behaves as CUDA does where programs may rely on it: streams, events, memory, and that it is late."""

from __future__ import annotations

import time

import pytest
import torch

from late_ranks import run_late
from ranks import fresh_values
from terrazzo.errors import LateDeviceError
from terrazzo.testing import late

pytestmark = pytest.mark.long

# ------------------------------------------------------------------ when tasks run


def check_nothing_runs_before_it_is_needed(device):
    late.schedule("needed", idle_ms=10**6)
    here = torch.zeros(4, pin_memory=True)
    x = torch.ones(4, device=device) * 3
    here.copy_(x, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert not event.query() and not torch.accelerator.current_stream().query()
    waits = late.host_waits()
    event.synchronize()
    assert late.host_waits() == waits + 1
    assert event.query() and here.tolist() == [3.0] * 4
    x.mul_(2)
    later = torch.accelerator.current_stream().record_event()
    answers = [later.query() for _ in range(10)]
    assert not answers[0] and answers[-1], "an event is late, but it happens"


def check_eager_runs_at_once(device):
    late.schedule("eager")
    torch.ones(4, device=device).mul_(3)
    assert torch.accelerator.current_stream().record_event().query()


def check_which_stream_comes_first(device):
    """What two streams write without order is what the later one writes, which the mode chooses."""
    side = torch.Stream(device=device)
    for mode, last in (("default_first", 2.0), ("default_last", 1.0)):
        late.schedule(mode, idle_ms=10**6)
        x = torch.zeros(1, device=device)
        torch.accelerator.synchronize()
        x.fill_(1.0)
        with torch.late.stream(side):
            x.fill_(2.0)
        torch.accelerator.synchronize()
        assert x.item() == last
    outcomes = set()
    for seed in range(20):
        late.schedule("random", seed, idle_ms=10**6)
        x.fill_(1.0)
        with torch.late.stream(side):
            x.fill_(2.0)
        torch.accelerator.synchronize()
        outcomes.add(x.item())
    assert outcomes == {1.0, 2.0}
    late.races()  # they are expected


def check_an_idle_host_does_not_stop_the_device(device):
    """Or ranks of which only one waits would wait for each other."""
    late.schedule("needed", idle_ms=20, queries=10**9)
    torch.ones(4, device=device).mul_(2)
    event = torch.accelerator.current_stream().record_event()
    end = time.monotonic() + 60
    while not event.query() and time.monotonic() < end:
        time.sleep(0.1)
    assert event.query()


def run_schedules() -> None:
    late.init()
    device = torch.device("late", 0)
    for check in (
        check_nothing_runs_before_it_is_needed,
        check_eager_runs_at_once,
        check_which_stream_comes_first,
        check_an_idle_host_does_not_stop_the_device,
    ):
        check(device)


def test_schedules():
    fresh_values(1, run_schedules)


# ------------------------------------------------------------------ streams, events, memory


def check_streams_and_events(device):
    default = torch.accelerator.current_stream()
    assert default == torch.late.default_stream() == torch.late.current_stream() and default.stream_id == 0
    side = torch.late.Stream(device, priority=-1)
    with torch.late.stream(side):
        assert torch.accelerator.current_stream() == side
        with side:
            assert torch.late.current_stream() == side
    assert torch.accelerator.current_stream() == default
    other = torch.Stream(device="late:1")
    with torch.late.stream(other):
        assert torch.accelerator.current_device_index() == 1 and torch.ones(1, device="late").device.index == 1
    assert torch.accelerator.current_device_index() == device.index
    # A wait is for the recording that there was, as with CUDA.
    event, x = torch.Event(device, enable_timing=True), torch.zeros(1, device=device)
    event.record()
    side.wait_event(event)
    x.add_(1)
    event.record()
    end = torch.Event(device, enable_timing=True)
    end.record()
    end.synchronize()
    assert event.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        event.record(other)
    with pytest.raises(RuntimeError, match="there is no device 9"):
        torch.accelerator.set_device_index(9)
    assert str(torch.accelerator.current_accelerator()) == "late" and torch.accelerator.device_count() == 4


def check_memory(device):
    torch.late.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1024, device=device)
    assert x.isnan().all().item(), "new memory is not zero by luck"
    y = torch.empty(1024, device=device)
    assert torch.accelerator.memory_allocated() == torch.late.memory_allocated() == before + 8192
    address = x.data_ptr()
    x.fill_(1)
    del x
    z = torch.empty(1024, device=device)
    assert z.data_ptr() == address and z.isnan().all().item(), "memory is used again, and what was in it is lost"
    del y, z
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() >= before + 8192
    assert torch.accelerator.memory_reserved() >= 8192
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**36, device=device)


def check_pinned_memory(device):
    x = torch.ones(5).pin_memory()
    assert x.is_pinned() and not torch.ones(5).is_pinned() and torch.empty(3, pin_memory=True).is_pinned()
    waits = late.host_waits()
    there = x.to(device, non_blocking=True)
    here = torch.empty(5, pin_memory=True).copy_(there, non_blocking=True)
    assert late.host_waits() == waits, "copies with pinned memory do not wait"
    torch.empty(5).copy_(there, non_blocking=True)
    assert late.host_waits() == waits + 1, "a copy to other memory waits, whatever it was asked for"
    torch.ones(5).to(device, non_blocking=True)
    assert late.host_waits() == waits + 2, "a copy from other memory may wait, and so counts"
    assert torch.equal(here, x)


def check_what_waits(device):
    """A step of training has no hidden waits."""
    layer, x = torch.nn.Linear(4, 4, device=device), torch.ones(2, 4, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        waits = late.host_waits()
        layer(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        assert late.host_waits() == waits
    for wait in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: bool((x > 0).all()), lambda: x.cpu()):
        waits = late.host_waits()
        wait()
        assert late.host_waits() == waits + 1


def test_streams_events_and_memory():
    run_late(
        1, check_streams_and_events, check_memory, check_pinned_memory, check_what_waits, modes=("needed", "random")
    )


# ------------------------------------------------------------------ starting


def check_start() -> None:
    late.init(devices=2)
    late.init()
    assert torch.accelerator.device_count() == 2
    with pytest.raises(LateDeviceError, match="started with devices=2"):
        late.init(devices=3)
    with pytest.raises(LateDeviceError, match="`mode` must be one of 'eager', 'needed'"):
        late.schedule("lazy")


def test_the_device_is_started_once():
    with pytest.raises(LateDeviceError, match="`devices` must be from 1 to 16, not 17"):
        late.init(devices=17)
    with pytest.raises(LateDeviceError, match="`backend_name` must be 'late' or 'nccl', not 'gloo'"):
        late.init(backend_name="gloo")
    fresh_values(1, check_start)
