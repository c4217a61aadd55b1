"""Accelerate's FSDP2 settings, with a model of Transformers and, if asked for, peft's LoRA, on terrazzo.

    accelerate launch --use_fsdp --fsdp_version 2 -m terrazzo run examples/libraries/accelerate_lora.py --lora
    torchrun --nproc-per-node 2 -m terrazzo run examples/libraries/accelerate_lora.py --cpu

Nothing here is terrazzo's, but for `fsdp_on_cpu`: Accelerate shards on accelerators only.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM


def make_model(lora: bool = False, tied: bool = False) -> torch.nn.Module:
    """A small model with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


def make_data(samples: int = 32) -> TensorDataset:
    """Random tokens."""
    return TensorDataset(torch.randint(0, 64, (samples, 8), generator=torch.Generator().manual_seed(1)))


def train(
    plugin: FullyShardedDataParallelPlugin | None = None,
    *,
    lora: bool = False,
    tied: bool = False,
    mixed_precision: str = "no",
    batch: int = 4,
    samples: int = 32,
    folder: str | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a pass, and on the main process the weights; with `folder`, saved and resumed on the way."""
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=mixed_precision, cpu=plugin is None)
    model = make_model(lora, tied)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(samples), batch_size=batch))
    losses = []
    for number, (tokens,) in enumerate(loader):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if folder is not None and number == 1:
            accelerator.save_state(folder)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            accelerator.load_state(folder)
    weights = accelerator.get_state_dict(model)
    return losses, {name: value.float().cpu() for name, value in weights.items()} if accelerator.is_main_process else {}


def main() -> None:
    from terrazzo.integrations.accelerate import fsdp_on_cpu

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    with fsdp_on_cpu() if options.cpu else nullcontext():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        losses, weights = train(plugin, lora=options.lora)
    if weights:
        print(" ".join(f"{loss:.4f}" for loss in losses))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
