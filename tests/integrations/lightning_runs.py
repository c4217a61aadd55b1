"""What the tests of Lightning train: a module that knows nothing of sharding, and the same without Lightning."""

from __future__ import annotations

import os
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TOTAL, EPOCHS, BEFORE = 8, 4, 2  # three steps are an epoch


def made() -> tuple[nn.Module, nn.ModuleList]:
    return nn.Linear(7, 6), nn.ModuleList(
        [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2)]
    )


class Net(pl.LightningModule):
    """Notes its losses."""

    def __init__(self, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.blocks = made()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.sum(1, keepdim=True)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        x, y = batch
        loss = (self(x) - y).square().mean()
        self.seen.append(loss.item())
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("valid", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.1)]


class Parallel(Net):
    """Its blocks are tensor-parallel; the first layer is not."""

    def configure_model(self) -> None:
        from terrazzo.tensor import DTensor
        from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for block in self.blocks:
            if not isinstance(block[0].weight, DTensor):  # Lightning calls this again to validate
                plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
                parallelize_module(block, self.device_mesh["tensor_parallel"], plan)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 7, generator=generator), torch.randn(24, 1, generator=generator))


def plainly() -> list[float]:
    """The losses of all epochs in one process, with PyTorch alone."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.1)
    losses = []
    for _ in range(EPOCHS):
        for x, y in DataLoader(data(), batch_size=TOTAL):
            loss = (net(x) - y).square().mean()
            loss.backward()
            losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return losses


def trainer(world: int, epochs: int, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(["enable_progress_bar", "logger", "enable_model_summary"], False)
    options = {"enable_checkpointing": False, "use_distributed_sampler": False, **quiet, **options}
    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=world, gradient_clip_val=0.5, num_sanity_val_steps=0, **options
    )


def loader(world: int, neighbours: int = 1) -> DataLoader[Any]:
    """This rank's part of each step's samples, in their order: Lightning's own sampler would shuffle."""
    parts = world // neighbours  # tensor-parallel neighbours see the same
    sampler = DistributedSampler(data(), parts, int(os.environ["RANK"]) // neighbours, shuffle=False)
    return DataLoader(data(), batch_size=TOTAL // parts, sampler=sampler)
