"""What all tests share: ranks end with the session, what is for accelerators runs in `make gpu` (`--device`), and what
says little more than another test, at length, runs in `make long` (`--long`) or `make proofs` (`--proofs`)."""

from __future__ import annotations

import gc
import inspect
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import device_ranks
import ranks
from benchmarks import devices

TESTS = Path(__file__).parent
# These take longest. Each is run by one process, so they come first: none is left for the end, when others are done.
FIRST = (
    "test_doctests.py", "fsdp/test_proof.py", "tensor/test_sweep.py", "checkpoint/stores/test_s3.py",
    "tensor/test_compile.py", "checkpoint/stores/test_formats.py", "checkpoint/test_state_dict_parallel.py",
    "tensor/test_half_precision.py", "tensor/test_gpt.py", "engine/test_pipeline.py",
)  # fmt: skip

# Time is never asserted: an example may take long on a busy machine.
hypothesis.settings.register_profile("terrazzo", deadline=None)
hypothesis.settings.load_profile("terrazzo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="Also run what is marked as long.")
    parser.addoption("--proofs", action="store_true", help="Also run what is marked as long or as a proof.")
    parser.addoption("--minutes", type=float, help="Begin no test after so long; files come in an order of chance.")
    parser.addoption("--device", help="Run what is marked gpu on this kind of device; with --long also on_late.")


def pytest_configure(config: pytest.Config) -> None:
    device_ranks.choose(config.getoption("--device"))


_BEGAN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() > _BEGAN + 60 * minutes:
        pytest.skip(f"not run: the {minutes:g} minutes of --minutes are over")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_needless(item)]
    for item in items:
        if len(list(item.iter_markers("long"))) > 1:  # it is long anyhow, and on the device `late`
            item.add_marker("proof")
    if kind := config.getoption("--device"):  # its ranks have that device, and would be wrong for other tests
        long = config.getoption("--long")
        deselected = {
            item for item in items
            if not item.get_closest_marker("gpu") and not (long and _way_of(item) == kind)
            or item.get_closest_marker("proof")
        }  # fmt: skip
    else:
        proofs = config.getoption("--proofs")
        left_out = ["gpu"] if proofs else ["gpu", "proof"] if config.getoption("--long") else ["gpu", "long", "proof"]
        deselected = {item for item in items for marker in left_out if item.get_closest_marker(marker)}
    config.hook.pytest_deselected(items=[item for item in items if item in deselected])
    items[:] = sorted((item for item in items if item not in deselected), key=_turn)
    if config.getoption("--minutes") is not None:  # so that not always the same are left out
        files = sorted({item.path for item in items})
        random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).shuffle(files)  # processes of one session agree
        items.sort(key=lambda item: files.index(item.path))


def _is_needless(item: pytest.Item) -> bool:
    """Whether it is on a device with one rank, or with four where there is the same test with two."""
    return _way_of(item) != "cpu" and _params_of(item).get("world", 2) != 2


def _params_of(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _way_of(item: pytest.Item) -> str:
    return str(_params_of(item).get("on_device", "cpu"))


def _turn(item: pytest.Item) -> int:
    file = item.path.relative_to(TESTS).as_posix()
    return FIRST.index(file) if file in FIRST else len(FIRST)


def pytest_collection_finish() -> None:
    """What is imported by now stays for ever: collections during the tests need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """What a test begins in the session's own process ends with it: other tests ask what happens without one."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_sessionfinish() -> None:
    ranks.close_all()


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where `run_ranks`, `run_fresh` and `fresh_values` call the checks of this test."""
    way = getattr(request, "param", "cpu")
    ranks.on_late = way.startswith("late")
    ranks.on_accelerators = way != "cpu" and not ranks.on_late
    if ranks.on_late:
        import late_ranks

        marks = [marker.kwargs for marker in request.node.iter_markers("on_late")]
        elsewhere, coalesces = (any(mark.get(name) for mark in marks) for name in ("elsewhere", "coalesces"))
        late_ranks.begin_test(request.node.nodeid.replace(way, ""), way, elsewhere, coalesces)
    yield
    ranks.on_late = ranks.on_accelerators = False


def _sends_checks(test: Any) -> bool:
    return bool({"fresh_values", "run_fresh", "run_ranks"} & set(test.__code__.co_names))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """On the device, a test that sends no checks to ranks is one itself."""
    test = pyfuncitem.function
    if not (ranks.on_late or ranks.on_accelerators) or _sends_checks(test):
        return None
    ranks.run_ranks(1, test, *(pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters))
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What is marked `on_late` runs on the device `late` as well, in both of `late_ranks.WAYS`.

    `make proofs` runs all of it, and `make long` the eager way only of what is marked `both=True`. With `--device` of
    this machine it runs there.

    In a module that is marked, these are the tests that send checks to ranks.
    """
    marker = metafunc.definition.get_closest_marker("on_late")
    if marker is None or metafunc.definition.get_closest_marker("cpu_only"):
        return
    if not _sends_checks(metafunc.function) and marker not in metafunc.definition.own_markers:
        return
    long, fails = [pytest.mark.long], marker.kwargs.get("fails")
    known = [pytest.mark.xfail(strict=True, reason=fails)] if fails else []
    both = any(each.kwargs.get("both") for each in metafunc.definition.iter_markers("on_late"))
    eager = pytest.param("late-eager", marks=known + long + ([] if both else [pytest.mark.proof]))
    lazy = pytest.param("late-lazy", marks=known + ([] if marker.kwargs.get("sample") else long))
    kind = metafunc.config.getoption("--device")
    ways = ["cpu", eager, lazy] if kind in (None, devices.LATE) else [kind]
    metafunc.parametrize("on_device", ways, indirect=True)
