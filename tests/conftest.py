"""What all tests share: ranks end with the session, what needs a GPU runs only where there is one, and what says little
more than another test, at length, runs in `make proofs` (`--proofs`)."""

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
    parser.addoption("--proofs", action="store_true", help="Also run what is marked as a proof.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--proofs"):
        proofs = [item for item in items if item.get_closest_marker("proof")]
        config.hook.pytest_deselected(items=proofs)
        items[:] = [item for item in items if item not in proofs]
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
