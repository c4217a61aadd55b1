"""What process groups of any backend answer."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import default_pg_timeout

from terrazzo._torch.groups import time_limit


class _WithoutOptions:
    """A backend of another maker: torch's base class raises when it is asked for its options."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    @property
    def options(self) -> Any:
        raise self._error("Backend does not implement getBackendOptions")


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_a_backend_without_options_has_the_usual_time_limit(error: type[Exception]) -> None:
    def limit(backend: Any) -> timedelta:
        group: Any = SimpleNamespace(_get_backend=lambda device: backend)
        return time_limit(group, torch.device("cpu"))

    assert limit(_WithoutOptions(error)) == default_pg_timeout
    own = timedelta(seconds=7)
    assert limit(SimpleNamespace(options=SimpleNamespace(_timeout=own))) == own
