"""Transformers shards its models itself, by plans: with packed weights and experts, under `terrazzo.install()`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import terrazzo
from installed import needs
from ranks import fresh_values

needs("transformers")


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, terrazzo.tensor.DTensor) else tensor


def check_mixtral(folder: str) -> None:
    """Weights, loss, gradients, a step and the saved model are those of one process."""
    warnings.simplefilter("ignore")
    terrazzo.install()
    from transformers import MixtralConfig, MixtralForCausalLM

    from terrazzo.layout.placement import _StridedShard

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **sizes)
    torch.manual_seed(0)
    alone = MixtralForCausalLM(config).eval()
    if dist.get_rank() == 0:
        alone.save_pretrained(f"{folder}/before")
    dist.barrier()
    model = MixtralForCausalLM.from_pretrained(f"{folder}/before", tp_plan="auto").eval()
    placed = {name: p.placements for name, p in model.named_parameters() if isinstance(p, terrazzo.tensor.DTensor)}
    assert placed["model.layers.0.mlp.experts.gate_up_proj"] == (_StridedShard(1, split_factor=2),)
    expected = dict(alone.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(whole(p), expected[name]), name
    tokens = torch.arange(12).reshape(2, 6)
    losses = [m(tokens, labels=tokens).loss for m in (model, alone)]
    torch.testing.assert_close(whole(losses[0]), losses[1])
    for loss in losses:
        loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p.grad), expected[name].grad, rtol=1e-4, atol=1e-6)
    for m in (model, alone):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    model.save_pretrained(f"{folder}/after")
    dist.barrier()
    again = MixtralForCausalLM.from_pretrained(f"{folder}/after")
    for name, p in again.named_parameters():
        torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_mixtral_by_its_own_plan(tmp_path: Path) -> None:
    fresh_values(2, check_mixtral, str(tmp_path), timeout=300)
