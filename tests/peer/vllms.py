"""Runs what docs/publish.md shows for vLLM on vLLM's own interface of weight transfer.

    pip download --no-deps vllm && unzip vllm-*.whl 'vllm/*.py' -d FOLDER
    python tests/peer/vllms.py FOLDER

The page's module is run as it is, with vLLM's engine classes and factory. Layers and the tensor-parallel group are
this script's, because vLLM's need its compiled parts. Two ranks train with `fully_shard`, two serve a model with fused
projections.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
import types
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


def _stand_ins(vllm: Path, group: Any) -> None:
    """What vLLM's interface and the page's module import of the rest of vLLM."""
    _module("vllm", vllm)
    _module("vllm.distributed", vllm / "distributed", get_tp_group=lambda: group)
    _module("vllm.logger", init_logger=logging.getLogger)
    _module("vllm.config", vllm / "config", VllmConfig=object)
    _module("vllm.config.parallel", ParallelConfig=object)
    _module("vllm.config.weight_transfer", WeightTransferConfig=types.SimpleNamespace)
    for name in ("model_executor", "model_executor.layers"):
        _module(f"vllm.{name}")
    _module(
        "vllm.model_executor.layers.linear",
        ColumnParallelLinear=ColumnParallelLinear,
        RowParallelLinear=RowParallelLinear,
    )
    _module("vllm.model_executor.layers.vocab_parallel_embedding", VocabParallelEmbedding=VocabParallelEmbedding)


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


def check(vllm: Path, recipe: str, address: str) -> int:
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
        _stand_ins(vllm, None)
        from vllm.distributed.weight_transfer import ModuleSource  # type: ignore[import-not-found]

        whole = list(ModuleSource(model).iter_full())  # what vLLM's own engines send of the same model
        assert all(torch.equal(x, versions[-1][name]) for name, x in whole)
        return len(whole)
    group = types.SimpleNamespace(device_group=meshes[1].get_group(), rank_in_group=meshes[1].get_local_rank())
    _stand_ins(vllm, group)
    sys.modules["terrazzo_vllm"] = types.ModuleType("terrazzo_vllm")
    exec(compile(recipe, "terrazzo_vllm.py", "exec"), sys.modules["terrazzo_vllm"].__dict__)
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # type: ignore[import-not-found]

    model = served()
    config = types.SimpleNamespace(parallel_config=None, model_config=None)
    engine = WeightTransferEngineFactory.create_engine(
        types.SimpleNamespace(backend="terrazzo"), config, torch.device("cpu"), model
    )
    torch.accelerator.synchronize = lambda *_: None  # vLLM calls it after an update; there is none here
    engine.init_transfer_engine(engine.parse_init_info({"address": address, "before": 2, "size": 4}))
    compared = 0
    for version in versions:
        engine.start_weight_update()
        engine.update_weights({})
        engine.finish_weight_update()
        cut = expected(version, group.rank_in_group)
        assert set(cut) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.data, cut[name]), name
            compared += 1
    engine.shutdown()
    return compared


def main() -> None:
    blocks = re.findall(r"```python\n(# terrazzo_vllm.py.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1, "the page has no module terrazzo_vllm.py"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    compared = run_ranks(4, check, Path(sys.argv[1]).resolve() / "vllm", blocks[0], address, timeout=240)
    print(f"parameters compared on each rank, those that train first: {compared}")


if __name__ == "__main__":
    main()
