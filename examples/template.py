"""A training loop to copy: fully_shard, mixed precision, accumulation, tensor parallelism, checkpoints, resume.

    torchrun --nproc-per-node 4 examples/template.py --folder runs/mine
    torchrun --nproc-per-node 2 examples/template.py --folder runs/mine --steps 200     # goes on, on other ranks
    torchrun --nproc-per-node 4 examples/template.py --folder runs/tp --tensor-parallel 2

Put your model and your data in place of `GPT` and `batch_of`. One process alone runs it too, as under a debugger.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.checkpoint import CheckpointManager
from terrazzo.fsdp import MixedPrecisionPolicy, fully_shard
from terrazzo.tensor import init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HEADS, LAYERS, LENGTH = 64, 4, 2, 32
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()  # learns this file


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        # -1 heads: with tensor parallelism a rank has some of them.
        q, k, v = (part(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.bytes(numbers) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(step: int, size: int) -> Tensor:
    """The whole batch of a step. It follows from the step, so a run that resumes needs no position in the data."""
    begins = torch.randint(len(TEXT) - LENGTH, (size,), generator=torch.Generator().manual_seed(step))
    return torch.stack([TEXT[begin : begin + LENGTH + 1] for begin in begins.tolist()])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", required=True, help="where checkpoints go; a URL too")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="samples in a step, of all ranks together")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches for one step of the optimizer")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--dtype", default="bfloat16", help="parameters are used in this dtype, and kept in float32")
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args(arguments)

    # Ranks: torchrun says how many; one process alone is a group of one rank.
    accelerator, world = torch.accelerator.current_accelerator(True), int(os.environ.get("WORLD_SIZE", 1))
    device = "cpu" if accelerator is None else accelerator.type
    sizes = (world // options.tensor_parallel, options.tensor_parallel)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("data", "tensor"))
    ranks, rank, first = mesh["data"].size(), mesh["data"].get_local_rank(), dist.get_rank() == 0

    # The model: tensor parallelism first, then what is gathered together.
    torch.manual_seed(0)
    model = GPT().to(device)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, options.dtype), reduce_dtype=torch.float32)
    for block in model.blocks:
        if options.tensor_parallel > 1:
            columns, rows = dict.fromkeys("q k v up".split(), ColwiseParallel()), ("out", "down")
            parallelize_module(block, mesh["tensor"], columns | dict.fromkeys(rows, RowwiseParallel()))
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding

    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(options.folder, save=options.save_every, keep=3) as manager:
        begin = 0 if manager.latest_step() is None else manager.restore("latest", state)
        if first:
            print(f"{world} ranks on {device}, from step {begin}", flush=True)
        for step in range(begin + 1, options.steps + 1):
            mine = batch_of(step, options.batch).chunk(ranks)[rank].to(device)
            mean = torch.zeros((), device=device)
            for number, part in enumerate(mine.chunk(options.accumulation), start=1):
                model.set_requires_gradient_sync(number == options.accumulation)  # gradients are reduced once
                logits = model(part[:, :-1]).float()
                loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / options.accumulation
                loss.backward()
                mean += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if manager.save(step, state, force=step == options.steps):  # in the background
                dist.all_reduce(mean)
                if first:
                    print(f"step {step}: loss {mean.item() / world:.4f}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
