"""Published weights onto sharded ranks, some steps, and weights to publish: no rank ever has all of the model.

torchrun --nproc-per-node 2 examples/huggingface/finetune.py [PUBLISHED [TRAINED]]

PUBLISHED is a folder of `save_pretrained`, or what `huggingface-cli download` made; without it, a tiny random model.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from terrazzo.fsdp import fully_shard
from terrazzo.integrations.huggingface import load_model, save_model


def make_tiny(folder: Path) -> None:
    """Something to begin with."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def finetune(published: Path, trained: Path, steps: int = 5) -> list[float]:
    """Train on random text; returns the losses."""
    config = AutoConfig.from_pretrained(published)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    load_model(model, published, dtype=torch.float32)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    text = torch.randint(config.vocab_size, (4, 16), generator=generator)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    save_model(model, trained, dtype=torch.bfloat16)
    if dist.get_rank() == 0:
        config.dtype = torch.bfloat16  # as it was saved
        config.save_pretrained(trained)
    return losses


def main() -> None:
    """Run on the ranks that torchrun has started."""
    dist.init_process_group("gloo")
    folders = [None]
    if dist.get_rank() == 0:
        root = Path(tempfile.mkdtemp())
        if not sys.argv[1:]:
            make_tiny(root / "published")
        folders = [root]
    dist.broadcast_object_list(folders)
    root = Path(str(folders[0]))
    published = Path(sys.argv[1]) if sys.argv[1:] else root / "published"
    trained = Path(sys.argv[2]) if sys.argv[2:] else root / "trained"
    losses = finetune(published, trained)
    if dist.get_rank() == 0:
        print("losses", [round(loss, 3) for loss in losses], "weights in", trained)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
