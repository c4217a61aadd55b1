"""Lightning's strategy for FSDP2, saved and resumed, on terrazzo.

    torchrun --nproc-per-node 2 -m terrazzo run examples/libraries/lightning_fsdp2.py FOLDER

Nothing here is terrazzo's.
"""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    """Two layers; notes its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.seen: list[float] = []

    def configure_model(self) -> None:
        """Shard each layer; Lightning has made the mesh by then."""
        from torch.distributed.fsdp import fully_shard  # late, so that a test can compare the two

        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=mesh)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def make_data() -> TensorDataset:
    """Random numbers: three steps of two ranks."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 8, generator=generator), torch.randn(24, 1, generator=generator))


def train(steps: int, save: str | None = None, resume: str | None = None, devices: int = 2) -> list[float]:
    """This rank's losses."""
    model = Regression()
    quiet: dict[str, Any] = dict.fromkeys(["enable_progress_bar", "logger", "enable_checkpointing"], False)
    strategy = ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
    trainer = pl.Trainer(max_steps=steps, accelerator="cpu", devices=devices, strategy=strategy, **quiet)
    trainer.fit(model, DataLoader(make_data(), batch_size=4), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return model.seen


if __name__ == "__main__":
    print(train(3, save=sys.argv[1]), train(6, resume=sys.argv[1]))
    torch.distributed.destroy_process_group()
