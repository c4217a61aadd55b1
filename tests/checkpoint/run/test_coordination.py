"""Steps that all ranks take together."""

from __future__ import annotations

import pytest

from terrazzo.checkpoint.run.coordination import find_team
from terrazzo.errors import CheckpointException, CommTimeout


def test_a_step_that_raises_an_error_of_communication_has_failed_like_any_other() -> None:
    """The ranks' own communication has not: nobody is named as missing but the rank that raised."""

    def step() -> None:
        raise CommTimeout("the receivers did not come")

    team = find_team(no_dist=True, doing="publishing")
    with pytest.raises(CommTimeout) as caught, team.guarded():
        team.together(step)
    assert str(caught.value) == "publishing failed on 1 rank:\n  rank 0: CommTimeout: the receivers did not come"
    assert isinstance(caught.value, CheckpointException) and isinstance(caught.value.__cause__, CommTimeout)
