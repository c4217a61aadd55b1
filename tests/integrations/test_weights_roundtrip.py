"""No silent loss: whatever kinds of tensors a model has, and however they are laid out, their bytes come back.

What is expected is made anew on one device from a seed; files are read by the safetensors library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from ranks import device_type, run_ranks

pytestmark = pytest.mark.on_late

LAYOUTS = ("plain", "tp", "fsdp", "fsdp_tp")
FORMATS = ("huggingface", "native", "dcp")
KINDS = ("uneven", "replicated", "tied", "frozen", "fused", "grouped", "experts", "wide", "adapter", "buffer", "split")


def tensors_of(kind: str, n: int, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of the model of one kind, by name."""
    generator = torch.Generator().manual_seed(seed * 100 + n)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    at = f"layers.{n}"
    made: dict[str, dict[str, torch.Tensor]] = {
        "uneven": {f"{at}.w": randn(5, 3), f"{at}.one": randn(1, 7).bfloat16(), f"{at}.none": randn(0, 4)},
        "replicated": {f"{at}.scale": randn(3), f"{at}.t": torch.tensor(2.5)},
        "tied": {f"{at}.embed": randn(7, 4)},
        "frozen": {f"{at}.frozen": randn(6, 2).half()},
        "fused": {f"{at}.qkv.weight": randn(8, 3), f"{at}.qkv.bias": randn(8)},
        "grouped": {f"{at}.attn": randn(12, 5)},
        "experts": {f"{at}.experts.gate_up": randn(3, 4, 5), f"{at}.experts.down": randn(3, 5, 2)},
        "wide": {f"{at}.wide": randn(2, 3, 4)},
        "adapter": {f"{at}.q.lora_A.default.weight": randn(2, 9), f"{at}.q.lora_B.default.weight": randn(9, 2)},
        "buffer": {f"{at}.count": torch.tensor([n, seed]), f"{at}.mask": randn(9) > 0},
        "split": {f"{at}.gate": randn(3, 4), f"{at}.up": randn(3, 4)},
    }
    return made[kind]


def in_files(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What of a tensor of the model is to be in the files, by plain torch."""
    at = ".".join(name.split(".")[:2])
    rest = name.removeprefix(f"{at}.")
    if rest.startswith("qkv."):
        parts = tensor.split([4, 2, 2])
        return {f"{at}.{letter}.{rest[4:]}": part for letter, part in zip("qkv", parts, strict=True)}
    if rest == "attn":  # two groups, each with 2 of one, 3 of the other, 1 of the third
        rows = tensor.reshape(2, 6, 5)
        return {f"{at}.a{i}": rows[:, s].reshape(-1, 5) for i, s in enumerate((slice(2), slice(2, 5), slice(5, 6)))}
    if rest == "experts.gate_up":
        return {
            f"{at}.expert.{e}.{'gu'[half]}": tensor[e, 2 * half : 2 * half + 2] for e in range(3) for half in range(2)
        }
    if rest == "experts.down":
        return {f"{at}.expert.{e}.d": tensor[e] for e in range(3)}
    if rest == "wide":
        return {f"{at}.narrow.{e}.{'lr'[half]}": tensor[e].chunk(2, 1)[half] for e in range(2) for half in range(2)}
    return {name: tensor}


def rename() -> Any:
    from terrazzo.integrations.huggingface import Rename, Rule

    return Rename(
        [
            Rule("layers.{n}.qkv.{w}", [f"layers.{{n}}.{letter}.{{w}}" for letter in "qkv"], sizes=(4, 2, 2)),
            Rule("layers.{n}.attn", [f"layers.{{n}}.a{i}" for i in range(3)], sizes=(4, 6, 2), groups=2),
            Rule("layers.{n}.experts.gate_up", [f"layers.{{n}}.expert.{{e}}.{part}" for part in "gu"], dim=1),
            Rule("layers.{n}.experts.down", "layers.{n}.expert.{e}.d"),
            Rule("layers.{n}.wide", [f"layers.{{n}}.narrow.{{e}}.{part}" for part in "lr"], dim=2),
            Rule(["layers.{n}.gate", "layers.{n}.up"], "layers.{n}.joined"),
        ]
    )


def build(kinds: list[str], seed: int, layout: str, device: str = "cpu") -> nn.Module:
    """The model, laid out; on the meta device it has no values."""
    from terrazzo.fsdp import fully_shard
    from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh

    world = dist.get_world_size()
    model = nn.Module()
    two = layout == "fsdp_tp" and world == 4
    meshes = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp")) if two else None
    mesh = meshes["tp"] if meshes is not None else init_device_mesh(device_type(), (world,))
    for n, kind in enumerate(kinds):
        for number, (name, tensor) in enumerate(tensors_of(kind, n, seed).items()):
            *path, last = name.split(".")
            module = model
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            tensor = tensor.to(device)
            if kind == "buffer":
                module.register_buffer(last, tensor)
                continue
            if (layout == "tp" or two) and kind not in ("replicated", "tied") and tensor.ndim:
                tensor = distribute_tensor(tensor, mesh, [Shard((n + number + seed) % tensor.ndim)], src_data_rank=None)
            module.register_parameter(last, nn.Parameter(tensor, requires_grad=kind != "frozen"))
            if kind == "tied":
                module.register_parameter("head", module._parameters[last])
    if layout.startswith("fsdp") and (layout == "fsdp" or two):
        sharded = [p for p in model.parameters() if p.ndim]  # a parameter without dims cannot be sharded
        ignored = {p for p in model.parameters() if not p.ndim}
        if sharded:
            fully_shard(model, mesh=meshes["dp"] if meshes is not None else mesh, ignored_params=ignored)
    return model


def save_it(kinds: list[str], seed: int, layout: str, form: str, folder: str, shard: int) -> None:
    from terrazzo.checkpoint import save
    from terrazzo.checkpoint.formats import DCPWriter
    from terrazzo.checkpoint.formats.convert import convert
    from terrazzo.checkpoint.state_dict import get_model_state_dict
    from terrazzo.integrations.huggingface import save_model

    model = build(kinds, seed, layout)
    if form == "huggingface":
        save_model(model, f"{folder}/hf", rename=rename(), max_shard_size=shard)
        return
    state = get_model_state_dict(model)
    where: dict[str, Any] = {"storage_writer": DCPWriter(f"{folder}/a")} if form == "dcp" else {}
    save(state, **(where or {"checkpoint_id": f"{folder}/a"}))
    if dist.get_rank() == 0:
        convert(f"{folder}/a", f"{folder}/hf", "huggingface")


def load_it(kinds: list[str], seed: int, layout: str, device: str, renamed: bool, folder: str) -> None:
    from terrazzo.integrations.huggingface import load_model

    model = build(kinds, seed + 1, layout, device)
    assert load_model(model, f"{folder}/hf", rename=rename() if renamed else {}) == ([], [])
    for n, kind in enumerate(kinds):
        for name, expected in tensors_of(kind, n, seed).items():
            module, _, last = name.rpartition(".")
            found: Any = getattr(model.get_submodule(module), last)
            assert found.requires_grad == (kind not in ("frozen", "buffer")), name
            if kind == "tied":
                assert model.get_submodule(module).head is found
            whole = found.full_tensor() if hasattr(found, "full_tensor") else found
            assert whole.dtype == expected.dtype and whole.shape == expected.shape, name
            assert bytes_of(whole) == bytes_of(expected), name


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """What is there, as the safetensors library reads it."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # no dict
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # on failure the example is shown; making it smaller would take minutes
)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=6, max_size=9),
    seed=st.integers(0, 1000),
    worlds=st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4))),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    form=st.sampled_from(FORMATS),
    device=st.sampled_from(("cpu", "meta")),
    shard=st.sampled_from((60, 300, 10**9)),
)
def test_no_byte_is_lost(
    tmp_path_factory: Any,
    kinds: list[str],
    seed: int,
    worlds: tuple[int, int],
    layouts: tuple[str, str],
    form: str,
    device: str,
    shard: int,
) -> None:
    folder = tmp_path_factory.mktemp("roundtrip")
    run_ranks(worlds[0], save_it, kinds, seed, layouts[0], form, str(folder), shard)
    renamed = form == "huggingface"
    if renamed:
        expected: dict[str, torch.Tensor] = {}
        for n, kind in enumerate(kinds):
            tensors = tensors_of(kind, n, seed)
            if kind == "split":
                expected[f"layers.{n}.joined"] = torch.cat(list(tensors.values()))
                continue
            for name, tensor in tensors.items():
                expected |= in_files(name, tensor)
        found = stored(folder / "hf")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert bytes_of(found[name]) == bytes_of(tensor), name
    run_ranks(worlds[1], load_it, kinds, seed, layouts[1], device, renamed, str(folder))
