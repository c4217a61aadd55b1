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
    """Uneven shards; terms or a mixture; even or empty shards.  Choices, mesh and sample rotate from name to name."""
    turn = zlib.crc32(name.encode())
    chosen = [
        ("uneven", "shard"),
        (("even", "mixed"), ("uneven", "mixed"), ("empty", "partial"), ("even", "partial"))[turn // 8 % 4],
        (("empty", "shard"), ("even", "shard"))[turn // 32 % 2],
    ]
    cases = []
    for i, (size, family) in enumerate(chosen):
        mesh = "4" if (turn + i) % 2 else "2x2"
        cases.append(Case(size, (turn + i) % 4, mesh, family, turn % 5))
    if entries()[name].get_inplace() is not None:
        family = ("shard", "mixed", "partial")[turn % 3]
        cases.append(Case("uneven", turn % 4, "4" if turn % 2 else "2x2", family, 0, True))
    return cases
