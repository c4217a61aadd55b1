"""Cross entropy of logits sharded over the classes: one device's value and gradients, without a gather of the
logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ranks import device_type, run_ranks
from terrazzo.errors import MixedTensorError
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.parallel import loss_parallel

pytestmark = pytest.mark.on_late

R = Replicate()

# Shape of the logits, mesh, their placements, and how a target DTensor is placed (None: a plain tensor).
LAYOUTS: list[tuple[Any, ...]] = [
    ((5, 3), (4,), [Shard(1)], None),  # the last rank has no class
    ((3, 7, 2, 5), (4,), [Shard(1)], [Shard(0)]),
    ((6, 8), (2, 2), [Shard(0), Shard(1)], [Shard(0), R]),
]
# As some of the above, with other dims.
MORE: list[tuple[Any, ...]] = [
    ((9,), (4,), [Shard(0)], None),
    ((6, 9), (2, 2), [Shard(1), Shard(1)], None),
    ((6, 8), (4,), [Shard(1)], None),
    ((4, 6, 5), (2, 2), [Shard(2), Shard(1)], [Shard(1), R]),
    ((6, 7), (4,), [Shard(-1)], [R]),
    ((4, 6, 5), (4,), [Shard(1)], None),
    ((5, 7), (2, 2), [Shard(1), Shard(0)], [R, Shard(0)]),
    ((6, 8), (2, 2), [R, Shard(1)], None),
]


def differences(layout: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> dict[Any, float]:
    """For every option the largest difference of the value and of first and second derivatives."""
    shape, mesh_shape, placements, target_placements = layout
    mesh = init_device_mesh(device_type(), mesh_shape)
    dim = 1 if len(shape) > 1 else 0
    classes, samples = shape[dim], [n for d, n in enumerate(shape) if d != dim]
    logits = torch.randn(shape, dtype=dtype) * 3
    indices = torch.randint(0, classes, samples)
    indices = indices.masked_fill(torch.rand(samples) < 0.2, 1) if samples else indices
    probabilities = torch.randn(shape, dtype=dtype).softmax(dim)
    weights = torch.rand(classes, dtype=dtype) + 0.1
    options = itertools.product(["mean", "sum", "none"], [None, weights], [0.0, 0.3], [-100, 1], [False, True])
    found = {}
    for reduction, weight, smoothing, ignore, by_probability in options:
        if by_probability and (ignore == 1 or target_placements is None and len(mesh_shape) > 1):
            continue
        given = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore}
        x = logits.clone().requires_grad_()
        target = probabilities.clone().requires_grad_() if by_probability else indices
        expected = F.cross_entropy(x, target, **given)
        y = distribute_tensor(logits, mesh, placements).requires_grad_()
        wanted = target.detach()
        if by_probability or target_placements is not None:
            wanted = distribute_tensor(wanted, mesh, placements if by_probability else target_placements)
        if by_probability:
            wanted.requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(y, wanted, **given)
        inputs, expected_inputs = ([y, wanted], [x, target]) if by_probability else ([y], [x])
        pairs = [(loss, expected)]
        first = torch.autograd.grad(loss.square().sum(), inputs, create_graph=True)
        expected_first = torch.autograd.grad(expected.square().sum(), expected_inputs, create_graph=True)
        pairs += zip(first, expected_first, strict=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        expected_second = torch.autograd.grad(sum(g.square().sum() for g in expected_first), expected_inputs)
        pairs += zip(second, expected_second, strict=True)
        worst = 0.0
        for mine, other in pairs:
            assert isinstance(mine, DTensor) and mine.dtype == other.dtype and mine.shape == other.shape
            assert torch.equal(mine.full_tensor().isnan(), other.isnan())
            difference = (mine.full_tensor() - other).detach().nan_to_num().abs()
            worst = max(worst, (difference / other.detach().abs().nan_to_num().clamp(min=1)).max().item())
        found[reduction, weight is not None, smoothing, ignore, by_probability] = worst
    return found


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.long) for each in MORE)], ids=str)
def test_every_option_with_gradients_of_both_orders(layout):
    for found in run_ranks(4, differences, layout):
        assert len(found) >= 24
        assert max(found.values()) < 1e-9, {k: v for k, v in found.items() if v >= 1e-9}


def placements_and_bytes() -> None:
    mesh, plane = init_device_mesh(device_type(), (4,)), init_device_mesh(device_type(), (2, 2))
    logits, target = torch.randn(64, 512), torch.randint(0, 512, (64,))
    x = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with CommDebugMode() as seen, loss_parallel():
        loss = nn.CrossEntropyLoss()(x, target)
        assert loss.placements == (R,)
        loss.backward()
    assert seen.get_total_bytes() <= 3 * 2 * 64 * 4, "three reductions of a number a row, and nothing in backward"
    outside = F.cross_entropy(x, distribute_tensor(target, mesh))
    assert (outside.full_tensor() - loss.full_tensor()).abs() < 1e-5
    y = distribute_tensor(logits, plane, [Shard(0), Shard(1)])
    spread = distribute_tensor(target, plane, [Shard(0), R])
    with loss_parallel():
        assert F.cross_entropy(y, spread).placements == (Partial("sum"), R)
        assert F.cross_entropy(y, spread, reduction="none").placements == (Shard(0), R)
        with pytest.raises(MixedTensorError, match="target must be a DTensor"):
            F.cross_entropy(y, target)
        with pytest.raises(IndexError, match="out of bounds"):
            F.cross_entropy(x, target + 500)
        with pytest.raises(ValueError, match="reduction"):
            F.cross_entropy(x, target, reduction="product")
        # As on one device: class probabilities are floating point numbers, class indices are int64 or uint8.
        shares = torch.zeros(64, 512, dtype=torch.int64)
        for wrong in ((shares,), (shares.bool(),), (target.float(),), (target.int(),), (shares.float(), None, None, 1)):
            for each in (logits, x):
                with pytest.raises(RuntimeError, match="point|ignore_index|int64|Long"):
                    F.cross_entropy(each, *wrong)
        terms = DTensor.from_local(logits[:, :128] / 2, plane, [Partial(), Shard(1)])
        whole = F.cross_entropy(torch.cat([logits[:, :128]] * 2, 1), target % 256)
        assert abs(F.cross_entropy(terms, target % 256).full_tensor() - whole) < 1e-5
        assert torch.equal(F.cross_entropy(logits, target), F.cross_entropy(logits, target))


def small_indices() -> None:
    """Class indices in uint8, which must neither wrap nor be a mask."""
    mesh = init_device_mesh(device_type(), (4,))
    logits, target = torch.randn(6, 500), torch.tensor([0, 3, 130, 200, 255, 1], dtype=torch.uint8)
    everywhere = distribute_tensor(target, mesh)
    for weight in (None, torch.rand(500)):
        options = {"weight": weight}
        expected = F.cross_entropy(logits, target, **options)
        placed = options if weight is None else options | {"weight": distribute_tensor(weight, mesh)}
        for placement in (Shard(1), Shard(0), R):
            x = distribute_tensor(logits, mesh, [placement])
            torch.testing.assert_close(F.cross_entropy(x, everywhere, **placed).full_tensor(), expected)
        with loss_parallel():
            x = distribute_tensor(logits, mesh, [Shard(1)])
            torch.testing.assert_close(F.cross_entropy(x, target, **options).full_tensor(), expected)


def test_class_indices_in_uint8():
    run_ranks(4, small_indices)


@pytest.mark.cpu_only("an accelerator finds out later")
def test_placements_bytes_and_refusals():
    run_ranks(4, placements_and_bytes)


def precision() -> None:
    mesh = init_device_mesh(device_type(), (4,))
    logits, target = torch.randn(16, 40) * 4, torch.randint(0, 40, (16,))
    logits[0, 3] = float("-inf")
    target[0] = 5
    exact = F.cross_entropy(logits, target)
    for dtype in (torch.bfloat16, torch.float16):
        x = distribute_tensor(logits.to(dtype), mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(x, target)
            loss.backward()
            assert loss.dtype is dtype and x.grad.dtype is dtype and x.grad.full_tensor().isfinite().all()
            assert abs(loss.full_tensor().float() - exact) < 0.03
            with torch.autocast(device_type(), dtype):
                assert F.cross_entropy(x, target).dtype is torch.float32


def test_half_precision_is_computed_in_single():
    run_ranks(4, precision)
