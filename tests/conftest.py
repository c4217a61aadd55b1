"""What all tests share: ranks end with the session, and what needs a GPU runs only where there is one."""

from __future__ import annotations

import hypothesis
import pytest
import torch

import ranks

# Time is never asserted: an example may take long on a busy machine.
hypothesis.settings.register_profile("terrazzo", deadline=None)
hypothesis.settings.load_profile("terrazzo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_sessionfinish() -> None:
    ranks.close_all()
