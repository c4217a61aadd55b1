"""A rank is killed, stopped, fails or is interrupted at each stage of save, async_save and load: the others all hear.

The suite runs a sample; `python -m tests.checkpoint.failing_matrix` runs every trial.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import fresh_values, run_fresh, run_ranks
from terrazzo.checkpoint import (
    AsyncCheckpointerType,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    async_save,
    load,
    save,
)
from terrazzo.comm.control import ControlPlane
from terrazzo.errors import CheckpointError, CheckpointException, CommError, UnsupportedValueError

LIMIT = timedelta(seconds=4)
KINDS = ("kill", "stop", "raise", "exit", "interrupt")
SAVE_STAGES = ("before", "state_dict", "stage", "plan", "set_up", "global", "place", "write", "finish", "commit")
LOAD_STAGES = ("before", "state_dict", "metadata", "plan", "global", "read", "give_back")


class Mishap:
    """Befalls one rank when a save or load comes to one stage."""

    def __init__(self, rank: int, stage: str, kind: str) -> None:
        self.here = dist.get_rank() == rank
        self.stage, self.kind = stage, kind

    def at(self, stage: str) -> None:
        if not self.here or stage != self.stage:
            return
        self.here = False
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)  # this thread may go on for a moment until the process stops
        elif self.kind == "raise":
            raise OSError(5, f"mishap at {stage}")
        elif self.kind == "exit":
            sys.exit(3)
        raise KeyboardInterrupt


class Careless:
    """An object of the caller's."""

    def __init__(self, mishap: Mishap) -> None:
        self.mishap = mishap

    def state_dict(self) -> dict[str, Any]:
        self.mishap.at("state_dict")
        return {"x": torch.ones(3), "n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mishap.at("give_back")


class Writer(FileSystemWriter):
    """Takes plans in the library's own form."""

    def __init__(self, path: str, mishap: Mishap) -> None:
        super().__init__(path)
        self.mishap = mishap

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.mishap.at("stage")
        return super().stage(state_dict)

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self.mishap.at("set_up")
        super().set_up_storage_writer(is_coordinator)

    def write(self, plan: Any, save_id: str, rank: int) -> Any:
        self.mishap.at("write")
        return super().write(plan, save_id, rank)

    def finish(self, metadata: Any, results: Any) -> None:
        self.mishap.at("finish")
        super().finish(metadata, results)
        self.mishap.at("commit")


class ItemWriter(Writer):
    """Sees PyTorch's items."""

    def placed(self, plan: Any, arranged: bytes, rank: int) -> Any:
        if rank == dist.get_rank():
            self.mishap.at("place")
        return super().placed(plan, arranged, rank)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.mishap.at("write")
        return super().write_data(plan, planner)


class GlobalWriter(ItemWriter):
    def prepare_global_plan(self, plans: Any) -> Any:
        self.mishap.at("global")
        return super().prepare_global_plan(plans)


class Planner(DefaultSavePlanner):
    def __init__(self, mishap: Mishap) -> None:
        super().__init__()
        self.mishap = mishap

    def hold(self) -> Any:
        self.mishap.at("plan")
        return super().hold()


class ItemPlanner(Planner):
    def create_local_plan(self) -> Any:
        self.mishap.at("plan")
        return super().create_local_plan()


class Reader(FileSystemReader):
    """Takes plans in the library's own form."""

    def __init__(self, path: str, mishap: Mishap) -> None:
        super().__init__(path)
        self.mishap = mishap

    def read_metadata(self) -> Any:
        self.mishap.at("metadata")
        return super().read_metadata()

    def use_root(self, data: bytes) -> Any:  # what the other ranks do instead
        self.mishap.at("metadata")
        return super().use_root(data)

    def read(self, plan: Any, receiver: Any) -> None:
        self.mishap.at("plan")
        self.mishap.at("read")
        super().read(plan, receiver)


class ItemReader(Reader):
    """Sees PyTorch's items, and brings the ranks together."""

    plans_alone = False

    def prepare_local_plan(self, plan: Any) -> Any:
        self.mishap.at("plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self.mishap.at("global")
        return super().prepare_global_plan(plans)

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.mishap.at("read")
        return super().read_data(plan, planner)


def wants_items(how: str, victim: int, stage: str) -> bool:
    """Whether a trial goes through PyTorch's items: some of all kinds of mishaps, and what only they have."""
    return stage in ("global", "place") or (how != "async_save") == (victim % 2 == 0)


def attempt(
    how: str, path: str, victim: int, stage: str, kind: str, connected: bool, environment: dict[str, str]
) -> Any:
    """One save or load with a mishap; what this rank raised, and after how long."""
    os.environ.update(environment)
    if connected:
        ControlPlane.for_group(timeout=10 * LIMIT)  # that all have started is not what is tested
    mishap = Mishap(victim, stage, kind)
    start = time.monotonic()
    try:
        mishap.at("before")
        state = {"w": torch.full((4,), 2.0), "object": Careless(mishap)}
        if how == "load":
            reader = (ItemReader if wants_items(how, victim, stage) else Reader)(path, mishap)
            load(state, storage_reader=reader, timeout=LIMIT, together=True)
        else:
            items = wants_items(how, victim, stage)
            writer = (GlobalWriter if stage == "global" else ItemWriter if items else Writer)(path, mishap)
            planner = (ItemPlanner if items else Planner)(mishap)
            arguments: dict[str, Any] = {"storage_writer": writer, "planner": planner, "timeout": LIMIT}
            if how == "save":
                save(state, **arguments)
            else:
                async_save(state, **arguments).result(30)
    except CheckpointException as error:
        kinds = sorted({base.__name__ for base in type(error).__mro__})
        failures = {rank: f"{type(wrapped).__name__}: {wrapped}" for rank, (wrapped, _) in error.failures.items()}
        return type(error).__name__, str(error), failures, kinds, time.monotonic() - start
    except BaseException as error:  # noqa: B036  # reported to the test
        return type(error).__name__, str(error), {}, [], time.monotonic() - start
    return "", "", {}, [], time.monotonic() - start


def saved(path: str) -> None:
    save({"w": torch.ones(4), "object": {"x": torch.zeros(3), "n": 0}}, checkpoint_id=path)


def values_at(path: str) -> float:
    target = {"w": torch.zeros(4)}
    load(target, checkpoint_id=path, no_dist=True)
    assert target["w"].eq(target["w"][0]).all()
    return float(target["w"][0])


def name_of(world: int, how: str, victim: int, stage: str, kind: str, connected: bool) -> str:
    """A trial in words."""
    return f"{how} {stage} {kind} rank {victim} of {world}" + ("" if connected else " unconnected")


def check_trial(
    place: str | Path,
    world: int,
    how: str,
    victim: int,
    stage: str,
    kind: str,
    connected: bool,
    environment: dict[str, str] | None = None,
) -> None:
    """Carry out a trial in a place: a folder, or a URL with what the ranks' environment has to say of it."""
    case = name_of(world, how, victim, stage, kind, connected)
    path = f"{place}/{case.replace(' ', '-')}"
    saved(path)
    only_coordinator = stage in ("global", "finish", "commit")
    befalls = victim == 0 or not only_coordinator
    awaited = [rank for rank in range(world) if rank != victim or not (kind == "stop" and befalls)]
    arguments = (how, path, victim, stage, kind, connected, environment or {})
    outcomes = run_fresh(world, attempt, *arguments, timeout=40, awaited=awaited)
    if not befalls:
        assert all(outcome.ok and outcome.value[0] == "" for outcome in outcomes), "\n".join(
            [case, *map(str, outcomes)]
        )
        return
    others = [outcome for outcome in outcomes if outcome.rank != victim]
    assert all(outcome.ok for outcome in others), "\n".join([case, *map(str, others)])
    # The last message may have been heard before the coordinator was gone.
    if stage == "commit" and kind in ("kill", "stop") and all(outcome.value[0] == "" for outcome in others):
        return
    texts = {outcome.value[1] for outcome in others}
    assert len(texts) == 1, f"{case}: {texts}"
    for outcome in others:
        name, text, failures, _, seconds = outcome.value
        assert name == "CheckpointException" and path in text, f"{case}: {name} {text}"
        assert list(failures) == [victim] and f"rank {victim}: " in text, f"{case}: {failures} {text}"
        assert seconds < LIMIT.total_seconds() + 12, case
    _, text, failures, kinds, _ = others[0].value
    expected = {
        "raise": f"OSError: [Errno 5] mishap at {stage}",
        "exit": "SystemExit: 3",
        "interrupt": "KeyboardInterrupt",
        "kill": "died",
        "stop": "stopped",
    }[kind]
    if stage == "before":  # nobody could be told
        expected = {"raise": "", "exit": "", "interrupt": ""}.get(kind, expected if connected else "")
        assert "CommError" in kinds, case
    assert expected in failures[victim], f"{case}: {failures}"
    own = outcomes[victim]
    if kind == "kill":
        assert own.signal == signal.SIGKILL, case
    elif kind == "stop":
        assert own.hung, case
    elif kind == "raise" and stage != "before":
        assert own.value[0] == "CheckpointException" and own.value[1] == text, f"{case}: {own.value}"
    elif kind in ("exit", "interrupt"):
        assert own.value[0] == {"exit": "SystemExit", "interrupt": "KeyboardInterrupt"}[kind], f"{case}: {own.value}"
    if how != "load":
        assert values_at(path) in ((1.0, 2.0) if stage == "commit" else (1.0,)), case


def matrix() -> list[tuple[int, str, int, str, str, bool]]:
    """Every trial."""
    trials: list[tuple[int, str, int, str, str, bool]] = []
    for world, kind in itertools.product((2, 4), KINDS):
        for how, stages in (("save", SAVE_STAGES), ("async_save", SAVE_STAGES), ("load", LOAD_STAGES)):
            for stage, victim in itertools.product(stages, range(world)):
                if stage == "stage" and how == "save":
                    continue
                trials += [
                    (world, how, victim, stage, kind, c) for c in ((True, False) if stage == "before" else (True,))
                ]
    return trials


# Of each kind of mishap one, at stages of every sort; which ranks, is the seed's choice.
SAMPLE = [
    (2, "save", 1, "before", "kill", False),
    (4, "save", 0, "write", "kill", True),
    (2, "save", 1, "plan", "exit", True),
    (2, "async_save", 0, "stage", "raise", True),
    (2, "async_save", 1, "write", "kill", True),
    (2, "save", 0, "global", "interrupt", True),
    (2, "load", 1, "read", "raise", True),
    (2, "load", 0, "plan", "kill", True),
    (2, "load", 1, "give_back", "exit", True),
]


@pytest.mark.parametrize("trial", SAMPLE, ids=lambda trial: "-".join(map(str, trial[:5])))
def test_the_others_hear_of_it(tmp_path: Path, trial: tuple[int, str, int, str, str, bool]) -> None:
    check_trial(tmp_path, *trial)


# ------------------------------------------------------------------ particular cases


def time_of_the_group(path: str) -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=4.5))
    if dist.get_rank() == 1:
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        async_save({"w": torch.zeros(2)}, checkpoint_id=path, process_group=group).result()
    assert isinstance(caught.value, CommError) and caught.value.missing == (1,)
    return str(caught.value), time.monotonic() - start


def test_the_time_limit_is_the_groups_own(tmp_path: Path) -> None:
    first, _ = run_fresh(2, time_of_the_group, str(tmp_path / "x"), timeout=60)
    assert first.ok, str(first)
    text, seconds = first.value
    assert "rank 1" in text and "4.5 s" in text and str(tmp_path / "x") in text and seconds < 15


class Talkative:
    """Communicates when it is asked for its state and when it is given it."""

    def __init__(self) -> None:
        self.value = torch.ones(1)

    def state_dict(self) -> dict[str, Any]:
        dist.all_reduce(self.value.clone())
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        total = state_dict["value"].clone()
        dist.all_reduce(total)


class Broadcasting(Talkative):
    def state_dict(self) -> dict[str, Any]:
        dist.broadcast(torch.zeros(7), 0)
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dist.broadcast(torch.zeros(7), 0)


def keys_in_another_order(path: str) -> list[str]:
    objects = {"first": Talkative(), "second": Broadcasting(), "inner": {"b": Broadcasting(), "a": Talkative()}}
    if dist.get_rank() == 1:
        objects = dict(reversed(objects.items()))
        objects["inner"] = dict(reversed(objects["inner"].items()))
    save(objects, checkpoint_id=path)
    load(objects, checkpoint_id=path)
    return list(objects)


def test_objects_may_communicate_whatever_the_order_of_keys(tmp_path: Path) -> None:
    first, second = run_ranks(2, keys_in_another_order, str(tmp_path), timeout=30)
    assert first == list(reversed(second))  # and each rank keeps its own order


def after_a_failure(path: str) -> list[str]:
    """One rank loses its connections where the others have not; then they save again."""
    done = []
    for attempt_number in range(3):
        try:
            if attempt_number == 1 and dist.get_rank() == 0:
                ControlPlane.for_group().abandon("a test")
                raise CheckpointError("abandoned")
            save({"w": torch.zeros(2)}, checkpoint_id=path, timeout=timedelta(seconds=10))
            done.append("saved")
        except CheckpointError as error:
            done.append("rank 0: CommError: a test" if "a test" in str(error) else str(error))
    return done


def test_ranks_find_each_other_again_after_a_failure(tmp_path: Path) -> None:
    first, second = run_ranks(2, after_a_failure, str(tmp_path))
    assert first == ["saved", "abandoned", "saved"]
    assert second == ["saved", "rank 0: CommError: a test", "saved"]


def own_type_everywhere(path: str) -> None:
    from torch.distributed.checkpoint.api import CheckpointException as Theirs

    state = {"bad": object()} if dist.get_rank() == 1 else {}
    for attempt_of in (save, lambda *args, **kwargs: async_save(*args, **kwargs).result()):
        with pytest.raises(UnsupportedValueError, match="(?s)rank 1: UnsupportedValueError: .*bad") as caught:
            attempt_of(state, checkpoint_id=path, timeout=LIMIT)
        error = caught.value
        assert isinstance(error, CheckpointException) and isinstance(error, Theirs)
        wrapped, stack = error.failures[1]
        assert isinstance(wrapped, UnsupportedValueError) and stack[-1].name in ("_all_held", "_pack")
        assert (error.__cause__ is not None) == (dist.get_rank() == 1)


def test_the_exception_is_of_the_failures_own_type_and_of_pytorchs(tmp_path: Path) -> None:
    run_ranks(2, own_type_everywhere, str(tmp_path))


def failing_process(path: str) -> str:
    state = {"w": torch.ones(2)} if dist.get_rank() == 0 else {"w": torch.ones(2), "x": object()}
    with pytest.raises(CheckpointException) as caught:
        async_save(
            state,
            checkpoint_id=path,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            timeout=timedelta(seconds=30),
        ).result()
    assert list(caught.value.failures) == [1]
    return str(caught.value)


def test_a_saving_process_tells_the_same(tmp_path: Path) -> None:
    first, second = fresh_values(2, failing_process, str(tmp_path / "x"), timeout=90)
    assert first == second and "rank 1: UnsupportedValueError" in first


def test_a_load_alone_says_rank_and_checkpoint(tmp_path: Path) -> None:
    saved(str(tmp_path))
    (data,) = tmp_path.glob("data-*")
    with data.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError) as caught:
        load({"w": torch.zeros(4)}, checkpoint_id=tmp_path)
    assert "data-" in str(caught.value)


# ------------------------------------------------------------------ states that cannot be


class Fails:
    def state_dict(self) -> dict[str, Any]:
        raise OSError(5, "no text: \ud83d")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def impossible() -> dict[str, tuple[dict[str, Any], str, type[Exception]]]:
    """States, what the error must say, and its type."""
    loop: dict[str, Any] = {}
    loop["again"] = {"model": loop}
    tensors: list[Any] = [torch.ones(2)]
    tensors.append(tensors)
    numbers: list[Any] = [1]
    numbers.append((numbers,))
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"deeper": deep}
    return {
        "a name is no text": (
            {"w": {"x\ud83d": torch.ones(2)}},
            r"'w\.x\\ud83d' cannot be the name",
            UnsupportedValueError,
        ),
        "a dict has itself": ({"outer": loop}, r"\['outer', 'again', 'model'\] contains itself", UnsupportedValueError),
        "a list has itself": ({"outer": tensors}, r"\['outer', 1\] contains itself", UnsupportedValueError),
        "a value has itself": ({"outer": numbers}, r"outer.*contains itself", UnsupportedValueError),
        "there is no end": (deep, r"levels of dicts and lists", UnsupportedValueError),
        "an error is no text": ({"it": Fails()}, r"no text: \\ud83d", OSError),
    }


def refuse_impossible(folder: str) -> int:
    save({"w": torch.ones(2)}, checkpoint_id=folder)
    count = 0
    for what, (state, match, kind) in impossible().items():
        calls = {
            "save": lambda state=state: save(state, checkpoint_id=folder, timeout=LIMIT),
            "async_save": lambda state=state: async_save(state, checkpoint_id=folder, timeout=LIMIT).result(),
            "load": lambda state=state: load(state, checkpoint_id=folder),
            "load together": lambda state=state: load(state, checkpoint_id=folder, together=True, timeout=LIMIT),
        }
        for call, run in calls.items():
            if what == "a value has itself" and call.startswith("load"):
                continue  # a value is replaced, whatever it was
            with pytest.raises(CheckpointException, match=match) as failed:
                run()
            assert all(isinstance(error, kind) for error, _ in failed.value.failures.values()), (what, call)
            count += 1
    state = {"w": torch.zeros(2)}
    load(state, checkpoint_id=folder)
    assert state["w"].eq(1).all()
    return count


def test_names_that_are_no_text_and_states_without_end_are_typed_errors_that_say_which(tmp_path: Path) -> None:
    assert run_ranks(2, refuse_impossible, str(tmp_path)) == [22, 22]
