"""An optimizer whose state is in files, and in memory only while its parameters are updated.

A step is divided into pieces: parameters of one group whose state has about `buffer_size` bytes. While the optimizer
itself updates one piece, the state of the next ones is read, and that of the last ones written. The state of a piece is
in one of `buffer_count` buffers, so there is never more of it in memory. Between steps the tensors of the state are
maps of the files, which can be read and written like others: savers and loaders need no other way to them.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from terrazzo.checkpoint.state_dict.lazy_state import initial_state
from terrazzo.comm import ControlPlane
from terrazzo.engine.config import AioConfig, OffloadOptimizerConfig
from terrazzo.engine.scratch import Region, Scratch, aligned
from terrazzo.errors import RankError, StateFileError
from terrazzo.tensor import DTensor
from terrazzo.tensor.dtensor import local_of, wrap

_LINE = 64  # bytes to which tensors are aligned
_MOST_THREADS = 64
_OWN_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_Views = dict[str, Tensor]  # by key of the state


@dataclass(eq=False, slots=True)
class _Placed:
    """Where the state of a parameter is: a region, and its tensors as the file has them."""

    region: Region
    starts: dict[str, int]  # in the region
    mapped: _Views

    def views(self, memory: Tensor) -> _Views:
        """The tensors in memory that has the region's bytes."""
        return {key: _seen(memory, start, self.mapped[key]) for key, start in self.starts.items()}


@dataclass(eq=False, slots=True)
class _Piece:
    """Parameters of one group that are updated together, and their state while it is in memory."""

    group: int
    params: list[Tensor]
    buffer: int = -1
    memory: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter, the bytes of its region
    pending: list[Future[None]] = field(default_factory=list)


class PagedState:
    """Steps an optimizer with its state in files. The optimizer stays as it is; its own `step` reads the maps."""

    def __init__(self, optimizer: Optimizer, section: OffloadOptimizerConfig, aio: AioConfig) -> None:
        assert section.nvme_path is not None, "the config is checked"
        self.optimizer = optimizer
        self.failed: BaseException | None = None  # why a step has been left half done
        self._scratch = Scratch(
            section.nvme_path, min(aio.intra_op_parallelism * aio.queue_depth, _MOST_THREADS), aio.block_size
        )
        self._piece_bytes = section.buffer_size
        self._buffers = [aligned(0)] * section.buffer_count
        self._new = aligned(0)  # a buffer for state that has no place yet
        self._freed = 0  # bytes of such state since memory has been given back
        self._placed: dict[Tensor, _Placed] = {}

    def mend(self) -> None:
        """Called when all has been loaded."""
        self.drop_pages()
        self.failed = None

    def step(self) -> None:
        """The optimizer's step, with the same result; all ranks call it, and if it fails on one, all raise."""
        self.check()
        try:
            _together(self._step, "an optimizer step with state in files")
        except BaseException as error:
            self.failed = error  # also where it did not fail: the step is to be one of all ranks
            raise

    @torch.no_grad()
    def _step(self) -> None:
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        before, after = [dict(group) for group in groups], [dict(group) for group in groups]
        hooks = {name: getattr(optimizer, name) for name in _OWN_HOOKS}
        for hook in list(hooks[_OWN_HOOKS[0]].values()):
            hook(optimizer, (optimizer,), {})
        pieces, updated = self._pieces(), 0

        def update(piece: _Piece) -> None:
            # Each begins with the same options: an optimizer may count steps in them.
            after[piece.group] = {**before[piece.group], "params": piece.params}
            optimizer.param_groups = [after[piece.group]]
            optimizer.step()

        try:
            vars(optimizer).update({name: OrderedDict() for name in hooks})  # theirs is the step, not a piece of it
            with closing(self._in_memory(pieces)) as ready:
                for piece in ready:
                    update(piece)
                    updated += 1
        except StateFileError:
            with suppress(Exception):  # that of the file is raised
                self._keep_others_going(pieces[updated:], update)
            raise
        finally:
            optimizer.param_groups = groups
            vars(optimizer).update(hooks)
        for group, changed in zip(groups, after, strict=True):
            group.update({key: value for key, value in changed.items() if key != "params"})
        for hook in list(hooks[_OWN_HOOKS[1]].values()):
            hook(optimizer, (optimizer,), {})
        self.drop_pages()

    def _keep_others_going(self, pieces: list[_Piece], update: Callable[[_Piece], None]) -> None:
        """After an error of a file, update what is left without its state, which stays as it is.

        The optimizers of other ranks may wait for this one, as Muon's and Lamb's do. The parameters get wrong values,
        but the step is half done in any case.
        """
        state = self.optimizer.state
        for piece in pieces:
            kept = {p: state.pop(p) for p in piece.params if p in state}
            try:
                update(piece)
            finally:
                for p in piece.params:
                    state.pop(p, None)
                state.update(kept)

    def look_at(self, tensor: Tensor, *, for_writing: bool = False) -> None:
        """Called before a tensor, which may be of the state, is read or written: only its pages are in memory then."""
        self.drop_pages()
        self._scratch.fetch_pages(local_of(tensor), for_writing=for_writing)

    def drop_pages(self) -> None:
        """Let go of the memory in which state has been looked at, or was new."""
        self._scratch.drop_pages()
        self._new = aligned(0)

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Inside, every trained parameter has state, as before its first step if it has taken none. On all ranks."""
        made = []

        def make() -> None:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    if not self.optimizer.state.get(p) and (state := initial_state(self.optimizer, p, group)):
                        self.optimizer.state[p] = state
                        made.append(p)
                        self._place(p)

        try:
            _together(make, "optimizer state in files")
            yield
        finally:
            for p in made:
                del self.optimizer.state[p]

    def check(self) -> None:
        """Raise if a step has been left half done; a checkpoint that is loaded replaces what it has changed."""
        if self.failed is not None:
            raise StateFileError(
                f"an optimizer step has been left half done, by {type(self.failed).__name__}: {self.failed}; load a "
                "checkpoint, or end the run"
            ) from self.failed

    def _pieces(self) -> list[_Piece]:
        """What is updated together: the same on ranks that have parts of the same parameters, as some optimizers
        exchange parts."""
        pieces = []
        for number, group in enumerate(self.optimizer.param_groups):
            size = 0
            for p in (p for p in group["params"] if p.grad is not None):
                nbytes = self._nbytes(p)
                if not size or size + nbytes > self._piece_bytes:
                    pieces.append(_Piece(number, []))
                    size = 0
                pieces[-1].params.append(p)
                size += nbytes
        return pieces

    def _nbytes(self, p: Tensor) -> int:
        """The bytes of the state of the largest part of a parameter that a rank has."""
        numel = p._layout.box((0,) * p.device_mesh.ndim).numel if isinstance(p, DTensor) else p.numel()
        state = [v for v in self.optimizer.state.get(p, {}).values() if _of_shape(v, p)]
        return max(numel * sum(v.itemsize for v in state or (p, p)), 1)

    def _in_memory(self, pieces: list[_Piece]) -> Generator[_Piece, None, None]:
        """Each piece with its state in memory, which is written when the next one is asked for."""
        free, coming = list(range(len(self._buffers))), iter(pieces)
        reading: deque[_Piece] = deque()
        writing: deque[_Piece] = deque()
        piece = None
        try:
            while True:
                while free and (next_one := next(coming, None)) is not None:
                    next_one.buffer = free.pop()
                    reading.append(next_one)
                    self._begin_to_read(next_one)
                if not reading:
                    break
                piece = reading.popleft()
                self._scratch.wait(piece.pending, "reading")
                for p, memory in piece.memory.items():
                    _exchange(self.optimizer.state.get(p, {}), self._placed[p].mapped, self._placed[p].views(memory))
                yield piece
                writing.append(piece)
                self._begin_to_write(piece)
                while writing and (not (free or reading) or all(each.done() for each in writing[0].pending)):
                    written = writing.popleft()
                    self._scratch.wait(written.pending, "writing")
                    written.memory.clear()  # of a buffer that may be replaced by a larger one
                    free.append(written.buffer)
            for written in writing:
                self._scratch.wait(written.pending, "writing")
        finally:
            last = [] if piece is None else [piece]
            wait([each for known in (*last, *reading, *writing) for each in known.pending])
            for known in last:  # after an error it still has its state in memory
                for p, memory in known.memory.items():
                    _exchange(self.optimizer.state.get(p, {}), self._placed[p].views(memory), self._placed[p].mapped)

    def _begin_to_read(self, piece: _Piece) -> None:
        """Begin to read what has not been replaced since it was written."""
        placed = {p: self._placed[p] for p in piece.params if p in self._placed}
        wanted = sum(each.region.nbytes for each in placed.values())
        if self._buffers[piece.buffer].numel() < wanted:
            self._buffers[piece.buffer] = aligned(wanted)
        start = 0
        for p, each in placed.items():
            memory = piece.memory[p] = self._buffers[piece.buffer][start : start + each.region.nbytes]
            start += each.region.nbytes
            state = self.optimizer.state.get(p, {})
            if any(key in state and _is_same(state[key], tensor) for key, tensor in each.mapped.items()):
                piece.pending += self._scratch.read(each.region, memory)

    def _begin_to_write(self, piece: _Piece) -> None:
        """Begin to write what the optimizer has changed, and put the maps in its place."""
        piece.pending = []
        for p in piece.params:
            state, placed = self.optimizer.state.get(p, {}), self._placed.get(p)
            if placed is None or _forms(_paged(state, p)) != _forms(placed.mapped):
                self._place(p)
                piece.memory.pop(p, None)
                continue
            views = placed.views(piece.memory[p])
            for key, view in views.items():
                if not _is_same(state[key], view):
                    local_of(view).copy_(local_of(state[key]))
                state[key] = placed.mapped[key]
            piece.pending += self._scratch.write(placed.region, piece.memory[p])

    @torch.no_grad()
    def _place(self, p: Tensor) -> None:
        """Write the state of a parameter where it has been before, or to a new region if it is another."""
        state = self.optimizer.state.get(p, {})
        found, placed = _paged(state, p), self._placed.get(p)
        if not found:
            return
        if self._freed > self._piece_bytes:
            self._freed = 0
            _give_back()
        if placed is None or _forms(found) != _forms(placed.mapped):
            starts, end = {}, 0
            for key, value in found.items():
                starts[key] = end
                end += -(-local_of(value).nbytes // _LINE) * _LINE
            region = self._scratch.allocate(end)
            everything = region.mapped()
            mapped = {key: _seen(everything, start, found[key]) for key, start in starts.items()}
            placed = self._placed[p] = _Placed(region, starts, mapped)
        if self._new.numel() < placed.region.nbytes:
            self._new = aligned(placed.region.nbytes)
        for key, view in placed.views(self._new).items():
            local_of(view).copy_(local_of(found[key]))
        self._scratch.wait(self._scratch.write(placed.region, self._new), "writing")
        state.update(placed.mapped)
        self._freed += placed.region.nbytes


def _together(work: Callable[[], None], what: str) -> None:
    """Do what all ranks do. If it fails on some, these raise their own error, and the others one that has it."""
    try:
        ControlPlane.for_group().run_together(work, what)
    except RankError as error:
        own = error.__cause__
        if own is None:
            raise
    else:
        return
    raise own


def _give_back() -> None:
    """Give memory back that is free: new state has been there, and glibc often does not use it for tensors again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _paged(state: Mapping[str, Any], p: Tensor) -> _Views:
    """The tensors of a parameter's state that are in files: those of its shape. Others are small."""
    return {key: value for key, value in state.items() if _of_shape(value, p) and local_of(value).numel()}


def _of_shape(value: Any, p: Tensor) -> bool:
    if type(value) not in (Tensor, DTensor) or value.shape != p.shape or not p.ndim:
        return False
    local = local_of(value)
    return type(local) is Tensor and local.device.type == "cpu" and local.layout is torch.strided


def _forms(tensors: _Views) -> dict[str, Any]:
    """What has to be the same for one tensor to be kept in the place of another."""
    return {key: (local_of(t).dtype, t._layout if isinstance(t, DTensor) else t.shape) for key, t in tensors.items()}


def _seen(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Bytes of memory as a tensor like another."""
    local = local_of(like)
    strides = torch.empty_like(local, device="meta").stride()  # dense, also if that of `like` has gaps
    seen = memory[start : start + local.nbytes].view(local.dtype).as_strided(local.shape, strides)
    return wrap(seen, like._layout) if isinstance(like, DTensor) else seen


def _exchange(state: dict[str, Any], old: _Views, new: _Views) -> None:
    for key, tensor in old.items():
        if key in state and _is_same(state[key], tensor):
            state[key] = new[key]


def _is_same(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and local_of(a).data_ptr() == local_of(b).data_ptr()
