"""Saving in the background: the values are those of the call, one save at a time, errors surface, memory stays flat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import OrderedDict, UserDict
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import terrazzo
from ranks import device_type, run_ranks
from terrazzo._threads import Worker
from terrazzo.checkpoint import (
    AsyncCheckpointerType,
    BlockingAsyncStager,
    Checkpoint,
    CheckpointManager,
    DefaultSavePlanner,
    DefaultStager,
    FileSystemWriter,
    PerRank,
    async_save,
    load,
    save,
)
from terrazzo.checkpoint.plan.sharded import ChunkedTensor, ShardViews
from terrazzo.checkpoint.run.background import background_of
from terrazzo.checkpoint.run.staging import put_together, take_apart
from terrazzo.errors import CheckpointError, CheckpointException, UnsupportedValueError
from terrazzo.layout.box import Box

pytestmark = pytest.mark.on_late(elsewhere=True, both=True)

KINDS = list(AsyncCheckpointerType)
LIMIT = timedelta(seconds=30)


class SlowWriter(FileSystemWriter):
    """Takes its time, and knows whether two saves were under way at once."""

    running = 0
    most = 0

    def write_data(self, plan, planner):
        SlowWriter.running += 1
        SlowWriter.most = max(SlowWriter.most, SlowWriter.running)
        time.sleep(0.1)
        try:
            return super().write_data(plan, planner)
        finally:
            SlowWriter.running -= 1


@pytest.mark.on_late
def test_training_goes_on_and_the_checkpoint_keeps_the_old_values(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(100, 10))
    scalar = torch.tensor(0.0)
    lists = {"history": [1, 2]}
    futures = []
    for step in range(3):
        state = {"w": weight, "s": scalar, "l": lists, "t": weight.detach().T, "own": PerRank(torch.full((2,), step))}
        futures.append(async_save(state, storage_writer=SlowWriter(tmp_path / str(step))))
        with torch.no_grad():
            weight += 1
            scalar += 1
        lists["history"].append(step)
    for step, future in enumerate(futures):
        assert "w" in future.result().state_dict_metadata
        target = {"w": torch.empty(100, 10), "s": torch.empty(()), "l": {"history": None}, "t": torch.empty(10, 100)}
        load(target, checkpoint_id=tmp_path / str(step))
        assert target["w"].eq(step).all() and target["t"].eq(step).all() and target["s"] == step
        assert target["l"]["history"] == [1, 2, *range(step)]
    assert SlowWriter.most == 1  # one save in flight at a time


def async_rounds(path: str, kind: AsyncCheckpointerType) -> None:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    weight = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])
    futures = []
    for step in range(3):
        state = {"w": weight, "rank": PerRank(dist.get_rank()), "step": step}
        futures.append(async_save(state, checkpoint_id=f"{path}/{step}", async_checkpointer_type=kind, timeout=LIMIT))
        with torch.no_grad():
            weight.to_local().add_(1)
        dist.all_reduce(torch.ones(1))  # training's own collectives go on meanwhile
    for step, future in enumerate(futures):
        metadata = future.result(60)
        assert sorted(metadata.state_dict_metadata) == ["rank@0", "rank@1", "step", "w"]
        target = {"w": distribute_tensor(torch.full((7, 3), -1.0), mesh, [Shard(1)]), "step": None, "rank": PerRank()}
        load(target, checkpoint_id=f"{path}/{step}")
        assert target["w"].to_local().eq(step).all() and target["step"] == step
        assert target["rank"].value == dist.get_rank()
    blocked = f"{path}/file"
    Path(blocked).touch()
    future = async_save({"w": weight}, checkpoint_id=f"{blocked}/x", async_checkpointer_type=kind, timeout=LIMIT)
    with pytest.raises(CheckpointError, match="failed on 2 ranks:\n  ranks 0-1: CheckpointExistsError"):
        future.result(60)
    future = async_save({"w": weight}, checkpoint_id=f"{path}/again", async_checkpointer_type=kind, timeout=LIMIT)
    future.result(60)
    background_of(None, False).close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.on_late(sample=True)
def test_ranks_save_in_the_background(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    run_ranks(2, async_rounds, str(tmp_path), kind)


def unseen_error(path: str) -> list[str]:
    Path(path, "file").touch()
    messages = []
    future = async_save({"w": torch.zeros(1)}, checkpoint_id=f"{path}/file/x", timeout=LIMIT)
    if dist.get_rank() == 0:
        future.exception()  # only one of the ranks looks
    for attempt in range(2):
        try:
            save({"w": torch.zeros(1)}, checkpoint_id=f"{path}/{attempt}", timeout=LIMIT)
            messages.append("")
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_an_error_that_nobody_asked_for_comes_out_of_the_next_save_on_all_ranks(tmp_path: Path) -> None:
    for first, second in run_ranks(2, unseen_error, str(tmp_path)):
        assert "before this one failed" in first and second == ""


@pytest.mark.on_late
def test_a_process_that_dies_is_an_error_and_is_replaced(tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0)}
    kind = AsyncCheckpointerType.PROCESS
    async_save(state, checkpoint_id=tmp_path / "a", async_checkpointer_type=kind).result(60)
    background = background_of(None, False)
    os.kill(background._process._process.pid, 9)
    future = async_save(state, checkpoint_id=tmp_path / "b", async_checkpointer_type=kind)
    with pytest.raises(CheckpointError, match="died"):
        future.result(60)
    async_save(state, checkpoint_id=tmp_path / "c", async_checkpointer_type=kind).result(60)
    target = torch.zeros(5)
    load({"w": target}, checkpoint_id=tmp_path / "c")
    assert torch.equal(target, state["w"])
    background.close()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_host_memory_is_flat_over_many_saves(tmp_path: Path) -> None:
    state = {f"w{i}": torch.ones(1 << 20) for i in range(8)}  # 32 MiB
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    sizes = []
    for _ in range(50):
        writer = FileSystemWriter(tmp_path, sync_files=False, cache_staged_state_dict=True)
        async_save(state, storage_writer=writer, async_stager=stager).result()
        sizes.append(resident())
    assert max(sizes[5:]) - min(sizes[5:]) < 8 << 20
    assert threading.active_count() < 50


@pytest.mark.on_late
def test_a_stager_reuses_its_memory_and_checks_types() -> None:
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    first = stager.stage({"a": torch.ones(3), "b": [torch.zeros(2, dtype=torch.bfloat16)]})
    address = first["a"].data_ptr()
    second = stager.stage({"a": torch.full((3,), 2.0), "b": [torch.ones(2, dtype=torch.bfloat16)]})
    assert second["a"].data_ptr() == address and second["a"].tolist() == [2, 2, 2]
    smaller = stager.stage({"a": torch.full((2,), 3.0)})
    assert smaller["a"].data_ptr() == address and smaller["a"].tolist() == [3, 3]
    fresh = BlockingAsyncStager()
    kept = fresh.stage({"a": torch.ones(3)})
    fresh.stage({"a": torch.zeros(3)})
    assert kept["a"].tolist() == [1, 1, 1]
    with pytest.raises(UnsupportedValueError, match=r"x\.0"):
        BlockingAsyncStager(type_check=True).stage({"x": [object()]})


class CountingStager(BlockingAsyncStager):
    """Records the calls that `async_save` makes."""

    def __init__(self, synchronize: bool) -> None:
        super().__init__()
        self.should_synchronize_after_execute = synchronize
        self.calls: list[str] = []

    def stage(self, state_dict):
        self.calls.append("stage")
        return super().stage(state_dict)

    def synchronize_staging(self) -> None:
        self.calls.append("synchronize")


@pytest.mark.parametrize("synchronize", [True, False])
@pytest.mark.on_late
def test_the_calls_that_a_stager_sees(tmp_path: Path, synchronize: bool) -> None:
    stager = CountingStager(synchronize)
    async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path, async_stager=stager).result()
    assert stager.calls == ["stage", "synchronize"]  # on this thread, or before the background reads the copy


class SlowStager:
    """Fills its copy in the background, one buffer for all."""

    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self.buffer = torch.full((1 << 16,), -1.0)
        self.thread: threading.Thread | None = None

    def stage(self, state_dict):
        source = state_dict["w"]

        def fill() -> None:
            time.sleep(0.2)
            self.buffer.copy_(source)

        self.thread = threading.Thread(target=fill)
        self.thread.start()
        return {"w": self.buffer}

    def synchronize_staging(self) -> None:
        self.thread.join()


@pytest.mark.on_late
def test_nothing_is_written_before_a_stager_is_done(tmp_path: Path) -> None:
    stager = SlowStager()
    weight = torch.full((1 << 16,), 1.0)
    future = async_save({"w": weight}, checkpoint_id=tmp_path, async_stager=stager)
    stager.synchronize_staging()  # what its user does before changing the state
    weight += 1
    future.result()
    target = torch.zeros(1 << 16)
    load({"w": target}, checkpoint_id=tmp_path)
    assert target.eq(1).all()


def two_groups_one_stager(path: str) -> list[float]:
    groups = [dist.new_group(), dist.new_group()]
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    futures = []
    for number, group in enumerate(groups):
        state = {"w": torch.full((1000,), float(number))}
        writer = SlowWriter(f"{path}/{number}")
        futures.append(async_save(state, storage_writer=writer, async_stager=stager, process_group=group))
    found = []
    for number, future in enumerate(futures):
        future.result(60)
        target = torch.full((1000,), -1.0)
        load({"w": target}, checkpoint_id=f"{path}/{number}")
        found += [target.min().item(), target.max().item()]
    return found


def test_a_stager_that_keeps_its_memory_serves_two_groups(tmp_path: Path) -> None:
    assert run_ranks(2, two_groups_one_stager, str(tmp_path)) == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_mappings_are_saved_in_the_background_as_save_has_them(tmp_path: Path) -> None:
    state = {"empty": OrderedDict(), "view": MappingProxyType({"w": torch.ones(2)}), "of": UserDict(x=OrderedDict())}
    save(state, checkpoint_id=tmp_path / "a")
    async_save(state, checkpoint_id=tmp_path / "b").result(30)
    for name in "ab":
        found = Checkpoint(tmp_path / name)
        assert type(found["empty"]) is type(found["of.x"]) is OrderedDict and found["view.w"][...].eq(1).all()
    with pytest.raises(CheckpointException, match=r"it\.lock: the value cannot be copied"):
        async_save({"it": {"lock": threading.Lock()}}, checkpoint_id=tmp_path / "c").result(30)


def test_what_save_refuses_async_save_refuses_too(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    masked = TwoHalves(torch.ones(2), torch.zeros(2))
    for value in (nested, torch.eye(3).to_sparse(), torch.empty(2, device="meta"), masked, (masked, 1)):
        for attempt in (save, async_save):
            with pytest.raises(UnsupportedValueError, match="bad"):
                attempt({"bad": value, "w": torch.ones(1)}, checkpoint_id=tmp_path / "x")
    assert not (tmp_path / "x" / "manifest.terrazzo").exists()


class TwoHalves(torch.Tensor):
    """A wrapper: its own memory is not its value."""

    @staticmethod
    def __new__(cls, left, right):
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __tensor_flatten__(self):
        return ["left", "right"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].left, args[0].right)
        raise NotImplementedError(func)


def chunked(fill: float) -> ChunkedTensor:
    """Two boxes of a tensor."""
    boxes = Box.whole((6, 4)).split(0, [2, 4])
    return ChunkedTensor(
        torch.Size([6, 4]), torch.float32, {box.offsets: (box, torch.full(box.lengths, fill)) for box in boxes}, None
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.on_late
def test_a_staged_tensor_is_its_boxes_and_their_elements(kind: AsyncCheckpointerType, tmp_path: Path) -> None:
    """Nothing is asked of it as of other libraries' tensors, and boxes stay the same objects."""
    weight = torch.arange(6.0)
    state = {"cut": chunked(1.0), "nested": [{"w": weight, "tied": weight, "cut": chunked(2.0)}], "step": 3}
    skeleton, sources = take_apart(state)
    assert len(sources) == 5 and skeleton.has_slots  # tied ones are copied once
    staged = put_together(skeleton, [source.clone() for source in sources])
    for before, after in ((state["cut"], staged["cut"]), (state["nested"][0]["cut"], staged["nested"][0]["cut"])):
        chunks = ShardViews().view("cut", after).chunks
        assert [box for box, _ in chunks] == [box for box, _ in before.own_chunks()]
        assert all(box is mine for (box, _), (mine, _) in zip(chunks, before.own_chunks(), strict=True))
        assert all(torch.equal(data, mine) for (_, data), (_, mine) in zip(chunks, before.own_chunks(), strict=True))
    assert not take_apart({"cut": chunked(1.0)})[0].has_slots
    future = async_save(state, checkpoint_id=tmp_path, async_checkpointer_type=kind, no_dist=True)
    for _, data in state["cut"].own_chunks():
        data.zero_()
    future.result(60)
    found = Checkpoint(tmp_path)
    assert torch.equal(found["cut"][...], torch.full((6, 4), 1.0, device="cpu")) and found["step"] == 3
    assert torch.equal(found["nested.0.cut"][...], torch.full((6, 4), 2.0, device="cpu"))
    assert torch.equal(found["nested.0.tied"][...], weight.cpu())


@pytest.mark.on_late
def test_several_threads_save_in_the_background(tmp_path: Path) -> None:
    """They take turns: what one stages is not overwritten by another before it is saved."""
    wrong: list[object] = []

    def save_own(number: int) -> None:
        for round_number in range(5):
            state = {"a": torch.full((20_000,), float(10 * number + round_number))}
            future = async_save(state, checkpoint_id=tmp_path / str(number), no_dist=True)
            state["a"].fill_(-1)
            future.result(60)
            found = {"a": torch.zeros(20_000)}
            load(found, checkpoint_id=tmp_path / str(number), no_dist=True)
            if not found["a"].eq(10 * number + round_number).all():
                wrong.append((number, round_number, found["a"].unique()))

    threads = [threading.Thread(target=save_own, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong


def test_a_save_in_flight_cannot_be_cancelled(tmp_path: Path) -> None:
    future = async_save({"w": torch.ones(10)}, storage_writer=SlowWriter(tmp_path), no_dist=True)
    assert not future.cancel()
    assert list(future.result(30).state_dict_metadata) == ["w"]


@pytest.mark.on_late
def test_what_is_called_when_a_save_has_ended_may_begin_the_next(tmp_path: Path) -> None:
    """On the thread of the save, while another thread waits for it to end."""
    chained: Future = Future()

    def next_one(_: Future) -> None:
        save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "b", no_dist=True)
        chained.set_result(async_save({"w": torch.ones(10) * 2}, checkpoint_id=tmp_path / "c", no_dist=True))

    first = async_save({"w": torch.zeros(10)}, storage_writer=SlowWriter(tmp_path / "a"), no_dist=True)
    first.add_done_callback(next_one)
    last = async_save({"w": torch.ones(10) * 3}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert last.result(30) and chained.result(30).result(30)
    for name, value in (("a", 0), ("b", 1), ("c", 2), ("d", 3)):
        found = {"w": torch.full((10,), -1.0)}
        load(found, checkpoint_id=tmp_path / name, no_dist=True)
        assert found["w"].eq(value).all(), name


class Slow(BlockingAsyncStager):
    """Takes its time after it has copied."""

    def stage(self, state_dict):
        staged = super().stage(state_dict)
        time.sleep(0.1)
        return staged


def two_groups_and_threads(path: str) -> None:
    """Each thread saves for a group of its own, with one stager that keeps its memory."""
    stager, other = Slow(cache_staged_state_dict=True), dist.new_group([0])

    def save_for(name: str, group: dist.ProcessGroup | None, value: float) -> None:
        state = {"w": torch.full((1000,), value)}
        async_save(state, checkpoint_id=f"{path}/{name}", async_stager=stager, process_group=group).result(30)

    threads = [threading.Thread(target=save_for, args=each) for each in (("a", None, 1.0), ("b", other, 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for name, value in (("a", 1.0), ("b", 2.0)):
        assert Checkpoint(f"{path}/{name}")["w"][...].eq(value).all()


def test_a_stager_of_several_groups_copies_for_one_at_a_time(tmp_path: Path) -> None:
    run_ranks(1, two_groups_and_threads, str(tmp_path))


@pytest.mark.on_late
def test_an_error_that_a_thread_waits_for_does_not_fail_another_threads_save(tmp_path: Path) -> None:
    class Failing(DefaultSavePlanner):
        def create_local_plan(self):
            assert go_on.wait(30)
            raise OSError("no plan")

    go_on = threading.Event()
    failing = async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "bad", planner=Failing(), no_dist=True)
    errors: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: errors.append(failing.exception(30)))
    thread.start()
    while not failing.asked:
        time.sleep(0.001)
    go_on.set()
    assert async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "good", no_dist=True).result(30)
    thread.join(30)
    assert isinstance(errors[0], CheckpointError)
    # One whose time runs out has not seen the error.
    go_on.clear()
    failing = async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "bad", planner=Failing(), no_dist=True)
    with pytest.raises(TimeoutError):
        failing.result(0.01)
    go_on.set()
    with pytest.raises(CheckpointError, match="before this one failed"):
        save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "good", no_dist=True)


class Saving:
    """Saves when it is asked for its state."""

    def __init__(self, path: Path, kind: AsyncCheckpointerType) -> None:
        self.path, self.kind, self.futures = path, kind, []

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {"w": torch.full((9,), 2.0)}
        self.futures.append(async_save(state, checkpoint_id=self.path, async_checkpointer_type=self.kind, no_dist=True))
        return {"w": torch.ones(9)}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.found = state_dict["w"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.on_late
def test_a_save_may_begin_inside_another(kind: AsyncCheckpointerType, tmp_path: Path) -> None:
    """As one in a signal handler does."""
    for _ in range(2):
        saving = Saving(tmp_path / "inner", kind)
        outer = async_save({"s": saving}, checkpoint_id=tmp_path / "outer", async_checkpointer_type=kind, no_dist=True)
        assert outer.result(30) and saving.futures[0].result(30)
        for name, key, value in (("inner", "w", 2.0), ("outer", "s.w", 1.0)):
            assert Checkpoint(tmp_path / name)[key][...].eq(value).all()


def test_a_signal_in_the_middle_of_a_copy_may_save(tmp_path: Path) -> None:
    class Interrupted(BlockingAsyncStager):
        def stage(self, state_dict):
            staged = super().stage(state_dict)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
            return staged

    def emergency(*_: object) -> None:
        future = async_save({"w": torch.full((9,), 2.0)}, checkpoint_id=tmp_path / "b", async_stager=own, no_dist=True)
        assert future.result(30)

    stager: BlockingAsyncStager = Interrupted(cache_staged_state_dict=True)
    own: BlockingAsyncStager | None = None
    before = signal.signal(signal.SIGUSR1, emergency)
    try:
        state = {"w": torch.ones(9)}
        assert async_save(state, checkpoint_id=tmp_path / "a", async_stager=stager, no_dist=True).result(30)
        assert Checkpoint(tmp_path / "a")["w"][...].eq(1).all() and Checkpoint(tmp_path / "b")["w"][...].eq(2).all()
        own = stager  # its memory is in use
        with pytest.raises(CheckpointError, match="pass another async_stager"):
            async_save(state, checkpoint_id=tmp_path / "a", async_stager=stager, no_dist=True)
        own = None
        assert async_save(state, checkpoint_id=tmp_path / "a", async_stager=stager, no_dist=True).result(30)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", [BlockingAsyncStager, DefaultStager])
def test_a_forked_process_has_its_own_use_of_a_stager(kind: type, tmp_path: Path) -> None:
    """Also of its thread, and of memory that the processes would share."""
    writing, go_on = threading.Event(), threading.Event()

    class Writing(FileSystemWriter):
        def write_data(self, plan, planner):
            assert writing.set() is None and go_on.wait(30)
            return super().write_data(plan, planner)

    stager = kind(cache_staged_state_dict=True) if kind is BlockingAsyncStager else kind()
    state = {"w": torch.ones(1000)}
    future = async_save(state, storage_writer=Writing(tmp_path / "a"), async_stager=stager, no_dist=True)
    assert writing.wait(30)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            state["w"].fill_(2)
            async_save(state, checkpoint_id=tmp_path / "b", async_stager=stager, no_dist=True).result(30)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    go_on.set()
    future.result(30)
    assert Checkpoint(tmp_path / "a")["w"][...].eq(1).all() and Checkpoint(tmp_path / "b")["w"][...].eq(2).all()


def test_a_process_forked_during_a_save_does_not_wait_for_it(tmp_path: Path) -> None:
    """Neither for its future nor in the manager: no thread of the forked process would ever end it."""
    writing, go_on = threading.Event(), threading.Event()

    class Writing(FileSystemWriter):
        def write_data(self, plan, planner):
            assert writing.set() is None and go_on.wait(30)
            return super().write_data(plan, planner)

    manager = CheckpointManager(tmp_path / "run", keep=1)
    state = {"w": torch.ones(10)}
    future = async_save(state, storage_writer=Writing(tmp_path / "a"), no_dist=True)
    assert writing.wait(30)
    running = Worker("test").submit(lambda: go_on.wait(30))
    manager._pending = running  # a save that has not ended
    said = f"this runs in process {os.getpid()}, from which process [0-9]+ was forked"
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            for each, kind in ((future, CheckpointError), (running, RuntimeError)):
                with pytest.raises(kind, match=said):
                    each.result()
            manager.wait()
            manager.save(1, state)
            manager.close()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    go_on.set()
    assert status == 0
    assert running.result(30) is True
    future.result(30)
    manager.close()
    found = CheckpointManager(tmp_path / "run")
    assert found.latest_step() == 1
    found.close()


IMPORTING = """
import sys, threading

found = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            found.append(name)

sys.meta_path.insert(0, Finder())
import torch
from terrazzo.checkpoint import CheckpointManager, DefaultStager, FileSystemWriter, async_save
from terrazzo.checkpoint.formats import HuggingFaceWriter

folder, weight = sys.argv[1], torch.ones(1000)
state = {"w": weight, "n": 3, "o": {"a": [1, "x", torch.float32]}}
async_save(state, checkpoint_id=f"{folder}/a").result()
async_save(state, checkpoint_id="memory://x/y").result()
async_save(state, storage_writer=FileSystemWriter(f"{folder}/b"), async_stager=DefaultStager()).result()
async_save({"w": weight}, storage_writer=HuggingFaceWriter(f"{folder}/h")).result()
manager = CheckpointManager(f"{folder}/m", keep=1)
for step in range(2):
    manager.save(step, state)
manager.close()
print(found)
"""


def test_the_thread_of_a_save_imports_nothing(tmp_path: Path) -> None:
    """A process that is forked meanwhile would wait for ever for that import."""
    environment = os.environ | {"PYTHONPATH": str(Path(terrazzo.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("planning", [False, True])
def test_a_process_forked_during_a_save_can_save(planning: bool, tmp_path: Path) -> None:
    """As the workers of a data loader are: they do not wait for the parent's save."""

    class Planning(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            assert inside.set() is None and go_on.wait(30)
            return plan

    class Writing(FileSystemWriter):
        def write_data(self, plan, planner):
            assert inside.set() is None and go_on.wait(30)
            return super().write_data(plan, planner)

    inside, go_on = threading.Event(), threading.Event()
    future = async_save(
        {"w": torch.ones(10)},
        storage_writer=FileSystemWriter(tmp_path / "a") if planning else Writing(tmp_path / "a"),
        planner=Planning() if planning else None,
        no_dist=True,
    )
    assert inside.wait(30)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            save({"z": torch.ones(2)}, checkpoint_id=tmp_path / "b", no_dist=True)
            async_save({"z": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True).result(30)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    go_on.set()
    future.result(30)
    for name in "bc":
        found = {"z": torch.zeros(2)}
        load(found, checkpoint_id=tmp_path / name, no_dist=True)
        assert found["z"].eq(1).all()
