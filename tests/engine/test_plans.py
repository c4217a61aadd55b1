"""`tensor_parallel.autotp_size`: Hugging Face's models, cut by their own plans, train as one device does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo
import terrazzo.deepspeed
from engine.runs import averaged, drawn
from installed import needs
from ranks import fresh_values, run_ranks
from terrazzo.engine import initialize
from terrazzo.errors import EngineConfigError

needs("transformers")


def check() -> None:
    warnings.simplefilter("ignore")
    terrazzo.install()
    from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 31}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}

    def llama(tied: bool) -> nn.Module:
        return drawn(lambda: LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)))

    def phi(tied: bool) -> nn.Module:  # its projections are packed
        return drawn(lambda: Phi3ForCausalLM(Phi3Config(**sizes, tie_word_embeddings=tied)))

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(31, (4, 6), generator=generator) for _ in range(3)]
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    on_host = {"device": "cpu"}
    for make, tied, stage, sequence, more in (
        (llama, False, 3, 1, {"offload_optimizer": on_host, "offload_param": on_host}),
        (llama, True, 1, 1, {}),
        (phi, False, 2, 1, {}),
        (llama, False, 2, 2, {"offload_optimizer": on_host}),
    ):
        one = make(tied)
        steps = torch.optim.AdamW(one.parameters(), lr=0.01, weight_decay=0.1)
        config = {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": {"stage": stage, **more}}
        config["sequence_parallel_size"] = sequence
        keys = {**config, "tensor_parallel": {"autotp_size": 2}}
        if more:
            engine = terrazzo.deepspeed.initialize(model=make(tied), config=keys)[0].core
        else:
            engine = initialize(make(tied), config=keys)
        data = engine.ranks.samples
        assert (engine.dp_world_size, engine.mp_world_size) == (2 // sequence, 2)
        for ids in batches:
            expected = one(input_ids=ids, labels=ids).loss
            expected.backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            steps.step()
            steps.zero_grad()
            mine = ids[data.index :: data.size]
            loss = engine(input_ids=mine, labels=mine).loss
            engine.backward(loss)
            assert averaged(loss.detach()) == pytest.approx(expected.item(), rel=1e-5), (make.__name__, tied, stage)
            engine.step()
        state = engine.module_state_dict()
        cut = 0
        for name, value in one.named_parameters():
            found = state[name]
            cut += found.to_local().numel() < value.numel() / 2 if hasattr(found, "to_local") else 0
            whole = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(whole, value.detach(), rtol=1e-3, atol=1e-4, msg=lambda m: f"{name}: {m}")  # noqa: B023
        assert cut or stage < 3
    with pytest.raises(EngineConfigError, match="carries no `tp_plan`"):
        initialize(nn.Linear(2, 2), config={**config, "tensor_parallel": {"autotp_size": 2}})
    with pytest.raises(EngineConfigError, match="3 does not divide the 4 ranks"):
        initialize(llama(False), config={**config, "tensor_parallel": {"autotp_size": 3}})


def test_models_of_hugging_face_are_cut_by_their_plans() -> None:
    fresh_values(4, check, timeout=200)


def check_sixteen_bits() -> None:
    """Weights, gradients and the optimizer's state in bfloat16: the same as a model that is bfloat16 itself."""
    warnings.simplefilter("ignore")
    terrazzo.install()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 31}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = torch.randint(31, (4, 6), generator=torch.Generator().manual_seed(1))
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.5}},
        "bf16": bf16,
        "tensor_parallel": {"autotp_size": 2},
    }
    one = drawn(lambda: LlamaForCausalLM(LlamaConfig(**sizes))).bfloat16()
    steps = torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.5)
    expected = []
    for _ in range(3):
        loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        expected.append(loss.item())
        torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        steps.step()
        steps.zero_grad()
    for stage in (1, 3):
        engine = initialize(
            drawn(lambda: LlamaForCausalLM(LlamaConfig(**sizes))),
            config={**config, "zero_optimization": {"stage": stage}},
        )
        mine = ids[engine.ranks.samples.index :: engine.ranks.samples.size]
        losses = []
        for _ in range(3):
            loss = engine(input_ids=mine, labels=mine).loss
            engine.backward(loss)
            engine.step()
            losses.append(averaged(loss.detach().float()))
        assert losses == pytest.approx(expected, rel=5e-3) and losses[-1] < losses[0], (stage, losses, expected)
        states = [t for state in engine.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        assert len(states) == len(list(one.parameters()))
        assert all(t.dtype is torch.bfloat16 for t in (*states, *engine.module.parameters()))


@pytest.mark.long
def test_models_in_sixteen_bits_are_cut_by_their_plans() -> None:
    fresh_values(4, check_sixteen_bits, timeout=200)


def not_installed() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    config = {"train_batch_size": 4, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(EngineConfigError, match=r"call terrazzo.install\(\) before transformers is imported"):
        initialize(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), config=config)


def test_without_install_it_says_so() -> None:
    run_ranks(2, not_installed)
