"""Experts of Transformers' models on different ranks, by `ExpertParallel`: one process's loss, gradients and files."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from installed import needs
from ranks import fresh_values
from terrazzo.fsdp import fully_shard
from terrazzo.integrations.huggingface import load_model, save_model
from terrazzo.tensor import DTensor, init_device_mesh
from terrazzo.tensor.parallel import ExpertParallel, parallelize_module

needs("transformers")

EXPERTS = "model.layers.*.mlp.experts"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "Mixtral": ({"num_local_experts": 5}, EXPERTS),
    "Qwen3Moe": ({"num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "head_dim": 8}, EXPERTS),
    "GptOss": ({"num_local_experts": 4, "head_dim": 8}, EXPERTS),  # with biases, transposed
    "Olmoe": ({"num_experts": 4}, EXPERTS),
    "GraniteMoe": ({"num_local_experts": 4}, "model.layers.*.block_sparse_moe.experts"),
}


def made(family: str, implementation: str) -> Any:
    import transformers

    more, _ = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**SIZES, **more, experts_implementation=implementation)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    return model.eval()


def placed(model: Any, family: str, ep: int) -> Any:
    """Experts over `ep` ranks, and all parameters sharded over the rest."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("rest", "ep"))
    parallelize_module(model, mesh["ep"], {FAMILIES[family][1]: ExpertParallel()})
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            fully_shard(module, mesh=mesh["rest"]).set_gradient_divide_factor(ranks)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_families(names: list[str], implementations: list[str], folder: str) -> None:
    warnings.simplefilter("ignore")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(64, (ranks, 1, 7), generator=torch.Generator().manual_seed(1))
    tokens[0] = 3  # few experts have tokens
    for family in names:
        for implementation in implementations:
            alone = made(family, implementation)
            model = placed(copy.deepcopy(alone), family, 2)
            expected = torch.stack([alone(x, labels=x).loss for x in tokens])
            expected.mean().backward()
            loss = model(tokens[rank], labels=tokens[rank]).loss
            loss.backward()
            torch.testing.assert_close(loss, expected[rank], rtol=1e-4, atol=1e-4)
            gradients = {name: p.grad for name, p in alone.named_parameters()}
            for name, p in model.named_parameters():
                wanted = gradients[name]
                mine = torch.zeros_like(wanted) if p.grad is None else whole(p.grad)
                torch.testing.assert_close(
                    mine, wanted, rtol=1e-3, atol=1e-5, msg=lambda m, n=f"{family} {name}": f"{n} {m}"
                )
            if implementation != implementations[0]:
                continue
            save_model(model, f"{folder}/{family}")  # as in the files of its family: split experts, if they are
            if rank == 0:
                alone.config.save_pretrained(f"{folder}/{family}")
            dist.barrier()
            again = type(alone).from_pretrained(f"{folder}/{family}")
            state = alone.state_dict()
            for name, p in again.state_dict().items():
                torch.testing.assert_close(p, state[name], rtol=0, atol=0)
            other = made(family, implementation)
            for p in other.parameters():
                p.data.zero_()
            other = placed(other, family, min(4, ranks) if family != "Mixtral" else 1)
            load_model(other, f"{folder}/{family}")
            for name, p in other.named_parameters():
                torch.testing.assert_close(whole(p), state[name], rtol=0, atol=0)


def test_mixtral_and_gpt_oss(tmp_path: Path) -> None:
    fresh_values(2, check_families, ["Mixtral", "GptOss"], ["eager"], str(tmp_path), timeout=300)


@pytest.mark.long
def test_families(tmp_path: Path) -> None:
    implementations = ["eager", "grouped_mm", "batched_mm"]
    fresh_values(4, check_families, list(FAMILIES), implementations, str(tmp_path), timeout=400)
