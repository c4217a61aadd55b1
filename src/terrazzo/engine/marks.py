"""What a rank tells `terrazzo train`: when it reached which point of its start, and where it is.

`terrazzo train` names a file in the environment; without it nothing is written. To it ranks append the points, to
measure how long recovery from a fault takes. Beside it each rank keeps a small file with its last step (`beat`), by
which a rank that hangs is found and `terrazzo top` shows the run, and the first rank of the host a list of what it has
imported, for ranks that are started again.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

import msgspec
import torch
import xxhash
from torch import Tensor

from terrazzo.comm import CommEvent, add_observer, remove_observer
from terrazzo.errors import EngineConfigError, RunConfigError

FILE: Final = "TERRAZZO_MARKS"
BEATS: Final = "beat-"  # the beginning of the names of the ranks' files
IMPORTED: Final = "imported"
MISCONFIGURED: Final = "misconfigured"
EVERY: Final = 1.0  # seconds between two beats of a rank, at least


class Mark(msgspec.Struct, frozen=True):
    """A rank has reached a point.

    Attributes:
        what: `made` (the engine), `loading`, `planned`, `read` or `stepped` (the first step after it); or
            `misconfigured`, if it ends because of an error of the config.
        at: seconds since 1970.
        rank: its number among all ranks.
        process: its process id, on its host.
        start: how many times the ranks had been restarted.
    """

    what: str
    at: float
    rank: int
    process: int
    start: int


def mark(what: str) -> None:
    """Write that this rank has reached the point."""
    file = os.environ.get(FILE)
    if not file:
        return
    rank, start = (int(os.environ.get(name) or 0) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    line = msgspec.json.encode(Mark(what, time.time(), rank, os.getpid(), start)) + b"\n"
    try:
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:  # the measuring process has ended
        return
    try:
        os.write(fd, line)  # in one call, so that lines of several ranks do not mix
    finally:
        os.close(fd)


def tell_of_config_errors() -> None:
    """Let one rank of a host print an error of the config that ends ranks of `terrazzo train`, and tell the launcher:
    the error is the same on all ranks, and would be when they are started again."""
    if FILE in os.environ and not isinstance(sys.excepthook, _Uncaught):
        sys.excepthook = _Uncaught(sys.excepthook)


class _Uncaught:
    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, EngineConfigError | RunConfigError):
            mark(MISCONFIGURED)
            name = f"{os.environ.get(FILE)}-config-{xxhash.xxh3_64_hexdigest(str(error).encode())}"
            with suppress(OSError):
                try:
                    os.close(os.open(name, os.O_CREAT | os.O_EXCL, 0o600))
                except FileExistsError:
                    return
        self._before(kind, error, trace)


def read_marks(data: bytes) -> list[Mark]:
    """The marks in the contents of the file, up to its last complete line."""
    return [msgspec.json.decode(line, type=Mark) for line in data[: data.rfind(b"\n") + 1].splitlines()]


# ------------------------------------------------------------------ the last step


class Beat(msgspec.Struct, frozen=True):
    """A rank has made a step.

    Attributes:
        step: how many it has made.
        at: seconds since 1970.
        rank: its number among all ranks.
        process: its process id, on its host.
        loss: its loss in that step.
        samples: how many all ranks have seen so far.
        tokens: the same, of tokens since the start.
        memory: bytes that it uses of its accelerator, or of the host without one.
        sent: bytes that it sent to other ranks in one of the last steps.
        start: by which starts of the ranks differ (`start_of`).
    """

    step: int
    at: float
    rank: int
    process: int
    loss: float | None = None
    samples: int | None = None
    tokens: int | None = None
    memory: int = 0
    sent: int | None = None
    start: tuple[str | None, ...] = ()


def start_of(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    """What the processes that were started together have in common, and no others."""
    return environment.get("TORCHELASTIC_RESTART_COUNT"), environment.get("MASTER_PORT")


class Imported(msgspec.Struct, frozen=True):
    """What a rank has imported: names of installed modules, and where modules are looked for."""

    modules: list[str]
    path: list[str]


class _Pulse:
    """Writes this rank's beats, at most one a second."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._rank, self._start = int(os.environ.get("RANK") or 0), start_of(os.environ)
        self._next = 0.0
        self._known = 0  # modules
        self._sent: int | None = None
        self._counted = 0
        self._counting = False
        self._unwritten: tuple[int, Tensor | float | None, int | None, int | None] | None = None
        atexit.register(self._write_last)
        if not faulthandler.is_enabled():  # `terrazzo train` ends a rank that hangs by SIGABRT
            faulthandler.enable()

    def beat(self, step: int, loss: Tensor | float | None, samples: int | None, tokens: int | None) -> None:
        if self._counting:  # one step of those that take a second
            remove_observer(self._count)
            self._sent, self._counting = self._counted, False
        now = time.monotonic()
        if now < self._next:
            self._unwritten = step, loss.detach() if isinstance(loss, Tensor) else loss, samples, tokens
            return
        self._next, self._unwritten = now + EVERY, None
        self._write(step, loss, samples, tokens)
        if len(sys.modules) != self._known and int(os.environ.get("LOCAL_RANK") or 0) == 0:
            self._known = len(sys.modules)
            said = Imported([name for name, module in sys.modules.items() if _is_installed(name, module)], sys.path)
            put(f"{self._file}-{IMPORTED}", msgspec.json.encode(said))
        self._counted, self._counting = 0, True
        add_observer(self._count)

    def _write_last(self) -> None:
        """When the program ends: its last steps may have been made within a second."""
        if self._unwritten is not None:
            with suppress(OSError, RuntimeError):  # the folder may be gone, and the device unusable
                self._write(*self._unwritten)

    def _write(self, step: int, loss: Tensor | float | None, samples: int | None, tokens: int | None) -> None:
        if isinstance(loss, Tensor):
            # A distributed tensor would ask other ranks, which may not write now.
            loss = float(loss) if type(loss) is Tensor else None
        beat = Beat(
            step, time.time(), self._rank, os.getpid(), loss, samples, tokens, _memory(), self._sent, self._start
        )
        put(f"{self._file}-{BEATS}{self._rank}", msgspec.json.encode(beat))

    def _count(self, event: CommEvent) -> None:
        self._counted += event.bytes


_pulses: dict[str, _Pulse] = {}


def beat(
    step: int, *, loss: Tensor | float | None = None, samples: int | None = None, tokens: int | None = None
) -> None:
    """Tell `terrazzo train` that this rank has made a step; for loops without the engine, which calls it itself.

    What is told is shown by `terrazzo top`, and a rank that tells nothing for `ranks.stuck_after` seconds is ended.
    Without `terrazzo train` it does nothing. It is written at most once a second, and only then the loss is waited for.

    >>> beat(1, loss=2.5, samples=16)

    Args:
        step: how many steps there have been.
        loss: this rank's.
        samples: how many all ranks have seen so far.
        tokens: how many tokens all ranks have seen so far.
    """
    file = os.environ.get(FILE)
    if file:
        pulse = _pulses.get(file) or _pulses.setdefault(file, _Pulse(file))
        pulse.beat(step, loss, samples, tokens)


def tokens_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The number of tokens in a model's inputs, for beats: of its first tensor, if that has integers in rows."""
    if not os.environ.get(FILE):  # nobody looks
        return 0
    first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
    if first is None or first.dim() != 2 or first.dtype not in (torch.int64, torch.int32):
        return 0
    return first.numel()


def _memory() -> int:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        is_used: Callable[[], bool] = getattr(module, "is_initialized", lambda: False)
        if is_used() and hasattr(module, "memory_allocated"):
            return int(module.memory_allocated())
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_INSTALLED: Final = tuple(
    {
        os.path.join(folder, "")
        for folder in (
            *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    }
)


def _is_installed(name: str, module: ModuleType) -> bool:
    """Whether a module is no part of the user's program, which is to be read anew by ranks that are started again."""
    if name.partition(".")[0] in ("terrazzo", "mpi4py"):  # mpi4py joins a job when it is imported
        return name.startswith("terrazzo")
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    return isinstance(origin, str) and origin.startswith(_INSTALLED) and getattr(spec, "name", None) == name


def put(path: str, data: bytes) -> None:
    """Write a small file, which a reader sees whole; or none, if it cannot be written, as when nobody listens."""
    try:
        with open(f"{path}.new", "wb") as file:
            file.write(data)
        os.rename(f"{path}.new", path)
    except OSError:
        pass
