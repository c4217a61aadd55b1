"""Muon with AdamW beside it, as a config asks for it: which parameters it takes, and the numbers of one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo.deepspeed as deepspeed
from ranks import run_ranks
from terrazzo.engine.config import OptimizerConfig
from terrazzo.engine.optim import make_optimizer
from terrazzo.errors import EngineConfigError, OptimValueError
from terrazzo.optim import MuonWithAuxAdam


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.lm_head = nn.Linear(6, 9, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.down(self.up(self.embedding(x)).tanh()))


PARAMS = {"lr": 0.02, "muon_lr": 0.05, "momentum": 0.9, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}
MUON, ADAM = ("up.weight", "down.weight"), ("embedding.weight", "up.bias", "down.bias", "lm_head.weight")


def check_numbers(stage: int, folder: str) -> None:
    torch.manual_seed(0)
    model = Model()
    reference, again = copy.deepcopy(model), copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": PARAMS},
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    named = dict(reference.named_parameters())
    muon = torch.optim.Muon([named[name] for name in MUON], lr=0.05, momentum=0.9, weight_decay=0.1)
    rest = [named[name] for name in ADAM]
    adam = torch.optim.AdamW(rest, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)

    def train(engines: list[deepspeed.DeepSpeedEngine]) -> None:
        x, y = torch.randint(0, 9, (2, 4), generator=generator)
        mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        for each in engines:
            each.backward(nn.functional.cross_entropy(each(x[mine]), y[mine]))
            each.step()
        nn.functional.cross_entropy(reference(x), y).backward()
        for step in (muon, adam):
            step.step()
            step.zero_grad()

    def compare(engine: deepspeed.DeepSpeedEngine) -> None:
        for name, p in engine.module.named_parameters():
            found = deepspeed.utils.safe_get_full_fp32_param(p)
            # Muon computes in bfloat16: a gradient that differs in its last bit may change an update by 1 of 256.
            close = {"rtol": 0, "atol": 2e-3} if name in MUON else {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(found, named[name].data, msg=name, **close)

    for _ in range(2):
        train([engine])
    compare(engine)
    engine.save_checkpoint(folder)
    resumed, *_ = deepspeed.initialize(model=again, model_parameters=again.parameters(), config=config)
    resumed.load_checkpoint(folder)
    train([engine, resumed])
    for p, q in zip(engine.module.parameters(), resumed.module.parameters(), strict=True):
        same = [deepspeed.utils.safe_get_full_fp32_param(each) for each in (p, q)]
        assert torch.equal(*same)


def check_stages(folder: str) -> None:
    for stage in (0, 2, 3):
        check_numbers(stage, f"{folder}/{stage}")


def test_a_config_has_the_numbers_of_one_device(tmp_path):
    run_ranks(2, check_stages, str(tmp_path))


def groups_of(model: nn.Module, **params: object) -> list[dict]:
    return make_optimizer(None, OptimizerConfig(type="Muon", params=params), model, {}).param_groups


def test_which_parameters_muon_takes():
    model = Model()
    taken, rest = groups_of(model, lr=0.3, adam_lr=0.1, ns_method="standard")
    assert {id(p) for p in taken["params"]} == {id(model.up.weight), id(model.down.weight)}
    assert (taken["lr"], rest["lr"], rest["betas"], rest["eps"]) == (0.3, 0.1, (0.9, 0.95), 1e-10)
    assert "adam_lr" not in rest, "only what the optimizer takes"
    model.embedding.weight.use_muon, model.down.weight.use_muon = True, False
    taken, _ = groups_of(model)
    assert {id(p) for p in taken["params"]} == {id(model.embedding.weight), id(model.up.weight)}
    for p in model.parameters():
        p.requires_grad_(p.ndim == 1)
    [only] = groups_of(model)
    assert not only["use_muon"] and only["lr"] == 3e-4
    conv = nn.Conv2d(2, 2, 3)
    with pytest.raises(EngineConfigError, match=r"weight.*4 dims.*use_muon"):
        groups_of(conv)
    conv.weight.use_muon = False
    assert len(groups_of(conv)) == 1
    for params, words in (({"ns_method": "fast"}, "'gram' or 'standard'"), ({"beta": 1}, "no beta; there are lr")):
        with pytest.raises(EngineConfigError, match=words):
            groups_of(Model(), **params)


def test_groups_say_which_optimizer_they_are_for():
    layer = nn.Linear(2, 2)
    with pytest.raises(OptimValueError, match="use_muon"):
        MuonWithAuxAdam([{"params": [layer.weight]}])
    with pytest.raises(OptimValueError, match="shape"):
        MuonWithAuxAdam([{"params": [layer.bias], "use_muon": True}])
    made = MuonWithAuxAdam([{"params": layer.parameters(), "use_muon": False}])
    layer(torch.ones(1, 2)).sum().backward()
    made.step()
    assert made.state[layer.bias]["step"] == 1 and not made.state[layer.weight]["exp_avg"].eq(0).any()
