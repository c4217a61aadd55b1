"""Ending a job when its cluster wants the machines back: all ranks save the same step, and exit.

A signal reaches ranks in different steps, and perhaps only some of them. They must agree on a step: in each step they
exchange whether any rank was told to stop, in a message that is sent while the next step is computed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.comm.waits import Waiting
from terrazzo.errors import LaunchError
from terrazzo.layout.drawing import ShownAsCall


class Stopped(SystemExit):
    """The job was told to end, and has saved; the exit status is that of a process that the signal ended.

    >>> Stopped(15).code
    143
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


class StopSignal(ShownAsCall):
    """Whether the job has been told to end, with the same answer on all ranks.

        stop = StopSignal()
        for batch in engine.training_dataloader:
            ...
            engine.step()
            if stop.agreed():
                engine.save_checkpoint(folder)
                stop.leave()

    Args:
        signals: the signals that mean stop. Slurm, Kubernetes and torchrun send SIGTERM; submitit sends SIGUSR2.
        file: a path; when a file appears there the job ends, as after SIGTERM. The first rank checks it in each step.
    """

    def __init__(
        self,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR2),
        *,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise LaunchError(
                "StopSignal needs a process group: create it after init_process_group or terrazzo.engine's initialize"
            )
        self._process = os.getpid()
        self._file = file if dist.get_rank() == 0 else None
        self._received = 0
        self._agreed = 0
        # On gloo, so that no step waits for an accelerator.
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._asked: tuple[torch.Tensor, Any] | None = None
        self._before = {number: signal.signal(number, self._note) for number in signals}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._received = number
        else:  # in a forked child: it ends, as it would without this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def agreed(self) -> bool:
        """Whether some rank had been told to stop by the previous step; every rank calls this once in each step."""
        if self._agreed:
            return True
        if self._asked is not None:
            answer, message = self._asked
            with Waiting("StopSignal.agreed()", range(dist.get_world_size())):
                message.wait()
            self._asked, self._agreed = None, int(answer)
        if not self._agreed:
            if self._file is not None and not self._received and os.path.exists(self._file):
                self._received = signal.SIGTERM
            answer = torch.tensor(self._received, device="cpu")
            self._asked = answer, dist.all_reduce(answer, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return bool(self._agreed)

    @property
    def ending(self) -> bool:
        """The last result of `agreed`, without communication. For programs in which another part calls `agreed`."""
        return bool(self._agreed)

    def close(self) -> None:
        """Restore the signal handlers, and wait for the last message."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}
        if self._asked is not None:
            self._asked[1].wait()
            self._asked = None

    def leave(self) -> None:
        """End this rank, after it has saved: raises `Stopped`, on every rank."""
        self.close()
        raise Stopped(self._agreed or signal.SIGTERM)

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._asked = None  # other ranks may never answer, and the exception must be shown
        self.close()
