"""torchao's float8, int8 and NF4 tensors as this rank's parts: one device's numbers and gradients, or refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import terrazzo
from installed import needs
from ranks import fresh_values, run_ranks
from terrazzo.errors import CommError
from terrazzo.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode

needs("torchao")


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(32, 64, bias=False)
        self.w2 = nn.Linear(32, 64, bias=False)
        self.out = nn.Linear(64, 32, bias=False)

    def forward(self, x: Any) -> Any:
        return self.out(F.silu(self.w1(x)) * self.w2(x))


def near(mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    # A product of float8 is summed in another order; that may round one element of the next cast to another float8.
    error = (mine - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-2, f"{what}: {error:.1e}"


def float8() -> dict[str, int]:
    """A feed-forward layer under tensor and sequence parallelism, by PyTorch's styles and by torchao's."""
    terrazzo.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            parallelize_module,
        )
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_tensor_parallel import (
            Float8ColwiseParallel,
            Float8RowwiseParallel,
            PrepareFloat8ModuleInput,
        )
    assert ColwiseParallel is terrazzo.tensor.parallel.ColwiseParallel
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(2, 64, 32, generator=generator) for _ in range(2))
    torch.manual_seed(1)
    plain = FeedForward()
    received = {}
    theirs = (Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput)
    ours = (ColwiseParallel, RowwiseParallel, PrepareModuleInput)
    for recipe, styles in [
        ("tensorwise", ours),
        ("tensorwise", theirs),
        ("rowwise", ours),
        ("rowwise_with_gw_hp", ours),
    ]:
        config: Any = Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", True)
        one = convert_to_float8_training(copy.deepcopy(plain), config=config)
        one_x = x.clone().requires_grad_()
        expected = one(one_x)
        (expected * weight).sum().backward()
        col, row, prepare = styles
        for sequence in (False, True):
            name = f"{recipe} {col.__name__} {sequence}"
            model = convert_to_float8_training(copy.deepcopy(plain), config=config)
            plan = {"w1": col(), "w2": col(), "out": row()}
            cut = lambda t: t.chunk(2, 1)[mesh.get_local_rank()] if sequence else t  # noqa: B023, E731
            if sequence:
                plan["out"] = row(output_layouts=Shard(1))
                plan[""] = prepare(input_layouts=Shard(1), desired_input_layouts=Replicate())
            model = parallelize_module(model, mesh, plan)
            mine = cut(x.clone()).contiguous().requires_grad_()
            with CommDebugMode() as seen:
                out = model(mine)
            (out * cut(weight)).sum().backward()
            near(out, cut(expected), name)
            near(mine.grad, cut(one_x.grad), f"{name}, gradient of the input")
            for (of, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
                near(p.grad.full_tensor(), q.grad, f"{name}, gradient of {of}")
            received[name] = seen.get_comm_bytes("forward").get("all_gather", 0)
    return received


def test_float8_linear_layers():
    for received in fresh_values(2, float8):
        # What torchao has cast before is gathered in one byte an element.
        assert received["tensorwise ColwiseParallel True"] == 4 * received["tensorwise Float8ColwiseParallel True"]


def quantised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.quantized_training import (
            Int8MixedPrecisionTrainingConfig,
            int8_weight_only_quantized_training,
        )
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = torch.randn(3, 256)
    values = torch.randn(128, 256)

    def of(config: Any) -> torch.Tensor:
        layer = nn.Linear(256, 128, bias=False)
        layer.weight = nn.Parameter(values.clone())
        quantize_(nn.Sequential(layer), config)
        return layer.weight

    weights = {
        "int8 by row": (of(Int8WeightOnlyConfig()), (0, 1), (0,)),
        "int8 in training": (of(int8_weight_only_quantized_training()), (0,), (0,)),
        "int8 products": (of(Int8MixedPrecisionTrainingConfig()), (0, 1), (0, 1)),
        "nf4": (to_nf4(values.clone(), 64, 64), (0,), ()),
    }
    for name, (weight, cuts, joins) in weights.items():
        kind = type(weight.data) if type(weight) is nn.Parameter else type(weight)
        linear = linear_nf4 if name == "nf4" else F.linear
        for placement in (Replicate(), Shard(0), Shard(1)):
            if isinstance(placement, Shard) and placement.dim not in cuts:
                with refuses(f"a {kind.__name__} of shape .* cannot be cut along dim 1"):
                    distribute_tensor(weight, mesh, [placement])
                continue
            placed = distribute_tensor(weight, mesh, [placement])
            assert isinstance(placed.to_local(), kind), f"{name}, {placement}: {type(placed.to_local())}"
            mine = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
            one_x = x.clone().requires_grad_()
            expected = linear(one_x, weight)
            expected.square().sum().backward()
            out = F.linear(mine, placed)
            out.square().sum().backward()
            torch.testing.assert_close(out.full_tensor(), expected, msg=lambda m: f"{name}, {placement}: {m}")  # noqa: B023
            torch.testing.assert_close(mine.grad.full_tensor(), one_x.grad, rtol=1e-4, atol=1e-3)
            if placed.requires_grad:
                torch.testing.assert_close(placed.grad.full_tensor(), weight.grad, rtol=1e-4, atol=1e-3)
                weight.grad = None
            if isinstance(placement, Shard) and placement.dim not in joins:
                with refuses("cannot be joined along dim"):
                    placed.full_tensor()
                continue
            whole = placed.full_tensor()
            assert isinstance(whole, kind)
            assert torch.equal(linear(x, whole), linear(x, weight)), f"{name}, {placement}"


def refuses(match: str) -> Any:

    return pytest.raises(CommError, match=match)


def test_quantised_weights():
    run_ranks(2, quantised)
