"""Experts of int8 (torchao) on different ranks, quantised by Transformers when it loads a model, under `install()`."""

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
from terrazzo.errors import FSDPError
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import init_device_mesh
from terrazzo.tensor.parallel import ExpertParallel, parallelize_module

needs("transformers", "torchao")


def check_experts(folder: str) -> None:
    """Each rank's experts are its own, and values and gradients are those of one process."""
    warnings.simplefilter("ignore")
    terrazzo.install()
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig
    from transformers import MixtralConfig, MixtralForCausalLM, TorchAoConfig
    from transformers.distributed import DistributedConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **sizes)
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        MixtralForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    dense = [".*self_attn.*", "lm_head"]
    int8 = FqnToConfig({r"re:.*experts\.(gate_up_proj|down_proj)": Int8WeightOnlyConfig()})

    def loaded(**more: Any) -> Any:
        quantised = {
            "quantization_config": TorchAoConfig(int8, modules_to_not_convert=dense),
            "experts_implementation": "eager",
        }
        return MixtralForCausalLM.from_pretrained(folder, **quantised, **more).eval()

    alone = loaded()
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    expected = alone(tokens, labels=tokens)
    expected.loss.backward()

    def check_gradients(model: Any) -> None:
        found = dict(model.named_parameters())
        assert found.keys() == dict(alone.named_parameters()).keys()
        for name, p in alone.named_parameters():
            assert p.requires_grad == found[name].requires_grad
            gradient = found[name].grad
            gradient = gradient.full_tensor() if isinstance(gradient, terrazzo.tensor.DTensor) else gradient
            torch.testing.assert_close(gradient, p.grad, rtol=1e-3, atol=1e-6)

    for tokens_reach_experts in ("all_to_all", "all_reduce"):
        both = DistributedConfig(tp_size=2, ep_size=2, ep_implementation=tokens_reach_experts)
        model = loaded(distributed_config=both)
        mine, theirs = (m.model.layers[0].mlp.experts for m in (model, alone))
        half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        for name in ("gate_up_proj", "down_proj"):
            part, all_of_them = getattr(mine, name), getattr(theirs, name)
            part = part.to_local() if isinstance(part, terrazzo.tensor.DTensor) else part
            assert type(part) is type(all_of_them) and type(part).__name__ == "Int8Tensor"
            assert torch.equal(part.dequantize(), all_of_them.dequantize()[half])
        outputs = model(tokens, labels=tokens)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-5)
        outputs.loss.backward()
        check_gradients(model)

    # With fully_shard, which leaves the experts to their ranks: they cannot be cut, and their values stay.
    rank = dist.get_rank()
    for divided in (False, True):
        model = loaded()
        experts = [layer.mlp.experts for layer in model.model.layers]
        if divided:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
            parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})
        else:
            with pytest.raises(
                FSDPError, match="Int8Tensor, a tensor subclass without .* add the parameter to ignored"
            ):
                fully_shard(experts[0])
        frozen = {p for module in experts for p in module.parameters()}
        for layer in model.model.layers:
            fully_shard(layer, ignored_params=frozen)
        fully_shard(model, ignored_params=frozen)
        outputs = model(tokens[rank : rank + 1], labels=tokens[rank : rank + 1])
        torch.testing.assert_close(outputs.logits, expected.logits[rank : rank + 1], rtol=1e-4, atol=1e-5)
        outputs.loss.backward()
        check_gradients(model)


@pytest.mark.long
def test_experts_of_int8(tmp_path: Path) -> None:
    fresh_values(2, check_experts, str(tmp_path), timeout=300)
