"""Checkpoints in DeepSpeed's layout without any training: of a made-up run, written by the converter.

That DeepSpeed itself agrees with what the converter writes is shown in tests/engine/test_deepspeed.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from terrazzo.checkpoint import save
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.formats.deepspeed.files import OpenFile

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b": (2, 3, 4), "c": ()}
FROZEN = {"f": (3, 3)}


def state_of(shapes: dict[str, tuple[int, ...]], frozen: dict[str, tuple[int, ...]], stage: int = 1) -> dict[str, Any]:
    """What an engine's checkpoint holds, of two param groups: the last parameter is alone in the second."""
    generator = torch.Generator().manual_seed(0)
    module = {name: torch.randn(shape, generator=generator) for name, shape in (shapes | frozen).items()}
    kept = {
        name: {
            "step": torch.tensor(3.0),
            **{k: torch.rand(shape, generator=generator) for k in ("exp_avg", "exp_avg_sq")},
        }
        for name, shape in shapes.items()
    }
    *names, last = shapes
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": names}, {"lr": 0.2, "betas": (0.9, 0.99), "params": [last]}]
    return {
        "module": module | {"running": torch.arange(4)},
        "buffer_names": ["running"],
        "optimizer": {"state": kept, "param_groups": groups},
        "param_shapes": [[[name, list(shapes[name])] for name in group["params"]] for group in groups],
        "frozen_param_shapes": [[name, list(shape)] for name, shape in frozen.items()],
        "shared_params": {"again": next(iter(shapes))},
        "lr_scheduler": {"last_batch_iteration": 2},
        "loss_scaler": {"cur_scale": 1.0},
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 24,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": False}},
        "mine": {"note": "hello"},
    }


def write(folder: Path, stage: int, ranks: int = 2, **settings: Any) -> dict[str, Any]:
    """Write the run as `<folder>/native`, and in DeepSpeed's layout as `<folder>/tag`; what it holds."""
    state = state_of(SHAPES, FROZEN)
    state["ds_config"]["zero_optimization"] |= settings
    save(state, checkpoint_id=folder / "native", no_dist=True)
    convert(folder / "native", folder / "tag", "deepspeed", stage=stage, ranks=ranks)
    return state


def write_universal(folder: Path, stage: int) -> dict[str, Any]:
    """Write the run as DeepSpeed's `ds_to_universal` would have, as `<folder>/tag`."""
    state = write(folder, stage)
    for file in (folder / "tag").glob("*_optim_states.pt"):
        if "pp_rank_0" in file.name:
            optimizer = plain(file)["optimizer_state_dict"]
        file.unlink()
    inner = optimizer["base_optimizer_state"] if stage < 3 else optimizer["optimizer_state_dict"]
    zero = folder / "tag" / "zero"
    for name, kept in state["optimizer"]["state"].items():
        (zero / name).mkdir(parents=True)
        tensors = {"fp32": state["module"][name], "exp_avg": kept["exp_avg"], "exp_avg_sq": kept["exp_avg_sq"]}
        for key, tensor in tensors.items():
            torch.save({"param": tensor} if stage < 3 else tensor.reshape(-1), zero / name / f"{key}.pt")
        if stage < 3:
            torch.save(kept["step"], zero / name / "step.pt")
    torch.save({**optimizer, "param_groups": inner["param_groups"]}, zero / "optimizer_state.pt")
    return state


def plain(file: Path) -> Any:
    """What a file holds, objects as dicts."""
    return OpenFile(file.parent, file.name).archive.materialised()
