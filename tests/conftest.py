"""What all tests share: the persistent ranks end with the session, and tests that need a GPU run only where there is one."""

from __future__ import annotations

import pytest
import ranks
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_sessionfinish() -> None:
    ranks.close_all()
