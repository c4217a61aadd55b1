"""A compiled program: its graphs, each with what it assumes, and the choice between them at each call."""

from __future__ import annotations

import importlib
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from terrazzo._torch.graphs import (
    NEEDS_SHAPE,
    NEEDS_VALUE,
    NO_FAKE,
    any_autocast,
    autocasts,
    dispatch_modes,
    function_modes,
    no_autocast,
)
from terrazzo.comm import captured
from terrazzo.errors import CaptureError, TerrazzoError
from terrazzo.graphs.capture import Backend, Conditions, Graph, NewCode, Subject, capture, distinct
from terrazzo.graphs.surroundings import Executed, NotSearched, Stale, Surroundings
from terrazzo.graphs.values import (
    Unkeyable,
    append_key_but_size,
    append_tensor_keys,
    collect,
    describe_tensor,
    describe_value,
    is_resizable,
)
from terrazzo.tensor import random
from terrazzo.tensor.dtensor import DTensor, local_of
from terrazzo.tensor.links import counts_as_replicated
from terrazzo.tensor.ops.cross_entropy import parallel_loss

_BACKENDS = {"inductor": "terrazzo.graphs.inductor", "aot_eager": "terrazzo.graphs.joint"}
_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_attention = F.scaled_dot_product_attention
_MOST_SEARCHES = 10  # each finds code that has not run before
_MOST_KNOWN = 256  # calls whose graphs are found without a look at their sizes


class CompileWarning(UserWarning):
    """A program that was passed to `terrazzo.compile` runs eagerly."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a program is compiled."""

    backend: str | Callable[..., Any] = "inductor"
    fullgraph: bool = False
    limit: int = 8


@dataclass
class Record:
    """One kind of call: its graph, or the reason why there is none."""

    what: dict[str, str]
    differs: dict[str, tuple[str, str]]
    graph: Graph | None = None
    error: CaptureError | None = None
    calls: int = field(default=0)


Sizes = dict[int, torch.Size]
"""The shapes of those arguments that may have other sizes in the same graph, by position."""


class Family:
    """Graphs whose programs were searched together: what they read is in the same surroundings.

    Another way through a program (evaluation after training) may run more code, which reads more. Then graphs of that
    way belong to another family, and those of before stay.
    """

    def __init__(self, surroundings: Surroundings, number: int) -> None:
        self.surroundings = surroundings
        self.number = number
        self.known: dict[Any, Record] = {}
        self.of_sizes: dict[Any, list[Record]] = {}
        """The records whose graphs serve several sizes, by the key of a call without its sizes."""

    def key(self, given: Sequence[Any], key: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """The key of a call and its tensors, those in the arguments first; raises Stale, Unkeyable."""
        around, numbers = self.surroundings.look()
        tensors = [*given, *around]
        whole = [*key, numbers]
        append_tensor_keys(tensors, whole)
        return tuple(whole), tensors

    def key_but_sizes(self, given: Sequence[Any], key: Sequence[Any], sizes: Sizes) -> Any:
        """The key of a call without these sizes; None if its graphs are for exact sizes, because of a DTensor."""
        around, numbers = self.surroundings.look()
        tensors = [*given, *around]
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            return None
        whole = [*key, numbers, tuple(distinct(tensors)[1])]
        append_tensor_keys([tensor for i, tensor in enumerate(tensors) if i not in sizes], whole)
        return tuple(whole)

    def remember(self, whole: Any, record: Record) -> None:
        """Run calls with this key by this record."""
        if len(self.known) >= _MOST_KNOWN:  # the graphs for several sizes are found again
            self.known = {key: r for key, r in self.known.items() if r.graph is None or r.graph.fits is None}
        self.known[whole] = record


class Program(NotSearched):
    """A function or module, and the graphs of it."""

    def __init__(self, eager: Callable[..., Any], searched: Any, name: str, settings: Settings) -> None:
        """`eager` runs the program; `searched` is the function or module in which its tensors are searched."""
        self.name = name
        self.settings = settings
        self.records: list[Record] = []
        self._eager = eager
        self._searched = searched
        self._families: list[Family] = []  # the one that was used last is first
        self._executed = Executed()
        self._sizes: dict[Any, list[Sizes]] = {}  # of the calls that were captured, by their keys without them
        self._searches = 0
        self._lock = threading.RLock()
        self._beyond: Record | None = None  # for all calls beyond recompile_limit
        self._warned: set[str] = set()
        self._backend: Backend | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if dispatch_modes() or captured.capturing() or F.scaled_dot_product_attention is not _attention:
            return self._eager(*args, **kwargs)  # an active mode must see the operations
        try:
            key, given = self._key(args, kwargs)
            record, tensors = self._find(key, given) or self._miss(key, given, args, kwargs)
        except Unkeyable as reason:
            self._cannot(CaptureError(f"{self.name} is called with {reason}", operation="an argument"))
            return self._eager(*args, **kwargs)
        graph = record.graph
        record.calls += 1
        if graph is None:
            return self._eager(*args, **kwargs)
        return self._run(graph, tensors)

    # ------------------------------------------------------------------ running

    def _run(self, graph: Graph, tensors: Sequence[Any]) -> Any:
        flat: list[Any] = [local_of(tensors[i]).detach() if cut else local_of(tensors[i]) for i, cut in graph.inputs]
        if graph.draws:
            flat += torch.tensor(
                [random.draw_number(mesh, generator) for mesh, generator in graph.draws], device="cpu"
            ).unbind()
        if graph.sizes:
            flat += [tensors[i].shape[dim] for i, dim in graph.sizes]
        if any_autocast():
            with no_autocast():
                results = graph.run(*flat)
        else:
            results = graph.run(*flat)
        for holder, name, value in graph.writes:
            holder[name] = value.build(results, tensors)
        return graph.outputs.build(results, tensors)

    # ------------------------------------------------------------------ keys

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        key: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *_modes()]
        tensors: list[Any] = []
        for arg in args:
            collect(arg, key, tensors)
        if kwargs:
            key.append(tuple(kwargs))
            for arg in kwargs.values():
                collect(arg, key, tensors)
        return key, tensors

    def _find(self, key: list[Any], given: list[Any]) -> tuple[Record, list[Any]] | None:
        for i, family in enumerate(self._families):
            try:
                whole, tensors = family.key(given, key)
            except Stale:
                continue
            record = family.known.get(whole)
            if record is not None:
                if i:
                    self._families = [family, *(other for other in self._families if other is not family)]
                return record, tensors
        return None

    def _newest(self, key: list[Any], given: list[Any]) -> tuple[Family, Any, list[Any]]:
        """The family of all code that has run so far, which is searched again if it is stale; and a call's key."""
        for family in self._families:
            if family.surroundings.executed == self._executed.globals.keys():
                try:
                    return family, *family.key(given, key)
                except Stale:
                    self._families = [other for other in self._families if other is not family]
        self._searches += 1
        surroundings = Surroundings(self._searched, self._executed)
        while surroundings.executed != self._executed.globals.keys():  # it has found what will run in backward
            surroundings = Surroundings(self._searched, self._executed)
        family = Family(surroundings, self._searches)
        self._families = [family, *(other for other in self._families if other.known)]
        try:
            return family, *family.key(given, key)
        except Stale:
            raise Unkeyable("other surroundings at each look: what one of its attributes holds is made anew") from None

    # ------------------------------------------------------------------ calls of a new kind

    def _miss(
        self, key: list[Any], given: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Record, list[Any]]:
        with self._lock:
            found = self._find(key, given)
            if found is not None:
                return found
            sizes, called = _sizes_of(given, key)
            here = [given[i] for i in sizes]
            before = self._sizes.get(called, ())
            for _ in range(_MOST_SEARCHES):
                family, whole, tensors = self._newest(key, given)
                like = family.key_but_sizes(given, called, sizes)
                for record in family.of_sizes.get(like, ()):
                    if record.graph is not None and record.graph.fits is not None and record.graph.fits(here):
                        family.remember(whole, record)
                        return record, tensors
                if self._beyond is not None:
                    return self._beyond, tensors
                what = self._describe(family, args, kwargs, tensors)
                record = Record(what, _difference(what, [other.what for other in self.records]))
                if len(self.records) >= self.settings.limit:
                    record.error = self._too_many(record)
                    self._beyond = record
                    self._warn(record.error)
                    return record, tensors
                try:
                    changing = {} if like is None else _changing(sizes, before)
                    record.graph = self._capture(family.surroundings, tensors, args, kwargs, changing)
                    if record.graph.fits is not None:
                        family.of_sizes.setdefault(like, []).append(record)
                except NewCode:
                    continue
                except CaptureError as error:
                    record.error = error
                break
            else:
                record.error = _located(CaptureError("each call of it runs code that is made anew"), self.name, None)
            if record.error is not None:
                self._cannot(record.error)
            self._sizes.setdefault(called, []).append(sizes)
            family.remember(whole, record)
            self.records.append(record)
            return record, tensors

    def _capture(
        self,
        surroundings: Surroundings,
        tensors: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        changing: dict[int, list[int]],
    ) -> Graph:
        own = self._searched if isinstance(self._searched, nn.Module) else getattr(self._searched, "__self__", None)
        for module in surroundings.modules:
            if module is not own and is_fully_sharded(module):
                raise _located(
                    CaptureError(
                        f"it contains a {type(module).__name__} of fully_shard, whose parameters are gathered while "
                        "it runs: compile the inner modules instead, and call fully_shard on the compiled modules",
                        operation="fully_shard",
                    ),
                    self.name,
                    None,
                )
        if surroundings.uncomparable is not None and surroundings.executed:  # before, it is not known what is used
            label, kind = surroundings.uncomparable
            file, line = self._executed.line_with(label.rpartition(".")[2]) or ("", 0)
            where = f" in the function at {file}:{line}" if file else ""
            raise CaptureError(
                f"terrazzo.compile cannot capture {self.name}: it uses {label}{where}, a {kind}, whose contents cannot "
                "be compared at each call: keep them in a tensor, or in a tuple, list or dict of at most 1000 items",
                operation=label,
                file=file,
                line=line,
            )
        conditions = Conditions(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocasts())
        subject = Subject(self._eager, args, kwargs, tensors, surroundings, conditions)
        if changing:
            try:
                return capture(subject, self._load_backend(), self._executed, changing)
            except NewCode:
                raise
            except Exception:  # a graph for these sizes alone has an error that shows what is wrong, if any
                pass
        try:
            return capture(subject, self._load_backend(), self._executed, {})
        except NewCode:
            raise
        except CaptureError as error:
            raise _located(error, self.name, error) from error.__cause__
        except (NEEDS_VALUE, NEEDS_SHAPE, NO_FAKE) as error:
            raise _located(CaptureError(_why(error), operation=str(error.func)), self.name, error) from error
        except TerrazzoError:
            raise
        except Exception as error:
            raise _located(CaptureError(f"{type(error).__name__}: {error}"), self.name, error) from error

    def _load_backend(self) -> Backend:
        if self._backend is None:
            asked = self.settings.backend
            if isinstance(asked, str):
                self._backend = importlib.import_module(_BACKENDS[asked]).backend
            else:
                self._backend = importlib.import_module(_BACKENDS["aot_eager"]).given(asked)
        assert self._backend is not None
        return self._backend

    def _cannot(self, error: CaptureError) -> None:
        if self.settings.fullgraph:
            raise error
        self._warn(error)

    def _warn(self, error: CaptureError) -> None:
        kind = "limit" if error.operation == "recompile_limit" else "capture"
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{error}. It runs eagerly", CompileWarning, stacklevel=5)

    def _too_many(self, record: Record) -> CaptureError:
        changes = "; ".join(f"{name} is {now}, was {before}" for name, (before, now) in record.differs.items())
        return CaptureError(
            f"{self.name} has {len(self.records)} graphs already, as many as recompile_limit allows, and is called in "
            f"yet another way ({changes or 'its surroundings changed'}); terrazzo.compile_report lists the "
            "differences",
            operation="recompile_limit",
        )

    def _describe(
        self, family: Family, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
    ) -> dict[str, str]:
        what = {"gradients": str(torch.is_grad_enabled()), "autocast": str(autocasts() or None)}
        what["inference mode"] = str(torch.is_inference_mode_enabled())
        what["modes"] = repr(_modes())
        for i, arg in enumerate(args):
            what.update(describe_value(f"argument {i}", arg))
        for name, arg in kwargs.items():
            what.update(describe_value(f"argument {name!r}", arg))
        slots = family.surroundings.slots()
        for (container, name), tensor in zip(slots, tensors[len(tensors) - len(slots) :], strict=True):
            what[container.name_of(name)] = describe_tensor(tensor)
        what.update(family.surroundings.describe())
        what["same tensors"] = str(distinct(tensors)[1])
        what["parts of the program"] = f"search {family.number}"
        return what


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard`, which this package does not know, was called on the module."""
    return hasattr(type(module), "unshard") and hasattr(type(module), "reshard")


def _modes() -> tuple[Any, ...]:
    modes: tuple[Any, ...] = (
        torch.get_default_dtype(),
        counts_as_replicated(),
        parallel_loss.is_entered(),
        autocasts(),
    )
    modes += tuple((type(mode), getattr(mode, "device", None)) for mode in function_modes())
    return modes


def _sizes_of(given: Sequence[Any], key: Sequence[Any]) -> tuple[Sizes, tuple[Any, ...]]:
    """The sizes of a call that may change without another graph, and what else identifies its arguments."""
    sizes = {i: tensor.shape for i, tensor in enumerate(given) if is_resizable(tensor)}
    rest = [*key, tuple(sizes)]
    for i in sizes:
        append_key_but_size(given[i], rest)
    return sizes, tuple(rest)


def _changing(sizes: Sizes, before: Sequence[Sizes]) -> dict[int, list[int]]:
    """The dims of arguments whose sizes are not the same in each call; empty if there are none, as at the first."""
    changing = {
        i: [dim for dim, size in enumerate(shape) if any(other[i][dim] != size for other in before)]
        for i, shape in sizes.items()
    }
    return changing if any(changing.values()) else {}


def _difference(what: dict[str, str], others: Sequence[dict[str, str]]) -> dict[str, tuple[str, str]]:
    """The conditions that differ from those of the most similar other record: the value there, and the value here."""
    differences = [
        {
            name: (other.get(name, "absent"), what.get(name, "absent"))
            for name in {**other, **what}
            if other.get(name) != what.get(name)
        }
        for other in others
    ]
    return min(differences, key=len, default={})


def _why(error: Any) -> str:
    name = error.func.name().partition(".")[0]
    if name in ("aten::_local_scalar_dense", "aten::item"):
        return "it needs a value of a tensor (.item(), float(), if or while on a tensor), which a graph does not have"
    if isinstance(error, NEEDS_SHAPE):
        return f"the shape of the result of {name} depends on values, which are not known in a graph"
    return f"{name} cannot run on tensors without data"


def _located(error: CaptureError, name: str, cause: BaseException | None) -> CaptureError:
    """The error with the line of the program: the innermost that is not in a library's file."""
    for frame, line in reversed(list(traceback.walk_tb(None if cause is None else cause.__traceback__))):
        file = frame.f_code.co_filename
        if not file.startswith((*_PACKAGES, "<")):
            where = f"{file}:{line} ({frame.f_code.co_name})"
            message = f"terrazzo.compile cannot capture {name}: at {where} {error}"
            return CaptureError(message, operation=error.operation, file=file, line=line)
    return CaptureError(f"terrazzo.compile cannot capture {name}: {error}", operation=error.operation)
