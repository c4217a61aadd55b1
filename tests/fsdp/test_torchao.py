"""torchao's float8 and int8 weights: fewer bytes are gathered, and they train as under PyTorch's fully_shard."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from installed import needs
from ranks import run_ranks
from terrazzo.fsdp import MXFP8, NVFP4, fully_shard
from terrazzo.tensor import init_device_mesh
from terrazzo.tensor.debug import CommDebugMode

needs("torchao")


class ByBytes:
    """An all-gather for PyTorch's: gloo does not know float8."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, async_op: bool = False):
        views = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        return dist.all_gather_into_tensor(*views, group=group, async_op=async_op)


def build(what: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
    if what == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        return convert_to_float8_training(model, config=config)
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    quantize_(model, Int8MixedPrecisionTrainingConfig())
    return model


def check(what: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    models = []
    for function in (fully_shard, torch_fsdp.fully_shard):
        model = build(what)
        for layer in (model[0], model[2]):
            function(layer, mesh=mesh)
            if function is not fully_shard:
                layer.set_custom_all_gather(ByBytes())
        models.append(function(model, mesh=mesh))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(16, 32, generator=generator)
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    with CommDebugMode() as mode, torch.no_grad():
        models[0](x)
    # Two matrices of one byte an element, of which each rank sends half; the rest are scales and largest values.
    if what == "float8":  # torchao gathers int8 weights in the precision that they rest in
        assert mode.get_total_bytes("forward") < 2 * 32 * 64 // 2 + 1500


@pytest.mark.parametrize("what", ["float8", "int8"])
def test_quantized_gather(what):
    run_ranks(2, check, what)


def check_bytes() -> None:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 512, generator=generator) * torch.logspace(-2, 2, 512)
    for x in (rows, rows.bfloat16()):
        values, scales = MXFP8().encode(x)
        wanted_scales, wanted = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        assert torch.equal(values, wanted.view(torch.uint8))
        assert torch.equal(scales.squeeze(-1), wanted_scales.view(torch.uint8))
        pairs, scales, of_rows = NVFP4().encode(x)
        for i, row in enumerate(x.split(1)):  # a tensor's second scale is a row's here
            second = per_tensor_amax_to_scale(row.abs().max())
            wanted_scales, wanted = nvfp4_quantize(row, 16, second)
            assert torch.equal(pairs[i], wanted[0]) and pairs.view(torch.float4_e2m1fn_x2).shape == pairs.shape
            assert torch.equal(scales[i, :, 0], wanted_scales[0].view(torch.uint8))
            assert torch.equal(of_rows[i].view(torch.float32).flatten(), second.view(1))


@pytest.mark.long
def test_codecs_make_the_bytes_of_torchao():
    run_ranks(1, check_bytes)
