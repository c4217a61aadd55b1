"""`python -m tests.tensor.gpt_proof` trains a GPT under every parallelism and prints docs/gpt-proof.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ranks import close_all, run_ranks
from tests.tensor.parallel.test_styles import against_torch
from tests.tensor.test_gpt import STEPS, UNEVEN, WAYS, train_both
from tests.tensor.test_gpt_techniques import SOME_WAYS, gradients_of

TEXT = f"""\
# A GPT under every parallelism, against one device

A GPT of two blocks (width 32, 4 heads, 64 words, sequences of 16, batches of 8; float32) is trained for {STEPS} steps
of AdamW with `clip_grad_norm_`, once on one device and once distributed over four ranks (gloo). Before each step the
loss, every gradient and the gradients' norm are compared. A gradient's difference is its worst element's, over the
largest element of that gradient where this is above 1. The tables hold the worst of all steps and ranks.

`python -m tests.tensor.gpt_proof > docs/gpt-proof.md` makes this page; the tests in `tests/tensor/test_gpt*.py` hold
every number below 1e-5 (below 5e-3 where bfloat16 rounds).
"""


def training(sizes: dict[str, int | bool], steps: int, batch: int, names: list[str]) -> None:
    print("| parallelism | mesh | loss | gradient | norm |")
    print("|---|---|---|---|---|")
    for name in names:
        rows = [row for rank in run_ranks(4, train_both, name, sizes, steps, batch) for row in rank]
        loss, gradient, norm = (max(row[i] for row in rows) for i in (0, 1, 3))
        mesh = " x ".join(map(str, WAYS[name].mesh))
        print(f"| {name} | {mesh} | {loss:.1e} | {gradient:.1e} | {norm:.1e} |")


def techniques() -> None:
    print("| technique | " + " | ".join(SOME_WAYS) + " |")
    print("|---" * (len(SOME_WAYS) + 1) + "|")
    for technique in ("reentrant", "non-reentrant", "gradient penalty", "accumulation", "autocast"):
        cells = []
        for name in SOME_WAYS:
            results = run_ranks(4, gradients_of, name, technique)
            cells.append(" / ".join(f"{max(result[i] for result in results):.1e}" for i in (0, 1)))
        print(f"| {technique} | " + " | ".join(cells) + " |")


def main() -> None:
    print(TEXT)
    training({}, STEPS, 8, list(WAYS))
    print("\n## What does not divide\n\n61 words, width 24, 3 heads, sequences of 7, batches of 5, two steps.\n")
    training(UNEVEN, 2, 5, [name for name in WAYS if "sequence" not in name and "plain" not in name])
    print("\n## Tied weights\n\nThe embedding and the last layer share their weight; three steps.\n")
    training({"tied": True}, 3, 8, list(WAYS)[1:])
    print(
        "\n## Techniques\n\nOne backward each: difference of the loss / of the gradients. Checkpointing in both forms,"
    )
    print("a penalty on the gradient's norm (its backward goes through the backward), three accumulated batches, and")
    print("bfloat16 autocast, whose own rounding is what differs.\n")
    techniques()
    print("\n## Against PyTorch's own styles\n\nThe same plan by `torch.distributed.tensor.parallel`:", end=" ")
    results = run_ranks(4, against_torch)
    loss, gradient = (max(result[i] for result in results) for i in (0, 1))
    print(f"the loss differs by {loss:.1e}, the gradients by {gradient:.1e}.")
    close_all()


if __name__ == "__main__":
    main()
