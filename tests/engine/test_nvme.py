"""Optimizer state in files: the same numbers as in memory, in bounded memory, and no harm when something fails."""

from __future__ import annotations

import copy
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.runs import config, make_model, param_groups, train, weights
from ranks import run_fresh, run_ranks
from terrazzo.checkpoint import Checkpoint, CheckpointManager, verify
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.engine import Engine, initialize
from terrazzo.errors import EngineError, RankError, StateFileError
from terrazzo.tensor.dtensor import local_of

STEPS = 3


class Counting(torch.optim.Optimizer):
    """Counts steps in its groups, and makes its state anew in each step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p].get("mean", torch.zeros_like(p))
                    self.state[p]["mean"] = 0.5 * old + p.grad
                    p.sub_(self.state[p]["mean"], alpha=group["lr"] / group["step"])


def engine_of(folder: str, stage: int, nvme: bool, seed: int = 0, **options: Any) -> Any:
    """With small pieces, so that each step has several: in memory, or in files."""
    make, buffers = options.pop("make", None), options.pop("buffers", 2)
    offload = {"device": "nvme", "nvme_path": folder, "buffer_size": 700, "buffer_count": buffers} if nvme else {}
    settings = config(stage, **options)
    settings["zero_optimization"] = {"stage": stage, "offload_optimizer": offload}
    settings["aio"] = {"block_size": 4096, "intra_op_parallelism": 2}
    if make is not None:
        del settings["optimizer"]
    model = make_model(seed)
    return initialize(model, make, parameters=param_groups(model) if make is None else None, config=settings)


def tensors_of(engine: Engine) -> dict[str, Tensor]:
    """Parameters and optimizer state, whole."""
    found = dict(weights(engine))
    for name, p in engine.module.named_parameters():
        for key, value in engine.optimizer.state.get(p, {}).items():
            value = torch.as_tensor(value)
            found[f"{name}.{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found


def check_same(a: Engine, b: Engine, extra: str = "") -> None:
    first, second = tensors_of(a), tensors_of(b)
    assert first.keys() == second.keys() and len(first) > 20
    assert [name for name in first if not torch.equal(first[name], second[name])] == [], extra
    options = [[{k: v for k, v in g.items() if k != "params"} for g in e.optimizer.param_groups] for e in (a, b)]
    assert options[0] == options[1]


def only_some(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(params)[:5], lr=0.01, amsgrad=True)


def counting(params: Any) -> torch.optim.Optimizer:
    return Counting(params, lr=0.1)


CASES: list[tuple[int, dict[str, Any]]] = [
    (0, {"buffers": 1}),
    (1, {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}, "gradient_accumulation_steps": 2}),
    (2, {"bf16": {"enabled": True}, "buffers": 3}),
    (2, {"make": only_some, "scheduler": None}),
    (3, {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}, "buffers": 9}),
    (3, {"make": counting}),
    (3, {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}, "scheduler": None}),
    (3, {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}}}),
]


def note(hooked: list[int], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    hooked.append(sum(len(group["params"]) for group in optimizer.param_groups))


def check_numbers(folder: str, cases: list[tuple[int, dict[str, Any]]]) -> None:
    for stage, options in cases:
        memory, files = (engine_of(folder, stage, nvme, **options) for nvme in (False, True))
        hooked: list[int] = []
        files.optimizer.register_step_post_hook(partial(note, hooked))
        steps = 12 if "fp16" in options else STEPS
        assert train(memory, steps) == train(files, steps), (stage, options)
        if options.get("make") is only_some:
            for engine in (memory, files):
                known = set(engine.optimizer.param_groups[0]["params"])
                rest = [p for p in engine.module.parameters() if p.requires_grad and p not in known]
                engine.optimizer.add_param_group({"params": rest, "lr": 0.05})
            assert train(memory, STEPS, steps) == train(files, STEPS, steps)
            steps += STEPS
        check_same(memory, files, f"{stage} {options}")
        assert memory.skipped_steps == files.skipped_steps and (files.skipped_steps > 0) == ("fp16" in options)
        assert hooked[0] > 1 and len(hooked) == steps - files.skipped_steps, "once a step, with all parameters"
        state = files.optimizer.state
        placed = {
            p for p in state if any(torch.is_tensor(v) and v.ndim and local_of(v).numel() for v in state[p].values())
        }
        assert placed == files.pages._placed.keys() and placed, "all that has a shape is in files"
        assert list(Path(folder).iterdir()) == [], "the files have no names"


def test_the_numbers_are_those_of_state_in_memory(tmp_path):
    run_ranks(2, check_numbers, str(tmp_path), CASES)
    run_ranks(1, check_numbers, str(tmp_path), CASES[3:4])


def save_in_files(folder: str) -> None:
    engine = engine_of(folder + "/state", 3, True)
    engine.save_checkpoint(folder + "/saved", "first")  # before any step, of which it must not keep anything
    used = engine.pages._scratch._used
    engine.save_checkpoint(folder + "/saved", "first again")
    assert not engine.optimizer.state and used == engine.pages._scratch._used > 0
    again = engine_of(folder + "/state", 2, False)
    again.load_checkpoint(folder + "/saved", "first")
    train(engine, STEPS), train(again, STEPS)
    check_same(engine, again)
    engine.save_checkpoint(folder + "/saved")
    engine.save_checkpoint(folder + "/deepspeed", layout="deepspeed")
    with pytest.raises(EngineError, match="copies the state to memory"):
        engine.save_checkpoint(folder + "/saved", "no", async_op=True)
    with CheckpointManager(folder + "/manager") as manager, pytest.MonkeyPatch.context() as patch:
        patch.delattr("terrazzo.checkpoint.manager.committing.async_save")
        assert engine.save_step(manager)
    name, p = next((n, p) for n, p in engine.module.named_parameters() if p.requires_grad)
    whole = engine.optimizer.state[p]["exp_avg"].full_tensor()
    if dist.get_rank() == 0:
        torch.save((name, whole), folder + "/one.pt")


def resume_from_files(folder: str) -> None:
    for source in ("saved", "deepspeed", "manager"):
        stage = {"saved": 1, "deepspeed": 3, "manager": 0}[source]
        memory, files = (engine_of(folder + "/state", stage, nvme, seed=5) for nvme in (False, True))
        train(files, 1)  # its state is replaced
        for engine in (memory, files):
            engine.load_checkpoint(f"{folder}/{source}")
        name, whole = torch.load(folder + "/one.pt")
        found = dict(files.module.named_parameters())[name]
        assert torch.equal(files.optimizer.state[found]["exp_avg"].full_tensor(), whole)
        assert train(memory, STEPS, STEPS) == train(files, STEPS, STEPS)
        check_same(memory, files, source)
    # What a user puts in the place of the state goes to files with the next step.
    files.optimizer.load_state_dict(copy.deepcopy(memory.optimizer.state_dict()))
    train(memory, 1), train(files, 1)
    check_same(memory, files)
    state = files.optimizer.state[found]["exp_avg"]
    assert state is files.pages._placed[found].mapped["exp_avg"]


def test_checkpoints_on_other_worlds(tmp_path):
    run_ranks(2, save_in_files, str(tmp_path))
    for world in (1, 2):
        run_ranks(world, resume_from_files, str(tmp_path))


@contextmanager
def failing(name: str, code: int, after: int = 0) -> Iterator[None]:
    """The system's call fails, after so many that do not."""
    real, calls, lock = getattr(os, name), [0], threading.Lock()

    def call(*arguments: Any) -> Any:
        with lock:
            calls[0] += 1
        if calls[0] > after:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    setattr(os, name, call)
    try:
        yield
    finally:
        setattr(os, name, real)


def check_errors(folder: str) -> None:
    Path(folder, "file").write_text("")
    with pytest.raises(RankError, match=r"nvme_path\) failed: (File exists|Not a directory)"):
        engine_of(folder + "/file", 1, True)
    kept = engine_of(folder, 3, False)
    train(kept, 1)
    for number, (name, code, message) in enumerate(
        [
            ("posix_fallocate", errno.ENOSPC, "No space left on device. Free space there"),
            ("preadv", errno.EIO, "reading for optimizer state in .* Input/output error"),
            ("pwritev", errno.EIO, "writing for optimizer state"),
        ]
    ):
        engine = engine_of(folder, 3, True)
        before = tensors_of(engine)
        if name != "posix_fallocate":  # which is called in the first step
            train(engine, 1)
        (engine if engine.global_steps else engine_of(folder, 3, False)).save_checkpoint(
            folder + "/saved", f"before{number}"
        )
        with failing(name, code, after=2), pytest.raises(StateFileError, match=message) as caught:
            train(engine, 1, engine.global_steps)
        assert caught.value.errno == code and isinstance(caught.value, OSError)
        assert len(engine.optimizer.param_groups) == 2 and before.keys() <= tensors_of(engine).keys()
        with pytest.raises(StateFileError, match="left half done, by StateFileError"):
            engine.save_checkpoint(folder + "/saved", f"after{number}")
        with pytest.raises(StateFileError, match="left half done"):
            engine.pages.step()
        engine.load_checkpoint(folder + "/saved", f"before{number}")
        train(engine, 1 - engine.global_steps)
        check_same(engine, kept)

    # A file that lost its end: for reads, and for the maps, which the system would tell of by a signal.
    for action in ("step", "save", "load"):
        engine = engine_of(folder, 3, True)
        train(engine, 1)
        engine.save_checkpoint(folder + "/saved", action)
        os.ftruncate(next(iter(engine.pages._placed.values())).region.file, 0)
        with pytest.raises(Exception, match="for optimizer state in .* (shorter than it was|Input/output error)"):
            if action == "step":
                train(engine, 1, 1)
            elif action == "save":
                engine.save_checkpoint(folder + "/saved", "no")
            else:
                engine.load_checkpoint(folder + "/saved", action)
        assert not Path(folder, "saved", "no", MANIFEST).exists()


def test_errors_are_typed_and_a_checkpoint_mends_them(tmp_path):
    run_ranks(1, check_errors, str(tmp_path))


def check_errors_of_one_rank(folder: str) -> None:
    """In a step, and while state is made for a checkpoint: all ranks raise, at once, and a checkpoint mends all."""
    failed = "rank 1: writing for optimizer state in .*state.* failed: Input/output error"
    engine = engine_of(folder + "/state", 3, True)
    bad = dist.get_rank() == 1
    kind: type[Exception] = StateFileError if bad else RankError
    with failing("pwritev", errno.EIO) if bad else nullcontext(), pytest.raises(kind, match=failed):
        engine.save_checkpoint(folder + "/saved", "no")
    assert not engine.optimizer.state and not Path(folder, "saved").exists()
    train(engine, 1)
    engine.save_checkpoint(folder + "/saved", "before")
    with failing("pwritev", errno.EIO, after=2) if bad else nullcontext(), pytest.raises(kind, match=failed):
        train(engine, 1, 1)
    with pytest.raises(StateFileError, match="(?s)left half done.*rank 1: writing"):
        engine.save_checkpoint(folder + "/saved", "after")
    engine.load_checkpoint(folder + "/saved", "before")
    train(engine, 1, 1)
    kept = engine_of(folder, 3, False)
    train(kept, 2)
    check_same(engine, kept)

    # The optimizer of the other rank waits for this one's parts.
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
    engine, kept = engine_of(folder + "/state", 3, True, **muon), engine_of(folder, 3, False, **muon)
    train(engine, 1)
    engine.save_checkpoint(folder + "/saved", "muon")
    with (
        failing("preadv", errno.EIO, after=1) if bad else nullcontext(),
        pytest.raises(kind, match="reading for optimizer state"),
    ):
        train(engine, 1, 1)
    engine.load_checkpoint(folder + "/saved", "muon")
    train(engine, 1, 1)
    train(kept, 2)
    check_same(engine, kept)


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    run_ranks(2, check_errors_of_one_rank, str(tmp_path))


def die_in_a_step(folder: str) -> None:
    engine = engine_of(folder + "/state", 2, True)
    train(engine, 1)
    engine.save_checkpoint(folder + "/saved")
    real, calls = os.pwritev, [0]

    def dying(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    os.pwritev = dying  # type: ignore[assignment]
    train(engine, 1, 1)


def test_a_rank_that_is_killed_leaves_no_file_and_a_whole_checkpoint(tmp_path):
    (outcome,) = run_fresh(1, die_in_a_step, str(tmp_path))
    assert outcome.signal == signal.SIGKILL
    assert list((tmp_path / "state").iterdir()) == []
    verify(tmp_path / "saved" / "global_step1")
    assert Checkpoint(tmp_path / "saved" / "global_step1")["global_steps"] == 1


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(field + ":"))


def extra(work: Callable[[], object]) -> int:
    """The most bytes that this process had in memory during `work` beyond what it had before."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    work()
    return max(0, status("VmHWM") - before)


def check_memory(folder: str) -> dict[str, int]:
    """160 MB of state, and buffers of 16 MB."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(20)))
    offload = {"device": "nvme", "nvme_path": folder + "/state", "buffer_size": 4 << 20, "buffer_count": 2}
    settings = config(1, bf16={"enabled": True})
    settings["zero_optimization"] = {"stage": 1, "offload_optimizer": offload}
    engine = initialize(model, config=settings)

    def step() -> None:
        engine.backward(engine(torch.ones(8, 1024)).float().square().mean())
        with torch.no_grad():
            found["a step"] = max(found.get("a step", 0), extra(engine.step))

    found: dict[str, int] = {}
    for _ in range(3):
        step()
    assert sum(v.nbytes for s in engine.optimizer.state.values() for v in s.values()) > 160 << 20
    found["saving"] = extra(lambda: engine.save_checkpoint(folder + "/saved"))
    found["loading"] = extra(lambda: engine.load_checkpoint(folder + "/saved"))
    found["a step after it"] = extra(step)
    return found


@pytest.mark.long
def test_memory_is_bounded(tmp_path):
    """Of ten times as much state as the buffers take; 45 MB are usual, and the allocator adds up to 30."""
    (outcome,) = run_fresh(1, check_memory, str(tmp_path))
    assert outcome.ok, outcome
    assert max(outcome.value.values()) < 96 << 20, outcome.value
