"""What nothing orders is found, in every mode, and what is ordered is not reported."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import tempfile

import pytest
import torch

from late_ranks import run_late
from terrazzo.errors import RaceError
from terrazzo.testing import late

pytestmark = pytest.mark.long


def side_stream(device):
    stream = torch.Stream(device=device)
    assert stream != torch.accelerator.current_stream(device)
    return stream


# ------------------------------------------------------------------ programs: `right` says whether the bug is mended


def another_stream_reads(device, right):
    side, x = side_stream(device), torch.ones(64, device=device)
    if right:
        side.wait_stream(torch.accelerator.current_stream())
    with torch.late.stream(side):
        y = x + 1
    torch.accelerator.current_stream().wait_stream(side)
    return y


def another_stream_writes(device, right):
    side, x = side_stream(device), torch.ones(64, device=device)
    side.wait_stream(torch.accelerator.current_stream())
    y = x + 1
    if right:
        side.wait_stream(torch.accelerator.current_stream())
    with torch.late.stream(side):
        x.zero_()
    torch.accelerator.current_stream().wait_stream(side)
    return y


def the_event_is_recorded_too_early(device, right):
    side, event = side_stream(device), torch.Event(device)
    x = torch.ones(64, device=device)
    if not right:
        event.record()
    x.mul_(2)
    if right:
        event.record()
    side.wait_event(event)
    with torch.late.stream(side):
        y = x + 1
    torch.accelerator.current_stream().wait_stream(side)
    return y


def memory_is_reused_without_record_stream(device, right):
    side, x = side_stream(device), torch.ones(64, device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with torch.late.stream(side):
        y = x + 1
    if right:
        x.record_stream(side)
    del x
    z = torch.zeros(64, device=device)
    torch.accelerator.current_stream().wait_stream(side)
    return y + z


def two_devices(device, right):
    """A copy between devices waits for both current streams, but not for another stream of the source."""
    side, x = side_stream(device), torch.ones(64, device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with torch.late.stream(side):
        x.mul_(2)
    if right:
        torch.accelerator.current_stream().wait_stream(side)
    return x.to("late:1")


def pinned_memory_is_read_too_early(device, right):
    x, here = torch.ones(64, device=device), torch.empty(64, pin_memory=True)
    here.copy_(x, non_blocking=True)
    if right:
        torch.accelerator.synchronize()
    return here.sum()


def pinned_memory_is_written_too_early(device, right):
    here = torch.ones(64).pin_memory()
    x = here.to(device, non_blocking=True)
    if right:
        torch.accelerator.synchronize()
    here.zero_()
    return x


def an_event_of_another_stream_is_waited_for(device, right):
    side, x, here = side_stream(device), torch.ones(64, device=device), torch.empty(64, pin_memory=True)
    here.copy_(x, non_blocking=True)
    (torch.accelerator.current_stream() if right else side).record_event().synchronize()
    return here.sum()


def the_host_reads_memory_of_the_device(device, right):
    x = torch.ones(64, device=device)
    torch.accelerator.synchronize()
    if not right:
        ctypes.string_at(x.data_ptr(), 8)
    return x


def the_result_of_a_collective_is_not_waited_for(device, right):
    x = torch.ones(64, device=device)
    work = torch.distributed.all_reduce(x, async_op=True)
    if right:
        work.wait()
    return x + 1


PROGRAMS = (
    another_stream_reads, another_stream_writes, the_event_is_recorded_too_early,
    memory_is_reused_without_record_stream, two_devices, pinned_memory_is_read_too_early,
    pinned_memory_is_written_too_early, an_event_of_another_stream_is_waited_for, the_host_reads_memory_of_the_device,
    the_result_of_a_collective_is_not_waited_for,
)  # fmt: skip


def check_each_program_in_each_mode(device):
    for program in PROGRAMS:
        for mode in late.MODES:
            for seed in range(3 if mode == "random" else 1):
                with late.checked(mode, seed):
                    program(device, right=True)
                with pytest.raises(RaceError) as raised:
                    with late.checked(mode, seed):
                        program(device, right=False)
                assert any(program.__name__ in line for race in raised.value.races for line in race.second.lines), (
                    program
                )


def test_a_race_is_found_in_every_mode_and_its_mended_program_is_clean():
    run_late(1, check_each_program_in_each_mode)


# ------------------------------------------------------------------ what a report says


def check_report(device):
    side, x = side_stream(device), torch.ones(3, 5, device=device)
    with pytest.raises(RaceError) as raised:
        with late.checked():
            x.mul_(2)  # the first
            with torch.late.stream(side):
                x.to(torch.bfloat16)  # the second
            torch.accelerator.synchronize()
    (race,) = raised.value.races
    assert (race.first.operation, race.first.does, race.first.tensor) == ("mul", "writes", "Float[3, 5]")
    assert race.first.stream == "the default stream of late:0"
    assert race.second.does == "reads" and race.second.stream == f"stream {side.stream_id} of late:0"
    assert race.overlap == 60
    source = open(__file__).read().splitlines()
    for access, comment in ((race.first, "# the first"), (race.second, "# the second")):
        file, _, line = access.lines[0].removesuffix(" in check_report").rpartition(":")
        assert file == __file__ and comment in source[int(line) - 1]
    assert str(race.first) in str(raised.value) and "does not wait for" in str(raised.value)
    assert late.races() == [], "what was raised is not reported again"
    copy = pickle.loads(pickle.dumps(raised.value))
    assert copy.races == raised.value.races and str(copy) == str(raised.value)


def check_backward_names_the_forward(device):
    """Backward runs in a thread without Python; its operations have the lines of their forward operations."""
    side, w = side_stream(device), torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RaceError) as raised:
        with late.checked():
            w.sin().sum().backward()  # forward
            with torch.late.stream(side):
                w.grad + 1
            torch.accelerator.synchronize()
    (race,) = raised.value.races
    assert race.first.lines[0] == "backward: SinBackward0"
    line = int(race.first.lines[1].rpartition(":")[2].split()[0])
    assert "# forward" in open(__file__).read().splitlines()[line - 1]


def check_each_pair_of_lines_is_reported_once(device):
    side, x = side_stream(device), torch.ones(3, device=device)
    with pytest.raises(RaceError) as raised:
        with late.checked():
            for _ in range(10):
                x.mul_(2)
                with torch.late.stream(side):
                    x + 1
    found = [(race.first.operation, race.second.operation) for race in raised.value.races]
    assert sorted(found) == [("add", "mul"), ("mul", "add")]


def check_an_error_of_the_program_is_kept(device):
    side, x = side_stream(device), torch.ones(3, device=device)
    with pytest.raises(KeyError) as raised:
        with late.checked():
            x.mul_(2)
            with torch.late.stream(side):
                x + 1
            raise KeyError("mine")
    assert "does not wait for" in raised.value.__notes__[0]


def test_reports():
    run_late(
        1,
        check_report,
        check_backward_names_the_forward,
        check_each_pair_of_lines_is_reported_once,
        check_an_error_of_the_program_is_kept,
    )


def check_system_calls(device):
    """They return an error, and nothing is reported: the program is told at once."""
    x, here = torch.ones(64, device=device), torch.empty(64, pin_memory=True)
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryFile() as file:
        here.copy_(x, non_blocking=True)
        with pytest.raises(OSError) as raised:
            os.write(file.fileno(), here.numpy())
        assert raised.value.errno == errno.EFAULT and "Bad address" in str(raised.value)
        torch.accelerator.synchronize()
        assert os.write(file.fileno(), here.numpy()) == 256
        assert libc.write(file.fileno(), ctypes.c_void_p(x.data_ptr()), 8) == -1
        assert ctypes.get_errno() == errno.EFAULT


def test_system_calls_with_protected_memory_fail():
    run_late(1, check_system_calls, modes=late.MODES)


def check_a_decorated_function_is_checked_at_each_call(device):
    @late.checked("needed")
    def racing():
        x = torch.ones(3, device=device)
        with torch.late.stream(side_stream(device)):
            x.mul_(2)

    for _ in range(2):
        with pytest.raises(RaceError):
            racing()


def test_a_decorated_function():
    run_late(1, check_a_decorated_function_is_checked_at_each_call)


# ------------------------------------------------------------------ what is no race


def check_parts_of_one_tensor(device):
    side, x = side_stream(device), torch.zeros(6, 8, device=device)
    torch.accelerator.synchronize()
    x[:, :4].fill_(1)
    with torch.late.stream(side):
        x[:, 4:].fill_(2)
    x[:3].T[:4].mul_(3)
    torch.accelerator.synchronize()
    assert x.sum().item() == 3 * 4 * 3 + 3 * 4 + 2 * 24


def check_parts_of_one_page_of_pinned_memory(device):
    """The host may use what no copy uses, also where a copy uses other bytes of the same page."""
    slab, x = torch.zeros(4096, pin_memory=True), torch.ones(1000, device=device)
    slab[:1000].copy_(x, non_blocking=True)
    slab[1000:1100] = 5
    assert slab[1000:4096].sum() == 500
    torch.accelerator.synchronize()
    assert slab[:1000].sum() == 1000
    y = slab[500:1500].to(device, non_blocking=True)
    slab[1500:].zero_()
    assert slab[500:1000].sum() == 500, "a copy that reads does not forbid to read"
    assert y.sum().item() == 1000


def check_what_the_host_waited_for(device):
    side, x = side_stream(device), torch.ones(64, device=device)
    for wait in (
        torch.accelerator.synchronize,
        lambda: torch.accelerator.current_stream().synchronize(),
        lambda: torch.accelerator.current_stream().record_event().synchronize(),
        lambda: x.sum().item(),
        lambda: x.cpu(),
    ):
        x.mul_(2)
        wait()
        with torch.late.stream(side):
            x.mul_(0.5)
        side.synchronize()
    event = torch.Event(device)
    x.mul_(2)
    event.record()
    while not event.query():
        pass
    with torch.late.stream(side):
        x.mul_(0.5)
    side.synchronize()
    assert x.sum().item() == 64


def check_record_stream_delays_reuse(device):
    side = side_stream(device)
    for _ in range(20):
        x = torch.ones(64, device=device)
        side.wait_stream(torch.accelerator.current_stream())
        with torch.late.stream(side):
            y = x + 1
        x.record_stream(side)
        del x
        torch.zeros(64, device=device)
    torch.accelerator.current_stream().wait_stream(side)
    assert y.sum().item() == 128


def test_what_is_ordered_is_not_reported():
    run_late(
        1,
        check_parts_of_one_tensor,
        check_parts_of_one_page_of_pinned_memory,
        check_what_the_host_waited_for,
        check_record_stream_delays_reuse,
        modes=late.MODES,
    )
