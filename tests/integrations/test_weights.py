"""Hugging Face weights: `transformers` reads what we wrote and the other way round, on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from installed import needs
from ranks import device_type, run_ranks

pytestmark = pytest.mark.on_late

needs("transformers")

TINY: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
}


def tiny(family: str) -> Any:
    """A random model of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family]})
    return AutoModelForCausalLM.from_config(config).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12).reshape(2, 6)).logits
    return found


def sharded(model: nn.Module) -> nn.Module:
    from terrazzo.fsdp import fully_shard

    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    return fully_shard(model)


def check_family(family: str, folder: str) -> None:
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from terrazzo.integrations.huggingface import load_model, save_model

    model = tiny(family)
    expected = logits(model)
    theirs, ours = f"{folder}/{family}-theirs", f"{folder}/{family}-ours"
    if dist.get_rank() == 0:
        model.save_pretrained(theirs, max_shard_size="20KB")
        model.config.save_pretrained(ours)
    dist.barrier()

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config).eval()
    loaded = sharded(empty)
    assert load_model(loaded, theirs) == ([], [])
    torch.testing.assert_close(logits(loaded), expected)

    save_model(loaded, ours, max_shard_size="20KB")
    again = AutoModelForCausalLM.from_pretrained(ours).eval()
    assert torch.equal(logits(again), expected)
    if dist.get_rank() == 0:
        index = json.loads(Path(ours, "model.safetensors.index.json").read_text())
        reference = json.loads(Path(theirs, "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(reference["weight_map"])
        assert index["metadata"]["total_size"] == reference["metadata"]["total_size"]


def check_families(folder: str) -> None:
    for family in FAMILIES:
        check_family(family, folder)


@pytest.mark.cpu_only("histograms of integers")
def test_transformers_and_a_sharded_model_read_each_other(tmp_path: Path) -> None:
    run_ranks(2, check_families, str(tmp_path))


def holder(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A model with just these parameters."""
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(last, nn.Parameter(tensor.detach().clone()))
    return model


def joined(state: dict[str, torch.Tensor], pairs: int, grouped: bool) -> dict[str, torch.Tensor]:
    """A state dict whose projections are fused, by plain torch."""
    result = {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            if grouped:  # the queries of a key, this key, its value
                rows = [part.reshape(pairs, -1, part.shape[1]) for part in parts]
                result[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(rows, 1).flatten(0, 1)
            else:
                result[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
        elif ".gate_proj." in name:
            up = state[name.replace(".gate_proj.", ".up_proj.")]
            result[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat([tensor, up])
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            result[name] = tensor
    return result


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.on_late
def test_fused_projections(grouped: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from terrazzo.integrations.huggingface import llama, load_model, qwen3, save_model

    for family, rules in (("llama", llama), ("qwen3", qwen3)):
        theirs = tiny(family)
        expected = joined(dict(theirs.named_parameters()), 2, grouped)
        rename = rules(theirs.config, grouped=grouped)
        folder = tmp_path / family
        theirs.config.save_pretrained(folder)
        save_model(holder(expected), folder, rename=rename)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(theirs))

        theirs.save_pretrained(folder / "theirs")
        ours = holder({name: torch.zeros_like(tensor) for name, tensor in expected.items()})
        load_model(ours, folder / "theirs", rename=rename)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.named_parameters())


@pytest.mark.cpu_only("histograms of integers")
@pytest.mark.on_late
def test_experts_that_the_model_has_one_by_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from terrazzo.integrations.huggingface import load_model, mixtral, save_model

    theirs = tiny("mixtral")
    single: dict[str, torch.Tensor] = {}
    for name, tensor in theirs.named_parameters():
        if name.endswith("gate_up_proj"):
            for e, (w1, w3) in enumerate(expert.chunk(2) for expert in tensor):
                single[name.replace("gate_up_proj", f"{e}.w1.weight")] = w1
                single[name.replace("gate_up_proj", f"{e}.w3.weight")] = w3
        elif name.endswith("experts.down_proj"):
            single |= {name.replace("down_proj", f"{e}.w2.weight"): expert for e, expert in enumerate(tensor)}
        else:
            single[name] = tensor
    theirs.config.save_pretrained(tmp_path)
    save_model(holder(single), tmp_path, rename=mixtral())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(theirs))
    ours = holder({name: torch.zeros_like(tensor) for name, tensor in single.items()})
    load_model(ours, tmp_path, rename=mixtral())
    assert all(torch.equal(tensor, single[name]) for name, tensor in ours.named_parameters())


def test_what_does_not_fit(tmp_path: Path) -> None:
    from terrazzo.errors import CheckpointError, CheckpointMismatchError, UnsupportedValueError
    from terrazzo.integrations.huggingface import Rename, Rule, load_model, save_model

    model = holder({"a.w": torch.ones(2, 3), "b": torch.ones(4), "n": torch.ones(2)})
    save_model(model, tmp_path, rename={"n": "m"})
    kept = {name: torch.zeros(shape) for name, shape in (("a.w", (3, 2)), ("b", (4,)), ("n", (2,)))}
    ours = holder(kept)
    with pytest.raises(CheckpointMismatchError) as caught:
        load_model(ours, tmp_path)
    assert "Error(s) in loading state_dict for Module:" in str(caught.value)
    assert 'Missing key(s) in state_dict: "n". ' in str(caught.value) and caught.value.missing == ("n",)
    assert 'Unexpected key(s) in state_dict: "m". ' in str(caught.value)
    assert "size mismatch for a.w: copying a param with shape torch.Size([2, 3])" in str(caught.value)
    assert not any(tensor.any() for tensor in ours.parameters()), "nothing is changed before all is known to fit"

    # Numbers are rounded only where that is asked for, and only to what is asked for.
    half = holder({"a.w": torch.zeros(2, 3).half(), "b": torch.zeros(4), "c": torch.zeros(1)})
    for dtype in (None, torch.bfloat16):
        with pytest.raises(CheckpointMismatchError, match="dtype mismatch for a.w: torch.float16 cannot represent"):
            load_model(half, tmp_path, strict=False, dtype=dtype)
    result = load_model(half, tmp_path, strict=False, dtype=torch.float16)
    assert (result.missing_keys, result.unexpected_keys) == (["c"], ["m"])
    assert half.a.w.eq(1).all() and half.b.dtype == torch.float32 and half.b.eq(1).all()

    with pytest.raises(CheckpointMismatchError, match="would all be written as 'x'"):
        save_model(model, tmp_path, rename={"b": "x", "n": "x"})
    with pytest.raises(CheckpointMismatchError, match="not in the model: c"):
        save_model(model, tmp_path, rename=Rename([Rule(["b", "c"], "x")]))
    model.register_buffer("i", torch.ones(2, dtype=torch.complex32))
    with pytest.raises((UnsupportedValueError, CheckpointError), match="i: safetensors has no type"):
        save_model(model, tmp_path)


class Wrapping(torch.Tensor):
    """A tensor without memory of its own, as quantised weights are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        made: Wrapping = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(function(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {})))


def check_wrapping(folder: str) -> None:
    from terrazzo.errors import UnsupportedValueError
    from terrazzo.integrations.huggingface import save_model
    from terrazzo.tensor import DTensor, Replicate, init_device_mesh

    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(Wrapping(torch.ones(2, 2)))
    with pytest.raises(UnsupportedValueError, match="weight: a Wrapping cannot be stored"):
        save_model(model, folder)
    mesh = init_device_mesh(device_type(), (1,))
    model.weight = nn.Parameter(DTensor.from_local(Wrapping(torch.ones(2, 2)), mesh, [Replicate()]))
    with pytest.raises(UnsupportedValueError, match="weight: a Wrapping cannot be stored"):
        save_model(model, folder)


def test_tensors_that_wrap_others(tmp_path: Path) -> None:
    run_ranks(1, check_wrapping, str(tmp_path))


def test_buffers_that_are_in_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from terrazzo.integrations.huggingface import load_model, save_model

    class WithTable(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, device=device))
            self.register_buffer("table", torch.arange(3.0, device=device), persistent=False)

    class KnowsHow(WithTable):
        def _init_weights(self, module: nn.Module) -> None:
            raise AssertionError("it would initialise the parameter, too")

    save_model(WithTable("cpu"), tmp_path)
    model = WithTable("cpu")
    load_model(model, tmp_path)
    assert model.table.tolist() == [0, 1, 2]
    for kind in (WithTable, KnowsHow):
        caplog.clear()
        model = kind("meta")
        load_model(model, tmp_path)
        assert model.w.tolist() == [1, 1] and model.table.is_meta, "what nobody knows is no number"
        assert "table: not in the files" in caplog.text


def check_adapters(folder: str) -> None:
    import torch.distributed as dist
    from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model

    from terrazzo.errors import CheckpointMismatchError, UnsupportedValueError
    from terrazzo.fsdp import fully_shard
    from terrazzo.integrations.huggingface import load_adapter, save_adapter

    def adapted(config: Any, seed: int) -> Any:
        model = get_peft_model(tiny("llama"), config)
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
                assert "lora" in name or "lm_head" in name
        return model.eval()

    def sharded_adapter(model: Any) -> Any:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    model = adapted(config, 7)
    expected = logits(model)
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/theirs")
    dist.barrier()
    model = sharded_adapter(model)
    save_adapter(model, f"{folder}/ours")
    if dist.get_rank() == 0:
        files = [Path(folder, who, "adapter_model.safetensors").read_bytes() for who in ("theirs", "ours")]
        assert files[0] == files[1], "byte for byte what peft writes from one device"
    again = PeftModel.from_pretrained(tiny("llama"), f"{folder}/ours").eval()
    assert torch.equal(logits(again), expected)

    other = sharded_adapter(adapted(PeftConfig.from_pretrained(f"{folder}/theirs"), 8))
    for parameter in other.parameters():
        parameter.requires_grad_(False)
    assert load_adapter(other, f"{folder}/theirs") == ([], [])
    torch.testing.assert_close(logits(other), expected)

    config.lora_alpha = 50
    with pytest.raises(CheckpointMismatchError, match="lora_alpha is 5, but 50 in the model"):
        load_adapter(get_peft_model(tiny("llama"), config), f"{folder}/ours")
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(UnsupportedValueError, match="norm.weight: trained, but not part of the adapter"):
        save_adapter(model, f"{folder}/ours")


def test_adapters_are_complete(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run_ranks(2, check_adapters, str(tmp_path))


def check_disagreement(folder: str) -> None:
    import torch.distributed as dist

    from terrazzo.errors import CheckpointError, DivergentValueError
    from terrazzo.integrations.huggingface import load_model, save_model

    rank = dist.get_rank()
    good = holder({"w": torch.ones(4), "b": torch.ones(2)})
    save_model(good, folder)
    with pytest.raises(DivergentValueError, match="'w'"):
        save_model(holder({"w": torch.ones(4) * rank, "b": torch.ones(2)}), folder)
    with pytest.raises(CheckpointError, match="rank 1 has other tensors than the coordinator"):
        save_model(holder({"w": torch.ones(4)} if rank else {"w": torch.ones(4), "b": torch.ones(2)}), folder)
    dist.barrier()
    assert [path.name for path in Path(folder).iterdir()] == ["model.safetensors"]
    load_model(good, folder)


def test_ranks_that_do_not_have_the_same(tmp_path: Path) -> None:
    run_ranks(2, check_disagreement, str(tmp_path))


def high_water() -> int:
    """The most memory that this process has had, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) << 10


def check_memory(folder: str) -> list[int]:
    from terrazzo.fsdp import fully_shard
    from terrazzo.integrations.huggingface import load_model, save_model

    def model(device: str) -> nn.Module:
        layers = [nn.Linear(4096, 4096, bias=False, device=device) for _ in range(6)]  # 64 MB each
        return fully_shard(nn.Sequential(*layers))

    one = model("meta")
    one.to_empty(device="cpu")
    for parameter in one.parameters():
        nn.init.ones_(parameter)
    grown = []
    for save in (True, False):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is there now
        before = high_water()
        if save:
            save_model(one, folder, max_shard_size="200MB")
        else:
            load_model(one, folder)
        grown.append(high_water() - before)
    return grown


@pytest.mark.proof
def test_memory(tmp_path: Path) -> None:
    """Of 384 MB, two ranks hold half each, and little more while they save and load."""
    for grown in run_ranks(2, check_memory, str(tmp_path), timeout=600):
        assert max(grown) < 64 << 20, [f"{nbytes >> 20} MB" for nbytes in grown]


def check_example(folder: str) -> list[float]:
    import sys

    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "huggingface"))
    import finetune

    published, trained = Path(folder, "published"), Path(folder, "trained")
    if dist.get_rank() == 0:
        finetune.make_tiny(published)
    dist.barrier()
    losses: list[float] = finetune.finetune(published, trained)
    dist.barrier()  # the config is there
    assert AutoModelForCausalLM.from_pretrained(trained).dtype == torch.bfloat16
    return losses


def test_the_example(tmp_path: Path) -> None:
    for losses in run_ranks(2, check_example, str(tmp_path)):
        assert losses[-1] < losses[0]
