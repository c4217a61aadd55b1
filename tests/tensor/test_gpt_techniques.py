"""What people do around a training step, on four ranks against one device: the same GPT, the same gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ranks import run_ranks
from terrazzo.tensor import init_device_mesh
from terrazzo.tensor.parallel import loss_parallel
from tests.tensor.models import GPT, batch_of_words, whole, worst_difference
from tests.tensor.test_gpt import WAYS, place_batch, ways

SOME_WAYS = ["data parallel", "tensor parallel", "data x tensor parallel", "sharded parameters x tensor parallel"]
SOME_WAYS.append("sequence parallel")
SHORT = ["sharded parameters x tensor parallel"]
TOLERANCE = 1e-5


def pair(name: str, **sizes: Any) -> tuple[nn.Module, nn.Module, Any]:
    """The model on one device, its distributed twin, and a function that brings a batch to the twin."""
    way = WAYS[name]
    torch.manual_seed(0)
    reference = GPT(**sizes)
    mesh = init_device_mesh("cpu", way.mesh, mesh_dim_names=("a", "b")[: len(way.mesh)])
    return reference, way.place(copy.deepcopy(reference), mesh), lambda data: place_batch(data, mesh, way)


def in_loss_parallel(name: str) -> Any:
    return loss_parallel() if WAYS[name].loss_parallel else nullcontext()


# ------------------------------------------------------------------ one backward


def gradients_of(name: str, technique: str) -> tuple[float, float, str]:
    recompute = technique if technique in ("reentrant", "non-reentrant") else None
    reference, model, brought = pair(name, recompute=recompute)
    step = {"autocast": autocast, "gradient penalty": penalised, "accumulation": accumulated}.get(technique, ordinary)
    expected = step(reference, lambda data: data)
    with in_loss_parallel(name):
        loss = step(model, brought)
    return (abs(whole(loss).item() - expected.item()), *worst_difference(model, reference, grads=True))


def ordinary(model: nn.Module, brought: Any) -> torch.Tensor:
    loss = model(*brought(batch_of_words(0)))
    loss.backward()
    return loss


def autocast(model: nn.Module, brought: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*brought(batch_of_words(0)))
    assert loss.dtype is torch.float32
    loss.backward()
    return loss


def penalised(model: nn.Module, brought: Any) -> torch.Tensor:
    """Adds the squared norm of the gradient to the loss: its backward goes through the backward."""
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(*brought(batch_of_words(0)))
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + 0.1 * sum(g.square().sum() for g in gradients)
        loss.backward()
    return loss


def accumulated(model: nn.Module, brought: Any) -> torch.Tensor:
    total = 0.0
    for step in range(3):
        loss = model(*brought(batch_of_words(step))) / 3
        loss.backward()
        total = total + loss.detach()
    return total


@pytest.mark.parametrize("name", ways(SOME_WAYS, SHORT))
@pytest.mark.parametrize("technique", ["reentrant", "non-reentrant", "gradient penalty", "accumulation"])
def test_gradients(name, technique):
    for loss, gradient, where in run_ranks(4, gradients_of, name, technique):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE, where


@pytest.mark.parametrize("name", ways(SOME_WAYS, SHORT))
def test_autocast(name):
    # A product of bfloat16 rounds at 2^-8, and terms are rounded before they are summed.
    for loss, gradient, where in run_ranks(4, gradients_of, name, "autocast"):
        assert loss < 5e-3
        assert gradient < 5e-3, where


# ------------------------------------------------------------------ GradScaler


def scaled_training(name: str) -> list[tuple[float, float, bool]]:
    reference, model, brought = pair(name)
    rows = []
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for step in range(5):
        data = batch_of_words(step)
        for m, scaler, optimizer, batch in zip(
            (reference, model), scalers, optimizers, (data, brought(data)), strict=True
        ):
            with in_loss_parallel(name) if m is model else nullcontext():
                scaler.scale(m(*batch)).backward()
            if step == 2:  # an overflow in one element, which one rank holds where parameters are sharded
                with torch.no_grad():
                    m.blocks[0].mlp.up.weight.grad[-1, -1] = float("inf")
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        same_scale = scalers[0].get_scale() == scalers[1].get_scale()
        rows.append((worst_difference(model, reference, grads=False)[0], scalers[1].get_scale(), same_scale))
    return rows


@pytest.mark.parametrize("name", ways(SOME_WAYS, SHORT))
def test_gradient_scaling_skips_the_step_of_an_overflow_everywhere(name):
    for rows in run_ranks(4, scaled_training, name):
        assert all(same for _, _, same in rows)
        assert [scale for _, scale, _ in rows] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
        assert max(difference for difference, _, _ in rows) < TOLERANCE
