"""Lightning trains, saves and resumes on terrazzo: with its own `ModelParallelStrategy`, and with ours."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.fsdp

import terrazzo
import terrazzo.checkpoint
from installed import needs
from ranks import fresh_values
from terrazzo.errors import FSDPValueError, UnsupportedValueError
from terrazzo.tensor import DTensor

needs("pytorch_lightning")

EXAMPLES = Path(__file__).parents[2] / "examples" / "libraries"


def check_lightning(folder: str) -> None:
    sys.path.insert(0, str(EXAMPLES))
    warnings.simplefilter("ignore")
    import lightning_fsdp2 as example

    def losses(path: str) -> list[list[float]]:
        return [example.train(6), example.train(3, save=path), example.train(6, resume=path)]

    expected = losses(f"{folder}-torch")
    terrazzo.install()
    assert torch.distributed.fsdp.fully_shard is terrazzo.fsdp.fully_shard
    found = losses(folder)
    terrazzo.uninstall()
    # Lightning does not go on as without a break (the second step after it differs), with PyTorch's either.
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert found[2][0] == pytest.approx(found[0][3], rel=1e-5), "resumed, not begun again"
    state = terrazzo.checkpoint.Checkpoint(folder)
    assert any("net.0.weight" in name for name in state), "it is one of terrazzo's"


@pytest.mark.long
def test_lightning(tmp_path):
    fresh_values(2, check_lightning, str(tmp_path / "saved"), timeout=300)


def mean(losses: list[float]) -> list[float]:
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def check_strategy(folder: str) -> None:
    """All epochs; the last checkpoints are kept."""
    warnings.simplefilter("ignore")
    from pytorch_lightning.callbacks import ModelCheckpoint

    from integrations.lightning_runs import BEFORE, EPOCHS, Net, loader, plainly, trainer
    from terrazzo.integrations.lightning import FullyShardStrategy

    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(int(os.environ["RANK"]))  # the first rank's values count
    net = Net()
    kept = ModelCheckpoint(folder, "{epoch}", monitor="loss", mode="max", save_top_k=EPOCHS - 1, save_last=True)
    run = trainer(world, EPOCHS, strategy=FullyShardStrategy(), callbacks=[kept], enable_checkpointing=True)
    run.fit(net, loader(world))
    expected = plainly()
    assert mean(net.seen) == pytest.approx(expected, rel=1e-5)
    weight = net.blocks[0][0].weight
    assert isinstance(weight, DTensor) and weight.to_local().shape[0] in (9 // world, 9 // world + 1)
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        *(f"epoch={n}.ckpt" for n in range(EPOCHS - 1)), "last.ckpt"
    ]  # fmt: skip
    assert run.validate(net, loader(world), verbose=False)[0]["valid"] < expected[0]
    stored = terrazzo.checkpoint.Checkpoint(f"{folder}/epoch={BEFORE - 1}.ckpt")
    assert stored["state_dict.blocks.0.0.weight"].parts == world
    assert "optimizer_states.0.state.first.weight.exp_avg" in stored


def check_resumed(*paths: str) -> None:
    warnings.simplefilter("ignore")
    from integrations.lightning_runs import BEFORE, EPOCHS, Net, loader, plainly, trainer
    from terrazzo.integrations.lightning import FullyShardStrategy

    world = int(os.environ["WORLD_SIZE"])
    expected = plainly()[3 * BEFORE :]
    torch.manual_seed(5)
    for path in paths:
        net = Net()
        run = trainer(world, EPOCHS, strategy=FullyShardStrategy(wrap=["Linear"]))
        run.fit(net, loader(world), ckpt_path=path)
        assert mean(net.seen) == pytest.approx(expected, rel=1e-5), path
        assert run.lr_scheduler_configs[0].scheduler.get_last_lr() == pytest.approx([0.0005])


def check_tensor_parallel(save: str, resume: str = "") -> None:
    """Two neighbours compute together, and as many as there are see different data."""
    warnings.simplefilter("ignore")
    from integrations.lightning_runs import BEFORE, EPOCHS, Parallel, loader, plainly, trainer
    from terrazzo.integrations.lightning import FullyShardStrategy

    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(int(os.environ["RANK"]))  # of the plain parts too, the first rank's values count
    net = Parallel()
    run = trainer(world, EPOCHS if resume else BEFORE, strategy=FullyShardStrategy(tensor_parallel_size=2))
    run.fit(net, loader(world, 2), ckpt_path=resume or None)
    assert mean(net.seen) == pytest.approx(plainly()[3 * BEFORE :] if resume else plainly()[: 3 * BEFORE], rel=1e-5)
    for weight, dims in ((net.first.weight, 1), (net.blocks[0][0].weight, 2)):
        assert isinstance(weight, DTensor) and weight.device_mesh.ndim == dims
    assert net.blocks[0][0].weight.to_local().shape[0] < 9 // (world // 2) or world == 2
    assert run.distributed_sampler_kwargs == {"num_replicas": world // 2, "rank": dist.get_rank() // 2}
    run.save_checkpoint(save)
    state = terrazzo.checkpoint.Checkpoint(save)
    parts = {name: state[f"state_dict.{name}"].parts for name in ("first.weight", "blocks.0.0.weight")}
    assert parts == {"first.weight": world // 2, "blocks.0.0.weight": world}, "nothing is stored twice"


def check_alone(folder: str) -> None:
    """Lightning's own strategy for one process, with terrazzo's files and with its own."""
    warnings.simplefilter("ignore")
    from integrations.lightning_runs import BEFORE, EPOCHS, Net, loader, plainly, trainer
    from terrazzo.integrations.lightning import TerrazzoCheckpointIO

    for name, plugins in (("ours", [TerrazzoCheckpointIO()]), ("file", None)):
        torch.manual_seed(0)
        run = trainer(1, BEFORE, plugins=plugins)
        run.fit(Net(), loader(1))
        run.save_checkpoint(f"{folder}/{name}.ckpt")
    for name in ("ours", "file"):
        net = Net()
        trainer(1, EPOCHS, plugins=[TerrazzoCheckpointIO()]).fit(net, loader(1), ckpt_path=f"{folder}/{name}.ckpt")
        assert net.seen == pytest.approx(plainly()[3 * BEFORE :], rel=1e-6)


def check_refused() -> None:
    warnings.simplefilter("ignore")
    from lightning_fabric.plugins.io import TorchCheckpointIO

    from integrations.lightning_runs import Net, loader, trainer
    from terrazzo.integrations.lightning import FullyShardStrategy, TerrazzoCheckpointIO

    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

    with pytest.raises(FSDPValueError, match="scale of Own"):
        trainer(1, 1, strategy=FullyShardStrategy()).fit(Own(), loader(1))
    with pytest.raises(FSDPValueError, match="wrap names Layer"):
        trainer(1, 1, strategy=FullyShardStrategy(wrap=["Layer"])).fit(Net(), loader(1))
    with pytest.raises(FSDPValueError, match="tensor_parallel_size 2 does not divide the number of ranks, 1"):
        trainer(1, 1, strategy=FullyShardStrategy(tensor_parallel_size=2)).fit(Net(), loader(1))
    with pytest.raises(UnsupportedValueError, match="TorchCheckpointIO cannot save"):
        trainer(1, 1, strategy=FullyShardStrategy(), plugins=[TorchCheckpointIO()])
    with pytest.raises(UnsupportedValueError, match="storage_options"):
        TerrazzoCheckpointIO().save_checkpoint({}, "nowhere", storage_options={})


def check_one_file(folder: str) -> None:
    """Lightning's `load_from_checkpoint` takes files only."""
    warnings.simplefilter("ignore")
    from integrations.lightning_runs import Net
    from terrazzo.integrations.lightning import TerrazzoCheckpointIO

    saved = f"{folder}/of two/epoch=1.ckpt"
    torch.save(TerrazzoCheckpointIO().load_checkpoint(saved), f"{folder}/one.ckpt")
    net = Net.load_from_checkpoint(f"{folder}/one.ckpt")
    stored = terrazzo.checkpoint.Checkpoint(saved)
    assert net.hparams == {"rate": 0.05}
    assert torch.equal(net.first.weight, stored["state_dict.first.weight"][...])


def check_one_process(folder: str) -> None:
    check_one_file(folder)
    check_resumed(f"{folder}/of two/epoch=1.ckpt")
    check_alone(folder)
    check_refused()


def run_all(world: int, check, *args: str) -> None:
    fresh_values(world, check, *args, timeout=300)


@pytest.mark.long
def test_the_strategy_trains_like_one_process_and_resumes_anywhere(tmp_path):
    run_all(2, check_strategy, str(tmp_path / "of two"))
    run_all(1, check_one_process, str(tmp_path))
    run_all(2, check_resumed, *(str(tmp_path / name) for name in ("of two/epoch=1.ckpt", "file.ckpt", "ours.ckpt")))


def check_not_parallel() -> None:
    warnings.simplefilter("ignore")
    from integrations.lightning_runs import Net, loader, trainer
    from terrazzo.integrations.lightning import FullyShardStrategy

    with pytest.raises(FSDPValueError, match="no parameter of Net is tensor-parallel: call .*parallelize_module"):
        trainer(2, 1, strategy=FullyShardStrategy(tensor_parallel_size=2)).fit(Net(), loader(2, 2))


@pytest.mark.long
def test_tensor_parallel_modules(tmp_path):
    two, four, whole = (str(tmp_path / name) for name in ("two.ckpt", "four.ckpt", "whole.ckpt"))
    run_all(4, check_tensor_parallel, four)
    run_all(2, check_tensor_parallel, two, four)
    run_all(1, check_resumed, four)
    run_all(2, check_not_parallel)
