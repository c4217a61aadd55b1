"""`CommDebugMode`: every collective and every operation within a block, by module, and by forward and backward."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any, Self

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from terrazzo._torch.dispatching import OpOverload, TorchDispatchMode
from terrazzo._torch.groups import group_called
from terrazzo.comm import CommEvent, add_observer, remove_observer, wire
from terrazzo.layout import Placement
from terrazzo.layout.drawing import Shown
from terrazzo.tensor.debug.counts import ByCollective, kind_of_operator
from terrazzo.tensor.debug.record import (
    Collective,
    ModuleTree,
    Operation,
    Phase,
    add_totals,
    describe_argument,
    json_tree,
    text_table,
)
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dispatch.structure import map_tensors
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.foreign import is_torch_dtensor


class CommDebugMode(Shown):
    """A context manager that records communication; entering it again starts a new record.

    It records each collective of this process just before it starts, wherever it comes from: operations on DTensors,
    conversions, `fully_shard`, and user code that calls `torch.distributed` or functional collectives. Collectives of
    forward and of backward are recorded separately, each under the module that it belongs to.

    Bytes are what a rank sends with the best algorithm, on average over the ranks; see `terrazzo.comm.observe`.

    >>> mode = CommDebugMode()
    >>> with mode:
    ...     _ = torch.nn.Linear(2, 2)(torch.ones(1, 2))
    >>> mode.get_total_counts(), mode.get_comm_counts()["all_reduce"]
    (0, 0)
    """

    def __init__(self) -> None:
        self._reset()
        self._open: ExitStack | None = None

    def _reset(self) -> None:
        self._tree = ModuleTree()
        self._collectives: list[Collective] = []

    def __enter__(self) -> Self:
        if self._open is not None:
            raise RuntimeError("this CommDebugMode has been entered already: create another one inside it")
        self._reset()
        tree = self._tree
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(tree.enter).remove)
            stack.callback(register_module_forward_hook(tree.leave, always_call=True).remove)
            add_observer(self._observe)
            stack.callback(remove_observer, self._observe)
            stack.enter_context(_LocalOperations(tree, self._add))
            stack.enter_context(_DistributedOperations(tree))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        assert self._open is not None
        stack, self._open = self._open, None
        stack.__exit__(*exc)

    def _observe(self, event: CommEvent) -> None:
        self._add(event.kind, event.axis.name, event.axis.size, event.bytes, event.op)

    def _add(self, kind: str, axis: str, ranks: int, nbytes: int, op: str | None) -> None:
        self._collectives.append(self._tree.write_collective(kind, axis, ranks, nbytes, op))

    def __str__(self) -> str:
        counts, moved = self.get_comm_counts(), self.get_comm_bytes()
        seen = [f"{counts[kind]} {kind}, {moved[kind]:,} bytes" for kind in counts]
        return f"CommDebugMode: {'; '.join(seen) or 'no communication'}"

    # ------------------------------------------------------------------ numbers

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective, in the order in which they started."""
        return tuple(self._collectives)

    def get_comm_counts(self, phase: Phase | None = None) -> ByCollective:
        """How many collectives of each kind there were; `phase` limits that to forward or backward.

        Looked up as described at `ByCollective`: `counts["all_reduce"]`, or torch's operator for it.
        """
        return self._sum(phase, lambda _: 1)

    @property
    def comm_counts(self) -> ByCollective:
        """`get_comm_counts()`, under PyTorch's name for it."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[Phase, ByCollective]]:
        """How many collectives of each kind each module had, in forward and in backward, by full name.

        A module's numbers include those of the modules in it, and `"Global"` has the totals. Other modules are listed
        only if they had a collective.
        """
        result: dict[str, dict[Phase, ByCollective]] = {}
        add_totals(self._tree.root, result)
        return result

    def get_comm_bytes(self, phase: Phase | None = None) -> ByCollective:
        """How many bytes the collectives of each kind moved."""
        return self._sum(phase, lambda collective: collective.bytes)

    def get_total_counts(self, phase: Phase | None = None) -> int:
        """How many collectives there were."""
        return sum(self.get_comm_counts(phase).values())

    def get_total_bytes(self, phase: Phase | None = None) -> int:
        """How many bytes they moved."""
        return sum(self.get_comm_bytes(phase).values())

    def _sum(self, phase: Phase | None, amount: Callable[[Collective], int]) -> ByCollective:
        if phase not in (None, "forward", "backward"):
            raise ValueError(f"phase must be 'forward', 'backward' or None (both), not {phase!r}")
        result = ByCollective()
        for collective in self._collectives:
            if phase is None or collective.phase == phase:
                result.add(collective.kind, amount(collective))
        return result

    # ------------------------------------------------------------------ modules

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """The parameters of each module that ran, as they were when it first ran: module name -> name -> tensor."""
        return {record.fqn: dict(record.parameters) for _, record in self._tree.root.walk() if record.parameters}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of each parameter that is a DTensor, by full parameter name."""
        return {
            f"{record.fqn}.{name}": parameter.placements
            for _, record in self._tree.root.walk()
            for name, parameter in record.parameters.items()
            if isinstance(parameter, DTensor)
        }

    # ------------------------------------------------------------------ tables

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A text table by module.

        Args:
            noise_level: What is shown.
                0: the number and bytes of the collectives of each module;
                1: also parameters, every operation on DTensors but trivial ones, and each collective in its place;
                2: also operations on plain local tensors but trivial ones;
                3: all operations.
        """
        return text_table(self._tree.root, _checked(noise_level))

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str | PathLike[str] = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the text table to a file."""
        with open(file_name, "w", encoding="utf-8") as file:
            file.write(self.generate_comm_debug_tracing_table(noise_level))

    def generate_json_dump(self, file_name: str | PathLike[str] = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the tree of modules as JSON, for a browser.

        Each module is an object with `fqn`, `module_type`, `parameters`, `collectives_forward`,
        `collectives_backward`, `operations_forward`, `operations_backward` and `children`; the noise levels are those
        of the table.
        """
        with open(file_name, "w", encoding="utf-8") as file:
            json.dump(json_tree(self._tree.root, _checked(noise_level)), file, indent=2)


def _checked(noise_level: int) -> int:
    if noise_level not in (0, 1, 2, 3):
        raise ValueError(f"noise_level must be 0, 1, 2 or 3, not {noise_level!r}")
    return noise_level


_TRIVIAL = frozenset(
    "detach alias view _unsafe_view view_as reshape t transpose permute expand slice select unsqueeze squeeze "
    "as_strided lift_fresh _to_copy clone empty empty_like empty_strided new_empty zeros_like ones_like "
    "new_zeros copy is_same_size stride size sym_size unbind split split_with_sizes set "
    "requires_grad dim numel item _local_scalar_dense is_floating_point contiguous wait_tensor".split()
)


def _record(tree: ModuleTree, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], distributed: bool) -> None:
    name = canonical_name(func)[0]
    arguments = [describe_argument(a) for a in args] + [f"{k}={describe_argument(v)}" for k, v in kwargs.items()]
    trivial = name in _TRIVIAL or name.startswith(("get_", "set_", "__get__", "__set__"))
    shown = f"aten.{name}" if isinstance(func, OpOverload) and "::" not in name else name
    tree.write(Operation(shown, tuple(arguments), distributed, trivial))


class _DistributedOperations(TorchFunctionMode):
    """Records the operations that the user calls on DTensors."""

    def __init__(self, tree: ModuleTree) -> None:
        super().__init__()
        self._tree = tree

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            _record(self._tree, func, args, kwargs, distributed=True)
        return func(*args, **kwargs)


class _LocalOperations(TorchDispatchMode):
    """Records what runs on local tensors, and collectives that do not go through `terrazzo.comm`."""

    def __init__(self, tree: ModuleTree, add: Callable[[str, str, int, int, str | None], None]) -> None:
        super().__init__()
        self._tree = tree
        self._add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) or is_torch_dtensor(t) for t in types):
            return NotImplemented  # it is decomposed first; the parts arrive here
        kind = kind_of_operator(func)
        if kind is None:
            _record(self._tree, func, args, kwargs, distributed=False)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not wire.sending.now:  # collectives of terrazzo.comm have been recorded by the observer
            self._add_foreign(kind, [*args, *kwargs.values(), result])
        return result

    def _add_foreign(self, kind: str, values: Sequence[Any]) -> None:
        group = _group_among(values)
        ranks = 1 if group is None else group.size()
        sizes: list[int] = []
        map_tensors(list(values), lambda t: sizes.append(t.nbytes))
        whole = max(sizes, default=0)
        moved = whole * (ranks - 1) // ranks
        name = "" if group is None else group.group_name
        self._add(kind, name, ranks, 2 * moved if kind == "all_reduce" else moved, None)


def _group_among(args: Sequence[Any]) -> ProcessGroup | None:
    for arg in args:
        if isinstance(arg, ProcessGroup):
            return arg
        if isinstance(arg, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(arg)
            except RuntimeError:
                continue  # a ReduceOp or another boxed argument
        if isinstance(arg, str):
            try:
                return group_called(GroupName(arg))
            except (RuntimeError, ValueError):
                continue  # the string is the name of a reduction
    return None
