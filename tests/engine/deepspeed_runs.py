"""Runs of the real DeepSpeed, for the tests to compare with, on ranks that have a process group and end after it.

For each case, such as `2-bf16`, trains the tests' model in that ZeRO stage and precision, saves halfway, goes on, and
writes the losses; and gives the checkpoint to DeepSpeed's own conversion to float32, and of some to that to universal
checkpoints.  A case with `@TAG` resumes from a checkpoint that is there instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import deepspeed.comm.torch
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import deepspeed
from engine.deepspeed_cases import BEFORE, PIPELINE, STEPS, UNIVERSAL, parsed, pipeline_layers
from engine.runs import TOTAL, WIDTH, averaged, batches, loss_of, make_model, param_groups

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # an optional speed-up, which takes a minute to compile
# Said to be unsupported on CPUs that have no instructions for it; PyTorch computes it all the same.
get_accelerator().is_fp16_supported = lambda: True
get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]


def settings(stage: int, precision: str, option: str) -> dict[str, object]:
    chosen: dict[str, object] = {
        "train_batch_size": TOTAL,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}},
    }
    if precision != "fp32":
        chosen[precision] = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    if option == "master":
        chosen["data_types"] = {"grad_accum_dtype": "fp32"}
    chosen["zero_optimization"] |= {"small": {"sub_group_size": 60}, "robin": {"round_robin_gradients": True}}.get(
        option, {}
    )
    return chosen


def make_universal(folder: Path) -> None:
    wanted = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    out = f"{folder}-universal"
    ds_to_universal.main(argparse.Namespace(input_folder=str(folder), output_folder=out, **wanted, **workers))


def run(out: Path, case: str) -> list[float]:
    name, _, tag = case.partition("@")
    stage, precision, option = parsed(name)
    model = make_model(seed=7 if tag else 0)
    groups = param_groups(model)
    chosen = settings(stage, precision, option)
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=chosen)[0]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    rank, size = dist.get_rank(), TOTAL // dist.get_world_size()
    start = 0
    if tag:
        path, client = engine.load_checkpoint(str(out), tag)
        assert path is not None and client["mine"] == [1, 2]
        start = engine.global_steps
        if precision == "fp16":
            assert engine.optimizer.loss_scaler.cur_iter == BEFORE and engine.optimizer.loss_scaler.cur_scale == 256
    losses = []
    for step, (x, y) in enumerate(batches(STEPS - start, start), start):
        x, y = (part[rank * size : (rank + 1) * size] for part in (x, y))
        loss = loss_of(engine, x.to(dtype), y)
        engine.backward(loss)
        engine.step()
        losses.append(averaged(loss))
        if step == BEFORE - 1 and not tag:
            engine.save_checkpoint(str(out), name, client_state={"mine": [1, 2]})
    if dist.get_rank() == 0:
        tag = tag or name
        if option != "master":  # zero_to_fp32 does not know that layout
            torch.save(get_fp32_state_dict_from_zero_checkpoint(str(out), tag), out / f"{tag}.pt")
        if name in UNIVERSAL:
            make_universal(out / tag)
    dist.barrier()
    return losses


def run_pipeline(out: Path) -> list[float]:
    """The same in two stages of layers."""
    torch.manual_seed(0)
    first, _, rest = pipeline_layers()
    tied = [TiedLayerSpec("twice", torch.nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    model = PipelineModule([first, *tied, *rest], num_stages=2, loss_fn=lambda x, y: loss_of(lambda x: x, x, y))
    parameters = [p for p in model.parameters() if p.requires_grad]
    chosen = {**settings(1, "fp32", ""), "train_micro_batch_size_per_gpu": TOTAL // 2}
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=chosen)[0]
    losses = []
    for step, (x, y) in enumerate(batches(STEPS)):
        losses.append(float(engine.train_batch(iter(zip(x.chunk(2), y.chunk(2), strict=True)))))
        if step == BEFORE - 1:
            engine.save_checkpoint(str(out), PIPELINE, client_state={"mine": [1, 2]})
    return losses


def run_all(out: Path, cases: list[str]) -> dict[str, list[float]]:
    """The losses of each case, on every rank."""
    deepspeed.init_distributed("gloo")
    return {case: run_pipeline(out) if case == PIPELINE else run(out, case) for case in cases}
