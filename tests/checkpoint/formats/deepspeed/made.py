"""Checkpoints in DeepSpeed's layout without any training: of a made-up run, written by the converter.

That DeepSpeed itself agrees with what the converter writes is shown in tests/engine/test_deepspeed.py.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

from terrazzo.checkpoint import save
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.formats.deepspeed.files import OpenFile
from terrazzo.checkpoint.stores import Place

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
    return OpenFile(Place(file.parent), file.name).archive.materialised()


def change_states(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write each rank's file of optimizer states again, with its `optimizer_state_dict` changed."""
    for file in folder.glob("*_optim_states.pt"):
        value = plain(file)
        change(value["optimizer_state_dict"])
        torch.save(value, file)


def with_gaps(folder: Path, gaps: list[list[int]]) -> None:
    """Write stage 1 or 2 of one rank again, with so many unused elements after the parameters of each group."""
    shapes = plain(folder / "mp_rank_00_model_states.pt")["param_shapes"]

    def spread(state: dict[str, Any]) -> None:
        def change(flat: dict[Any, torch.Tensor] | list[torch.Tensor], key: Any, group: int) -> None:
            lengths = [prod(shape) for shape in shapes[group].values()]
            parts = zip(flat[key][: sum(lengths)].split(lengths), gaps[group], strict=True)
            flat[key] = torch.cat([torch.cat([part, torch.full((gap,), -7.0)]) for part, gap in parts])

        for group in range(len(gaps)):
            change(state["single_partition_of_fp32_groups"], group, group)
            for key in ("exp_avg", "exp_avg_sq"):
                change(state["base_optimizer_state"]["state"][group], key, group)
        state |= {"group_paddings": [0] * len(gaps), "param_alignment_paddings": gaps}

    change_states(folder, spread)


def elastic(folder: Path) -> None:
    """Write stage 1 or 2 again as with `elastic_checkpoint`: the state of each group without padding, in a list."""

    def change(state: dict[str, Any]) -> None:
        base = state["base_optimizer_state"]
        lean = [dict(base["state"].get(number, {})) for number in range(len(base["param_groups"]))]
        state["base_optimizer_state_step"] = next((each.pop("step") for each in lean if "step" in each), None)
        for each, padding in zip(lean, state["group_paddings"], strict=True):
            for key, value in each.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    each[key] = value[: len(value) - padding].clone()
        state["base_optimizer_state"] = lean

    change_states(folder, change)


def write_pipeline(folder: Path) -> None:
    """Two stages of two layers each; the first and the last are one module to DeepSpeed, with a weight in common."""
    weight, biases = torch.randn(3, 3), (torch.randn(3), torch.randn(3))
    layers = [{"weight": weight, "bias": biases[0]}, {"gain": torch.randn(2), "buffer": torch.arange(2)}]
    layers += [{"gain": torch.randn(2), "frozen": torch.randn(4)}, {"weight": weight, "bias": biases[1]}]
    tag = folder / "tag"
    tag.mkdir()
    for number, layer in enumerate(layers):
        stored = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in layer.items()}
        torch.save(stored, tag / f"layer_{number:02d}-model_states.pt")
    for stage, inner in enumerate((1, 2)):
        named = {"tied_modules.t.weight": weight, "tied_modules.t.bias": biases[stage]}
        named[f"{inner}.gain"] = layers[inner]["gain"]
        flat = torch.cat([tensor.reshape(-1) for tensor in named.values()])
        optimizer = {
            "base_optimizer_state": {
                "state": {0: {"step": 3, "exp_avg": flat + 1, "exp_avg_sq": flat + 2}},
                "param_groups": [{"lr": 0.1, "params": [0]}],
            },
            "single_partition_of_fp32_groups": [flat],
            "zero_stage": 1,
            "group_paddings": [0],
        }
        torch.save({"optimizer_state_dict": optimizer}, tag / f"zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt")
        model = {
            "module": None,
            "buffer_names": [f"{inner}.buffer"] if stage == 0 else [],
            "param_shapes": [{name: tensor.shape for name, tensor in named.items()}],
            "shared_params": {},
            "global_steps": 3,
            "dp_world_size": 1,
            "mp_world_size": 2,
            "checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 1},
        }
        torch.save(model, tag / f"mp_rank_0{stage}_model_states.pt")


PREFIX = "h.deepspeed_moe.experts.deepspeed_experts."


def write_experts(folder: Path, data_first: bool) -> dict[str, torch.Tensor]:
    """Four experts on two of four ranks each, as DeepSpeed writes them in stage 2; returns the weights, stacked."""
    folder.mkdir()
    values = {"up.weight": torch.randn(4, 3, 2), "up.bias": torch.randn(4, 3), "frozen": torch.randn(4, 2)}
    dense = torch.randn(5)
    for e in range(4):
        file = folder / f"layer_0_expert_{e}_mp_rank_00_model_states.pt"
        torch.save({f"{PREFIX}{e}.{name}": value[e].bfloat16() for name, value in values.items()}, file)
    trained = ["up.weight", "up.bias"]
    local = {f"{PREFIX}{e}.{name}": values[name].shape[1:] for e in range(2) for name in trained}
    for rank in range(4):
        part, place = (rank // 2, rank % 2) if data_first else (rank % 2, rank // 2)
        experts = torch.cat([values[name][2 * part + e].flatten() for e in range(2) for name in trained])
        lines = [(dense, 2, rank), (experts, 10, place)]
        cut = [line[size * at : size * (at + 1)] for line, size, at in lines]
        padded = [torch.cat([c, torch.zeros(size - len(c))]) for c, (_, size, _) in zip(cut, lines, strict=True)]
        state = {
            "zero_stage": 2,
            "loss_scaler": None,
            "single_partition_of_fp32_groups": cut,
            "group_paddings": [len(p) - len(c) for p, c in zip(padded, cut, strict=True)],
            "partition_count": [4, 2],
            "base_optimizer_state": {
                "state": {number: {"step": 3, "exp_avg": p + 1} for number, p in enumerate(padded)},
                "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "moe": True, "params": [1]}],
            },
        }
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}, file)
    model = {
        "module": {"d": dense.bfloat16()},
        "param_shapes": [{"d": torch.Size([5])}, local],
        "frozen_param_shapes": None,
        "buffer_names": [],
        "shared_params": {},
        "dp_world_size": 4,
        "ds_config": {"use_data_before_expert_parallelism": data_first},
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    torch.save({"optimizer": None}, folder / "expp_rank_0_mp_rank_00_optim_states.pt")
    return {"d": dense, **{PREFIX + name: value for name, value in values.items()}}
