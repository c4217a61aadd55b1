"""What all tests share: ranks end with the session, what is for accelerators runs in `make gpu` (`--device`), and what
says little more than another test, at length, runs in `make long` (`--long`) or `make proofs` (`--proofs`)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import device_ranks
import ranks

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
    parser.addoption("--device", help="Run what is marked gpu, and nothing else, on this kind of device.")


def pytest_configure(config: pytest.Config) -> None:
    device_ranks.choose(config.getoption("--device"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device"):  # its ranks have that device, and would be wrong for other tests
        deselected = {item for item in items if not item.get_closest_marker("gpu")}
    else:
        proofs = config.getoption("--proofs")
        left_out = ["gpu"] if proofs else ["gpu", "proof"] if config.getoption("--long") else ["gpu", "long", "proof"]
        deselected = {item for item in items for marker in left_out if item.get_closest_marker(marker)}
    config.hook.pytest_deselected(items=[item for item in items if item in deselected])
    items[:] = sorted((item for item in items if item not in deselected), key=_turn)


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
