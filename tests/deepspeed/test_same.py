"""Scripts see the same under DeepSpeed and under terrazzo; all of them in `make proofs`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from engine.deepspeed_cases import deepspeed_is_installed
from ranks import run_fresh, run_ranks

pytestmark = pytest.mark.on_late

HERE = Path(__file__).parent
IN_THE_SUITE = [
    *("gpt", "lora", "experts", "experts_on_each", "experts_by_rank", "smallest", "smallest_half", "by_hand"),
    "pipeline",
]


def load(name: str):
    """A module beside this one; `deepspeed` as a package's name is taken."""
    spec = importlib.util.spec_from_file_location(f"deepspeed_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_ours(names: list[str], folder: str) -> dict[str, list[float]]:
    import terrazzo.deepspeed as ours

    return load("scripts").run(ours, names, Path(folder))


def check_theirs(names: list[str], folder: str) -> dict[str, list[float]]:
    scripts = load("scripts")
    theirs = scripts.real()
    theirs.init_distributed("gloo")
    return scripts.run(theirs, names, Path(folder))


@pytest.mark.long
@pytest.mark.skipif(not deepspeed_is_installed(), reason="DeepSpeed is not installed: make deepspeed")
def test_groups_of_neighbours_see_the_same(tmp_path):
    """On four ranks, where two are neighbours."""
    theirs = run_fresh(4, check_theirs, ["neighbours"], str(tmp_path), timeout=400)
    assert all(outcome.ok for outcome in theirs), "\n".join(map(str, theirs))
    ours = run_ranks(4, check_ours, ["neighbours"], str(tmp_path))[0]
    load("same").differences(theirs[0].value, ours)


def check_examples(theirs: bool, folder: str) -> dict[str, list[float]]:
    import terrazzo.deepspeed as ours

    which = load("scripts").real() if theirs else ours
    which.init_distributed("gloo")
    return load("examples").run(which, Path(folder))


# In 16 bits the two round at other places.
EXAMPLES = {"masked_words": 2e-3, "finetuning": 3e-2, "with_a_file": 3e-2}


@pytest.mark.long
@pytest.mark.cpu_only("as programs for DeepSpeed are, these are for one kind of device")
@pytest.mark.skipif(not deepspeed_is_installed(), reason="DeepSpeed is not installed: make deepspeed")
def test_ten_kinds_of_programs(tmp_path):
    theirs = run_fresh(2, check_examples, True, str(tmp_path), timeout=400)
    assert all(outcome.ok for outcome in theirs), "\n".join(map(str, theirs))
    found = theirs[0].value
    assert len(found) == 10
    for name, values in run_ranks(2, check_examples, False, str(tmp_path))[0].items():
        limit = EXAMPLES.get(name, 1e-4)
        torch.testing.assert_close(
            values, found[name], rtol=limit, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.long
@pytest.mark.cpu_only("DeepSpeed reads what was saved")
@pytest.mark.skipif(not deepspeed_is_installed(), reason="DeepSpeed is not installed: make deepspeed")
def test_deepspeed_goes_on_from_our_experts(tmp_path):
    ours = run_ranks(2, check_ours, ["experts_of_ours"], str(tmp_path))[0]
    theirs = run_fresh(2, check_theirs, ["experts_of_ours"], str(tmp_path), timeout=400)
    assert all(outcome.ok for outcome in theirs), "\n".join(map(str, theirs))
    load("same").differences(theirs[0].value, ours)


@pytest.mark.long
@pytest.mark.skipif(not deepspeed_is_installed(), reason="DeepSpeed is not installed: make deepspeed")
def test_scripts_see_the_same(tmp_path):
    # DeepSpeed's ranks are killed afterwards: what it leaves behind can abort an interpreter that ends.
    theirs = run_fresh(2, check_theirs, IN_THE_SUITE, str(tmp_path), timeout=400)
    assert all(outcome.ok for outcome in theirs), "\n".join(map(str, theirs))
    ours = run_ranks(2, check_ours, IN_THE_SUITE, str(tmp_path))[0]
    assert set(load("same").differences(theirs[0].value, ours)) == set(IN_THE_SUITE)
