"""How torchrun's agent starts and ends the processes of ranks, which `terrazzo train` changes while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, Protocol

from torch.distributed.elastic.multiprocessing import PContext

from terrazzo._torch.declared import private, replace

_POPEN = "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler._popen"

popen: Callable[[Any, Sequence[str], dict[str, str]], Any] | None = private(
    _POPEN,
    "restarted ranks are forked from a process that has imported what they need",
    instead=None,
    without="restarted ranks import everything again",
    patched=True,
)
is_in_bad_fork: Callable[[], bool] = private(
    "torch.cuda._is_in_bad_fork", "a process that was forked after CUDA was used cannot use it", instead=lambda: False
)


class Process(Protocol):
    """What the agent uses of a `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None if it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the status, or raises `subprocess.TimeoutExpired`."""


Starting = Callable[[Callable[[], Process], Sequence[str], dict[str, str], tuple[int, int, int]], Process]
"""Of a rank: torchrun's own way to start it, the command, the environment, and stdin, stdout, stderr -> its process."""


@contextmanager
def started_by(start: Starting) -> Iterator[None]:
    """Inside, `start` makes the processes of the ranks that the agent of this process starts."""
    own = popen
    if own is None:
        yield
        return

    def stands_in(handler: Any, args: Sequence[str], env: dict[str, str]) -> Any:
        files: list[IO[str] | None] = [getattr(handler, name, None) for name in ("_stdout", "_stderr")]
        out, err = (number if file is None else file.fileno() for number, file in enumerate(files, 1))
        return start(partial(own, handler, args, env), args, env, (0, out, err))

    replace(_POPEN, stands_in)
    try:
        yield
    finally:
        replace(_POPEN, own)


def wait_for_ranks(seconds: int) -> None:
    """Where torchrun has no option for it: how long its agent waits for ranks that are told to end."""
    PContext.close.__defaults__ = (None, seconds)


def fork_is_usable() -> bool:
    """In a forked process: whether it may use the accelerator, which the process that was forked has not touched."""
    return not is_in_bad_fork() and not any(map(_is_accelerator, os.listdir("/proc/self/fd")))


def _is_accelerator(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") in ("/dev/nvidia-uvm", "/dev/kfd")
    except OSError:
        return False
