"""Transformers shards its models itself, by their plans, under `terrazzo.install()`: one process's numbers.

Tensor, expert and data parallelism, and two of them together, for dense models, packed projections, experts of several
forms, latent attention, tied and shared weights.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import terrazzo
from installed import needs
from integrations.families import DENSE, EXPERTS, config_of
from ranks import fresh_values

needs("transformers")

HOW: dict[str, dict[str, Any]] = {
    "tensor": {"tp_size": 2},
    "data": {"fsdp_size": 2},
    "expert": {"fsdp_size": 2, "ep_size": 2},
    "expert of one batch": {"tp_size": 2, "ep_size": 2},
    # on 4 ranks
    "tensor, data": {"tp_size": 2, "fsdp_size": 2},
    "tensor, data, expert": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    "tensor, data, expert of one batch": {"tp_size": 2, "fsdp_size": 2, "ep_size": 2},
    "expert and replicas": {"fsdp_size": 4, "ep_size": 2},
    "replicas": {"dp_replicate_size": 2, "fsdp_size": 2},
    "replicas, expert": {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
}


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, terrazzo.tensor.DTensor) else tensor


def made(family: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.02, 0.1)
    return model.eval()


def check_same(name: str, found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10, msg=lambda m: f"{name}: {m}")


def check_family(family: str, how: str, folder: str, *, few: bool = False) -> None:
    """Weights, logits, loss, every gradient and their norm, tokens, a step, and three ways to save.

    `few`: all tokens are equal, so that most experts have none.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.checkpoint import (
        consolidate_distributed_checkpoint,
        load_optimizer_distributed,
        save_optimizer_distributed,
    )

    from terrazzo.layout.placement import _StridedShard

    name, rank = f"{family}, {how}", dist.get_rank()
    folder = f"{folder}/{name}"  # which other ranks may still read when this one goes on
    alone = made(family)
    if rank == 0:
        alone.save_pretrained(f"{folder}/before")
    dist.barrier()

    def loaded(path: str, config: dict[str, Any]) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            f"{folder}/{path}", distributed_config=DistributedConfig(**config)
        ).eval()

    def check_state(where: str, model: Any, tolerance: float = 0.0) -> None:
        expected = alone.state_dict()
        found = model.state_dict()
        assert found.keys() == expected.keys(), f"{name}, {where}: {found.keys() ^ expected.keys()}"
        for key, value in found.items():
            check_same(f"{name}, {where}: {key}", whole(value).detach(), expected[key], tolerance)

    model = loaded("before", HOW[how])
    sharded = {key: p for key, p in model.named_parameters() if isinstance(p, terrazzo.tensor.DTensor)}
    placements = {q for p in sharded.values() for q in p.placements}
    assert not all(q.is_replicate() for q in placements), f"{name}: nothing is sharded"
    if (family, how) == ("mixtral", "tensor"):
        packed = sharded["model.layers.0.mlp.experts.gate_up_proj"]
        assert packed.placements == (_StridedShard(1, split_factor=2),)
    check_state("loaded", model)
    tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    if few:
        tokens.fill_(5)
    outputs, expected = (m(tokens, labels=tokens, use_cache=False) for m in (model, alone))
    check_same(f"{name}: logits", whole(outputs.logits), expected.logits, 1e-4)
    check_same(f"{name}: loss", whole(outputs.loss), expected.loss, 1e-5)
    for m in (outputs, expected):
        m.loss.backward()
    gradients = {key: p.grad for key, p in alone.named_parameters()}
    for key, p in model.named_parameters():
        wanted, found = (torch.zeros_like(whole(p)) if g is None else whole(g) for g in (gradients[key], p.grad))
        check_same(f"{name}: gradient of {key}", found, wanted, 2e-3)
    norms = [whole(torch.nn.utils.clip_grad_norm_(m.parameters(), 1e3)) for m in (model, alone)]
    check_same(f"{name}: norm", *norms, 2e-3)
    chosen = [m.generate(tokens[:1], max_new_tokens=5, do_sample=False) for m in (model, alone)]
    assert torch.equal(*chosen), f"{name}: {chosen}"
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False) for m in (model, alone))
    for each in (optimizer, other):
        each.step()
    check_state("a step", model, 5e-2)
    # What is saved, not what one device would have by now: its step differs by rounding.
    with torch.no_grad():
        for key, value in alone.state_dict().items():
            value.copy_(whole(model.state_dict()[key]))
    model.save_pretrained(f"{folder}/after")
    model.save_pretrained(f"{folder}/parts", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, f"{folder}/optimizer")
    dist.barrier()
    if rank == 0:
        consolidate_distributed_checkpoint(f"{folder}/parts", f"{folder}/complete")
        model.config.save_pretrained(f"{folder}/complete")
    dist.barrier()
    check_state("consolidated", AutoModelForCausalLM.from_pretrained(f"{folder}/complete"))
    check_state("saved", AutoModelForCausalLM.from_pretrained(f"{folder}/after"))
    again = loaded("parts", HOW[how])
    check_state("saved in parts", again)
    for p in again.parameters():
        p.grad = torch.zeros_like(p)
    resumed = torch.optim.AdamW(again.parameters(), lr=1e-3, foreach=False)
    load_optimizer_distributed(again, resumed, f"{folder}/optimizer")
    before = dict(zip([key for key, _ in model.named_parameters()], model.parameters(), strict=True))
    for key, p in again.named_parameters():
        for kind, theirs in optimizer.state[before[key]].items():  # none for a parameter without a gradient
            check_same(f"{name}: {kind} of {key}", whole(resumed.state[p][kind]), whole(theirs), 0.0)
    assert len(optimizer.state) > len(gradients) // 2


def check_families(cases: list[tuple[str, str]], folder: str, few: bool = False) -> None:
    warnings.simplefilter("ignore")
    terrazzo.install()
    for family, how in cases:
        try:
            check_family(family, how, folder, few=few)
        except Exception as error:  # of this rank alone, perhaps: without the others it must not go on to the next
            raise AssertionError(f"{family}, {how}: {type(error).__name__}: {error}") from error


@pytest.mark.long
def test_tensor_expert_and_data_parallelism_of_packed_experts(tmp_path: Path) -> None:
    cases = [(family, how) for how in ("tensor", "data", "expert") for family in ("mixtral", "phi3")]
    cases = [(f, h) for f, h in cases if f in EXPERTS or "expert" not in h]
    fresh_values(2, check_families, cases, str(tmp_path / "models"), timeout=300)


@pytest.mark.proof
def test_all_families(tmp_path: Path) -> None:
    two = [(f, h) for f in (*DENSE, *EXPERTS) for h in ("tensor", "data", "expert", "expert of one batch")]
    two = [(f, h) for f, h in two if f in EXPERTS or "expert" not in h]
    fresh_values(2, check_families, two, str(tmp_path / "models"), timeout=1200)


@pytest.mark.proof
def test_several_kinds_of_parallelism_at_once(tmp_path: Path) -> None:
    four = [("mixtral", how) for how in list(HOW)[4:]]
    four += [(f, "tensor, data") for f in ("llama", "phi3", "glm4", "deepseek_v3", "gpt_oss")]
    four += [("qwen3_moe", "replicas, expert"), ("deepseek_v3", "expert and replicas"), ("llama", "replicas")]
    fresh_values(4, check_families, four, str(tmp_path / "models"), timeout=300)
    fresh_values(4, check_families, four[:6], str(tmp_path / "few"), True, timeout=300)
