"""What the fuzzer runs: a program is a mesh and some Python statements about tensors `v0`, `v1`, ...

The statements run twice, with two meanings of the few names that make tensors: DTensors on the ranks of the mesh, and
the same tensors on one device.  They are plain text, so that ranks can be sent them, a failing one can be cut down line
by line, and what is left can be pasted into a file.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from terrazzo.layout import Partial, Placement, Replicate, Shard
from terrazzo.tensor import DTensor
from tests.tensor.sweep.placing import choose, distribute

MESHES: tuple[tuple[int, ...], ...] = ((2,), (4,), (2, 2))


@dataclass(frozen=True)
class Program:
    """Statements that run on the ranks of a mesh of these sizes."""

    mesh: tuple[int, ...]
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"mesh = {self.mesh}", *self.steps])

    @classmethod
    def parse(cls, text: str) -> Program:
        """What `str` gave; empty lines and comments are left out."""
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        return cls(ast.literal_eval(lines[0].removeprefix("mesh = ")), tuple(lines[1:]))

    def script(self) -> str:
        """The program for `torchrun`, from the root of the repository."""
        ranks = 1
        for n in self.mesh:
            ranks *= n
        names = ("Partial", "Replicate", "Shard")
        lines = [
            f"# PYTHONPATH=src:tests:. torchrun --nproc-per-node {ranks} program.py",
            "import copy",
            "import numpy as np",
            "import torch",
            "import torch.nn.functional as F",
            f"from terrazzo.tensor import {', '.join(names)}, init_device_mesh",
            "from tests.tensor.fuzz.program import distributed",
            f'mesh = init_device_mesh("cpu", {self.mesh})',
            "globals().update(distributed(mesh))  # leaf, index, place: on one device `plain()` has their meanings",
            *self.steps,
        ]
        return "\n".join(lines)


# ------------------------------------------------------------------ the names that statements use


def plain() -> dict[str, Any]:
    """The meanings on one device."""

    def leaf(shape: Sequence[int], dtype: str, *placements: Placement, grad: bool = False) -> torch.Tensor:
        return _values(shape, dtype).clone().requires_grad_(grad)

    def index(data: Any, *placements: Placement) -> torch.Tensor:
        return torch.tensor(data)

    def place(tensor: torch.Tensor, *placements: Placement) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    return {**_COMMON, "leaf": leaf, "index": index, "place": place}


def distributed(mesh: Any) -> dict[str, Any]:
    """The meanings on a mesh."""

    def leaf(shape: Sequence[int], dtype: str, *placements: Placement, grad: bool = False) -> DTensor:
        return distribute(_values(shape, dtype).requires_grad_(grad), mesh, list(placements))

    def index(data: Any, *placements: Placement) -> torch.Tensor:
        tensor = torch.tensor(data)
        return distribute(tensor, mesh, list(placements)) if placements else tensor

    def place(tensor: DTensor, *placements: Placement) -> torch.Tensor:
        # Whether a redistribution gives the same memory, and in which order, is not promised: hence the clone.
        return tensor.redistribute(mesh, list(placements)).clone(memory_format=torch.contiguous_format)

    return {**_COMMON, "leaf": leaf, "index": index, "place": place}


_COMMON: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "np": np,
    "copy": copy,
    "Shard": Shard,
    "Replicate": Replicate,
    "Partial": Partial,
}


def _values(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Small whole numbers, which every floating type holds exactly, all different while there are enough of them."""
    kind = getattr(torch, dtype)
    count = 1
    for n in shape:
        count *= n
    numbers = (torch.arange(count) * 7 + 3) % 31 - 11
    if kind == torch.bool:
        return (numbers % 3 == 0).reshape(tuple(shape))
    if kind.is_complex:
        return torch.complex(numbers.float(), (numbers % 5).float()).to(kind).reshape(tuple(shape))
    return numbers.to(kind).reshape(tuple(shape))


def placements_for(shape: tuple[int, ...], floating: bool, mesh_ndim: int, rng: random.Random) -> str:
    """Placements as arguments of a statement, chosen as the sweep chooses them."""
    family = rng.choice(("replicate", "shard", "shard", "shard", "partial", "mixed"))
    return ", ".join(
        repr(p.reduce_op).join(("Partial(", ")")) if isinstance(p, Partial) else _text(p)
        for p in choose(shape, floating, family, mesh_ndim, rng, rng.randrange(8))
    )


def _text(placement: Placement) -> str:
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"


# ------------------------------------------------------------------ statements as code


@lru_cache(maxsize=4096)
def compiled(step: str) -> CodeType:
    return compile(step, "<step>", "exec")


@lru_cache(maxsize=4096)
def variables_read(step: str) -> frozenset[str]:
    """The program's own variables that a statement needs."""
    read = set()
    for node in ast.walk(ast.parse(step)):
        if isinstance(node, ast.Name) and is_variable(node.id):
            if isinstance(node.ctx, (ast.Load, ast.Del)) or _is_augmented(step):
                read.add(node.id)
    return frozenset(read)


def _is_augmented(step: str) -> bool:
    return any(isinstance(node, ast.AugAssign) for node in ast.walk(ast.parse(step)))


def is_variable(name: str) -> bool:
    return name[0] == "v" and name[1:].isdigit()


def simplified(step: str) -> list[str]:
    """The statement with one operation less, or with a simpler tensor: what a shrinker tries."""
    tree = ast.parse(step)
    found = []
    for node in ast.walk(tree):
        for parent_field, old, new in _simpler_children(node):
            _put(node, parent_field, old, new)
            found.append(ast.unparse(tree))
            _put(node, parent_field, new, old)
    return [text for text in dict.fromkeys(found) if text != step]


def _simpler_children(node: ast.AST) -> list[tuple[str, ast.AST, ast.AST]]:
    changes: list[tuple[str, ast.AST, ast.AST]] = []
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                of_module = isinstance(child.func.value, ast.Name) and not is_variable(child.func.value.id)
                if not of_module:
                    changes.append((name, child, child.func.value))
                elif child.args:
                    changes.append((name, child, child.args[0]))
            elif isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
                if child.func.id == "leaf" and child.keywords:
                    changes.append((name, child, ast.Call(child.func, child.args, [])))
                if child.func.id == "leaf" and ast.unparse(child.args[1]) != "'float32'":
                    args = [child.args[0], ast.Constant("float32"), *child.args[2:]]
                    changes.append((name, child, ast.Call(child.func, args, child.keywords)))
                if child.func.id in ("Shard", "Partial"):
                    changes.append((name, child, ast.Call(ast.Name("Replicate", ast.Load()), [], [])))
            elif isinstance(child, ast.Subscript) and isinstance(child.ctx, ast.Load):
                changes.append((name, child, child.value))
            elif isinstance(child, (ast.BinOp, ast.UnaryOp)):
                inner = child.left if isinstance(child, ast.BinOp) else child.operand
                if not isinstance(inner, ast.Constant):
                    changes.append((name, child, inner))
    return changes


def _put(node: ast.AST, field: str, old: ast.AST, new: ast.AST) -> None:
    value = getattr(node, field)
    if isinstance(value, list):
        value[[id(v) for v in value].index(id(old))] = new
    else:
        setattr(node, field, new)
