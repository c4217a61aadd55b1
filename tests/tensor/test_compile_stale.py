"""A compiled program is never stale: what it reads besides its arguments, and that changed, counts at the next call.

Every program here runs eagerly and compiled, before and after one change; the eager run says what is right.
"""

from __future__ import annotations

import functools
import gc
import logging
import signal
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import typing_extensions
from torch import nn

import terrazzo
from terrazzo.errors import CaptureError
from terrazzo.graphs.program import CompileWarning

SCALE = 1.0
TABLE = {"scale": [1.0]}
helpers = types.ModuleType("helpers_of_a_test")
helpers.scale = 1.0
WEIGHT = torch.ones(2)


def by_global(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE * TABLE["scale"][0] * helpers.scale


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    factor = [1.0]

    def call(*args: Any) -> Any:
        return function(*args) * factor[0]

    call.factor = factor
    call.calls = 1.0
    return call


@decorated
def by_decorator(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * scale * by_decorator.calls


@dataclass
class Config:
    scale: float = 1.0
    shared: ClassVar[float] = 1.0
    inner: Any = None
    names: dict[str, float] = field(default_factory=lambda: {"a": 1.0})

    @property
    def both(self) -> float:
        return self.scale * SCALE * self.shared


class Slotted:
    __slots__ = ("__hidden", "scale")

    def __init__(self) -> None:
        self.scale, self.__hidden = 1.0, 1.0

    def value(self) -> float:
        return self.scale * self.__hidden


class Pair(NamedTuple):
    first: Config
    second: float = 1.0


class Scale(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * SCALE * Scale.factor


class Base(nn.Module):
    of_base = 1.0

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    @classmethod
    def made(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.of_base


class Model(Base):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config(inner=Config())
        self._list = [1.0]
        self._ordered = OrderedDict(a=[1.0])
        self.slotted = Slotted()
        self.pair = Pair(Config())
        self.lookup = "scale"
        self.layer = nn.Linear(2, 2)
        self.layer.extra = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.static(self.made(by_decorator(by_global(x))))
        x = x * self.config.both * self.config.inner.scale * self.config.names["a"] * self._list[0]
        x = x * self._ordered["a"][0] * self.slotted.value() * self.pair.first.scale
        x = x * getattr(self.config, self.lookup) * self.layer.extra.scale * WEIGHT
        return Scale.apply(x)


def set_global(name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: globals().__setitem__(name, value)


def made_anew(model: Model) -> None:
    model.config = Config(scale=3.0, inner=Config())


CHANGES: dict[str, Callable[[Model], None]] = {
    "a global": set_global("SCALE", 2.0),
    "a list in a global": lambda model: TABLE["scale"].__setitem__(0, 3.0),
    "a variable of a module": lambda model: setattr(helpers, "scale", 4.0),
    "a tensor in a global": set_global("WEIGHT", torch.tensor([5.0, 6.0])),
    "a closure of a decorator": lambda model: by_decorator.factor.__setitem__(0, 2.0),
    "an attribute of a function": lambda model: setattr(by_decorator, "calls", 3.0),
    "an object's attribute": lambda model: setattr(model.config, "scale", 2.0),
    "an inner object's attribute": lambda model: setattr(model.config.inner, "scale", 2.0),
    "a dict of an object": lambda model: model.config.names.__setitem__("a", 2.0),
    "a class variable": lambda model: setattr(Config, "shared", 2.0),
    "one that hides a class variable": lambda model: setattr(model.config, "shared", 5.0),
    "a private list": lambda model: model._list.__setitem__(0, 2.0),
    "a list in an OrderedDict": lambda model: model._ordered["a"].__setitem__(0, 2.0),
    "a slot": lambda model: setattr(model.slotted, "scale", 2.0),
    "a private slot": lambda model: setattr(model.slotted, "_Slotted__hidden", 2.0),
    "an object in a tuple": lambda model: setattr(model.pair.first, "scale", 2.0),
    "an attribute of a base class": lambda model: setattr(Base, "of_base", 2.0),
    "one that hides a base class's": lambda model: setattr(Model, "of_base", 7.0),
    "a method": lambda model: setattr(Base, "static", staticmethod(lambda x: x * 11.0)),
    "a property": lambda model: setattr(Config, "both", property(lambda self: 13.0)),
    "another object": made_anew,
    "an attribute of PyTorch's module": lambda model: setattr(model.layer.extra, "scale", 2.0),
    "what only backward reads": lambda model: setattr(Scale, "factor", 3.0),
}


def run(f: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    result = f(x)
    result.sum().backward()
    return result.detach(), x.grad


@pytest.fixture
def unchanged():
    """What the changes change is as it was afterwards."""
    before = SCALE, WEIGHT
    held = {owner: dict(vars(owner)) for owner in (Base, Model, Config, Scale)}
    yield
    globals().update(SCALE=before[0], WEIGHT=before[1])
    TABLE["scale"][0] = helpers.scale = by_decorator.factor[0] = by_decorator.calls = 1.0
    for owner, names in held.items():
        for name in set(vars(owner)) - set(names):
            delattr(owner, name)
        for name, value in names.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)


def test_what_changed_counts_at_the_next_call(unchanged):
    model = Model()
    fast = terrazzo.compile(model, backend="aot_eager", fullgraph=True, recompile_limit=100)
    torch.testing.assert_close(run(fast), run(model), rtol=0, atol=0)
    for name, change in CHANGES.items():
        before = run(model)
        change(model)
        expected = run(model)
        assert not all(map(torch.equal, before, expected)), f"{name} changes nothing"
        torch.testing.assert_close(run(fast), expected, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")
    graphs = len(terrazzo.compile_report(fast).graphs)
    run(fast)
    assert len(terrazzo.compile_report(fast).graphs) == graphs <= len(CHANGES) + 1


class Modes(nn.Module):
    unused = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.in_training(x) if self.training else self.in_evaluation(x)

    def in_training(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    def in_evaluation(self, x: torch.Tensor) -> torch.Tensor:
        return x * TABLE["scale"][0]

    def elsewhere(self) -> int:
        return self.unused


def test_another_way_through_the_program_costs_one_graph_and_what_it_does_not_read_none(unchanged):
    model = Modes()
    fast = terrazzo.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(2)
    for _ in range(3):
        for training in (True, False):
            fast.train(training)
            fast(x)
        Modes.unused += 1
    assert [graph.calls for graph in terrazzo.compile_report(fast).graphs] == [3, 3]
    globals().update(SCALE=2.0)
    assert fast(x).tolist() == [1.0, 1.0]
    fast.train()
    assert fast(x).tolist() == [2.0, 2.0]


SEEN = {1.0}
QUEUE: deque[Any] = deque([1.0])
ARRAY = np.ones(1)
MANY = set(range(1001))
LONG = [1.0] * 1001
WORDS = {str(i): 1.0 for i in range(1001)}
NESTED = [[1.0]] * 1001
SIGN = 0.0
VARIABLE: ContextVar[float] = ContextVar("variable", default=1.0)


def by_set(x: torch.Tensor) -> torch.Tensor:
    return x * sum(SEEN)


def by_deque(x: torch.Tensor) -> torch.Tensor:
    return x * QUEUE[0]


def by_item(x: torch.Tensor) -> torch.Tensor:
    return x * QUEUE[-1].scale


def by_array(x: torch.Tensor) -> torch.Tensor:
    return x * float(ARRAY[0])


def by_many(x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 if 0 in MANY else 2.0)


def by_long(x: torch.Tensor) -> torch.Tensor:
    return x * LONG[-1] * WORDS["1000"]


def by_nested(x: torch.Tensor) -> torch.Tensor:
    return x * NESTED[0][0]


def appending(x: torch.Tensor) -> torch.Tensor:
    LONG.append(2.0)
    return x * 2


def adding(x: torch.Tensor) -> torch.Tensor:
    SEEN.add(2.0)
    return x * 2


def by_context(x: torch.Tensor) -> torch.Tensor:
    return x * VARIABLE.get()


def counting(x: torch.Tensor) -> torch.Tensor:
    counting.calls += 1
    return x * 2


counting.calls = 0


LOCAL = threading.local()


def by_thread(x: torch.Tensor) -> torch.Tensor:
    return x * getattr(LOCAL, "scale", 1.0)


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_what_a_thread_or_a_context_has_set_is_compared():
    by_variable = terrazzo.compile(by_context, backend="aot_eager", fullgraph=True)
    token = VARIABLE.set(3.0)
    assert by_variable(torch.ones(2)).tolist() == [3.0, 3.0]
    VARIABLE.reset(token)
    assert by_variable(torch.ones(2)).tolist() == [1.0, 1.0]
    by_local = terrazzo.compile(by_thread, backend="aot_eager", fullgraph=True)
    assert by_local(torch.ones(2)).tolist() == [1.0, 1.0]
    for scale in (3.0, 4.0):
        LOCAL.scale = scale
        assert by_local(torch.ones(2)).tolist() == [scale, scale]
    assert in_another_thread(lambda: by_local(torch.ones(2)).tolist()) == [1.0, 1.0]
    del LOCAL.scale
    assert by_local(torch.ones(2)).tolist() == [1.0, 1.0]


def test_sets_and_deques_are_compared():
    for function, change, undo in (
        (by_set, functools.partial(SEEN.add, 2.0), functools.partial(SEEN.remove, 2.0)),
        (by_deque, functools.partial(QUEUE.appendleft, 3.0), QUEUE.popleft),
    ):
        fast = terrazzo.compile(function, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            assert fast(torch.ones(2)).tolist() == [1.0, 1.0]
        assert [graph.calls for graph in terrazzo.compile_report(fast).graphs] == [3]
        change()
        assert fast(torch.ones(2)).tolist() == [3.0, 3.0]
        undo()
        assert fast(torch.ones(2)).tolist() == [1.0, 1.0]
    item = types.SimpleNamespace(scale=1.0)
    QUEUE.append(item)
    fast = terrazzo.compile(by_item, backend="aot_eager", fullgraph=True)
    for item.scale in (1.0, 2.0, 1.0):
        assert fast(torch.ones(2)).tolist() == [item.scale] * 2
    QUEUE.pop()
    for function, what in ((adding, "SEEN"), (appending, "LONG")):
        with pytest.raises(CaptureError, match=f"it changes .*{what}"):
            terrazzo.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert SEEN == {1.0} and len(LONG) == 1001


def test_long_lists_and_dicts_are_compared():
    fast = terrazzo.compile(by_long, backend="aot_eager", fullgraph=True)
    for holder, place in ((LONG, -1), (WORDS, "1000")):
        for value in (1.0, 1.0, 2.0, 1.0):
            holder[place] = value
            assert fast(torch.ones(2)).tolist() == [value] * 2
    before = len(terrazzo.compile_report(fast).graphs)
    fast(torch.ones(2))
    assert len(terrazzo.compile_report(fast).graphs) == before
    for change, undo in (
        (lambda: WORDS.update(new=1.0), lambda: WORDS.pop("new")),
        (lambda: LONG.append(1.0), LONG.pop),
    ):
        change()
        assert fast(torch.ones(2)).tolist() == [1.0, 1.0]
        undo()


def test_numbers_that_python_takes_for_equal_are_others(unchanged):
    """0.0 and -0.0, 1 and 1.0 and True; and a NaN is the same as another."""
    fast = terrazzo.compile(lambda x, s: 1 / (x * s), backend="aot_eager", fullgraph=True)
    for s in (0.0, -0.0, np.float64(0.0), np.float64(-0.0), 1, 1.0, True):
        assert torch.equal(fast(torch.ones(2), s), 1 / (torch.ones(2) * s)), s
    parts = terrazzo.compile(lambda x, s: torch.view_as_real(x * s.conjugate()).reciprocal(), backend="aot_eager")
    for s in (complex(1, 0.0), complex(1, -0.0)):
        assert torch.equal(parts(torch.ones(2), s), torch.view_as_real(torch.ones(2) * s.conjugate()).reciprocal()), s
    keys = terrazzo.compile(lambda x, d: [x * key for key in d], backend="aot_eager", fullgraph=True)
    for key in (1, 1.0, True):
        assert (
            keys(torch.ones(2, dtype=torch.int64), {key: 0})[0].dtype == (torch.ones(1, dtype=torch.int64) * key).dtype
        )
    by_sign = terrazzo.compile(lambda x: 1 / (x * SIGN), backend="aot_eager", fullgraph=True)
    for sign in (0.0, -0.0, 0.0):
        globals().update(SIGN=sign)
        assert by_sign(torch.ones(2)).tolist() == [float("inf") if str(sign) == "0.0" else float("-inf")] * 2
    filled = terrazzo.compile(lambda x, s: x.clamp(min=s), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        filled(torch.ones(2), float("nan"))
    assert [graph.calls for graph in terrazzo.compile_report(filled).graphs] == [3]


@pytest.mark.parametrize(("function", "what"), [(by_array, "ARRAY"), (by_many, "MANY"), (by_nested, "NESTED")])
def test_what_cannot_be_compared_is_refused_with_its_place(function, what):
    with pytest.raises(CaptureError, match=f"it uses {what} in the function at .*test_compile_stale.py") as info:
        terrazzo.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert info.value.line == function.__code__.co_firstlineno
    fast = terrazzo.compile(function, backend="aot_eager")
    with pytest.warns(CompileWarning, match=what):
        assert fast(torch.ones(2)).tolist() == [1.0, 1.0]


class Slot:
    __slots__ = ("pair",)


class Anew(Slot):
    pair = property(lambda self: (float("3"),))  # another object at each look


def test_what_is_made_anew_at_each_look_is_refused():
    held = Anew()
    fast = terrazzo.compile(lambda x: x * held.pair[0], backend="aot_eager")
    with pytest.warns(CompileWarning, match="made anew"):
        assert fast(torch.ones(2)).tolist() == [3.0, 3.0]


def test_a_count_of_calls_is_refused_and_runs_eagerly():
    fast = terrazzo.compile(counting, backend="aot_eager")
    with pytest.warns(CompileWarning, match=r"it changes .*calls"):
        fast(torch.ones(2))
    fast(torch.ones(2))
    assert counting.calls == 2


EVENTS = 0
REFERENCES: list[Any] = []
LOGGER = logging.getLogger("program")


def count(*given: Any, **named: Any) -> None:
    global EVENTS
    EVENTS += 1


class Finalized:
    def __del__(self) -> None:
        count()


class Collections:
    def count(self, phase: str, info: dict[str, int]) -> None:
        count()


class Logged(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        count()


def by_finalizer(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    def provoke() -> None:
        made = Finalized()
        made.itself = made  # type: ignore[attr-defined]  # only a collection frees it
        del made
        gc.collect()

    return provoke


def by_weak_reference(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    def renew(gone: Any = None) -> None:
        made = Collections()
        made.itself = made  # type: ignore[attr-defined]
        REFERENCES.append(weakref.ref(made, renew))
        if gone is not None:
            count()

    renew()
    return gc.collect


def by_callback(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    gc.callbacks.append(Collections().count)
    return gc.collect


def by_allocations(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    gc.callbacks.append(count)
    gc.set_threshold(1)
    return lambda: [[] for _ in range(100)]


def by_signal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    signal.signal(signal.SIGUSR1, count)
    return lambda: signal.raise_signal(signal.SIGUSR1)


def by_warning(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    monkeypatch.setattr(warnings, "showwarning", count)
    return lambda: warnings.warn("a warning", stacklevel=1)


def by_log(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    monkeypatch.setattr(LOGGER, "handlers", [Logged()])
    return lambda: logging.getLogger("program").warning("a warning")


@pytest.fixture
def interrupts():
    """Collections, signals and warnings are as they were afterwards."""
    callbacks, threshold, handler = list(gc.callbacks), gc.get_threshold(), signal.getsignal(signal.SIGUSR1)
    gc.collect()
    globals().update(EVENTS=0)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield
    gc.callbacks[:] = callbacks
    gc.set_threshold(*threshold)
    REFERENCES.clear()
    signal.signal(signal.SIGUSR1, handler)


@pytest.mark.parametrize(
    "cause", [by_finalizer, by_weak_reference, by_callback, by_allocations, by_signal, by_warning, by_log]
)
def test_what_interrupts_a_program_is_no_part_of_it(cause, interrupts, monkeypatch):
    provoke = cause(monkeypatch)

    def program(x: torch.Tensor) -> torch.Tensor:
        provoke()
        return x * SCALE

    callbacks = list(gc.callbacks)
    fast = terrazzo.compile(program, backend="aot_eager", fullgraph=True)
    assert fast(torch.ones(2)).tolist() == [1.0, 1.0]
    assert EVENTS > 0
    assert gc.callbacks == callbacks and gc.isenabled()
    assert len(terrazzo.compile_report(fast).graphs) == 1


class Alike:
    """Methods that are called as handlers of signals and callbacks of collections are, and that are none."""

    def of_signal(self, x: torch.Tensor, number: int, frame: types.FrameType) -> torch.Tensor:
        return x * SCALE

    def of_collection(self, x: torch.Tensor, phase: str, info: dict[str, int]) -> torch.Tensor:
        return x * TABLE["scale"][0]


def test_what_is_only_called_as_handlers_are_is_part_of_the_program(unchanged):
    alike, kinds = Alike(), ["signal", "collection"]

    def program(x: torch.Tensor) -> torch.Tensor:
        of_signal, of_collection = [getattr(alike, "of_" + kind) for kind in kinds]  # found only because they run
        x = of_signal(x, int(signal.SIGUSR1), sys._getframe())
        return of_collection(x, "start", {"generation": 0, "collected": 0, "uncollectable": 0})

    fast = terrazzo.compile(program, backend="aot_eager", fullgraph=True)
    fast(torch.ones(2))
    globals().update(SCALE=2.0)
    TABLE["scale"][0] = 3.0
    assert fast(torch.ones(2)).tolist() == [6.0, 6.0]


def test_a_finalizer_of_what_the_program_makes_is_part_of_it(interrupts):
    def program(x: torch.Tensor) -> torch.Tensor:
        Finalized()
        return x * 2

    with pytest.raises(CaptureError, match="it changes EVENTS"):
        terrazzo.compile(program, backend="aot_eager", fullgraph=True)(torch.ones(2))


def test_what_pytorch_runs_is_no_part_of_a_program():
    """Its modules are imported when they are first needed, and make types with `typing_extensions`."""

    def program(x: torch.Tensor) -> torch.Tensor:
        typing_extensions.TypedDict("Made", {"scale": int})
        return x * 2

    assert terrazzo.compile(program, backend="aot_eager", fullgraph=True)(torch.ones(2)).tolist() == [2.0, 2.0]


class Caching:
    @functools.cached_property
    def mask(self) -> torch.Tensor:
        return torch.ones(2) * 3


def test_what_the_capture_computes_stays_in_no_object():
    cache = Caching()
    fast = terrazzo.compile(lambda x: x * cache.mask, backend="aot_eager")
    with pytest.warns(CompileWarning, match=r"it changes cache.mask"):
        assert fast(torch.ones(2)).tolist() == [3.0, 3.0]
    assert type(cache.mask) is torch.Tensor
    assert fast(torch.ones(2)).tolist() == [3.0, 3.0]


def test_compiled_modules_and_functions_are_freed():
    def use() -> list[weakref.ref[Any]]:
        model = Model()
        fast = terrazzo.compile(model, backend="aot_eager")
        fast(torch.ones(2))
        weight = model.layer.weight
        function = terrazzo.compile(lambda x: x * weight, backend="aot_eager")
        function(torch.ones(2))
        return [weakref.ref(each) for each in (fast, model, weight, function)]

    alive = use()
    gc.collect()
    assert [each() for each in alive] == [None] * 4
    assert sys.getprofile() is None
