"""Can the device find a missing wait? Takes out one wait, event, record or copy at a time, and runs what uses it.

    python -m tests.testing.late.mutations [--only TEXT] [--write docs/late-mutations.md]

A mutation is caught if the run ends with a race, with another result than unchanged code, with an error, or not in
time. What is not caught is an error of this table, unless it is `superfluous`: then something else orders the same
accesses.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from ranks import close_all, run_fresh
from terrazzo.testing import late
from tests.testing.late import test_terrazzo_checkpoint as saving
from tests.testing.late import test_terrazzo_fsdp as sharding
from tests.testing.late import test_terrazzo_tensor as tensors

_LIMIT = 60.0  # seconds of a run
_MODES = ("needed", "default_first", "default_last")


@dataclass(frozen=True)
class Mutation:
    """`what` is `"wait KIND MARK"` or `"record MARK"` of fully_shard's plan, or a function whose text `old` becomes
    `new`."""

    what: str
    check: Callable[..., Any]
    old: str = ""
    new: str = ""
    world: int = 2
    superfluous: str = ""  # why it does no harm
    backend_name: str = "late"

    @property
    def planned(self) -> list[str]:
        """`"wait"`, a kind and a mark, or `"record"` and a mark."""
        return self.what.split(" ", 1 if self.what.startswith("record ") else 2)

    @property
    def name(self) -> str:
        return self.what + (f": `{self.old}`" if self.old else "")


def _plan(what: str, check: Callable[..., Any] = sharding.check_plain, **more: Any) -> Mutation:
    return Mutation(what, check, **more)


_FSDP, _SAVE, _PUBLISH = "terrazzo.fsdp", "terrazzo.checkpoint", "terrazzo.publish"
_REACHED = sharding.check_unused_parameters
_SAME_STREAM = "what it orders is on one stream"
_OWN_STREAM = "the collective runs on the stream that started it, and others wait for this one"
_ITS_STREAM = "what it frees is memory of the stream of gathers, which uses it again in order"

MUTATIONS = (
    # ---- fully_shard's plan: waits for marks, and the marks themselves
    _plan("wait GATHER copied"),
    _plan("wait GATHER kept", sharding.check_some_blocks_stay_gathered, world=4),
    _plan("wait GATHER freed", sharding.check_writes_between_two_runs),
    _plan("wait COPY_OUT gathered", sharding.check_mixed_precision),
    _plan("wait REDUCE packed"),
    _plan("wait FINISH reduced", superfluous=_SAME_STREAM),
    _plan("wait HAND_OVER finished"),
    _plan("wait RELEASE reduced"),
    _plan("wait ALL_REDUCE reduced", sharding.check_replicas, world=4),
    _plan("wait FINISH all-reduced", sharding.check_replicas, world=4, superfluous=_SAME_STREAM),
    _plan("wait STORE reduced", sharding.check_replicas_and_accumulation, world=4, superfluous=_SAME_STREAM),
    _plan("wait DISCARD gathered", sharding.check_gathers_that_are_given_up, superfluous=_ITS_STREAM),
    _plan("wait FOLLOW written"),
    _plan("record written", sharding.check_writes_to_kept_parts, world=4),
    _plan("record gathered"),
    _plan("record copied"),
    _plan("record freed", sharding.check_writes_between_two_runs),
    _plan("record kept", sharding.check_some_blocks_stay_gathered, world=4),
    _plan("record packed"),
    _plan("record reduced"),
    _plan("record finished"),
    _plan("record handed over", sharding.check_accumulation_in_shards),
    _plan("record all-reduced", sharding.check_replicas, world=4, superfluous=_SAME_STREAM),
    # ---- what runs the plan
    Mutation(
        f"{_FSDP}.run.streams:Streams.mark_of",
        sharding.check_plain,
        "event.record(self._current() if stream is None else stream)",
        "pass",
    ),
    Mutation(
        f"{_FSDP}.run.streams:Streams._current",
        sharding.check_another_current_device,
        "current_stream(self._index)",
        "current_stream()",
    ),
    Mutation(
        f"{_FSDP}.run.streams:Streams._behind_others",
        sharding.check_shared_streams_beside_two,
        "beside.wait_stream(other)",
        "pass",
    ),
    Mutation(
        f"{_FSDP}.run.streams:Streams.begin_step",
        sharding.check_plain,
        "self._marks[WRITTEN] = self.mark_of() if stepped is None else stepped",
        "pass",
    ),
    Mutation(
        f"{_FSDP}.run.presence:Sums.__init__",
        _REACHED,
        "self._event = torch.get_device_module(sums.device.type).Event()",
        "return",
    ),
    Mutation(f"{_FSDP}.run.presence:Sums.__init__", _REACHED, "self._event.record()", "pass"),
    Mutation(f"{_FSDP}.run.presence:Sums._known", _REACHED, "self._event.synchronize()", "pass"),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients._ended",
        sharding.check_plain,
        "running.pending.wait()",
        "running.pending._result",
        superfluous=_OWN_STREAM,
    ),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients._release_packed",
        sharding.check_plain,
        "running._replace(packed=None)",
        "running",
        superfluous="it frees memory, and orders nothing",
    ),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients._add_partial",
        sharding.check_replicas_and_accumulation,
        "self._held.append(section)",
        "pass",
        world=4,
    ),
    Mutation(f"{_FSDP}.run.gradients:Gradients.settle", sharding.check_offload, "self._copied.synchronize()", "pass"),
    Mutation(f"{_FSDP}.run.gradients:Gradients._at_rest", sharding.check_offload, "self._copied.record()", "pass"),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients._accumulate_in_shards",
        sharding.check_offload_and_accumulation,
        "if known or hooked:",
        "if False:",
    ),
    Mutation(
        f"{_FSDP}.run.bucket:Bucket.receive",
        sharding.check_plain,
        "gathered = pending.wait()",
        "gathered = pending._result",
        superfluous=_OWN_STREAM,
    ),
    Mutation(f"{_FSDP}.run.root:Root.give_up", sharding.check_blocks_unsharded_before, "self._join()", "pass"),
    Mutation(f"{_FSDP}.run.executor:Executor.reset", sharding.check_failing_backwards, "self.streams.join()", "pass"),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients._call_hook",
        sharding.check_hooks_on_reductions,
        "stream.wait_stream(current)",
        "pass",
    ),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients._call_hook",
        sharding.check_hooks_on_reductions,
        "current.wait_stream(stream)",
        "pass",
    ),
    Mutation(
        f"{_FSDP}.run.unit:Unit.was_written_since_forward",
        sharding.check_writes_to_kept_parts,
        "or any(kept is not None and kept.is_written for kept in self._kept)",
        "",
        world=4,
    ),
    Mutation(
        f"{_FSDP}.run.kept:Kept.receive",
        sharding.check_some_blocks_stay_gathered,
        "pending.wait()",
        "pending._result",
        world=4,
        superfluous=_OWN_STREAM,
    ),
    Mutation(
        f"{_FSDP}.offload:_park",
        sharding.check_offloaded_state_that_the_host_reads,
        "devices.add(settings.mesh.device)",
        "pass",
    ),
    Mutation(
        f"{_FSDP}.offload:to_host",
        sharding.check_offload_of_the_optimizer,
        "return host.copy_(local, non_blocking=settings.pinned)",
        "return host",
    ),
    Mutation(
        f"{_FSDP}.offload:to_device",
        sharding.check_offload_of_the_optimizer,
        "return local.to(settings.mesh.device, non_blocking=settings.pinned)",
        "return local",
    ),
    Mutation(
        f"{_FSDP}.offload:_park",
        sharding.check_offloaded_state_that_the_host_reads,
        "torch.get_device_module(device.type).current_stream(device).synchronize()",
        "pass",
    ),
    Mutation(
        f"{_FSDP}.run.streams:Streams.on_stream",
        sharding.check_plain,
        "with device.stream(beside), wire.OnThisStream() if starts else nullcontext():",
        "with wire.OnThisStream() if starts else nullcontext():",
        superfluous="what is on one stream is in order; it costs time only",
    ),
    Mutation(
        f"{_FSDP}.run.streams:Streams.on_stream",
        sharding.check_plain,
        "wire.OnThisStream() if starts else nullcontext()",
        "nullcontext()",
        superfluous="collectives on a stream of the backend are waited for; it costs time only",
    ),
    Mutation(
        f"{_FSDP}.run.presence:Sums.__init__",
        _REACHED,
        ".copy_(sums, non_blocking=True)",
        ".fill_(1)",
    ),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients._at_rest",
        sharding.check_offload,
        "to_host(reduced.to(dtype), settings)",
        "to_host(reduced.to(dtype), settings).zero_()",
    ),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients.discard",
        sharding.check_failing_backwards,
        "running.pending.wait()",
        "pass",
        superfluous="nobody reads the result, and a collective keeps its memory until it is done",
    ),
    Mutation(
        "terrazzo.comm.sections:place",
        sharding.check_offload,
        ".copy_(part, non_blocking=True)",
        ".zero_()",
    ),
    Mutation(
        f"{_FSDP}.run.bucket:Bucket._place",
        sharding.check_plain,
        "torch._foreach_copy_(views, list(chunks))",
        "torch._foreach_zero_(views)",
    ),
    Mutation(
        "terrazzo.comm.flat:FlatPlan.pack",
        sharding.check_plain,
        "torch.cat(rows, 1, out=sections.view(self.n, -1))",
        "pass",
    ),
    Mutation(
        "terrazzo.comm.flat:FlatPlan.unpack",
        sharding.check_plain,
        "torch.split_with_sizes_copy(sections.view(self.n, -1), self.own_splits, 1, out=pieces)",
        "pass",
    ),
    Mutation(
        f"{_FSDP}.run.kept:Kept.take",
        sharding.check_some_blocks_stay_gathered,
        "torch._foreach_copy_(views, plan.own_chunks(values))",
        "pass",
        world=4,
    ),
    Mutation(
        "terrazzo.comm.watch:Watch._reduce_on_device",
        sharding.check_plain,
        "stream.wait_event(now)",
        "pass",
        superfluous="before a first comparison its stream has freed nothing that others use",
    ),
    Mutation(
        "terrazzo.comm.watch:Watch._reduce_on_device",
        sharding.check_plain,
        "work.wait()",
        "pass",
        superfluous=_OWN_STREAM,
    ),
    Mutation(
        "terrazzo.comm.watch:Watch._reduce_on_device",
        sharding.check_plain,
        "return streams.mark_of(stream), found",
        "return now, found",
    ),
    Mutation(
        "terrazzo.comm.watch:Watch._check",
        sharding.check_state_dicts_between,
        "comparing.work.synchronize()",
        "pass",
    ),
    # ---- collectives
    Mutation("terrazzo.comm.pending:Pending.__init__", sharding.check_encoded_replicas, "self.wait()", "pass", world=4),
    Mutation(
        "terrazzo.comm.pending:Pending.wait",
        tensors.check_products,
        "wait_for(self._work, self.kind, self.axis)",
        "pass",
    ),
    Mutation(
        "terrazzo.comm.pending:Pending.wait",
        tensors.check_redistribution,
        "wait_for(self._work, self.kind, self.axis)",
        "pass",
    ),
    Mutation(
        "terrazzo.comm.pending:Pending.wait",
        tensors.check_parallel_styles,
        "wait_for(self._work, self.kind, self.axis)",
        "pass",
    ),
    Mutation(
        "terrazzo.comm.pending:Pending.wait", sharding.check_plain, "wait_for(self._work, self.kind, self.axis)", "pass"
    ),
    Mutation(
        "terrazzo.comm.pending:Pending.wait",
        tensors.check_context_parallel,
        "wait_for(self._work, self.kind, self.axis)",
        "pass",
    ),
    Mutation("terrazzo.comm.pending:wait_for", tensors.check_muon, "work.wait()", "pass"),
    Mutation(
        "terrazzo.comm.differentiable:_waits",
        tensors.check_redistribution,
        "pending.wait",
        "lambda: pending._result",
    ),
    Mutation(
        "terrazzo.tensor.experimental.ring_attention:_arrived",
        tensors.check_context_parallel,
        "pending.wait()",
        "pending._finish()",
    ),
    # ---- checkpoints and publishing
    Mutation(
        f"{_SAVE}.run.device_copies:ThisAccelerator.beside",
        saving.check_saving_in_the_background,
        "stream.wait_stream(torch.accelerator.current_stream(device))",
        "pass",
    ),
    Mutation(
        f"{_SAVE}.run.device_copies:ThisAccelerator.wait",
        saving.check_saving_in_the_background,
        "self._streams[device].record_event().synchronize()",
        "pass",
    ),
    Mutation(
        f"{_SAVE}.run.device_copies:copy_from_devices",
        saving.check_saving_in_the_background,
        "accelerator.wait(device)",
        "pass",
    ),
    Mutation(
        f"{_SAVE}.run.device_copies:copy_from_devices",
        saving.check_stagers,
        "accelerator.wait(device)",
        "pass",
        superfluous="a stager's memory is not pinned, and a copy to such memory waits",
    ),
    Mutation(f"{_SAVE}.run.device_copies:copy_from_devices", saving.check_managers, "accelerator.wait(device)", "pass"),
    Mutation(f"{_SAVE}.native.datafile:_arrived", saving.check_saving, "event.synchronize()", "pass"),
    Mutation(
        f"{_SAVE}.native.datafile:Pump._through_buffers",
        saving.check_saving,
        "torch.accelerator.current_stream(tensor.device).record_event() if on_device else None",
        "None",
    ),
    Mutation(
        f"{_SAVE}.native.datafile:Pump._through_buffers",
        saving.check_saving_from_another_device,
        "torch.accelerator.current_stream(tensor.device).record_event()",
        "torch.accelerator.current_stream().record_event()",
    ),
    Mutation(
        f"{_SAVE}.native.datafile:Pump._through_buffers",
        saving.check_saving_through_buffers,
        "buffer = buffers[i % 2]",
        "buffer = buffers[0]",
    ),
    Mutation(
        f"{_SAVE}.native.datafile:Pump._through_buffers",
        saving.check_saving,
        "target.view(window.shape).copy_(window, non_blocking=on_device)",
        "target.zero_()",
    ),
    Mutation(
        f"{_SAVE}.run.device_copies:copy_from_devices",
        saving.check_saving_in_the_background,
        "with accelerator.beside(device):",
        "with accelerator.beside(device) and torch.no_grad():",
    ),
    Mutation(
        f"{_SAVE}.run.device_copies:copy_from_devices",
        saving.check_saving_in_the_background,
        "targets[number].copy_(sources[number], non_blocking=True)",
        "pass",
    ),
    Mutation(
        f"{_SAVE}.native.requests:Requests._take", saving.check_loading, "torch._foreach_copy_(targets, staged)", "pass"
    ),
    Mutation(
        f"{_PUBLISH}.host_copy:copy_into",
        saving.check_publishing_through_a_channel,
        "as_bytes(target).copy_(as_bytes(source))",
        "as_bytes(target).copy_(as_bytes(source), non_blocking=True)",
    ),
    Mutation(
        f"{_PUBLISH}.host_copy:copy_into",
        saving.check_publishing_in_bfloat16,
        ".to(target.dtype))",
        ".to(target.dtype), non_blocking=True)",
    ),
    Mutation(
        f"{_PUBLISH}.host_copy:Snapshot.take", saving.check_publishing, "copy_into(target, part.data)", "target.zero_()"
    ),
    Mutation(
        f"{_PUBLISH}.host_copy:HostCopy.apply",
        saving.check_publishing_again_at_once,
        "torch.accelerator.current_stream(device).synchronize()",
        "pass",
    ),
    Mutation(
        f"{_PUBLISH}.host_copy:HostCopy.apply",
        saving.check_publishing_again_at_once,
        "torch.accelerator.current_stream(device).synchronize()",
        "torch.accelerator.current_stream().synchronize()",
    ),
    Mutation(
        f"{_PUBLISH}.host_copy:HostCopy.apply",
        saving.check_publishing_through_a_channel,
        "torch.accelerator.current_stream(device).synchronize()",
        "pass",
    ),
    Mutation(
        f"{_PUBLISH}.host_copy:HostCopy.apply",
        saving.check_publishing,
        "as_bytes(live).copy_(as_bytes(slot.data), non_blocking=True)",
        "pass",
    ),
    Mutation(
        f"{_PUBLISH}.channel:pack",
        saving.check_publishing_through_a_channel,
        "as_bytes(view).copy_(as_bytes(source))",
        "view.zero_()",
    ),
    Mutation(
        f"{_PUBLISH}.by_channel:ChannelSource.receive",
        saving.check_publishing_through_a_channel,
        "as_bytes(slot.data[asked.box.relative_to(slot.box).slices()]).copy_(as_bytes(view))",
        "slot.data.zero_()",
    ),
)


# ------------------------------------------------------------------ on a rank


def mutate(mutation: Mutation) -> None:
    """Change the code of this process."""
    if not mutation.old:
        _mutate_plan(*mutation.planned)
        return
    function, source = place_of(mutation)
    namespace: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(mutation.old, mutation.new)
    exec(compile(code, mutation.what, "exec"), function.__globals__ | {}, namespace)
    (changed,) = namespace.keys() - {"annotations"}
    function.__code__ = namespace[changed].__code__


def place_of(mutation: Mutation) -> tuple[Any, str]:
    """The function that is changed, and its source, which has `old` once; a LookupError says what is gone."""
    module, _, path = mutation.what.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for name in path.split("."):
            function = getattr(function, name)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"there is no {mutation.what} ({error}): mend this table") from error
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]  # without decorators: the code within them is replaced
    if source.count(mutation.old) != 1:
        raise LookupError(f"{mutation.what} has {source.count(mutation.old)} times {mutation.old!r}: mend this table")
    return function, source


_planned = 0
"""How many operations of plans were changed."""


def _mutate_plan(what: str, *names: str) -> None:
    from terrazzo.fsdp.run import streams

    original = streams.Streams.on_stream

    def on_stream(self: Any, operation: Any, call: Any) -> Any:
        global _planned
        before = operation
        if what == "record" and operation.records is not None and operation.records.what == names[0]:
            operation = replace(operation, records=None)
        if what == "wait" and operation.kind.name == names[0]:
            operation = replace(operation, waits=tuple(mark for mark in operation.waits if mark.what != names[1]))
        _planned += operation is not before and operation != before
        return original(self, operation, call)

    streams.Streams.on_stream = on_stream  # type: ignore[method-assign]


def values_on(mutation: Mutation | None, check: Callable[..., Any], backend_name: str) -> list[Any]:
    """On a rank: what the check returns in each mode."""
    late.init(backend_name=backend_name)
    late.init_process_group()
    device = torch.device("late", torch.distributed.get_rank())
    torch.accelerator.set_device_index(device.index)
    if mutation is not None:
        mutate(mutation)
    values = []
    for mode in _MODES:
        with late.checked(mode):
            values.append(check(device))
    if mutation is not None and not mutation.old and not _planned:
        raise LookupError(f"no plan of {check.__name__} has {mutation.what!r}: mend this table")
    return values


# ------------------------------------------------------------------ the table


def outcome_of(mutation: Mutation | None, check: Callable[..., Any], world: int, backend_name: str) -> tuple[str, Any]:
    """How a run ended: "" if every rank returned; and what they returned."""
    ranks = run_fresh(world, values_on, mutation, check, backend_name, timeout=_LIMIT)
    errors = [outcome.error for outcome in ranks if outcome.error]
    if any("LookupError" in error for error in errors):
        raise LookupError(errors[0])
    if any("RaceError" in error or "The device `late` found" in error for error in errors):
        return "a race", None
    if errors:
        if any("Bad address" in error for error in errors):
            return "protected memory, in a system call", None
        raised = re.findall(r"^([\w.]+(?:Error|Exception))\b", errors[0], flags=re.MULTILINE)
        return "other values" if "AssertionError" in raised else f"an error: {', '.join(raised[-1:])}", None
    if any(not outcome.ok for outcome in ranks):
        return "it did not end", None
    return "", [outcome.value for outcome in ranks]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="only mutations whose names have this text")
    parser.add_argument("--write", type=Path, help="write the table as a page")
    given = parser.parse_args()
    unchanged: dict[Any, Any] = {}
    rows, wrong, began = [], [], time.monotonic()
    for mutation in MUTATIONS:
        if given.only not in mutation.name:
            continue
        key = mutation.check, mutation.world, mutation.backend_name
        if key not in unchanged:
            ended, values = outcome_of(None, *key)
            if ended:
                wrong.append(f"{mutation.check.__name__} fails without a mutation: {ended}")
            unchanged[key] = values
        try:
            ended, values = outcome_of(mutation, *key)
        except LookupError as error:
            wrong.append(str(error).strip().splitlines()[-1])
            continue
        if not ended and not same(values, unchanged[key]):
            ended = "other values"
        if bool(ended) == bool(mutation.superfluous):
            wrong.append(f"{mutation.name}, {mutation.check.__name__}: {ended or 'not caught'}")
        rows.append((mutation, ended or f"not caught: {mutation.superfluous or '?'}"))
        print(f"{mutation.name} ({mutation.check.__name__}): {rows[-1][1]}", flush=True)
    close_all()
    if given.write:
        given.write.write_text(page(rows))
    print(f"{len(rows)} mutations in {time.monotonic() - began:.0f} s, {len(wrong)} of them wrong")
    for text in wrong:
        print("WRONG:", text)
    sys.exit(bool(wrong))


def page(rows: list[tuple[Mutation, str]]) -> str:
    """The table as Markdown."""
    caught = sum(not ended.startswith("not caught") for _, ended in rows)
    lines = [
        "# Mutations that the device finds",
        "",
        "One wait, event, record or copy is taken out of terrazzo at a time, and a program that uses it runs on",
        "[the device `late`](prove-streams.md), in three modes. This page is made by",
        "`python -m tests.testing.late.mutations --write docs/late-mutations.md`:",
        f"{caught} of {len(rows)} are caught; the others do no harm, for the reason in the table.",
        "",
        "| taken out | program | found by |",
        "|---|---|---|",
    ]
    for mutation, ended in rows:
        what = mutation.what if not mutation.old else f"{mutation.what.removeprefix('terrazzo.')}: `{mutation.old}`"
        program = mutation.check.__name__.removeprefix("check_").replace("_", " ")
        lines.append(f"| {what} | {program} | {ended} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
