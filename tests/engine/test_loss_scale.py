"""The adaptive loss scale, against DeepSpeed's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.deepspeed_cases import deepspeed_is_installed
from terrazzo.engine.loss_scale import DynamicLossScale
from terrazzo.errors import LossScaleError

overflows = st.lists(st.booleans(), max_size=40)


@pytest.mark.skipif(not deepspeed_is_installed(), reason="needs DeepSpeed: make setup installs it")
@settings(deadline=None)  # the first example imports DeepSpeed
@given(overflows, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_like_deepspeeds(overflows, window, hysteresis, consecutive):
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    options = {"consecutive_hysteresis": consecutive, "min_scale": 2.0**-50, "dtype": torch.half}
    theirs = DynamicLossScaler(2.0**8, scale_window=window, delayed_shift=hysteresis, **options)
    ours = DynamicLossScale(2.0**8, window=window, hysteresis=hysteresis, consecutive=consecutive, minimum=2.0**-50)
    for overflow in overflows:
        ours.update(overflow)
        _without_ranks(theirs, overflow)
        assert (ours.value, ours.left) == (theirs.cur_scale, theirs.cur_hysteresis)


def _without_ranks(scaler, overflow):
    """DeepSpeed's asks for the rank in order to report."""
    from deepspeed.runtime.fp16 import loss_scaler

    rank, loss_scaler.dist.get_rank = loss_scaler.dist.get_rank, lambda: 1
    try:
        scaler.update_scale(overflow)
    finally:
        loss_scaler.dist.get_rank = rank


@given(overflows)
def test_a_restored_one_goes_on_alike(overflows):
    first = DynamicLossScale(16.0, window=2, minimum=2.0**-50)
    for overflow in overflows:
        second = DynamicLossScale(1.0, window=2, minimum=2.0**-50)
        second.load_state_dict(first.state_dict())
        first.update(overflow)
        second.update(overflow)
        assert first.state_dict() == second.state_dict()


def test_it_does_not_shrink_for_ever():
    scale = DynamicLossScale(2.0, hysteresis=1)
    scale.update(True)
    with pytest.raises(LossScaleError, match="smallest loss scale, 1"):
        scale.update(True)
