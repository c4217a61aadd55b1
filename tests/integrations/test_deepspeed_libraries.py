"""Libraries that import DeepSpeed, on `terrazzo.deepspeed`: Transformers' Trainer with a config, and Accelerate."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo.deepspeed
from installed import needs
from integrations.families import config_of
from ranks import fresh_values
from terrazzo.deepspeed.git_version_info import version
from terrazzo.errors import EngineError

needs("accelerate", "transformers")

EXAMPLES = Path(__file__).parents[2] / "examples" / "libraries"


def settings(stage: int) -> dict[str, Any]:
    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    return {
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": adam},
    }


def check_names() -> None:
    import deepspeed.launcher.runner
    import deepspeed.utils.z3_leaf_module
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    import deepspeed

    assert deepspeed is terrazzo.deepspeed and ZeroParamStatus is terrazzo.deepspeed.zero.ZeroParamStatus
    assert deepspeed.launcher.runner.__spec__.name == "terrazzo.deepspeed.launcher.runner"
    assert callable(deepspeed.utils.z3_leaf_module), "a function, as before"
    assert importlib.util.find_spec("deepspeed") and importlib.metadata.version("deepspeed") == version
    with pytest.raises(ModuleNotFoundError, match="use peft"):
        importlib.import_module("deepspeed.linear")


def check_trainer(folder: str) -> None:
    import transformers_trainer as example

    expected = example.train(f"{folder}/ddp", use_cpu=True, lr_scheduler_type="constant")
    for stage in (2, 3):
        more: dict[str, Any] = {"deepspeed": settings(stage), "lr_scheduler_type": "constant"}
        forget()
        assert example.train(f"{folder}/{stage}", **more) == pytest.approx(expected, rel=1e-5)
        assert (Path(folder) / str(stage) / "checkpoint-2" / "latest").read_text().strip() == "global_step2"
        forget()
        assert example.train(f"{folder}/{stage}", resume=True, **more) == pytest.approx(expected, rel=1e-5)


def check_loading(folder: str) -> None:
    import transformers_trainer as example
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    model = example.make_model()
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(f"{folder}/model")
    torch.distributed.barrier()
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4}
    kept = HfDeepSpeedConfig(config)
    again = LlamaForCausalLM.from_pretrained(f"{folder}/model")
    del kept
    engine, *_ = terrazzo.deepspeed.initialize(model=again, config=config)
    tokens = example.Tokens().numbers[:4]
    torch.testing.assert_close(engine(input_ids=tokens).logits, model(input_ids=tokens).logits)


def check_routers(folder: str) -> None:
    """Biases that choose experts keep what bfloat16 cannot tell apart."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    model = AutoModelForCausalLM.from_config(config_of("deepseek_v3"))
    name, bias = next((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    bias.copy_(10 + 0.001 * torch.arange(len(bias)))
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(f"{folder}/routers")
    torch.distributed.barrier()
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": 2, "bf16": {"enabled": True}}
    kept = HfDeepSpeedConfig(config)
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/routers", dtype=torch.bfloat16)
    del kept
    assert again.lm_head.weight.dtype is torch.bfloat16
    engine, *_ = terrazzo.deepspeed.initialize(model=again, config=config)
    torch.testing.assert_close(engine.module.get_buffer(name), bias, rtol=0, atol=0)


def check_accelerate() -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    def run(accelerator: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        seen = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:  # DeepSpeed clips a step's gradients, not those of its parts
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen += [float(accelerator.reduce(loss.detach(), "mean")), optimizer.param_groups[0]["lr"]]
        return seen, {n: p.detach().clone() for n, p in accelerator.get_state_dict(model).items()}

    forget()
    expected, weights = run(Accelerator(cpu=True, gradient_accumulation_steps=2))
    forget()
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2, gradient_clipping=1.0)
    seen, ours = run(Accelerator(deepspeed_plugin=plugin))
    assert seen == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(ours, weights)


def forget() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def check_all(folder: str) -> None:
    # One process for all, since the libraries take seconds to import.
    terrazzo.deepspeed.install()
    terrazzo.deepspeed.install()  # which does nothing
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(EXAMPLES))
    check_names()
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # Accelerate starts DeepSpeed on accelerators only.
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
    check_trainer(folder)
    check_loading(folder)
    check_routers(folder)
    check_accelerate()


def test_the_trainer_and_accelerate_train_as_without_deepspeed(tmp_path):
    fresh_values(2, check_all, str(tmp_path))


def test_installing_too_late_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    with pytest.raises(EngineError, match="DeepSpeed has been imported"):
        terrazzo.deepspeed.install()
