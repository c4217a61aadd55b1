"""What all tests share: ranks end with the session, what needs a GPU runs only where there is one, and what says little
more than another test, at length, runs in `make long` (`--long`) or `make proofs` (`--proofs`)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import hypothesis
import pytest
import torch

import ranks

# Time is never asserted: an example may take long on a busy machine.
hypothesis.settings.register_profile("terrazzo", deadline=None)
hypothesis.settings.load_profile("terrazzo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="Also run what is marked as long.")
    parser.addoption("--proofs", action="store_true", help="Also run what is marked as long or as a proof.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    proofs = config.getoption("--proofs")
    left_out = [] if proofs else ["proof"] if config.getoption("--long") else ["long", "proof"]
    deselected = {item for item in items for marker in left_out if item.get_closest_marker(marker)}
    config.hook.pytest_deselected(items=[item for item in items if item in deselected])
    items[:] = [item for item in items if item not in deselected]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


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
