"""`offload_states`: what an engine keeps moves to the CPU and back, and training goes on as if it had not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo.deepspeed as deepspeed
from ranks import device_type, run_ranks
from terrazzo.deepspeed.zero.config import OffloadDeviceEnum, OffloadStateTypeEnum
from terrazzo.errors import EngineError

pytestmark = [pytest.mark.on_late, pytest.mark.filterwarnings("ignore:offload_states")]

STATES = OffloadStateTypeEnum


def engine_in(stage: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, config=settings)[0]


def devices(engine: deepspeed.DeepSpeedEngine) -> list[set[str]]:
    """Of the parameters, the gradients, and the optimizer's states."""
    parameters = list(engine.module.parameters())
    states = [v for state in engine.basic_optimizer.state.values() for v in state.values() if v.ndim]
    return [
        {t.device.type for t in found}
        for found in (parameters, [p.grad for p in parameters if p.grad is not None], states)
    ]


def check_offloading() -> None:
    kind = {device_type()}
    for stage in (1, 3):
        plain, moved = engine_in(stage), engine_in(stage)
        for step, include in enumerate(([STATES.optim_states], None, [STATES.hp_params, STATES.lp_params])):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank())).to(
                device_type()
            )
            losses = []
            for engine in (plain, moved):
                loss = engine(x).square().mean()
                engine.backward(loss)
                if engine is moved and step:
                    moved.offload_states([STATES.lp_grads] if step == 1 else None)
                    assert devices(moved)[1] == kind & {"cpu"}
                    with pytest.raises(EngineError, match="call reload_states.. first"):
                        moved.step()
                    moved.reload_states()
                    assert devices(moved) == [kind] * 3
                engine.step()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
            (moved.optimizer if step == 0 else moved).offload_states(include, device=OffloadDeviceEnum.cpu)
            parameters, _, states = devices(moved)
            assert states == ({"cpu"} if step < 2 else kind)
            assert parameters == kind
            if step == 0:  # evaluation needs no optimizer
                with torch.no_grad():
                    torch.testing.assert_close(moved(x), plain(x), rtol=0, atol=0)
            moved.offload_states(device=OffloadDeviceEnum.none)
            (moved.optimizer if step == 0 else moved).reload_states(non_blocking=True)
            assert devices(moved) == [kind, set(), kind]
        state = moved.core.module_state_dict()
        for name, value in plain.core.module_state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    if kind != {"cpu"}:
        with pytest.warns(UserWarning, match="float32 shards stay on the accelerator"):
            moved.offload_states([STATES.hp_params])
    with pytest.raises(EngineError, match="to the CPU, not to"):
        moved.offload_states(device=OffloadDeviceEnum.nvme)


def test_what_is_moved_comes_back():
    run_ranks(2, check_offloading)
