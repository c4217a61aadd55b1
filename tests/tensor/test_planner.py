"""What the planner chooses, against all that it could choose; what it says about that; and what a plan costs to make.

No ranks are needed: plans are made from shapes and placements.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from ranks import run_ranks
from terrazzo.comm.axis import _axes_by_mesh, axis_of
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard, moved_bytes
from terrazzo.tensor import DTensor, explain, init_device_mesh
from terrazzo.tensor.dispatch.candidates import Candidate, candidates_of
from terrazzo.tensor.dispatch.empties import takes_empty_shards
from terrazzo.tensor.dispatch.planner import choices, make_plan
from terrazzo.tensor.dispatch.spec import Call, Operand, Spec
from terrazzo.tensor.ops.table import apply_rule
from tests.layout.test_layout import Mesh

R = Replicate()


def call_of(name: str, func: Callable[..., Any], layouts: list[Layout]) -> tuple[Call, Spec]:
    operands = [Operand(layout, (i,)) for i, layout in enumerate(layouts)]
    call = Call(name, func, tuple(operands), {}, operands)
    spec = apply_rule(call)
    assert spec is not None
    return call, spec


def random_call(draw: random.Random, meshes: list[tuple[int, ...]]) -> tuple[Spec, list[Layout]]:
    shape_of_mesh = draw.choice(meshes)
    mesh = Mesh(shape_of_mesh, (0,) * len(shape_of_mesh))
    a, b, c = (draw.choice([64, 256, 1024, 4096]) for _ in range(3))
    d = draw.choice([8, 16, 64])
    name, func, shapes = draw.choice(
        [
            ("mm", torch.mm, [(a, b), (b, c)]),
            ("bmm", torch.bmm, [(d, a, b), (d, b, c)]),
            ("linear", F.linear, [(d, a, b), (c, b)]),
            ("add", torch.add, [(a, b), (b,)]),
            ("add", torch.add, [(a, b), (a, b)]),
        ]
    )
    layouts = []
    for shape in shapes:
        among: list[Placement] = [R, Partial(), *(Shard(k) for k in range(len(shape)))]
        layouts.append(Layout.of(mesh, [draw.choice(among) for _ in shape_of_mesh], shape))
    return call_of(name, func, layouts)[1], layouts


def combinations(
    spec: Spec, layouts: list[Layout], m: int = 0, sharded: dict[int, list[int]] | None = None
) -> Iterator[tuple[Candidate, ...]]:
    """Whatever all mesh dims together can choose."""
    mesh_shape, sharded = layouts[0].mesh_shape, sharded or {}
    if m == len(mesh_shape):
        yield ()
        return
    for candidate in candidates_of(spec, layouts, m, mesh_shape, sharded, (), None):
        now = {f: list(ms) for f, ms in sharded.items()}
        if candidate.factor is not None:
            now.setdefault(candidate.factor, []).append(m)
        for rest in combinations(spec, layouts, m + 1, now):
            yield (candidate, *rest)


def lies_there(spec: Spec, layouts: list[Layout], m: int, candidate: Candidate) -> bool:
    """Whether what has the loop is sharded on it already, or replicated."""
    return candidate.factor is not None and all(
        layout.placements[m] in (need, R)
        for layout, need, dims in zip(layouts, candidate.ins, spec.ins, strict=True)
        if candidate.factor in dims
    )


def elements(spec: Spec, layouts: list[Layout], chosen: tuple[Candidate, ...]) -> float:
    """What one rank receives by the steps of the transitions, and by reducing the terms of the results."""
    mesh_shape = layouts[0].mesh_shape
    total = 0.0
    for i, layout in enumerate(layouts):
        total += moved_bytes(layout, layout.with_placements([c.ins[i] for c in chosen]), 1)
    for m, candidate in enumerate(chosen):
        for j, shape in enumerate(spec.shapes):
            if isinstance(candidate.outs[j], Partial) and not lies_there(spec, layouts, m, candidate):
                cuts = [n for n, c in zip(mesh_shape, chosen, strict=True) if isinstance(c.outs[j], Shard)]
                total += 2 * prod(shape) / prod(cuts) * (mesh_shape[m] - 1) / mesh_shape[m]
    return total


def chosen_and_least(count: int, meshes: list[tuple[int, ...]]) -> list[tuple[float, float]]:
    draw, found = random.Random(7), []
    for _ in range(count):
        spec, layouts = random_call(draw, meshes)
        chosen = tuple(choice.best for choice in choices(spec, layouts) if choice.best is not None)
        least = min(elements(spec, layouts, c) for c in combinations(spec, layouts))
        found.append((elements(spec, layouts, chosen), least))
    return found


def test_on_a_line_nothing_is_cheaper_than_what_is_chosen() -> None:
    for cost, least in chosen_and_least(400, [(4,), (8,), (2,)]):
        assert cost == pytest.approx(least, rel=1e-6, abs=4)  # transitions count whole elements


def test_on_several_mesh_dims_little_is_cheaper() -> None:
    found = chosen_and_least(500, [(2, 4), (4, 2), (8, 8), (2, 2, 2)])
    assert sum(cost <= 1.01 * least + 8 for cost, least in found) >= 0.9 * len(found)
    assert sum(cost for cost, _ in found) <= 1.1 * sum(least for _, least in found)


def test_every_rank_chooses_alike() -> None:
    draw = random.Random(3)
    for _ in range(50):
        spec, layouts = random_call(draw, [(2, 4), (3, 2)])
        here = [choice.best for choice in choices(spec, layouts)]
        mesh = Mesh(layouts[0].mesh_shape, tuple(n - 1 for n in layouts[0].mesh_shape))
        there = [Layout.of(mesh, layout.placements, layout.shape, layout.order) for layout in layouts]
        assert [choice.best for choice in choices(spec, there)] == here


# ------------------------------------------------------------------ thousands of ranks


def boxes_asked(
    monkeypatch: pytest.MonkeyPatch, func: Callable[..., Any], shapes: list[tuple[int, ...]], ranks: int
) -> int:
    """How many boxes are asked for until it is known whether all ranks can run a call of operands cut along dim 0."""
    mesh = Mesh((ranks,), (0,))
    layouts = [Layout.of(mesh, [Shard(0)], shape) for shape in shapes]
    call, spec = call_of(func.__name__, func, layouts)
    plan = make_plan(call, spec)
    assert plan is not None
    asked = 0
    box = Layout.box

    def counted(layout: Layout, *args: Any) -> Any:
        nonlocal asked
        asked += 1
        return box(layout, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Layout, "box", counted)
        locals_ = [torch.zeros(tuple(o.dst.local_shape)) for o in plan.operands]
        assert takes_empty_shards(spec, plan, func, locals_, {})
    return asked


def test_a_missed_plan_asks_few_ranks_what_they_hold(monkeypatch) -> None:
    for ranks in (8, 4096):
        assert boxes_asked(monkeypatch, torch.add, [(ranks, 2), (ranks, 2)], ranks) == 0
        assert boxes_asked(monkeypatch, torch.relu, [(3 * ranks, 2)], ranks) == 0
        # Full, short and no shards: of the operand, and of the result where one is empty.
        assert boxes_asked(monkeypatch, torch.relu, [(ranks + ranks // 4 + 1, 2)], ranks) <= 6


def test_the_first_operations_import_nothing() -> None:
    program = """
import sys, torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from terrazzo.tensor import Shard, init_device_mesh, ones
dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
x = ones(8, 8, device_mesh=init_device_mesh("cpu", (8,)), placements=[Shard(0)])
known = set(sys.modules)
(x @ x.t()).relu().add(x).softmax(-1).sum(0)[:, None][[0, 1]]
print(len(set(sys.modules) - known), "sympy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "False"]


# ------------------------------------------------------------------ explanations


def what_explain_says() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = DTensor.from_local(torch.zeros(2, 4, dtype=torch.bfloat16), mesh, [Shard(0)])
    w = DTensor.from_local(torch.zeros(1, 16, dtype=torch.bfloat16), mesh, [Shard(0)])
    said = explain(torch.mm, x, w)
    (choice,) = said.choices
    assert said.operation == "mm" and choice.chosen is not None
    # Of 4 x 16 elements of two bytes three quarters come from others.
    assert (choice.chosen.receives, choice.chosen.reduces) == (96, 0)
    assert choice.chosen.results == torch.mm(x, w).placements == (Shard(0),)
    by_terms = next(option for option in choice.options if option.results == (Partial(),))
    assert by_terms.reduces == 2 * 8 * 16 * 2 * 3 // 4 and by_terms.receives == 8 * 4 * 2 * 3 // 16
    assert by_terms.counted and by_terms.cost > choice.chosen.cost
    assert "fewest bytes, 96 against" in choice.reason and "96 " in str(said)

    row = explain(F.linear, x.redistribute(placements=[Shard(1)]), w.t())
    assert row.choices[0].chosen is not None and not row.choices[0].chosen.counted
    assert row.choices[0].chosen.results == (Partial(),)
    # Keyword and in-place forms are the same calls.
    assert explain(torch.mm, input=x, mat2=w) == said
    before = x.to_local().clone()
    assert [option.results for option in explain(torch.Tensor.add_, x, w[:, :1].sum()).choices[0].options] == [
        (Shard(0),)
    ]
    assert torch.equal(x.to_local(), before)
    alone = DeviceMesh("cpu", [[3, 2], [1, 0]])
    known = axis_of(alone, 0), axis_of(alone, 1)
    if dist.get_rank() == 0:  # this makes no process group for both dims, for which it would wait
        explain(torch.mean, DTensor.from_local(torch.zeros(4), alone, [Shard(0), Shard(0)]), 0)
        images = DTensor.from_local(torch.zeros(1, 2, 3), alone, [Shard(0), Shard(0)])
        explain(F.batch_norm, images, None, None, training=True)
        explain(F.cross_entropy, images[:, :, 0], DTensor.from_local(torch.zeros(1).long(), alone, [Shard(0)] * 2))
        assert {*_axes_by_mesh[id(alone)][1].values()} == {*known}
    apart = explain(torch.softmax, x.redistribute(placements=[Shard(1)]), 1)
    assert apart.choices == () and "softmax: " in str(apart)
    with pytest.raises(DTensorError, match="none of the arguments"):
        explain(torch.mm, x.to_local(), w.to_local())


def test_explanations() -> None:
    run_ranks(4, what_explain_says)
