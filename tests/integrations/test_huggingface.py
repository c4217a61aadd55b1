"""Accelerate, peft and Transformers' Trainer with their FSDP2 settings, on terrazzo and on PyTorch's own FSDP2."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from installed import needs
from ranks import fresh_values

needs("accelerate", "transformers", "peft")

EXAMPLES = Path(__file__).parents[2] / "examples" / "libraries"
WRAP: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
# FullyShardedDataParallelPlugin's settings, and those of the example.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": True}, {}),
    ({"reshard_after_forward": False, "activation_checkpointing": True}, {"mixed_precision": "bf16", "tied": True}),
    ({"cpu_ram_efficient_loading": True}, {"lora": True, "samples": 16}),
]
# A whole state dict says little more than the others, of tests/checkpoint too.
LONG = [({"state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": True}, {"tied": True})]


def check_accelerate(folder: str, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    sys.path.insert(0, str(EXAMPLES))
    warnings.simplefilter("ignore")
    import accelerate_lora as example
    from accelerate import FullyShardedDataParallelPlugin

    from terrazzo.integrations.accelerate import fsdp_on_cpu

    for number, (settings, how) in enumerate(cases):
        results = []
        for who in ("torch", "terrazzo"):
            if who == "terrazzo":
                terrazzo.install()
            try:
                with fsdp_on_cpu():
                    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **WRAP, **settings)
                    # Accelerate's pickled random states are loaded from a folder of their own.
                    saved = f"{folder}/{who}{number}" if "state_dict_type" in settings else None
                    results.append(example.train(plugin, folder=saved, **how))
            finally:
                terrazzo.uninstall()
        (expected, weights), (losses, ours) = results
        close: dict[str, float] = (
            {"rtol": 2e-2, "atol": 2e-2} if how.get("mixed_precision") else {"rtol": 1e-5, "atol": 1e-5}
        )
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **close)
        torch.testing.assert_close(ours, weights, **close)
        assert len(set(losses)) > 1


def check_trainer(folder: str) -> None:
    sys.path.insert(0, str(EXAMPLES))
    warnings.simplefilter("ignore")
    import transformers_trainer as example

    from terrazzo.integrations.accelerate import fsdp_on_cpu

    expected = example.train(f"{folder}/ddp", use_cpu=True)
    with fsdp_on_cpu():
        terrazzo.install()
        losses = example.train(f"{folder}/fsdp", use_cpu=True, **example.FSDP)
        resumed = example.train(f"{folder}/fsdp", use_cpu=True, resume=True, **example.FSDP)
        terrazzo.uninstall()
    assert losses == pytest.approx(expected, rel=1e-5) and len(losses) == 4
    assert resumed == pytest.approx(expected, rel=1e-5)


def check_all(folder: str) -> None:
    # One process for both, since the libraries take seconds to import.
    check_accelerate(folder, CASES)
    check_trainer(folder)


@pytest.mark.long
def test_accelerate_peft_and_the_trainer(tmp_path):
    fresh_values(2, check_all, str(tmp_path), timeout=400)


@pytest.mark.long
def test_accelerate_with_whole_checkpoints(tmp_path):
    fresh_values(2, check_accelerate, str(tmp_path), LONG, timeout=400)
