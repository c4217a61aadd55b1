"""PyTorch's tests of fully_shard ask for GPUs; this has them run on the CPU with gloo, on either library.

"cuda" becomes "cpu" and "nccl" becomes "gloo" wherever a file says so, a GPU is a rank, of which there are four, and
streams and events order nothing. No assertion is changed.
"""

from __future__ import annotations

import ast
import contextlib
import re
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal import common_cuda, common_distributed, common_utils

RANKS = 4
_NAMES = {"cuda": "cpu", "nccl": "gloo", "cpu:gloo,cuda:nccl": "gloo"}


class Stream:
    """In place of a stream and of an event: everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return None

    record = wait = wait_stream = wait_event = synchronize = __exit__ = _nothing

    def record_event(self, *_: Any) -> Stream:
        return Stream()

    def __enter__(self) -> Stream:
        return self


class _GradScaler(torch.amp.grad_scaler.GradScaler):
    def __init__(self, device: str = "cpu", *args: Any, **kwargs: Any) -> None:
        super().__init__(device, *args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None:
    return None


CUDA = types.SimpleNamespace(
    Stream=Stream,
    Event=Stream,
    current_stream=Stream,
    stream=lambda _: contextlib.nullcontext(),
    device_count=lambda: RANKS,
    is_available=lambda: False,
    current_device=lambda: "cpu",
    manual_seed=torch.manual_seed,
    initial_seed=torch.initial_seed,
    amp=torch.amp,
    **dict.fromkeys(("synchronize", "set_device", "empty_cache", "_sleep"), _nothing),
)


class OnCPU(ast.NodeTransformer):
    """What a file says of GPUs, said of the CPU."""

    _in_device = False  # whether what is visited is a property that says which GPU is the rank's

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str):
            text = re.sub(r"^cuda:\d$", "cpu", _NAMES.get(node.value, node.value))
            return ast.copy_location(ast.Constant(text), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and first.value == "cuda:":
            return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if ast.unparse(node) == "torch.cuda":
            return ast.copy_location(ast.Name("__cuda__", ast.Load()), node)
        self.generic_visit(node)
        return node

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        self.generic_visit(node)
        if self._in_device and node.value is not None and ast.unparse(node.value) == "self.rank":
            node.value = ast.copy_location(ast.Constant("cpu"), node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        outer, self._in_device = self._in_device, node.name == "device"
        self.generic_visit(node)
        self._in_device = outer
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.func) == "torch.device":
            node.args = node.args[:1]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            node.args = [ast.Constant("cpu") if ast.unparse(arg) == "self.rank" else arg for arg in node.args]
        for keyword in node.keywords:
            if keyword.arg == "device" and ast.unparse(keyword.value) in ("self.rank", "dist.get_rank()"):
                keyword.value = ast.copy_location(ast.Constant("cpu"), keyword.value)
            if keyword.arg in ("device_ids", "device_id"):
                keyword.value = ast.copy_location(ast.Constant(None), keyword.value)
        return node


def prepare() -> None:
    """Have torch's helpers for tests, in this process, take the CPU for GPUs."""

    def has_ranks(count: int, *_: Any, **__: Any) -> Callable[[Any], Any]:
        return (lambda test: test) if count <= RANKS else unittest.skip(f"needs {count} ranks")

    ours: dict[types.ModuleType, dict[str, Any]] = {
        common_cuda: {"TEST_CUDA": True, "TEST_MULTIGPU": True},
        common_utils: {"get_cycles_per_ms": lambda: 1},
        common_distributed: {
            "skip_if_lt_x_gpu": has_ranks,
            "at_least_x_gpu": lambda count: count <= RANKS,
            "requires_nccl": lambda: lambda test: test,
            "requires_nccl_version": lambda *_: lambda test: test,
        },
    }
    for module, names in ours.items():
        for name, value in names.items():
            setattr(module, name, value)
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    torch.amp.grad_scaler.GradScaler = _GradScaler  # type: ignore[misc]


def helpers(module: types.ModuleType) -> None:
    """`common_fsdp` of PyTorch's tests, with processes for ranks, and eager where it would compile as well."""

    class FSDPTestMultiThread(module.FSDPTest):  # type: ignore[name-defined,misc]  # of a module made here
        def _run_test_method(self) -> None:
            return None

        def perThreadSetUp(self) -> None:
            return None

        def perThreadTearDown(self) -> None:
            return None

    def eager(compile_compute_on_module: Any = None) -> Callable[[Any], Any]:
        return lambda test: test

    module.__dict__.update(
        DEVICE_COUNT=RANKS, FSDPTestMultiThread=FSDPTestMultiThread, test_compiled_fsdp=eager, TEST_CUDA=False
    )
