"""Rename rules for families of models whose layers are fused in the model and separate in the files."""

from __future__ import annotations

from typing import Any

from torch import nn

from terrazzo.integrations.huggingface.rename import Rename, Rule

_LAYER = "model.layers.{n}."


def llama(
    config: Any, *, qkv: str | None = "qkv_proj", gate_up: str | None = "gate_up_proj", grouped: bool = False
) -> Rename:
    """Llama, Mistral, Qwen2 and others with the same names, for a model with fused projections.

    Args:
        config: The model's config; it has the numbers of heads.
        qkv: The model's name for the projection to queries, keys and values, in `self_attn`; None: not fused.
        gate_up: The model's name for the two projections in `mlp`; None: not fused.
        grouped: In the fused projection, the queries of each key are followed by this key and its value; if False, all
            queries come first.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, head_dim=8)
    >>> [link.file for link in llama(config).links({"model.layers.0.self_attn.qkv_proj.weight": (64, 32)})]
    ['model.layers.0.self_attn.q_proj.weight', 'model.layers.0.self_attn.k_proj.weight', \
'model.layers.0.self_attn.v_proj.weight']
    """
    rules = []
    if qkv is not None:
        heads, pairs = config.num_attention_heads, config.num_key_value_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        rules.append(
            Rule(
                f"{_LAYER}self_attn.{qkv}.{{w}}",
                [f"{_LAYER}self_attn.{letter}_proj.{{w}}" for letter in "qkv"],
                sizes=(heads * head, pairs * head, pairs * head),
                groups=pairs if grouped else 1,
            )
        )
    if gate_up is not None:
        rules.append(
            Rule(f"{_LAYER}mlp.{gate_up}.{{w}}", [f"{_LAYER}mlp.{name}_proj.{{w}}" for name in ("gate", "up")])
        )
    return Rename(rules)


def qwen3(
    config: Any, *, qkv: str | None = "qkv_proj", gate_up: str | None = "gate_up_proj", grouped: bool = False
) -> Rename:
    """Qwen3, for a model with fused projections: see `llama`. The norms of queries and keys keep their names.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, head_dim=8)
    >>> [link.file for link in qwen3(config).links({"model.layers.0.mlp.gate_up_proj.weight": (64, 32)})]
    ['model.layers.0.mlp.gate_proj.weight', 'model.layers.0.mlp.up_proj.weight']
    """
    return llama(config, qkv=qkv, gate_up=gate_up, grouped=grouped)


def mixtral(config: Any = None, *, qkv: str | None = None) -> Rename:
    """Mixtral, for a model with stacked experts (`mlp.experts.gate_up_proj`), as in transformers 5, or separate ones.

    Separate experts are `mlp.experts.{e}.w1`, `w2` and `w3`; names that equal those in the files are kept.

    >>> [link.file for link in mixtral().links({"model.layers.0.mlp.experts.down_proj": (2, 8, 4)})]
    ['model.layers.0.block_sparse_moe.experts.0.w2.weight', 'model.layers.0.block_sparse_moe.experts.1.w2.weight']
    """
    file = f"{_LAYER}block_sparse_moe."
    rules = [
        Rule(f"{_LAYER}mlp.gate.weight", f"{file}gate.weight"),
        Rule(
            f"{_LAYER}mlp.experts.gate_up_proj",
            [f"{file}experts.{{e}}.w1.weight", f"{file}experts.{{e}}.w3.weight"],
            dim=1,
        ),
        Rule(f"{_LAYER}mlp.experts.down_proj", f"{file}experts.{{e}}.w2.weight"),
        Rule(f"{_LAYER}mlp.experts.{{e}}.{{w}}.weight", f"{file}experts.{{e}}.{{w}}.weight"),
    ]
    return Rename([*rules, *(llama(config, qkv=qkv, gate_up=None).rules if qkv is not None else ())])


def qwen3_moe(config: Any = None, *, qkv: str | None = None) -> Rename:
    """Qwen3 with experts, for a model with stacked experts, as in transformers 5.

    >>> [link.file for link in qwen3_moe().links({"model.layers.0.mlp.experts.down_proj": (2, 8, 4)})]
    ['model.layers.0.mlp.experts.0.down_proj.weight', 'model.layers.0.mlp.experts.1.down_proj.weight']
    """
    experts = f"{_LAYER}mlp.experts."
    rules = [
        Rule(
            f"{experts}gate_up_proj",
            [f"{experts}{{e}}.gate_proj.weight", f"{experts}{{e}}.up_proj.weight"],
            dim=1,
        ),
        Rule(f"{experts}down_proj", f"{experts}{{e}}.down_proj.weight"),
    ]
    return Rename([*rules, *(llama(config, qkv=qkv, gate_up=None).rules if qkv is not None else ())])


def family_of(model: nn.Module) -> Rename:
    """The rules that a model of transformers needs: where it has stacked experts, the files have separate ones."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    known = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}
    return known[kind]() if kind in known else Rename()
