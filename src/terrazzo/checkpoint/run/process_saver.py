"""Save in a separate process, so that training and saving do not compete for the GIL.

Each rank starts one process, which is kept for later saves. These processes have a process group of their own. The
state is copied into shared memory, which is mapped once; for each save only a small description is sent.
"""

from __future__ import annotations

import os
import pickle
import socket
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from terrazzo.checkpoint.native.names import as_told, for_torch
from terrazzo.checkpoint.run.coordination import Failure, Team, with_plane
from terrazzo.checkpoint.run.save_session import SaveSession
from terrazzo.checkpoint.run.staging import HostMemory, Skeleton, Specs, carve, put_together, take_apart
from terrazzo.comm.addresses import listen_at, own_address
from terrazzo.comm.control import DEFAULT_TIMEOUT, ControlPlane
from terrazzo.comm.processes import host_identity
from terrazzo.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Parcel:
    """A staged state dict for the process, whose tensors are in shared memory; or the error of staging."""

    skeleton: Skeleton = field(default_factory=lambda: Skeleton({}))
    specs: Specs = field(default_factory=list)
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class _Order:
    """A message to the process: save this."""

    session: SaveSession  # without connections
    limit: timedelta | None
    parcel: Parcel
    new_buffer: bool  # shared memory follows; if not, it is the same as last time
    for_torch: bool  # see native.names


class _Meeting(msgspec.Struct, array_like=True, frozen=True):
    """The address of the store through which the processes connect; the first rank's process hosts it."""

    host: str
    port: int
    loopback: bool  # all ranks are on one host, so that connections use the loopback interface


class ProcessSaver:
    """The saving process of this rank. Constructing it is collective."""

    def __init__(self, team: Team, timeout: timedelta | None) -> None:
        self._memory = HostMemory(shared=True)
        self._sent: torch.Tensor | None = None
        self._store: dist.TCPStore | None = None
        self._limit = timeout
        limit = timeout or (DEFAULT_TIMEOUT if team.plane is None else team.plane.timeout)
        meeting = self._meeting_point(team, limit)
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, team.rank, team.ranks, meeting, limit)
        self._process = context.Process(target=_serve, args=arguments, name="terrazzo-save", daemon=True)
        self._process.start()
        theirs.close()

    def _meeting_point(self, team: Team, limit: timedelta) -> _Meeting | None:
        """The address where the processes will connect; the first rank sends it to all."""
        if team.plane is None:
            return None

        def host_store(hosts: list[bytes]) -> bytes:
            loopback = len(set(hosts)) == 1 and hosts[0] != b""
            address = "127.0.0.1" if loopback else own_address()
            # Bound here, because a store would bind to all interfaces.
            listening = listen_at(address)
            port = listening.getsockname()[1]
            self._store = dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=limit,
                master_listen_fd=listening.detach(),
            )
            return msgspec.msgpack.encode(_Meeting(address, port, loopback))

        return msgspec.msgpack.decode(team.reduce(lambda: host_identity().encode(), host_store), type=_Meeting)

    def stage(self, state_dict: STATE_DICT_TYPE) -> Parcel:
        """Copy the state into the shared memory."""
        skeleton, sources = take_apart(state_dict)
        self._memory.copy(sources)
        return Parcel(skeleton, [(tensor.shape, tensor.dtype) for tensor in sources])

    def save(self, session: SaveSession, parcel: Parcel) -> Metadata:
        """Send the process the staged state to save, and wait for the result."""
        buffer = self._memory.buffer
        order = _Order(
            replace(session, team=replace(session.team, plane=None)),
            None if session.team.plane is None else session.team.plane.timeout,
            parcel,
            buffer is not self._sent,
            for_torch(),
        )
        # Not `send`: it would move tensors of the planner, the writer and the values to shared memory, also for the
        # caller. Only the buffer should be there.
        data = pickle.dumps(order)
        try:
            self._connection.send_bytes(data)
            if order.new_buffer:
                self._connection.send(buffer)
            self._sent = buffer
            outcome = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            self._process.join(1)
            raise CheckpointError(
                f"the saving process of rank {session.team.global_rank} died (exit code {self._process.exitcode})"
            ) from error
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, Metadata)
        return outcome

    @property
    def alive(self) -> bool:
        """Whether the process can save."""
        return self._process.is_alive()

    def close(self) -> None:
        """End the process."""
        self._connection.close()  # the process then ends
        self._process.join(10)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
        self._memory = HostMemory(shared=True)


def _serve(
    connection: Connection, rank: int, ranks: tuple[int, ...], meeting: _Meeting | None, limit: timedelta
) -> None:
    """The main function of the process: save until the connection is closed."""
    failed: BaseException | None = None
    if meeting is not None:
        try:
            if meeting.loopback:
                interfaces = (name for _, name in socket.if_nameindex() if name.startswith("lo"))
                os.environ["GLOO_SOCKET_IFNAME"] = next(interfaces, "lo")
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=len(ranks), timeout=limit)
        except Exception as error:
            failed = CheckpointError(f"the saving processes of ranks {list(ranks)} could not connect: {error}")
    buffer: torch.Tensor | None = None
    while True:
        try:
            order: _Order = pickle.loads(connection.recv_bytes())
            buffer = connection.recv() if order.new_buffer else buffer
        except EOFError:
            break
        connection.send_bytes(_outcome(order, buffer, ranks, failed))
        if failed is not None:
            break  # the next save starts a new process
    if dist.is_initialized():
        dist.destroy_process_group()


def _outcome(order: _Order, buffer: torch.Tensor | None, ranks: tuple[int, ...], failed: BaseException | None) -> bytes:
    """Save; returns the pickled metadata or the pickled error, for the pipe to the parent."""
    try:
        if failed is not None:
            raise failed
        session = order.session
        if len(ranks) > 1:
            # The processes have the ranks of their training processes.
            session.team = with_plane(
                session.team, lambda: ControlPlane.for_group(timeout=order.limit).renewed().speaking_of(ranks)
            )
        with as_told(order.for_torch):
            return pickle.dumps(session.run(lambda: _unpack(order.parcel, buffer)))
    except BaseException as error:
        error.__traceback__ = None
        try:
            return pickle.dumps(error)
        except (pickle.PicklingError, TypeError, AttributeError):
            return pickle.dumps(CheckpointError(f"{type(error).__name__}: {error}"))


def _unpack(parcel: Parcel, buffer: torch.Tensor | None) -> STATE_DICT_TYPE:
    if parcel.error is not None:
        raise parcel.error.exception()
    if buffer is None:
        return parcel.skeleton.values
    return put_together(parcel.skeleton, carve(buffer, parcel.specs))
