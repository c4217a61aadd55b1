"""A step's timeline: what ran and what is planned, against the plan's own checker and report, and in a browser."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp.compare import Model, apart, batches, loss_of, mine, shard_blocks
from fsdp.plan_checker import check
from ranks import run_ranks
from terrazzo.comm import axis_of, collectives
from terrazzo.errors import FSDPError, ViewError
from terrazzo.fsdp import explain, fully_shard, report, timeline, trace
from terrazzo.fsdp.perfetto import perfetto
from terrazzo.fsdp.spans import OVERLAPPING, memory_of, spans_of
from terrazzo.tensor import init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from terrazzo.view import page_of
from terrazzo.view.data.trace_data import moved_bytes, read_timeline, trace_data
from view.chromium import chromium, opened, texts


def check_what_ran(folder: str) -> None:
    model = apart(shard_blocks(Model(), reshard_after_forward=True))
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    with trace(model) as steps:
        loss_of(model, mine(x), mine(y)).backward()
    steps.save(f"{folder}/rank-{dist.get_rank()}.json")
    found = steps.timeline()
    said = report(model)
    assert (found.rank, found.world, found.planned) == (dist.get_rank(), 2, False)
    assert found.groups == ["Model", "blocks.0", "blocks.1", "blocks.2"] and set(found.replicas) == {""}
    # Memory: as the checker of plans has it, and below what report says.
    most = max(each.memory for each in found.operations)
    assert most == check(steps.operations, explain(model).spec)
    assert found.held == said.held and found.bound == said.peak
    assert found.held + most == found.bound, "the step that ran is the one that is planned"
    assert max(nbytes for _, nbytes in memory_of(found)) == found.held + most
    assert found.operations[-1].after == 0, "all is given back"
    # Bytes: in all what report says.
    moved = moved_bytes(found)
    assert sum(moved.values()) == steps.total_bytes() == said.moved
    assert {over for _, over, _ in moved} == {"dim0"} and {kind for *_, kind in moved} == {"gather", "reduce"}
    # Time: lanes in which the host does one thing after the other do not overlap.
    spans = spans_of(found)
    for lane in ("compute", "waits", "other"):
        own = sorted((span.begin, span.end) for span in spans if span.lane == lane)
        assert own and all(begin >= end for (_, end), (begin, _) in zip(own, own[1:], strict=False)), lane
    assert {span.groups for span in spans if span.lane == "compute"} == set(found.groups)
    gathers = [span for span in spans if span.what == "gather"]
    assert len(gathers) == len([e for e in steps.operations if e.kind == "gather"])
    for span in gathers:
        copied = [s for s in spans if s.what == "copy out" and s.groups == span.groups and s.begin >= span.begin]
        assert span.end == min(copy.end for copy in copied)
    assert [span.groups for span in spans if span.what == "reduce"] == ["blocks.2", "blocks.1", "blocks.0", "Model"]
    assert any(span.backward for span in spans) and not spans[0].backward


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("traces")
    run_ranks(2, check_what_ran, str(folder))
    return [folder / f"rank-{rank}.json" for rank in range(2)]


def test_a_file_says_what_ran(traces):
    timelines = [read_timeline(path) for path in traces]
    data = trace_data(timelines, "step")
    assert [each["rank"] for each in data["ranks"]] == [0, 1] and not data["planned"]
    first = min(timelines, key=lambda each: each.began)
    shift = [each["memory"][0][0] for each in data["ranks"]]
    assert shift[timelines.index(first)] == 0 and all(later >= 0 for later in shift)
    json.dumps(data, allow_nan=False)


def test_perfetto_has_the_same(traces):
    timelines = [read_timeline(path) for path in traces]
    events = json.loads(perfetto(timelines))["traceEvents"]
    for each in timelines:
        own = [event for event in events if event["pid"] == each.rank]
        assert {e["args"]["name"] for e in own if e["name"] == "process_name"} == {f"rank {each.rank} of 2"}
        spans = spans_of(each)
        assert len([e for e in own if e["ph"] == "X"]) == len(
            [s for s in spans if s.lane in ("compute", "waits", "other")]
        )
        begun, ended = ([e for e in own if e["ph"] == kind] for kind in "be")
        assert len(begun) == len(ended) == len([s for s in spans if s.lane in OVERLAPPING])
        assert {e["id"] for e in begun} == {e["id"] for e in ended} and len({e["id"] for e in begun}) == len(begun)
        assert sum(e["args"]["bytes"] for e in begun) == sum(moved_bytes(each).values())
        memory = [e["args"]["bytes"] for e in own if e["ph"] == "C"]
        assert max(memory) == max(nbytes for _, nbytes in memory_of(each)) <= each.bound


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "not a trace"), ("{", "not a trace"), ('{"traceEvents": []}', "has no timeline")],
)
def test_other_files_are_refused(text, message, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ViewError, match=message):
        read_timeline(tmp_path / "x.json")


def test_a_group_that_is_not_there_is_refused(traces, tmp_path):
    document = json.loads(traces[0].read_text())
    document["terrazzo"]["operations"][0]["unit"] = 99
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(ViewError, match="not there"):
        read_timeline(tmp_path / "x.json")


# ------------------------------------------------------------------ tensor parallelism


def check_tensor_parallel(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)])
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.set_coalesce_bytes(0)
    model(torch.ones(4, 8)).sum().backward()  # from now on it is known what runs last
    with trace(model) as steps:
        model(torch.ones(4, 8)).sum().backward()
        total = axis_of(mesh, 0)
        collectives.all_reduce(torch.ones(2), total)
        started = collectives.all_reduce_start(torch.ones(1000), total)
    steps.save(f"{folder}/rank-{dist.get_rank()}.json")
    started.wait()
    found = steps.timeline()
    # A block's output is summed over tp in forward; in backward the gradient of its input, which data has none of.
    # An all-reduce of T bytes among 2 ranks makes each send T.
    said = [(each.kind, each.axis, each.nbytes, each.backward) for each in found.collectives]
    nbytes = 4 * 8 * 4
    assert said == [
        ("all_reduce", "tp", nbytes, False),
        ("all_reduce", "tp", nbytes, False),
        ("all_reduce", "tp", nbytes, True),
        ("all_reduce", "dp", 8, False),
        ("all_reduce", "dp", 4000, False),
    ]
    assert [each.async_op for each in found.collectives] == [False] * 4 + [True]
    assert all(each.begin < each.end for each in found.collectives[:4])
    last = found.collectives[4]
    assert last.begin == last.end, "it was not waited for while the trace lasted"
    spans = [span for span in spans_of(found) if span.lane == "collectives"]
    assert [span.groups for span in spans[:3]] == ["0 over tp", "1 over tp", "1 over tp"]
    computed = [span for span in spans_of(found) if span.lane == "compute"]
    assert not any(c.begin < s.end and s.begin < c.end for c in computed for s in spans[:4]), "compute leaves them out"
    moved = moved_bytes(found)
    assert moved["0", "tp", "all-reduce"] == nbytes and moved["1", "tp", "all-reduce"] == 2 * nbytes
    fully_sharded = sum(count for (_, over, kind), count in moved.items() if over == "dp" and kind != "all-reduce")
    assert fully_sharded == steps.total_bytes() == report(model).moved


@pytest.fixture(scope="module")
def parallel_traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parallel")
    run_ranks(4, check_tensor_parallel, str(folder))
    return [folder / f"rank-{rank}.json" for rank in range(4)]


def test_collectives_of_the_program_are_shown_by_mesh_dim(parallel_traces):
    timelines = [read_timeline(path) for path in parallel_traces]
    data = trace_data(timelines, "step")
    assert "collectives" in data["lanes"]
    assert all(["0", "tp", "all-reduce", 128] in each["moved"] for each in data["ranks"])
    events = json.loads(perfetto(timelines))["traceEvents"]
    begun = [event["name"] for event in events if event["ph"] == "b" and event["pid"] == 3]
    assert [name for name in begun if "over tp" in name] == ["all-reduce 0 over tp", *["all-reduce 1 over tp"] * 2]
    named = {event["name"] for event in json.loads(parallel_traces[0].read_text())["traceEvents"]}
    assert {"tp", "dp"} <= {name.partition(" over ")[2] for name in named if name.startswith("all-reduce ")}


# ------------------------------------------------------------------ ranks that do not exist


def planned_model() -> nn.Module:
    """One of 512 simulated ranks, 8 replicas of 64 that shard."""
    dist.init_process_group("fake", rank=3, world_size=512, store=FakeStore())
    mesh = init_device_mesh("cpu", (8, 64), mesh_dim_names=("replicas", "shards"))
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=8)
    return fully_shard(model, mesh=mesh)


def test_a_plan_of_ranks_that_do_not_exist():
    model = planned_model()
    model.set_coalesce_bytes(0)
    found, plan = timeline(model), explain(model)
    assert (found.rank, found.world, found.planned) == (3, 512, True)
    assert sum(moved_bytes(found).values()) == plan.moved
    assert {over for _, over, _ in moved_bytes(found)} == {"shards", "shards, neighbours", "replicas"}
    assert max(each.memory for each in found.operations) == check(plan.operations, plan.spec)
    assert found.held + max(each.memory for each in found.operations) == found.bound
    begins = [each.begin for each in found.operations]
    assert begins == list(range(len(plan.operations)))
    backward = [each.backward for each in found.operations if each.kind != "write"]
    assert backward == sorted(backward) and any(backward) and not all(backward)
    reduces = [each.backward for each in found.operations if each.kind == "reduce"]
    assert reduces and all(reduces)
    with pytest.raises(FSDPError, match="not sharded"):
        timeline(nn.Linear(1, 1))
    with pytest.raises(ViewError, match="no common clock"):
        page_of(found, _ran(found))


def _ran(planned):
    import msgspec

    return msgspec.structs.replace(planned, planned=False)


# ------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def test_the_page_of_a_step(browser, traces, tmp_path):
    timelines = [read_timeline(path) for path in traces]
    page_of(*timelines, title="two ranks").save(tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html", viewport={"width": 1200, "height": 1600}) as page:
        assert page.locator(".chart").count() == 1, "memory"
        assert texts(page, ".timeline .group") == ["rank 0", "rank 1"]
        assert texts(page, ".timeline .lane") == ["compute", "waits", "gathers", "reductions", "other"] * 2
        page.get_by_label("1", exact=True).uncheck()
        assert texts(page, ".timeline .group") == ["rank 0"]
        rows = texts(page, "table.moved tbody tr")
        assert len(rows) == len({group for group, *_ in moved_bytes(timelines[0])}) + 1 and "over dim0" in texts(
            page, "th"
        )
        bar = page.locator(".timeline .span").first
        about = bar.locator("title").text_content()
        bar.dispatch_event("click")  # where it is too short for a mouse, too
        assert about.startswith("rank 0: ") and texts(page, ".said") == [about]
        assert page.locator(".timeline .span.picked").count() == 1
        whole = texts(page, ".timeline .tick")
        page.keyboard.press("w")
        assert texts(page, ".timeline .tick") != whole, "closer"
        page.keyboard.press("0")
        assert texts(page, ".timeline .tick") == whole
        page.keyboard.press("n")
        assert texts(page, ".said") != [about] and page.locator(".timeline .span.picked").count() == 1
        page.keyboard.press("p")
        page.keyboard.press("f")
        assert texts(page, ".said") == [about]
        assert page.locator(".timeline .span.picked rect").bounding_box()["width"] > 200, "a third of the timeline"


def test_two_steps_compared(browser, traces, tmp_path):
    """The second step is the first at half the speed, so every time is twice as long, and nothing else differs."""
    first = [read_timeline(path) for path in traces]
    slower = [
        replace(
            each,
            operations=[dataclasses.replace(o, begin=2 * o.begin, end=2 * o.end) for o in each.operations],
        )
        for each in first
    ]
    data = trace_data([*first, *slower], "both")
    assert data["steps"] == ["step 1", "step 2"] and [each["step"] for each in data["ranks"]] == [0, 0, 1, 1]
    assert [each["rank"] for each in data["ranks"]] == [0, 1, 0, 1]
    shift = [each["memory"][0][0] for each in data["ranks"]]
    assert min(shift[:2]) == min(shift[2:]) == 0, "each step has a clock of its own"
    page_of(*first, *slower).save(tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html", viewport={"width": 1200, "height": 900}) as page:
        assert texts(page, ".timeline .group") == ["rank 0, A", "rank 0, B", "rank 1, A", "rank 1, B"]
        rows = {
            row[0]: row[1:]
            for row in (each.split("\t") for each in page.locator(".times table").inner_text().split("\n"))
        }
        assert "(+100%)" in rows["compute"][-1] and "(+100%)" in rows["waits"][-1]
        assert rows["sent"][0] == rows["sent"][1] and rows["memory, at most"][0] == rows["memory, at most"][1]
        assert page.locator(".modules tbody tr").count() > 3 and page.locator(".modules .better").count() == 0
        page.get_by_label("1", exact=True).uncheck()
        assert texts(page, ".timeline .group") == ["rank 0, A", "rank 0, B"]


@pytest.mark.long
def test_the_page_of_a_tensor_parallel_step(browser, parallel_traces, tmp_path):
    page_of(*map(read_timeline, parallel_traces)).save(tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as page:
        assert texts(page, ".timeline .lane").count("collectives") == 4
        assert {"over dp", "over tp"} <= set(texts(page, "table.moved th"))


def test_the_page_of_a_plan(browser, tmp_path):
    page_of(planned_model()).save(tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as page:
        assert "3 of 512" in page.locator(".facts").first.text_content()
        assert {"over shards", "over replicas"} <= set(texts(page, "th"))
        assert "has its number, not its time" in page.locator("#page").text_content()


def test_names_of_modules_stay_text(browser, tmp_path):
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    model = nn.Module()
    model.register_module("<img src=x onerror='window[`broken`]=1'><a href='http://evil'>", nn.Linear(64, 64))
    for each in model.children():
        fully_shard(each)
    model.head = nn.Linear(64, 8)
    fully_shard(model)
    page_of(model).save(tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as page:
        named = page.locator(".timeline .span", has=page.locator("title", has_text="<img src=x"))
        named.first.dispatch_event("click")
        assert "<img src=x" in texts(page, ".said")[0]
        assert page.locator("#page a, #page img").count() == 0
