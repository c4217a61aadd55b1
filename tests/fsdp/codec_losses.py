"""`python -m tests.fsdp.codec_losses > docs/codec-losses.md` trains a GPT with each codec and prints the page."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from ranks import close_all, run_ranks
from terrazzo.demo.model import GPT, Sizes, loss_of
from terrazzo.demo.text import Passages
from terrazzo.fsdp import MXFP8, NVFP4, Codec, Float8Rows, Int8Blocks, MixedPrecisionPolicy, fully_shard, report
from terrazzo.tensor import init_device_mesh

STEPS, LAST, BATCH, RANKS = 200, 20, 16, 2
SIZES = Sizes(width=64, heads=4, blocks=2, length=32)
WAYS: dict[str, tuple[Codec | None, Codec | None]] = {
    "bfloat16": (None, None),
    "int8 blocks": (Int8Blocks(), None),
    "float8 rows": (Float8Rows(), None),
    "MXFP8": (MXFP8(), None),
    "NVFP4": (NVFP4(), None),
    "bfloat16, gradients as int8": (None, Int8Blocks()),
    "int8 blocks, gradients as int8": (Int8Blocks(), Int8Blocks()),
    "MXFP8, gradients as int8": (MXFP8(), Int8Blocks()),
    "bfloat16 in two replicas, gradients as int8": (None, Int8Blocks()),
}

TEXT = f"""\
# Losses with encoded communication

A GPT of {SIZES.blocks} blocks (width {SIZES.width}, {SIZES.heads} heads, sequences of {SIZES.length} characters) learns
the demo's text in {STEPS} steps of AdamW on {RANKS} ranks, {BATCH} sequences each: in bfloat16, with gradients that are
reduced in float32 unless they are encoded. The losses are means over ranks and steps; all ways see the same data. Bytes
are those that a rank sends in a step. What is decoded is rounded, so some difference to bfloat16 remains, whose own
rounding is in all rows; the last digits depend on the processor. In the last row each rank has the whole model, and
gradients are encoded on both ways of their all-reduce, which is as many bytes in float32 as the first row has.

`python -m tests.fsdp.codec_losses > docs/codec-losses.md` makes this page.

| gathered as | first {LAST} steps | last {LAST} steps | last, less bfloat16's | bytes sent |
|---|---|---|---|---|"""


def losses_of(name: str) -> tuple[list[float], int]:
    """The mean loss of each step, and the bytes that a rank sends in one."""
    gather, reduce = WAYS[name]
    mesh = init_device_mesh("cpu", (RANKS, 1) if "replicas" in name else (RANKS,))
    torch.manual_seed(0)
    model = GPT(SIZES)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_codec=gather, reduce_codec=reduce)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    whole = replace(policy, output_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=whole, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    passages = Passages(SIZES.length)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        chosen = torch.randint(len(passages), (BATCH,), generator=generator)
        batch = torch.stack([passages[int(i)] for i in chosen])
        loss = loss_of(model(batch[:, :-1]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses, report(model).moved


def ends_of(name: str) -> tuple[float, float, int]:
    """The mean losses of the first and of the last steps, and the bytes sent."""
    losses, moved = run_ranks(RANKS, losses_of, name)[0]
    return sum(losses[:LAST]) / LAST, sum(losses[-LAST:]) / LAST, moved


def main() -> None:
    print(TEXT)
    reference = 0.0
    for name in WAYS:
        first, last, moved = ends_of(name)
        reference = reference or last
        print(f"| {name} | {first:.4f} | {last:.4f} | {last - reference:+.4f} | {moved:,} |")
    close_all()


if __name__ == "__main__":
    from tests.fsdp import codec_losses  # as ranks know it

    codec_losses.main()
