"""What is read of DeepSpeed's files is what was saved; files that are damaged, lacking or hostile are typed errors."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.formats.deepspeed.made import (
    PREFIX,
    SHAPES,
    change_states,
    elastic,
    plain,
    with_gaps,
    write,
    write_experts,
    write_pipeline,
    write_universal,
)
from terrazzo.checkpoint import Checkpoint
from terrazzo.checkpoint.formats import DeepSpeedReader
from terrazzo.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    UnsafePickleError,
)


def read(path: Path) -> dict[str, Any]:
    return Checkpoint(path).state_dict()


def assert_read(path: Path, state: dict[str, Any]) -> None:
    found = read(path)
    assert found["module"].keys() == state["module"].keys()
    for name, tensor in state["module"].items():
        assert torch.equal(found["module"][name], tensor) and found["module"][name].dtype == tensor.dtype, name
    for name, kept in state["optimizer"]["state"].items():
        assert found["optimizer"]["state"][name].keys() == kept.keys()
        for key, tensor in kept.items():
            assert torch.equal(found["optimizer"]["state"][name][key], tensor), (name, key)
    for group, saved in zip(found["optimizer"]["param_groups"], state["optimizer"]["param_groups"], strict=True):
        assert {key: group[key] for key in saved} == saved
    for name in ("lr_scheduler", "global_steps", "global_samples", "shared_params", "buffer_names", "mine"):
        assert found[name] == state[name], name


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("ranks", (1, 2, 7))
def test_partitions(tmp_path, stage, ranks):
    assert_read(tmp_path / "tag", write(tmp_path, stage, ranks))


@pytest.mark.parametrize("stage", (1, 3))
def test_the_model_is_in_one_piece(tmp_path, stage):
    write(tmp_path, stage)
    names = [*DeepSpeedReader(tmp_path / "tag").read_metadata().state_dict_metadata]
    first = next(number for number, name in enumerate(names) if name.startswith("optimizer.state."))
    assert {f"module.{name}" for name in SHAPES} <= set(names[:first])


def test_settings_that_change_the_layout(tmp_path):
    for number, (stage, settings) in enumerate(((2, {"round_robin_gradients": True}), (3, {"sub_group_size": 8}))):
        state = write(tmp_path / str(number), stage, 2, **settings)
        assert_read(tmp_path / str(number) / "tag", state)
    shapes = plain(next((tmp_path / "1" / "tag").glob("*rank_0*model_states.pt")))["param_shapes"]
    assert [list(named) for named in shapes] == [["a.weight"], ["a.bias", "b"], ["c"]]


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_config_that_was_given_as_a_path(tmp_path, stage):
    state = write(tmp_path, stage)
    for file in (tmp_path / "tag").glob("*_states.pt"):
        torch.save(plain(file) | {"ds_config": "ds_config.json"}, file)
    assert_read(tmp_path / "tag", state)


def test_states_without_padding(tmp_path):
    state = write(tmp_path, 2, 3)
    elastic(tmp_path / "tag")
    for group in state["optimizer"]["param_groups"]:  # which are not saved so
        del group["lr"], group["betas"]
    assert_read(tmp_path / "tag", state)


GAPS = [[1, 0, 2], [1]]


def test_unused_elements_between_parameters(tmp_path):
    state = write(tmp_path, 1, 1)
    with_gaps(tmp_path / "tag", GAPS)
    assert_read(tmp_path / "tag", state)
    for wrong in (
        [[1.0, 0, 2], [1]],
        [[-1, 2, 2], [1]],
        [[True, 0, 2], [1]],
        [[3], [1]],
        [[0, 1, 2]],
        "12",
        [[9, 0, 2], [1]],
    ):
        change_states(tmp_path / "tag", lambda state, wrong=wrong: state.update(param_alignment_paddings=wrong))
        with pytest.raises(CheckpointError, match=r"zero_pp_rank_0_mp_rank_00_optim_states\.pt: "):
            read(tmp_path / "tag")


@pytest.mark.parametrize("stage", (2, 3))
def test_universal(tmp_path, stage):
    assert_read(tmp_path / "tag", write_universal(tmp_path, stage))
    (tmp_path / "latest_universal").write_text("tag")
    assert read(tmp_path)["global_steps"] == 3


def test_universal_of_a_model_that_was_tensor_parallel(tmp_path):
    state = write_universal(tmp_path, 2)
    file = tmp_path / "tag" / "mp_rank_00_model_states.pt"
    model = plain(file) | {"frozen_param_shapes": None, "mp_world_size": 2, "shared_params": {}}
    # Each rank's file has the shapes of its part of the parameters; buffers are the same on all.
    model["param_shapes"] = [
        {name: (1, *shape[1:]) for name, shape in group.items()} for group in model["param_shapes"]
    ]
    for rank in range(2):
        only_buffers = {"running": model["module"]["running"]}
        torch.save(model | {"module": only_buffers}, file.with_name(f"mp_rank_0{rank}_model_states.pt"))
    found = read(tmp_path / "tag")
    assert found["module"].keys() == state["module"].keys() - {"f"}
    for name, kept in state["optimizer"]["state"].items():
        assert torch.equal(found["module"][name], state["module"][name])
        assert torch.equal(found["optimizer"]["state"][name]["exp_avg"], kept["exp_avg"])
    torch.save(model, file)
    with pytest.raises(CheckpointFormatError, match="tensor-parallel, and .* was not trained"):
        read(tmp_path / "tag")


@pytest.mark.parametrize(("padding", "shape"), [(-60, (5, 3)), (-22, (5, 3)), (2, (1 << 40, 3))])
def test_partitions_that_are_too_short_for_the_parameters(tmp_path, padding, shape):
    """They would be gone through for ever, or element by element: partitions of fewer elements than 0, of 0, of few."""
    write(tmp_path, 1)
    file = tmp_path / "tag" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    optim = plain(file)
    optim["optimizer_state_dict"]["group_paddings"][0] = padding
    torch.save(optim, file)
    file = tmp_path / "tag" / "mp_rank_00_model_states.pt"
    model = plain(file)
    model["param_shapes"][0]["a.weight"] = torch.Size(shape)
    torch.save(model, file)
    with pytest.raises(CheckpointError, match=r"no count|the partitions of parameters with \d+ elements have 44"):
        read(tmp_path / "tag")


def test_more_files_than_may_be_open(tmp_path):
    import resource

    write_universal(tmp_path, 2)
    open_now = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 4, limits[1]))
    try:
        read(tmp_path / "tag")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("data_first", (False, True))
def test_experts_are_stacked(tmp_path, data_first):
    values = write_experts(tmp_path / "tag", data_first)
    found = read(tmp_path / "tag")
    frozen = f"{PREFIX}frozen"
    assert found["module"].keys() == values.keys() and found["module"][frozen].dtype is torch.bfloat16
    for name, value in values.items():
        assert torch.equal(found["module"][name], value.bfloat16() if name == frozen else value), name
        if name != frozen:
            assert torch.equal(found["optimizer"]["state"][name]["exp_avg"], value + 1), name
    names = [f"{PREFIX}up.weight", f"{PREFIX}up.bias"]
    assert [group["params"] for group in found["optimizer"]["param_groups"]] == [["d"], names]
    assert found["param_shapes"] == [[["d", [5]]], [[names[0], [4, 3, 2]], [names[1], [4, 3]]]]
    file = tmp_path / "tag" / "layer_0_expert_2_mp_rank_00_model_states.pt"
    experts = torch.load(file)
    for changed, what in (
        ({name: value[:1] for name, value in experts.items()}, r"shape \(1,"),
        ({"h.experts.w1.2": torch.ones(1)}, "no parameter of a layer deepspeed.moe.layer.MoE"),
    ):
        torch.save(changed, file)
        with pytest.raises(CheckpointError, match=what):
            read(tmp_path / "tag")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"only the experts \[0, 1, 3\]"):
        read(tmp_path / "tag")


def test_pipelines(tmp_path):
    write_pipeline(tmp_path)
    found = read(tmp_path / "tag")
    names = {"0.weight", "0.bias", "1.gain", "1.buffer", "2.gain", "2.frozen", "3.bias"}
    assert found["module"].keys() == names and found["shared_params"] == {"3.weight": "0.weight"}
    trained = ["0.weight", "0.bias", "1.gain", "3.bias", "2.gain"]
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1, "params": trained}]
    assert [name for name, _ in found["param_shapes"][0]] == trained and found["buffer_names"] == ["1.buffer"]
    for name in trained:
        weight, state = found["module"][name], found["optimizer"]["state"][name]
        assert weight.dtype is torch.float32 and state["step"] == 3
        assert torch.equal(state["exp_avg"], weight + 1) and torch.equal(state["exp_avg_sq"], weight + 2)
    layer = torch.load(tmp_path / "tag" / "layer_03-model_states.pt")
    assert torch.equal(found["module"]["3.bias"].bfloat16(), layer["bias"])
    (tmp_path / "tag" / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match="model states of 1 model ranks"):
        read(tmp_path / "tag")


# ------------------------------------------------------------------ what cannot be read


def lacking(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in nested containers."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from lacking(item, (*path, key))


CHANGES = {"none": None, "text": "text", "negative": -50, "large": 1 << 40, "empty": torch.zeros(0)}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ("2", "3", "universal"))
def test_files_that_are_not_as_they_should_be(tmp_path, kind, every):
    """Whatever a file lacks, or has of another type, it is read all the same or a typed error.

    Each value of a file is changed in every way, or in one way.
    """
    write_universal(tmp_path, 2) if kind == "universal" else write(tmp_path, int(kind))
    refused = 0
    for file in sorted((tmp_path / "tag").rglob("*.pt")):
        if "rank_1" in file.name or file.parent.name in ("a.bias", "b", "c"):
            continue
        original, bytes_before = plain(file), file.read_bytes()
        for path in lacking(original):
            changes = ["remove", "longer", *CHANGES]
            for change in changes if every else [changes[zlib.crc32(repr(path).encode()) % len(changes)]]:
                value = copy.deepcopy(original)
                container = value
                for key in path[:-1]:
                    container = container[key]
                if change == "remove":
                    del container[path[-1]]
                elif change == "longer" and isinstance(container[path[-1]], torch.Size):
                    container[path[-1]] = torch.Size([1 << 40, *container[path[-1]][1:]])
                else:
                    container[path[-1]] = CHANGES.get(change)
                torch.save(value, file)
                try:
                    read(tmp_path / "tag")
                except CheckpointError as error:
                    refused += 1
                    assert str(tmp_path) in str(error), (path, change, error)
        file.write_bytes(bytes_before)
    assert refused > (20 if every else 7)


@pytest.mark.parametrize("kind", ("2", "3", "universal"))
def test_damaged_files_are_named(tmp_path, kind):
    write_universal(tmp_path, 3) if kind == "universal" else write(tmp_path, int(kind))
    for file in sorted((tmp_path / "tag").rglob("*.pt")):
        if kind == "universal" and "rank_1" in file.name:
            continue
        data = file.read_bytes()
        for part in (b"", data[:3], data[: len(data) // 2], data[:-40], b"no archive" + data):
            file.write_bytes(part)
            with pytest.raises(CheckpointError, match=file.name):
                read(tmp_path / "tag")
        file.unlink()
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path / "tag")
        assert file.name in str(caught.value) or "rank" in str(caught.value) or "model states" in str(caught.value)
        file.write_bytes(data)
    read(tmp_path / "tag")


def test_other_kinds_of_parallelism_are_named(tmp_path):
    write(tmp_path, 2)
    tag = tmp_path / "tag"
    for name, what in (
        ("layer_00-model_01-model_states.pt", "tensor-parallel"),
        ("layer_0_expert_1_mp_rank_01_model_states.pt", "tensor-parallel"),
        ("expert_1_mp_rank_00_model_states.pt", "without the layer's number"),
    ):
        (tag / name).write_bytes(b"")
        with pytest.raises(CheckpointFormatError, match=what):
            read(tag)
        (tag / name).unlink()
    for file in list(tag.iterdir()):
        shutil.copy(file, file.with_name(file.name.replace("mp_rank_00", "mp_rank_01")))
    with pytest.raises(CheckpointFormatError, match="tensor-parallel"):
        read(tag)
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(CheckpointNotFoundError, match="gone"):
        DeepSpeedReader(tmp_path).read_metadata()


class Hostile:
    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.file,)


@pytest.mark.parametrize("kind", ("2", "3", "universal"))
def test_pickles_are_never_run(tmp_path, kind):
    write_universal(tmp_path, 2) if kind == "universal" else write(tmp_path, int(kind))
    ran = tmp_path / "ran"
    for file in sorted((tmp_path / "tag").rglob("*.pt")):
        data, value = file.read_bytes(), plain(file)
        torch.save({**value, "hostile": Hostile(ran)} if isinstance(value, dict) else [value, Hostile(ran)], file)
        with pytest.raises(UnsafePickleError, match=file.name):
            read(tmp_path / "tag")
        file.write_bytes(pickle.dumps(Hostile(ran)))
        with pytest.raises(CheckpointError, match=file.name):
            read(tmp_path / "tag")
        file.write_bytes(data)
    assert not ran.exists()
