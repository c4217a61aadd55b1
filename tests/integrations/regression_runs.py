"""What tests of clusters share: the examples' run by PyTorch alone, and one that goes on until it is told to end."""

from __future__ import annotations

from pathlib import Path

import torch

from terrazzo.engine import ResumableSampler
from terrazzo.engine.config import Batch


def losses_alone(steps: int) -> list[float]:
    """Of examples/clusters, in this process."""
    from regression import CONFIG, make_data, make_model

    model, data, batch = make_model(), make_data(), CONFIG["train_batch_size"]
    optimizer = torch.optim.AdamW(model.parameters(), **CONFIG["optimizer"]["params"])
    order = ResumableSampler(len(data), Batch(batch, batch, 1), rank=0, ranks=1, seed=CONFIG["seed"])
    losses = []
    for _, chosen in zip(range(steps), order, strict=False):
        x, y = data[chosen]
        loss = (model(x) - y).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as the engine does by default
        optimizer.step()
    return losses


def train_until_told(folder: str, further: int) -> list[tuple[int, float]]:
    """The example of submitit: without a checkpoint as long as it may, with one so many further steps."""
    import submitit_job

    latest = Path(folder) / "latest"
    last = int(latest.read_text().removeprefix("global_step")) + further if latest.exists() else 10**9
    return submitit_job.train(folder, last)
