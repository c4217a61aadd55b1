"""Which cases the sweep runs: all that matter, or for the test suite a few of each entry, rotating."""

from __future__ import annotations

import zlib

from tests.tensor.sweep.check import Case
from tests.tensor.sweep.placing import FAMILIES, MESHES
from tests.tensor.sweep.samples import SIZES, entries


def full_plan(name: str, samples: int) -> list[Case]:
    """Every size, mesh and family, twice for those that leave a choice; and the in-place form where there is one."""
    cases = []
    forms = (False, True) if entries()[name].get_inplace() is not None else (False,)
    for inplace in forms:
        for size in SIZES:
            for mesh in MESHES:
                for family in FAMILIES:
                    for seed in range(1 if family == "replicate" else 2):
                        for sample in range(1 if family == "replicate" else samples):
                            cases.append(Case(size, sample, mesh, family, seed, inplace))
    return cases


def short_plan(name: str) -> list[Case]:
    """Sharded evenly, sharded unevenly or with empty shards, terms, and a mixture: sample, mesh and form rotate by
    name."""
    turn = zlib.crc32(name.encode())
    has_inplace = entries()[name].get_inplace() is not None
    cases = []
    for i, (size, family) in enumerate(
        (("even", "shard"), ("uneven", "shard"), ("empty", "shard"), ("empty", "partial"), ("even", "mixed"))
    ):
        mesh = "4" if (turn + i) % 2 else "2x2"
        cases.append(Case(size, (turn + i) % 4, mesh, family, turn % 5))
    if has_inplace:
        cases.append(
            Case("uneven", turn % 4, "4" if turn % 2 else "2x2", ("shard", "mixed", "partial")[turn % 3], 0, True)
        )
    return cases
