"""A GPT that learns a text: a script of one's own, which survives crashes.

    terrazzo train examples/train.toml                     # as train.toml says
    terrazzo train examples/train.toml --per-host 2        # go on, with other ranks
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_gpt.py examples/train.toml    # the same, by hand

What makes it go on is `load_step` before the loop and `save_step` in it; the run's file says which steps are saved and
which checkpoints are kept.  All else is an ordinary script.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from terrazzo.engine import initialize
from terrazzo.launch import StopSignal, read_run

LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Text(Dataset[Tensor]):
    """A file as passages of bytes."""

    def __init__(self, path: Path) -> None:
        self.numbers = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self.numbers[index * LENGTH : (index + 1) * LENGTH + 1]


class GPT(nn.Module):
    """Guesses the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.bytes(numbers) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", help="the run's file")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn; this script, if nothing else")
    options = parser.parse_args()
    run = read_run(options.run)

    torch.manual_seed(0)
    engine = initialize(GPT(), training_data=Text(options.text), config=run.engine)
    stop = StopSignal()
    first = dist.get_rank() == 0
    with run.manager(stop) as manager:
        engine.load_step(manager)
        if first:
            print(f"{dist.get_world_size()} ranks, from step {engine.global_steps}", flush=True)
        for passages in engine.training_dataloader:
            if engine.global_steps >= options.steps:
                break
            passages = passages.to(engine.device)
            loss = F.cross_entropy(engine(passages[:, :-1]).flatten(0, 1), passages[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            # In the background; an error of the save before comes out here.
            if engine.save_step(manager, force=engine.global_steps == options.steps):
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if first:
                    print(f"step {engine.global_steps}: loss {mean / dist.get_world_size():.4f}", flush=True)
            if stop.ending:  # the cluster wants the machines back, and this step is being saved
                break
    if stop.ending:
        stop.leave()
    stop.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
