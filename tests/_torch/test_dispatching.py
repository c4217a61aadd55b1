"""Values that PyTorch keeps for a thread."""

from __future__ import annotations

import sys

from terrazzo._torch.dispatching import get_in_thread, set_in_thread


class Value:
    pass


def test_a_value_that_a_thread_keeps_has_one_reference_more():
    value, name = Value(), "terrazzo: a test"
    before = sys.getrefcount(value)
    for _ in range(3):
        set_in_thread(name, value)
        assert sys.getrefcount(value) == before + 1
        assert get_in_thread(name) is value
    set_in_thread(name, None)
    assert sys.getrefcount(value) == before and get_in_thread(name) is None
