"""Can the device find a missing wait? Takes out one wait, event, record or copy at a time, and runs what uses it.

    python -m tests.testing.late.mutations [--only TEXT] [--write docs/late-mutations.md]

A mutation is caught if the run ends with a race, with another result than unchanged code, with an error, or not in
time. What is not caught is an error of this table, unless it is `superfluous`: then something else orders the same
accesses.
"""

from __future__ import annotations

import argparse
import inspect
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
    def name(self) -> str:
        return self.what + (f": `{self.old}`" if self.old else "")


def _plan(what: str, check: Callable[..., Any] = sharding.check_plain, **more: Any) -> Mutation:
    return Mutation(what, check, **more)


_FSDP, _SAVE = "terrazzo.fsdp", "terrazzo.checkpoint"
_REACHED = sharding.check_unused_parameters
_SAME_STREAM = "what it orders is on one stream"
_WAITED = "the stream that started the collective has waited for it"
_OWN_STREAM = "the collective runs on the stream that started it"
_WAITS_LATER = "the stream that uses the result waits for the collective"

MUTATIONS = (
    # ---- fully_shard's plan: waits for marks, and the marks themselves
    _plan("wait GATHER copied"),
    _plan("wait GATHER kept", sharding.check_some_blocks_stay_gathered, world=4),
    _plan("wait GATHER freed", sharding.check_writes_to_unsharded_parameters),
    _plan("wait COPY_OUT gathered", sharding.check_mixed_precision),
    _plan("wait REDUCE packed"),
    _plan("wait FINISH reduced", superfluous=_SAME_STREAM),
    _plan("wait HAND_OVER finished"),
    _plan("wait RELEASE reduced"),
    _plan("wait ALL_REDUCE reduced", sharding.check_replicas, world=4),
    _plan("wait FINISH all-reduced", sharding.check_replicas, world=4, superfluous=_SAME_STREAM),
    _plan("wait STORE reduced", sharding.check_replicas_and_accumulation, world=4, superfluous=_SAME_STREAM),
    _plan("wait DISCARD gathered", sharding.check_gathers_that_are_given_up, superfluous=_WAITS_LATER),
    _plan("wait FOLLOW written"),
    _plan("record gathered"),
    _plan("record copied"),
    _plan("record freed", sharding.check_writes_to_unsharded_parameters),
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
        "event.record(self._device.current_stream() if stream is None else stream)",
        "pass",
    ),
    Mutation(
        f"{_FSDP}.run.streams:Streams._queued",
        sharding.check_plain,
        "self._marks[WRITTEN] = self.mark_of() if event is None else event",
        "pass",
    ),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients._note_reached",
        _REACHED,
        "self._reached = there, event",
        "self._reached = there, None",
    ),
    Mutation(f"{_FSDP}.run.gradients:Gradients._note_reached", _REACHED, "event.record()", "pass"),
    Mutation(f"{_FSDP}.run.gradients:Gradients._unreached", _REACHED, "event.synchronize()", "pass"),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients.wait",
        sharding.check_plain,
        "self._reduced = self._pending.wait()",
        "self._reduced = self._pending._result",
        superfluous=_OWN_STREAM,
    ),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients.release",
        sharding.check_plain,
        "self._packed = None",
        "pass",
        superfluous="it frees memory, and orders nothing",
    ),
    Mutation(
        f"{_FSDP}.run.gradients:Gradients.all_reduce",
        sharding.check_replicas_in_bfloat16,
        "self._held = [self._reduced]",
        "self._held = []",
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
        superfluous=_WAITED,
    ),
    Mutation(
        f"{_FSDP}.run.unit:Unit._wait_if_at_once", sharding.check_plain, "one.wait()", "pass", superfluous=_WAITS_LATER
    ),
    Mutation(
        f"{_FSDP}.run.unit:Unit.reduce", sharding.check_plain, "gradients.wait()", "pass", superfluous=_WAITS_LATER
    ),
    Mutation(
        f"{_FSDP}.run.unit:Unit.all_reduce",
        sharding.check_replicas,
        "gradients.wait()",
        "pass",
        world=4,
        superfluous=_WAITS_LATER,
    ),
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
        f"{_FSDP}.run.kept:Kept.receive",
        sharding.check_some_blocks_stay_gathered,
        "pending.wait()",
        "pending._result",
        world=4,
        superfluous=_WAITED,
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
    # ---- collectives
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
    Mutation(f"{_SAVE}.native.pump:_arrived", saving.check_saving, "event.synchronize()", "pass"),
    Mutation(
        f"{_SAVE}.native.pump:Pump._through_buffers",
        saving.check_saving,
        "torch.accelerator.current_stream(tensor.device).record_event() if on_device else None",
        "None",
    ),
    Mutation(
        f"{_SAVE}.native.pump:Pump._through_buffers",
        saving.check_saving_from_another_device,
        "torch.accelerator.current_stream(tensor.device).record_event()",
        "torch.accelerator.current_stream().record_event()",
    ),
    Mutation(
        f"{_SAVE}.native.pump:Pump._through_buffers",
        saving.check_saving_through_buffers,
        "target = buffers[i % 2]",
        "target = buffers[0]",
    ),
)


# ------------------------------------------------------------------ on a rank


def mutate(mutation: Mutation) -> None:
    """Change the code of this process."""
    if not mutation.old:
        _mutate_plan(*mutation.what.split(" ", 1 if mutation.what.startswith("record ") else 2))
        return
    module, _, path = mutation.what.partition(":")
    function: Any = sys.modules[module] if module in sys.modules else __import__(module, fromlist=["_"])
    for name in path.split("."):
        function = getattr(function, name)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutation.old) != 1:
        raise LookupError(f"{mutation.what} has {source.count(mutation.old)} times {mutation.old!r}: mend this table")
    namespace: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source.replace(mutation.old, mutation.new), module, "exec")
    exec(code, function.__globals__ | {}, namespace)
    (changed,) = namespace.keys() - {"annotations"}
    function.__code__ = namespace[changed].__code__


def _mutate_plan(what: str, *names: str) -> None:
    from terrazzo.fsdp.run import streams

    original = streams.Streams.on_stream

    def on_stream(self: Any, operation: Any, call: Any) -> Any:
        if what == "record" and operation.records is not None and operation.records.what == names[0]:
            operation = replace(operation, records=None)
        if what == "wait" and operation.kind.name == names[0]:
            operation = replace(operation, waits=tuple(mark for mark in operation.waits if mark.what != names[1]))
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
        return "an error: " + errors[0].strip().splitlines()[-1][:80], None
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
        "[the device `late`](prove-streams.md), in three modes. `python -m tests.testing.late.mutations --write` makes",
        f"this page: {caught} of {len(rows)} are caught; the others do no harm, for the reason in the table.",
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
