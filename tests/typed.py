"""A user's program with terrazzo's calls, as `mypy --strict` reads it (`make types`); nobody runs it.

A `type: ignore` that is not needed is an error there.  `fully_shard` has a program of its own, tests/fsdp/typed.py.
"""

from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import terrazzo
import terrazzo.checkpoint as checkpoint
from terrazzo.checkpoint.manager import Keep, Save
from terrazzo.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from terrazzo.checkpoint.stores import MemoryStore
from terrazzo.engine import Engine, initialize
from terrazzo.errors import CheckpointError, ConflictError
from terrazzo.integrations.huggingface import load_model, save_model
from terrazzo.launch import Run, StopSignal, read_run
from terrazzo.optim import Muon
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, explain, init_device_mesh, randn
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from terrazzo.tensor.policy import communication_policy


def tensors() -> Tensor:
    """Distributed tensors are tensors."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x: DTensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    y: DTensor = x.redistribute(placements=[Replicate()])
    local: Tensor = y.to_local()
    drawn: DTensor = randn(4, 4, device_mesh=mesh, placements=[Shard(1)])
    terms: DTensor = DTensor.from_local(local, mesh, [Partial()])
    mode = CommDebugMode()
    with mode, communication_policy("warn", above=1 << 20):
        whole: Tensor = (drawn @ terms).sum()
    sent: int = mode.get_total_bytes("forward")
    print(explain(torch.mm, x, y), sent)
    with communication_policy("forbid"):  # type: ignore[arg-type]  # there is no such action
        pass
    wrong: int = x.full_tensor()  # type: ignore[assignment]  # it is a tensor
    return whole + wrong


def parallel(model: nn.Module) -> nn.Module:
    """A plan by names."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def save(model: nn.Module, folder: Path) -> int:
    """Checkpoints, in the foreground and in the background, and a manager."""
    optimizer = Muon(model.parameters(), lr=1e-3)
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    state = {"model": weights, "optimizer": moments, "step": 3, "place": checkpoint.PerRank(7)}
    checkpoint.save(state, checkpoint_id=folder)
    saving = checkpoint.async_save(state, store=MemoryStore())
    assert isinstance(saving, Future)
    saving.result()
    try:
        checkpoint.load(state, checkpoint_id=folder)
    except (ConflictError, CheckpointError) as error:
        print(error)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    opened = checkpoint.Checkpoint(folder)
    print(opened["model.weight"], len(opened))
    keep = Keep(last=2, steps=50, best=1)
    with checkpoint.CheckpointManager(folder, save=Save(first=True, steps=10), keep=keep, best="loss") as manager:
        saved: bool = manager.save(10, state, {"loss": 0.5})
        steps: list[int] = manager.steps()
        manager.save("ten", state)  # type: ignore[arg-type]  # a step is a number
    return len(steps) + saved


def train(path: Path) -> None:
    """The engine, as a run's file has it."""
    run: Run = read_run(path)
    data = TensorDataset(torch.ones(8, 4))
    engine: Engine = initialize(nn.Linear(4, 2), training_data=data, config=run.engine)
    engine.load_checkpoint(run.checkpoints)
    assert engine.training_dataloader is not None  # it has been given data
    with StopSignal() as stop:
        for (x,) in engine.training_dataloader:
            loss: Tensor = engine.backward(engine(x).square().mean())
            engine.step()
            if engine.global_steps >= 4 or stop.agreed() or loss.isnan():
                break
    engine.save_checkpoint(run.checkpoints, async_op=True).result()


def others(model: nn.Module, folder: Path) -> None:
    """Hugging Face weights, `compile` and `install`."""
    load_model(model, folder)
    save_model(terrazzo.compile(model), folder, dtype=torch.bfloat16)
    save_model(model)  # type: ignore[call-arg]  # where to?
    terrazzo.install()
    terrazzo.uninstall()
