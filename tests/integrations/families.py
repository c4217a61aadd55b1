"""Families of Transformers' models, tiny: what their parallelism is tried with."""

from __future__ import annotations

from typing import Any

_SIZES = {
    "vocab_size": 67,  # uneven on any number of ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_MIXED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}

DENSE: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {},  # with biases
    "qwen3": {"head_dim": 8},  # with norms of heads
    "gemma": {"head_dim": 8},  # tied
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "phi": {},
    "phi3": {},  # packed
    "glm": {"head_dim": 8},  # packed
    "glm4": {"head_dim": 8},
    "olmo2": {},
    "cohere": {},
    "granite": {},
    "smollm3": {},
    "starcoder2": {},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},  # biases, sinks, transposed
    "glm4_moe": {**_MIXED, "head_dim": 8, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**_MIXED, **_LATENT, "n_group": 2, "topk_group": 1},
    "dots1": {**_MIXED, "n_shared_experts": 1, "num_key_value_heads": 4},  # norms of heads, reduced by hand
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},  # outputs of projections are gathered
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "phimoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "input_jitter_noise": 0.0,  # random in training
        "router_jitter_noise": 0.0,
    },
}


def config_of(family: str) -> Any:
    """The configuration of a tiny model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**_SIZES | (DENSE | EXPERTS)[family])
