"""The lease of a run's folder: only one live job saves, removes checkpoints and moves `latest` there.

The file `job.lease` in the folder names the job's process, that of its first rank. Each version of it is written on the
condition that the one before has not changed, so of two jobs only one gets the lease, and a job that has lost it cannot
renew it. A thread renews it.

The holder is dead if its host is this one and has no such process any more. On other hosts it is dead if it has not
renewed the lease for `_SECONDS`: a new job waits until it knows. So it does if the lease was taken at another path: the
folder may be a copy, whose lease nobody renews. Another manager of the same process gives way to the newer one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from typing import Final

import msgspec

from terrazzo.checkpoint.native.names import JOB
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores import ABSENT, SMALL, Store
from terrazzo.checkpoint.stores.base import Absent, Version
from terrazzo.comm.processes import Condition, condition_of, own_identity
from terrazzo.errors import CheckpointCorruptError, ConflictError

_SECONDS: Final = 90.0  # a lease that was not renewed for so long has expired
_LOOKS: Final = 0.25  # seconds between two looks at a lease whose holder may be dead


class _Holder(msgspec.Struct, frozen=True):
    """A job, in the file: `process` as `own_identity` has it, `since` in seconds since 1970, `folder` where it is."""

    name: str
    host: str
    pid: int
    process: str
    since: float
    renewed: int = 0  # makes each version of the file another one
    folder: str = ""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"

    def condition(self) -> Condition:
        """What is known of its process."""
        return condition_of(self.process) if self.host == socket.gethostname() else Condition.UNKNOWN

    def is_this_process(self) -> bool:
        """Whether the job's process is this one."""
        return self.condition() is Condition.RUNNING and self.process == own_identity().decode()


_NOBODY: Final = _Holder("", "an unknown host", 0, "", 0.0)  # of a file that cannot be read


class JobLease:
    """The lease of this job for a run's folder, on the job's first rank."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seconds = min(_SECONDS, store.lease_seconds)
        self._process = os.getpid()
        self._own: _Holder | None = None  # None while the lease is not held
        self._lost = ""  # why it is not held any more
        self._version: Absent | Version = ABSENT
        self._seen: tuple[Absent | Version, float] | None = None  # another job's lease, and when it was first seen
        self._lock = threading.Lock()
        self._over = threading.Event()

    def is_free(self) -> bool:
        """Whether no job of another process has the folder; raises a `ConflictError` if a live one has.

        False if that is not known yet: the other job may be dead. Then call it again. It waits for a moment.
        """
        holder, version = self._read()
        return holder is None or holder.is_this_process() or self._is_dead(holder, version)

    def take(self, *, again: bool = False) -> bool:
        """Take the lease, if it is not held; returns False, or raises, as `is_free` does.

        One that was lost is taken only with `again`: the job must have restored what the other job has saved.
        """
        if again:
            self._lost = ""
        holder, version = self._read()
        if self._own is not None or self._lost:
            self._check_own(holder)
            return True
        if holder is not None and holder.is_this_process():
            LOGGER.warning(
                "%s: another manager of this process has saved here and was not closed; it cannot save any more",
                self._store.location,
            )
        elif holder is not None and not self._is_dead(holder, version):
            return False
        pid, since = os.getpid(), time.time()
        own = _Holder(
            uuid.uuid4().hex, socket.gethostname(), pid, own_identity().decode(), since, folder=self._store.location
        )
        self._store.prepare()
        try:
            self._version = self._store.put(JOB, msgspec.json.encode(own), only_if=version)
        except ConflictError:
            if self._read()[0] != own:  # a put whose reply was lost meets its own version
                return False
            self._version = self._store.present(JOB)
        self._own, self._seen, self._over = own, None, threading.Event()
        threading.Thread(target=self._renew_all, args=(self._over,), name="terrazzo-job-lease", daemon=True).start()
        return True

    def check(self) -> None:
        """Raise a `ConflictError` unless this job still holds the lease."""
        self._check_own(self._read()[0])

    def release(self) -> None:
        """Give the lease up, if this job holds it."""
        self._over.set()
        if self._process != os.getpid():  # a process that forked has it
            return
        with self._lock:
            own, self._own = self._own, None
            if own is None:
                return
            with suppress(OSError, ConflictError):  # it is another job's, or expires
                self._renew(own)  # so that no other job takes it before it is removed
                self._store.delete([JOB])

    def _check_own(self, holder: _Holder | None) -> None:
        if not self._lost and (self._own is None or holder is None or holder.name != self._own.name):
            self._over.set()
            self._own = None
            self._lost = f"the file {JOB} is gone" if holder is None else f"it has been taken by {holder}"
        if self._lost:
            raise ConflictError(
                f"{self._store.location}: this job has lost its lease of the folder, so it saves and removes nothing "
                f"there: {self._lost}; end one of the two jobs, or call restore to continue from what is there now"
            )

    def _read(self) -> tuple[_Holder | None, Absent | Version]:
        try:
            data, version = self._store.get(JOB, SMALL)
        except (FileNotFoundError, NotADirectoryError):
            return None, ABSENT
        except CheckpointCorruptError:  # too large
            return _NOBODY, self._store.present(JOB)
        try:
            holder = msgspec.json.decode(bytes(data), type=_Holder)
            holder.condition()
            return holder, version
        except (ValueError, msgspec.MsgspecError):
            return _NOBODY, version

    def _is_dead(self, holder: _Holder, version: Absent | Version) -> bool:
        """Whether another job's process is dead; raises if it is alive. False: not known yet."""
        condition = holder.condition()
        if condition is Condition.DEAD:
            return True
        if holder.folder != self._store.location:
            condition = Condition.UNKNOWN
        now = time.monotonic()
        first = self._seen is None
        self._seen = self._seen or (version, now)
        if condition is not Condition.UNKNOWN or self._seen[0] != version:
            self._seen = None
            raise ConflictError(
                f"{self._store.location} is used by another live job: {holder}; only one may save there: end it, or "
                "use another folder"
            )
        if now - self._seen[1] > self._seconds or self._is_old():
            return True
        if first:
            LOGGER.warning(
                "%s: waiting for at most %.0f seconds to see whether the job that has saved there is alive: %s",
                self._store.location,
                self._seconds,
                holder,
            )
        time.sleep(min(_LOOKS, self._seconds))
        return False

    def _is_old(self) -> bool:
        """Whether the lease has expired by the store's clock; it may be one that was just renewed."""
        with suppress(FileNotFoundError):
            modified = self._store.stat(JOB).modified  # 0 if the store has no dates
            return modified > 0 and self._store.now() - modified > self._seconds
        return False

    def _renew_all(self, over: threading.Event) -> None:
        while not over.wait(self._seconds / 4):
            try:
                with self._lock:
                    if self._own is None or over.is_set():
                        return
                    self._renew(self._own)
            except (ConflictError, FileNotFoundError, NotADirectoryError):  # it is lost, as the next save will say
                return
            except Exception as error:
                LOGGER.warning("%s: the lease of the folder was not renewed: %s", self._store.location, error)

    def _renew(self, own: _Holder) -> None:
        renewed = msgspec.structs.replace(own, renewed=own.renewed + 1)
        try:
            self._version = self._store.put(JOB, msgspec.json.encode(renewed), only_if=self._version)
        except ConflictError:
            holder, version = self._read()
            if holder is None or holder.name != own.name:
                raise
            self._version = version  # an earlier put of this job has taken effect, though it raised
        if self._own is not None:
            self._own = renewed
