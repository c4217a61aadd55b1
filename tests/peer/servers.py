"""Runs what docs/publish.md shows for vLLM and SGLang on their own interfaces for new weights.

    pip download --no-deps vllm sglang && unzip vllm-*.whl 'vllm/*.py' -d FOLDER && unzip sglang-*.whl '*.py' -d FOLDER
    python tests/peer/servers.py FOLDER [vllm|sglang]

The page's modules are run as they are, with vLLM's engine classes and factory, and with SGLang's `WeightUpdater`.
Layers and the tensor-parallel group are this script's, because the servers' need their compiled parts. Two ranks train
with `fully_shard`, two serve a model with fused projections.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "publish.md"
TRAIN, SERVE = (0, 1), (2, 3)
HEADS = {"q_proj": 16, "k_proj": 8, "v_proj": 8}  # the rows of each


class ColumnParallelLinear(nn.Module):
    def __init__(self, *output_sizes: int, degree: int = 2) -> None:
        super().__init__()
        self.output_sizes = list(output_sizes)
        self.weight = _parameter(sum(output_sizes) // degree, 8)
        self.bias = _parameter(sum(output_sizes) // degree)


class RowParallelLinear(nn.Module):
    def __init__(self, inputs: int, degree: int = 2) -> None:
        super().__init__()
        self.weight, self.bias = _parameter(8, inputs // degree), _parameter(8)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, degree: int = 2) -> None:
        super().__init__()
        self.weight = _parameter(12 // degree, 8)


def _parameter(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape), requires_grad=False)
    # vLLM says both of every weight of a linear layer, however it is cut.
    parameter.output_dim, parameter.input_dim = 0, 1  # type: ignore[attr-defined]
    return parameter


def served() -> nn.Module:
    attention = nn.Module()
    attention.qkv_proj, attention.o_proj = ColumnParallelLinear(*HEADS.values()), RowParallelLinear(16)
    mlp = nn.Module()
    mlp.gate_up_proj, mlp.down_proj = ColumnParallelLinear(12, 12), RowParallelLinear(12)
    layer = nn.ModuleDict({"self_attn": attention, "mlp": mlp, "norm": nn.LayerNorm(8)})
    return nn.ModuleDict({"embed_tokens": VocabParallelEmbedding(), "layers": nn.ModuleList([layer])})


class Layer(nn.ModuleDict):
    def forward(self) -> None:
        """Never called: weights are sent."""


def trained() -> nn.Module:
    attention = nn.ModuleDict({name: nn.Linear(8, rows) for name, rows in HEADS.items()})
    attention["o_proj"] = nn.Linear(16, 8)
    mlp = nn.ModuleDict({"gate_proj": nn.Linear(8, 12), "up_proj": nn.Linear(8, 12), "down_proj": nn.Linear(12, 8)})
    layer = Layer({"self_attn": attention, "mlp": mlp, "norm": nn.LayerNorm(8)})
    return Layer({"embed_tokens": nn.Embedding(12, 8), "layers": nn.ModuleList([layer])})


def _module(name: str, folder: Path | None = None, **names: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = [] if folder is None else [str(folder)]
    module.__dict__.update(names)
    sys.modules[name] = module


def _stand_ins(folder: Path, group: Any) -> None:
    """What the interfaces and the page's modules import of the rest of vLLM and SGLang."""
    vllm, srt = folder / "vllm", folder / "sglang" / "srt"
    _module("vllm", vllm)
    _module("vllm.distributed", vllm / "distributed", get_tp_group=lambda: group)
    _module("vllm.logger", init_logger=logging.getLogger)
    _module("vllm.config", vllm / "config", VllmConfig=object)
    _module("vllm.config.parallel", ParallelConfig=object)
    _module("vllm.config.weight_transfer", WeightTransferConfig=types.SimpleNamespace)
    _module("sglang", folder / "sglang")
    for name, names in {
        "": (),
        ".configs": (),
        ".configs.load_config": ("LoadConfig",),
        ".model_loader": (),
        ".model_loader.loader": ("get_model_loader", "post_load_weights"),
        ".model_loader.utils": ("set_default_torch_dtype",),
        ".model_loader.weight_utils": ("default_weight_loader", "get_pp_stage_load_group"),
        ".platforms": ("current_platform",),
        ".utils": ("MultiprocessingSerializer", "get_available_gpu_memory", "init_custom_process_group"),
        ".utils.network": ("NetworkAddress",),
        ".utils.patch_torch": (),
    }.items():
        _module(f"sglang.srt{name}", srt / name[1:].replace(".", "/"), **dict.fromkeys(names))
    nothing = types.SimpleNamespace(
        restore_weights_before_loading=lambda *_: None, postprocess_weights=lambda *_: None
    )  # of weights that are packed after loading
    sys.modules["sglang.srt.model_loader.loader"].__dict__["DefaultModelLoader"] = nothing
    sys.modules["sglang.srt.utils"].__dict__["dynamic_import"] = _imported
    sys.modules["sglang.srt.utils.patch_torch"].__dict__["monkey_patch_torch_reductions"] = lambda: None
    _module(
        "sglang.srt.runtime_context",
        get_parallel=lambda: types.SimpleNamespace(tp_group=group, tp_rank=group.rank_in_group),
        get_model=lambda: types.SimpleNamespace(weight_cache_mode="off"),
    )
    _module("sglang.srt.model_executor", srt / "model_executor")
    _module("sglang.srt.model_executor.model_runner_components", srt / "model_executor/model_runner_components")
    _module("sglang.kernels.ops.gemm.bf16_fp32", hpc_bf16xfp32_gemm_enabled=lambda: False)


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


Updates = tuple[Callable[[], None], Callable[[], None]]


def with_vllm(model: nn.Module, group: Any, address: str) -> Updates:
    """How weights are updated, and what comes last."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # type: ignore[import-not-found]

    config = types.SimpleNamespace(parallel_config=None, model_config=None)
    engine = WeightTransferEngineFactory.create_engine(
        types.SimpleNamespace(backend="terrazzo"), config, torch.device("cpu"), model
    )
    torch.accelerator.synchronize = lambda *_: None  # vLLM calls it after an update; there is none here
    engine.init_transfer_engine(engine.parse_init_info({"address": address, "before": 2, "size": 4}))

    def update() -> None:
        engine.start_weight_update()
        engine.update_weights({})
        engine.finish_weight_update()

    return update, engine.shutdown


def with_sglang(model: nn.Module, group: Any, address: str) -> Updates:
    """The same."""
    name = "terrazzo_sglang.receive"
    os.environ["TERRAZZO_TRANSFER"] = f"{address} 2 4"
    updaters = importlib.import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
    fields: dict[str, Any] = dict.fromkeys(updaters.WeightUpdater.__dataclass_fields__)
    fields |= {"tp_rank": group.rank_in_group, "device": "cpu", "custom_weight_loaders": [name]}
    updater = updaters.WeightUpdater(**fields | {"get_model": lambda: model, "_model_update_group": {}})

    def update() -> None:
        updater.begin_weight_update()
        assert updater.update_weights_from_tensor([], load_format=name) == (True, "Success")
        updater.end_weight_update(run_post_load=False)

    return update, lambda: None


def expected(weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """What a worker has, cut by hand."""

    def rows(*names: str) -> torch.Tensor:
        return torch.cat([weights[name].chunk(2)[rank] for name in names])

    at = "layers.0.self_attn."
    found = {"embed_tokens.weight": rows("embed_tokens.weight")}
    for leaf in ("weight", "bias"):
        found[f"{at}qkv_proj.{leaf}"] = rows(*(f"{at}{name}.{leaf}" for name in HEADS))
        found[f"layers.0.mlp.gate_up_proj.{leaf}"] = rows(*(f"layers.0.mlp.{x}_proj.{leaf}" for x in ("gate", "up")))
        found[f"layers.0.norm.{leaf}"] = weights[f"layers.0.norm.{leaf}"]
    for name in (f"{at}o_proj", "layers.0.mlp.down_proj"):
        found[f"{name}.weight"] = weights[f"{name}.weight"].chunk(2, dim=1)[rank]
        found[f"{name}.bias"] = weights[f"{name}.bias"]
    return found


def check(server: str, folder: Path, modules: dict[str, str], address: str) -> int:
    from terrazzo.fsdp import fully_shard
    from terrazzo.publish import Transfer, join

    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", ranks) for ranks in (TRAIN, SERVE)]
    versions = []
    for seed in range(2):
        torch.manual_seed(seed)
        versions.append({name: torch.randn_like(x) for name, x in trained().state_dict().items()})
    if rank in TRAIN:
        model: Any = trained()
        fully_shard(model["layers"][0], mesh=meshes[0])
        fully_shard(model, mesh=meshes[0])
        transfer = Transfer(send=model, process_group=join(address, rank, 4))
        for version in versions:
            for name, parameter in model.named_parameters():
                parameter.data.to_local().copy_(version[name].chunk(2)[rank])
            transfer.run()
        if server != "vllm":
            return 0
        _stand_ins(folder, None)
        from vllm.distributed.weight_transfer import ModuleSource  # type: ignore[import-not-found]

        whole = list(ModuleSource(model).iter_full())  # what vLLM's own engines send of the same model
        assert all(torch.equal(x, versions[-1][name]) for name, x in whole)
        return len(whole)
    group = types.SimpleNamespace(device_group=meshes[1].get_group(), rank_in_group=meshes[1].get_local_rank())
    _stand_ins(folder, group)
    for name, source in modules.items():
        if name in ("served", f"terrazzo_{server}"):
            sys.modules[name] = types.ModuleType(name)
            exec(compile(source, f"{name}.py", "exec"), sys.modules[name].__dict__)
    model = served()
    update, end = {"vllm": with_vllm, "sglang": with_sglang}[server](model, group, address)
    compared = 0
    for version in versions:
        update()
        cut = expected(version, group.rank_in_group)
        assert set(cut) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.data, cut[name]), name
            compared += 1
    end()
    return compared


def main() -> None:
    modules = dict(re.findall(r"```python\n# (served|terrazzo_\w+)\.py[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert set(modules) == {"served", "terrazzo_vllm", "terrazzo_sglang"}, "the page has other modules"
    folder = Path(sys.argv[1]).resolve()
    for server in sys.argv[2:] or ("vllm", "sglang"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        compared = run_ranks(4, check, server, folder, modules, address)
        print(f"{server}: parameters compared on each rank, those that train first: {compared}")


if __name__ == "__main__":
    main()
