"""Random programs of views, indices, writes and redistributions are as on one device, or raise a typed error.

`make proofs` runs ten thousand; `python -m tests.tensor.fuzz` runs others, or one from a file.
"""

from __future__ import annotations

import pytest

from tests.tensor.fuzz.program import MESHES, Program
from tests.tensor.fuzz.run import Finding, make, run, verdict_of

PROGRAMS = 200


def test_programs_are_as_on_one_device():
    found = [Finding(program, v.fault, v.at) for program, v in run(make(PROGRAMS)) if v.fault]
    assert not found, "\n\n".join(map(str, found[:3]))


@pytest.mark.parametrize(
    "steps, fault",
    [
        (("v0 = leaf((4, 3), 'float32', Shard(0))", "v1 = v0._local[:1]"), "not a DTensor"),
        (("v0 = leaf((4, 3), 'float32', Shard(0))", "v0._local.add_(1)"), "raises AttributeError|one device raises"),
        (("v0 = leaf((4, 3), 'float32', Shard(0))", "q = getattr(v0, '_local', v0).shape"), "instead of"),
        (("v0 = leaf((4, 3), 'float32', Replicate())", "getattr(v0, '_local', v0[1:1]).add_(1)"), "v0 is"),
    ],
)
def test_what_differs_is_found(steps, fault):
    program = Program(MESHES[0], steps)
    verdict = verdict_of(program if "Replicate" in steps[0] else program)
    assert any(part in verdict.fault for part in fault.split("|")), verdict
