"""Which cases the sweep runs: all that matter, or for the test suite a few of each entry, rotating."""

from __future__ import annotations

import zlib

from tests.tensor.sweep.cases import Case
from tests.tensor.sweep.forms import FORMS, has_form
from tests.tensor.sweep.placing import FAMILIES, MESHES
from tests.tensor.sweep.samples import SIZES, dtypes_of, entries

# Sharded evenly, sharded unevenly or with empty shards, terms, and a mixture.
_WAYS = (("even", "shard"), ("uneven", "shard"), ("empty", "shard"), ("empty", "partial"), ("even", "mixed"))


def forms_of(name: str) -> list[str]:
    return [form for form in FORMS if has_form(entries()[name], form)]


def full_plan(name: str, samples: int) -> list[Case]:
    """Every size, mesh and family for float32, called as the database does and in place.

    In each other form and dtype as many samples, each in some of these ways.
    """
    cases = []
    forms = forms_of(name)
    for dtype in dtypes_of(entries()[name]):
        for form in forms:
            if dtype == "float32" and form in ("plain", "inplace"):
                cases += _everything(samples, form)
            else:
                cases += _some(f"{name} {dtype} {form}", samples, form, dtype)
    return cases


def quick_plan(name: str, samples: int) -> list[Case]:
    """Each dtype and form in some ways."""
    cases = []
    for dtype in dtypes_of(entries()[name]):
        for form in forms_of(name):
            cases += _some(f"{name} {dtype} {form}", samples, form, dtype)
    return cases


def short_plan(name: str) -> list[Case]:
    """As called for float32, one form of another dtype; dtypes, forms, ways, meshes and samples rotate."""
    turn = zlib.crc32(name.encode())
    forms, dtypes = forms_of(name), dtypes_of(entries()[name])
    cases = [_case(name, turn % 4, "plain", "float32")] if "float32" in dtypes else []
    others = [d for d in dtypes if d != "float32"]
    for i in range(1 if "float32" in dtypes else min(2, len(others))):
        if others:
            cases.append(_case(name, 4 + i, forms[(turn + i) % len(forms)], others[(turn + i) % len(others)]))
    return cases


def other_form(name: str) -> list[Case]:
    """What the short plan leaves out: float32 in place, and in one of the forms that are not the plain call."""
    forms = forms_of(name)
    if len(forms) == 1 or "float32" not in dtypes_of(entries()[name]):
        return []
    cases = [_case(name, 6, forms[1 + zlib.crc32(name.encode()) % (len(forms) - 1)], "float32")]
    return [*cases, _case(name, 1, "inplace", "float32")] if "inplace" in forms else cases


def _everything(samples: int, form: str) -> list[Case]:
    return [
        Case(size, sample, mesh, family, seed, form)
        for size in SIZES
        for mesh in MESHES
        for family in FAMILIES
        for seed in range(1 if family == "replicate" else 2)
        for sample in range(1 if family == "replicate" else samples)
    ]


def _some(words: str, samples: int, form: str, dtype: str) -> list[Case]:
    return [_case(words, i, form, dtype) for i in range(samples + 1)]


def _case(words: str, i: int, form: str, dtype: str) -> Case:
    turn = zlib.crc32(words.encode()) + i
    size, family = _WAYS[turn % len(_WAYS)]
    return Case(size, turn % 4, "4" if (turn // 5) % 2 else "2x2", family, turn % 5, form, dtype)
