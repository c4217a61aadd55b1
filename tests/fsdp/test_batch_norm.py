"""A model with BatchNorm (Transformers' ResNet): statistics of each rank's own, as in PyTorch, or of all ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as pytorchs
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from ranks import run_ranks
from terrazzo.engine import initialize
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor

pytestmark = pytest.mark.on_late

TOTAL, STEPS = 8, 4


class Synced(nn.BatchNorm2d):
    """Statistics of the whole batch, which `nn.SyncBatchNorm` has on accelerators only."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        dims, world = (0, 2, 3), dist.get_world_size()
        mean, square = all_reduce(torch.stack([x.mean(dims), x.square().mean(dims)])) / world
        variance = square - mean.square()
        count = x.numel() // x.shape[1] * world
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight * (variance + self.eps).rsqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


def resnet(synced: bool = False) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=5, hidden_sizes=[5, 9], depths=[1, 2], layer_type="basic", num_labels=3)
    model = ResNetForImageClassification(config)
    if synced:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.BatchNorm2d:
                    setattr(module, name, Synced(child.num_features))
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 8
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(TOTAL, 3, 32, 32, generator=generator), torch.randint(3, (TOTAL,), generator=generator))
        for _ in range(STEPS)
    ]


def shard(model: nn.Module, apply) -> nn.Module:
    for stage in model.resnet.encoder.stages:
        apply(stage)
    apply(model)
    return model


def train(model: nn.Module, part: slice = slice(None)) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches():
        loss = model(x[part], labels=y[part]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mine() -> slice:
    size = TOTAL // dist.get_world_size()
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}


def check_own_statistics() -> tuple[list[float], Tensor]:
    ours, theirs = shard(resnet(), fully_shard), shard(resnet(), pytorchs.fully_shard)
    assert train(ours, mine()) == pytest.approx(train(theirs, mine()), rel=1e-5)
    torch.testing.assert_close(whole_state(ours), whole_state(theirs), rtol=1e-4, atol=1e-5)
    for model in (ours, theirs):
        model.eval()
    x = batches()[0][0]
    torch.testing.assert_close(ours(x).logits, theirs(x).logits, rtol=1e-4, atol=1e-5)
    return whole_state(ours)["resnet.embedder.embedder.normalization.running_mean"]


@pytest.mark.long
def test_each_rank_has_its_own_statistics_as_in_pytorch():
    first, second = run_ranks(2, check_own_statistics)
    assert not torch.allclose(first, second)


def check_synced() -> None:
    single = resnet()
    expected = train(single)
    sharded = shard(resnet(synced=True), fully_shard)
    losses = torch.tensor(train(sharded, mine()))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / dist.get_world_size(), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole_state(sharded), whole_state(single), rtol=1e-3, atol=1e-4)


def test_statistics_of_all_ranks_train_like_one_process():
    run_ranks(2, check_synced)


def check_engine(folder: str) -> None:
    single = resnet()
    train(single)
    described = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    for stage in (1, 3):
        config = {"train_batch_size": TOTAL, "zero_optimization": {"stage": stage}, "optimizer": described}
        config["gradient_clipping"] = 0
        engine = initialize(resnet(synced=True), config=config)
        for x, y in batches():
            engine.backward(engine(x[mine()], labels=y[mine()]).loss)
            engine.step()
        state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in engine.module_state_dict().items()}
        torch.testing.assert_close(state, dict(single.state_dict()), rtol=1e-3, atol=1e-4)
        engine.save_checkpoint(folder, str(stage))
        again = initialize(resnet(synced=True), config=copy.deepcopy(config))
        again.load_checkpoint(folder, str(stage))
        for name, buffer in again.module.named_buffers():
            assert torch.equal(buffer, state[name]), name


def test_the_engine_with_batch_norm(tmp_path):
    run_ranks(2, check_engine, str(tmp_path))
