"""Transformers' `Trainer` with its FSDP2 settings, on terrazzo.

    torchrun --nproc-per-node 2 -m terrazzo run examples/libraries/transformers_trainer.py FOLDER [--cpu]

Nothing here is terrazzo's, but for `fsdp_on_cpu`: Accelerate, on which the `Trainer` stands, shards on accelerators
only.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

FSDP: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": True},
}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random passages."""

    def __init__(self) -> None:
        self.numbers = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.numbers[index], "labels": self.numbers[index]}


def make_model() -> LlamaForCausalLM:
    """A small model with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def train(folder: str, *, batch: int = 4, steps: int = 4, resume: bool = False, **settings: Any) -> list[float]:
    """The losses of the steps; saved after the second, and with `resume` started there."""
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    trainer = Trainer(model=make_model(), args=arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    from terrazzo.integrations.accelerate import fsdp_on_cpu

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    with fsdp_on_cpu() if options.cpu else nullcontext():
        print(train(options.folder, use_cpu=options.cpu, **FSDP))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
