"""A plugin of pytest: `pytest_plugins = ["terrazzo.testing.late.plugin"]` in `conftest.py`.

def test_my_streams(late_device):           # runs once in each mode, and fails if there is a race
    x = torch.ones(8, device=late_device)
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from terrazzo.errors import DeviceBuildError
from terrazzo.testing import late


@pytest.fixture(params=late.MODES)
def late_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device `late:0`: the test runs in each mode, and fails if two accesses of it have no order.

    Where the device cannot be compiled, the test is skipped.
    """
    try:
        late.init()
    except DeviceBuildError as error:
        pytest.skip(str(error).partition("\n")[0])
    with late.checked(request.param):
        yield torch.device("late", 0)
