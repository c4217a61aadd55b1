"""The benchmark runner: turns, samples, ratios, budgets, failures. Cases here make up the numbers."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import __main__ as command_line
from benchmarks import cases
from benchmarks.cases import Budget, Case
from benchmarks.report import Report, report, result_of, tables, write_json
from benchmarks.runner import run
from terrazzo.errors import DeviceBuildError
from terrazzo.testing.late import build

CASES = """
    import os, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from benchmarks.cases import Budget, Prepared, case

    @case(budget=Budget("overhead", 0.5))
    def timed(setting):
        return {name: lambda: torch.ones(8) for name in ("plain", "terrazzo", "torch")}

    @case(world=2, unit="MB", repetitions=4, budget=Budget("value", 11))
    def values(setting):
        x = torch.ones(1)
        dist.all_reduce(x)
        assert (setting.world, setting.rank, setting.quick, x.item()) == (2, dist.get_rank(), False, 2.0)
        (setting.folder / f"of-{setting.rank}").write_text("here")
        turns = []
        def take_turn(name, value):
            turns.append(name)
            return len(turns) if name == "order" else value
        return {"order": lambda: take_turn("order", 0), "terrazzo": lambda: take_turn("terrazzo", 10 + setting.rank)}

    @case(unit="count", repetitions=3)
    def prepared(setting):
        calls = []
        return {"terrazzo": Prepared(run=lambda: len(calls), before=lambda: calls.append(1))}

    @case(world=2, repetitions=1)
    def raising(setting):
        raise LookupError("on purpose")

    @case(world=2, repetitions=1)
    def dying(setting):
        if setting.rank == 1:
            os._exit(3)
        dist.barrier()

    @case(repetitions=1)
    def hanging(setting):
        time.sleep(3600)

    @case(unit="count", repetitions=1)
    def after_failures(setting):
        return {"terrazzo": lambda: 1}

    @case(world=4, unit="count", repetitions=2, budget=Budget("value", 1), runs_on="accelerator")
    def on_a_device(setting):
        x = torch.ones(1, device=setting.device)
        dist.all_reduce(x)
        return {"terrazzo": lambda: x.item()}

    @case(repetitions=1)
    def lacking(setting):
        def lacks():
            raise NotImplementedError("no rule")
        return {"terrazzo": lambda: torch.ones(8), "torch": lacks}

    @case(repetitions=1)
    def ours_lacks(setting):
        def lacks():
            raise NotImplementedError("no rule")
        return {"terrazzo": lacks, "torch": lambda: torch.ones(8)}

    @case(unit="count", repetitions=1)
    def no_number(setting):
        return {"terrazzo": lambda: "one"}
"""


@pytest.fixture
def register(monkeypatch, tmp_path):
    """A register of its own, with the cases above under the topic `tiny`."""
    monkeypatch.setattr(cases, "_cases", {})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bench_tiny", raising=False)
    (tmp_path / "bench_tiny.py").write_text(textwrap.dedent(CASES))
    cases.load(["bench_tiny"])


def one(name: str, **options):
    (result,) = run([cases.get(name)], **options)
    return result


def case_with(budget: Budget | None) -> Case:
    return Case("topic.name", "module", lambda setting: {}, 1, "s", 3, budget)


# ------------------------------------------------------------------ running


@pytest.mark.long
def test_timed_implementations_get_the_repetitions_asked_for(register):
    result = one("tiny.timed")
    assert {name: len(samples) for name, samples in result.samples.items()} == dict.fromkeys(
        ("plain", "terrazzo", "torch"), 21
    )
    assert all(0 < sample < 1 for samples in result.samples.values() for sample in samples)
    assert set(result.ratios) == {"plain", "torch"}


def test_quick_takes_few_repetitions(register):
    assert len(one("tiny.timed", quick=True).samples["plain"]) == 3


@pytest.mark.long
def test_ranks_take_turns_and_the_largest_value_counts(register):
    result = one("tiny.values")
    assert result.samples["terrazzo"] == [11, 11, 11, 11]
    assert result.samples["order"] == [1, 4, 5, 8], "who begins changes"
    assert (result.measured, result.kept) == (11, True)


def test_preparation_comes_before_every_sample(register):
    assert one("tiny.prepared").samples["terrazzo"] == [1, 2, 3]


def test_an_operation_that_others_lack_is_measured_without_them(register):
    result = one("tiny.lacking")
    assert set(result.samples) == {"terrazzo"} and result.error is None
    assert "NotImplementedError: no rule" in one("tiny.ours_lacks").error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny.raising", "rank 1 failed\nTraceback(.|\n)*LookupError: on purpose"),
        ("tiny.dying", "rank 1 exited with status 3"),
        ("tiny.no_number", "returns its sample, not str"),
    ],
)
def test_failures_are_results(register, name, words):
    result = one(name)
    assert re.search(words, result.error)
    assert result.samples == {} and result.kept is None


def test_a_hang_ends_and_the_next_case_runs(register):
    hung, after = run([cases.get("tiny.hanging"), cases.get("tiny.after_failures")], limit=1)
    assert "rank 0 had not finished" in hung.error and "in hanging" in hung.error
    assert after.samples == {"terrazzo": [1]} and after.error is None


# ------------------------------------------------------------------ choosing


def test_cases_are_chosen_by_name_topic_and_wildcard(register):
    def names(*patterns):
        return [case.name for case in cases.select(patterns)]

    assert names("tiny.values") == ["tiny.values"]
    assert names("tiny.*ing") == ["tiny.raising", "tiny.dying", "tiny.hanging", "tiny.lacking"]
    assert names("tiny") == names() and len(names()) == 10
    assert names("tiny.values", "tiny.timed") == ["tiny.timed", "tiny.values"]
    with pytest.raises(LookupError, match=r"'tin'; there are tiny.timed, "):
        names("tin")


def test_a_name_is_registered_once(register):
    with pytest.raises(ValueError, match=r"two benchmark cases named '\w+.timed'"):
        for _ in range(2):
            cases.case(name="timed")(lambda setting: {})


# ------------------------------------------------------------------ ratios and budgets

SAMPLES = {"plain": [1.0, 1.0, 2.0], "terrazzo": [2.0, 2.0, 3.0], "torch": [5.0, 9.0, 6.0]}


def test_ratios_are_medians_over_repetitions():
    result = result_of(case_with(None), SAMPLES)
    assert result.medians == {"plain": 1.0, "terrazzo": 2.0, "torch": 6.0}
    assert result.ratios == {"plain": 2.0, "torch": 0.4}
    assert result.overhead == 1.0 / 4.0
    assert (result.measured, result.kept) == (None, None)


@pytest.mark.parametrize(
    ("budget", "measured", "kept"),
    [
        (Budget("overhead", 0.25), 0.25, True),
        (Budget("overhead", 0.24), 0.25, False),
        (Budget("time", 0.4), 0.4, True),
        (Budget("time", 0.39), 0.4, False),
        (Budget("speed", 2.5), 2.5, True),
        (Budget("speed", 2.6), 2.5, False),
        (Budget("time", 2.0, of="plain"), 2.0, True),
        (Budget("value", 2.0), 2.0, True),
        (Budget("value", 1.9), 2.0, False),
        (Budget("time", 1.0, of="deepspeed"), None, None),
    ],
)
def test_budgets(budget, measured, kept):
    result = result_of(case_with(budget), SAMPLES)
    assert (result.measured, result.kept) == (measured, kept)


def test_overhead_is_absent_where_torch_costs_nothing_over_plain():
    assert result_of(case_with(None), SAMPLES | {"torch": SAMPLES["plain"]}).overhead is None


# ------------------------------------------------------------------ output


def text_of(*results) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        for table in tables(results):
            console.print(table)
    return capture.get()


def test_the_table_shows_medians_ratios_and_verdicts():
    kept, over, absent = (
        result_of(case_with(budget), SAMPLES)
        for budget in (Budget("overhead", 0.5), Budget("speed", 15), Budget("time", 1, of="deepspeed"))
    )
    text = text_of(kept, over, absent)
    assert "overhead <= 0.5 of torch" in text and "ok" in text
    assert "speed >= 15 of torch" in text and "over: 2.5" in text
    assert "not measured" in text
    assert "6 s" in text and "0.4" in text


def test_json_keeps_every_sample(tmp_path):
    written = report([result_of(case_with(Budget("time", 0.5)), SAMPLES)], quick=True)
    write_json(tmp_path / "out.json", written)
    read = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Report)
    assert read == written
    assert read.results[0].samples == SAMPLES and read.machine.cores > 0


def test_the_command(register, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(cases, "modules_here", lambda: ["bench_tiny"])
    app = command_line.app
    listed = CliRunner().invoke(app, ["--list", "tiny.values"])
    assert (listed.exit_code, listed.stdout.split()) == (0, ["tiny.values", "world", "2", "value", "<=", "11"])
    ran = CliRunner().invoke(app, ["tiny.prepared", "tiny.no_number", "--json", str(tmp_path / "out.json")])
    assert ran.exit_code == 1, "a case failed"
    assert "prepared" in ran.stdout and "returns its sample, not str" in ran.stderr
    assert len(msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Report).results) == 2
    assert CliRunner().invoke(app, ["nothing"]).exit_code == 2


# ------------------------------------------------------------------ on accelerators


@pytest.mark.long
def test_a_case_for_accelerators_has_a_rank_for_each_device(register):
    try:
        build.built()
    except DeviceBuildError as error:
        pytest.skip(str(error).partition("\n")[0])
    result = one("tiny.on_a_device", device="late")
    assert result.error is None and result.world == 2 and result.budget is None
    assert set(result.samples["terrazzo"]) == {2.0}


def test_cases_are_chosen_by_where_they_run(register):
    names = [case.name for case in cases.select([], "accelerator")]
    assert names == ["tiny.on_a_device"] and "tiny.on_a_device" not in [case.name for case in cases.select([])]
    with pytest.raises(LookupError, match="no benchmark case for the accelerator is named 'tiny.timed'"):
        cases.select(["tiny.timed"], "accelerator")
