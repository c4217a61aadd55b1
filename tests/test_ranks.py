"""The instrument that tests on several ranks rest on must itself report every way in which a rank can go wrong."""

from __future__ import annotations

import importlib.util
import marshal
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import PYC_TAIL, get_cache_dir

import ranks
from ranks import RanksFailed, fresh_values, run_fresh, run_ranks
from terrazzo.testing import pool
from terrazzo.testing.process import _TestLoader


@dataclass(frozen=True)
class Scale:
    """A class of a test module, to travel as argument and result."""

    by: float


def identity():
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def summed(scale: Scale):
    x = torch.full((2,), float(dist.get_rank() + 1)) * scale.by
    dist.all_reduce(x)
    return x, scale


def surroundings():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return dist.get_backend(), torch.get_num_threads(), [os.environ[name] for name in names]


@pytest.mark.parametrize("world", ranks.WORLDS)
def test_every_rank_is_called_in_its_own_process(world):
    results = run_ranks(world, identity)
    assert [r[:2] for r in results] == [(rank, world) for rank in range(world)]
    assert len({r[2] for r in results} | {os.getpid()}) == world + 1
    assert run_ranks(world, identity) == results, "the processes persist"
    assert run_ranks(world, os.getpid) == [r[2] for r in results], "a function of any module will do"


def test_arguments_and_results_travel():
    for x, scale in run_ranks(2, summed, Scale(0.5)):
        assert scale == Scale(0.5)
        torch.testing.assert_close(x, torch.full((2,), 1.5))


def test_ranks_look_as_under_torchrun_and_have_one_thread():
    for rank, (backend, threads, environment) in enumerate(run_ranks(2, surroundings)):
        assert (backend, threads) == ("gloo", 1)
        assert environment == [str(rank), str(rank), "2", "2", "127.0.0.1"]


def test_other_worlds_and_local_functions_are_refused():
    with pytest.raises(ValueError, match="run_fresh takes any"):
        run_ranks(3, identity)
    with pytest.raises(ValueError, match="module level"):
        run_ranks(2, lambda: None)


# ------------------------------------------------------------------ failures


def fail_on(failing: list[int]):
    rank = dist.get_rank()
    print(f"words of rank {rank}")
    os.write(2, b"words from below python\n")
    assert rank not in failing, f"as told: {rank}"
    return rank


def wrong_value():
    left = [dist.get_rank(), 7]
    assert left == [0, 8]


def unpicklable():
    return lambda: None


def leave():
    sys.exit("leaving")


def test_one_failing_rank():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, fail_on, [1])
    report = str(caught.value)
    assert "1 of 2 ranks failed in tests.test_ranks.fail_on" in report
    assert "=== rank 0 returned" in report
    assert "=== rank 1 failed" in report
    assert "as told: 1" in report and "as told: 0" not in report
    assert "words of rank 1" in report and "words of rank 0" not in report
    assert "words from below python" in report
    assert run_ranks(2, fail_on, []) == [0, 1], "the next test is served"


def test_two_failing_ranks_are_both_reported():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(4, fail_on, [1, 3])
    report = str(caught.value)
    assert "2 of 4 ranks failed" in report
    assert "as told: 1" in report and "as told: 3" in report


def test_a_failing_assertion_shows_its_values():
    with pytest.raises(RanksFailed, match=r"assert \[0, 7\] == \[0, 8\]"):
        run_ranks(1, wrong_value)


def test_results_that_cannot_travel_and_exits_are_failures():
    with pytest.raises(RanksFailed, match="unpicklable"):
        run_ranks(1, unpicklable)
    with pytest.raises(RanksFailed, match="SystemExit: leaving"):
        run_ranks(1, leave)


def wait_for_nobody():
    if dist.get_rank() == 0:
        return
    stuck_here()


def stuck_here():
    dist.recv(torch.zeros(1), src=0)


def stop_oneself():
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_hang_ends_with_the_stacks():
    before = run_ranks(2, identity)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, wait_for_nobody, timeout=1)
    report = str(caught.value)
    assert "=== rank 0 returned" in report
    assert "=== rank 1 had not finished" in report and "in stuck_here" in report and "in wait_for_nobody" in report
    after = run_ranks(2, identity)
    assert not {r[2] for r in before} & {r[2] for r in after}, "new processes"
    assert not any(alive(r[2]) for r in before)


def test_a_hang_in_which_no_stacks_can_be_written_ends_too(monkeypatch):
    monkeypatch.setattr(pool, "_DUMP_LIMIT", 0.5)
    run_ranks(1, identity)  # the module is loaded, so that the limit is the function's own
    with pytest.raises(RanksFailed, match="did not react"):
        run_ranks(1, stop_oneself, timeout=2)


def fail_while_others_wait():
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


def test_the_others_need_not_wait_for_the_whole_limit(monkeypatch):
    monkeypatch.setattr(pool, "_GRACE", 0.5)
    with pytest.raises(RanksFailed, match="the cause") as caught:
        run_ranks(2, fail_while_others_wait, timeout=3600)
    assert "in fail_while_others_wait" in str(caught.value)


def die(how: str):
    if dist.get_rank() == 1:
        print("last words")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


@pytest.mark.parametrize(("how", "words"), [("exit", "exited with status 3"), ("kill", "was killed by SIGKILL")])
def test_a_dead_rank_is_reported_and_replaced(how, words):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, die, how)
    assert f"=== rank 1 {words}" in str(caught.value)
    assert "last words" in str(caught.value)
    assert [r[0] for r in run_ranks(2, identity)] == [0, 1]


# ------------------------------------------------------------------ fresh ranks


def each_its_own_way():
    rank = dist.get_rank()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise LookupError("on purpose")
    if rank == 2:
        return {"rank": rank}
    print("staying", flush=True)
    time.sleep(3600)


def test_fresh_ranks_report_each_outcome():
    killed, failed, returned, hung = run_fresh(4, each_its_own_way, timeout=10)
    assert (killed.signal, killed.exitcode, killed.ok) == (signal.SIGKILL, -signal.SIGKILL, False)
    assert "LookupError: on purpose" in failed.error and failed.exitcode is None and not failed.ok
    assert returned.ok and returned.value == {"rank": 2}
    assert hung.hung and "in each_its_own_way" in hung.stacks and hung.output == "staying\n" and not hung.ok


def fail_one_after_the_other():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        raise LookupError("the cause")
    store.wait(["never"], timedelta(seconds=1))


def test_of_fresh_ranks_that_should_all_return_the_first_failure_is_shown_first():
    with pytest.raises(RanksFailed) as caught:
        fresh_values(3, fail_one_after_the_other)
    title, first, *_ = str(caught.value).splitlines()
    assert title == "in fail_one_after_the_other:" and first == "=== rank 1 failed"
    assert str(caught.value).index("LookupError: the cause") < str(caught.value).index("=== rank 0 failed")
    assert fresh_values(2, dist.get_rank) == [0, 1]


def survive():
    """The store outlives rank 0, so the survivors can still meet."""
    if dist.get_rank() == 0:
        os._exit(0)
    survivors = dist.new_group([1, 2], use_local_synchronization=True)
    x = torch.ones(1)
    dist.all_reduce(x, group=survivors)
    return x.item()


def test_the_death_of_rank_0_leaves_the_others_able_to_work():
    dead, *alive = run_fresh(3, survive)
    assert dead.exitcode == 0 and not dead.ok
    assert [outcome.value for outcome in alive] == [2.0, 2.0]


def test_fresh_ranks_leave_the_persistent_ones_alone():
    before = run_ranks(2, identity)
    fresh = [outcome.value for outcome in run_fresh(2, identity)]
    assert run_ranks(2, identity) == before
    assert not {f[2] for f in fresh} & {b[2] for b in before}
    assert not any(alive(f[2]) for f in fresh)


# ------------------------------------------------------------------ what one test leaves to the next


def make_a_mess(folder: str):
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.manual_seed(99)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir(folder)
    print("litter")


def look_around():
    found = torch.get_default_dtype(), str(torch.get_default_device()), torch.is_grad_enabled()
    draws = random.random(), float(np.random.rand()), torch.rand(1).item()
    return found, draws, "LEFT_BEHIND" in os.environ, os.getcwd()


def make_groups(count: int):
    for _ in range(count):
        dist.new_group()
    return os.getpid()


def test_global_state_is_set_back(tmp_path, capfd):
    before = run_ranks(2, look_around)
    run_ranks(2, make_a_mess, str(tmp_path))
    assert capfd.readouterr().out == "[rank 0] litter\n[rank 1] litter\n"
    assert run_ranks(2, look_around) == before
    assert capfd.readouterr().out == ""
    assert before[0][0] == (torch.float32, "cpu", True)
    assert before[0][1] == before[1][1]


def test_ranks_with_many_threads_are_replaced_after_the_test(monkeypatch):
    few = run_ranks(2, make_groups, 1)
    assert run_ranks(2, make_groups, 0) == few
    monkeypatch.setattr(pool, "_MAX_THREADS", 8)
    run_ranks(2, make_groups, 8)
    assert run_ranks(2, make_groups, 0) == few, "they may hold what the test has left in them"
    name, _, _ = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{name} (teardown)")
    assert run_ranks(2, make_groups, 0) == few
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{name}_next (setup)")
    later = run_ranks(2, make_groups, 8)
    assert not set(later) & set(few)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # no pytest
    assert not set(run_ranks(2, make_groups, 0)) & set(later)


def test_a_module_that_pytest_has_compiled_is_not_compiled_again(tmp_path):
    """Unless the compiled file is of another source, or of a module that was elsewhere."""
    path, elsewhere = tmp_path / "test_x.py", tmp_path / "test_y.py"
    compiled = get_cache_dir(path) / f"test_x{PYC_TAIL}"
    compiled.parent.mkdir()

    def value() -> int:
        found: dict[str, int] = {}
        exec(_TestLoader("test_x", str(path)).get_code("test_x"), found)
        return found["value"]

    for place, source, expected in ((path, b"value = 1", 2), (elsewhere, b"value = 1", 1), (path, b"value = 3", 3)):
        path.write_bytes(source)
        code = compile("value = 2", str(place), "exec")
        header = importlib.util.MAGIC_NUMBER + bytes([3, 0, 0, 0]) + importlib.util.source_hash(b"value = 1")
        compiled.write_bytes(header + marshal.dumps(code))
        assert value() == expected


# ------------------------------------------------------------------ the end of the session


def alive(pid: int) -> bool:
    """Whether the process runs: one that has ended but is not yet collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("end", [pytest.param("return", marks=pytest.mark.long), "SIGKILL"])
def test_ranks_die_with_the_session(tmp_path, end):
    """Also a rank that hangs, and reads no end of file, when the session is killed."""
    program = tmp_path / "session.py"
    program.write_text(
        textwrap.dedent(f"""
        import os, signal, sys, threading, time
        sys.path[:0] = {[str(Path(ranks.__file__).parent)]}
        import ranks

        def note_and_hang(folder, hang):
            open(os.path.join(folder, os.environ["RANK"] + ".pid"), "w").write(str(os.getpid()))
            time.sleep(3600 if hang else 0)

        if __name__ == "__main__":
            sys.modules["session"] = sys.modules["__main__"]
            note_and_hang.__module__ = "session"
            sys.path.append({str(tmp_path)!r})
            ranks.run_ranks(2, note_and_hang, {str(tmp_path)!r}, False)
            if {end!r} == "SIGKILL":
                threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
                ranks.run_ranks(2, note_and_hang, {str(tmp_path)!r}, True)
        """)
    )
    finished = subprocess.run([sys.executable, str(program)], timeout=120, capture_output=True, text=True)
    assert finished.returncode == (0 if end == "return" else -signal.SIGKILL), finished.stderr
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.05)
