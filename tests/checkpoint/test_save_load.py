"""Saving and loading: every kind of value, every change of layout and world size, compared with whole tensors."""

import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ranks import device_type, run_ranks
from terrazzo.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    PerRank,
    load,
    load_state_dict,
    save,
    save_state_dict,
)
from terrazzo.checkpoint.state_dict import get_optimizer_state_dict
from terrazzo.checkpoint.stores import MemoryStore
from terrazzo.errors import (
    CheckpointError,
    CheckpointException,
    CheckpointExistsError,
    CheckpointIOError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DivergentValueError,
    DivergentValueWarning,
    UnsupportedValueError,
)
from terrazzo.fsdp import fully_shard

pytestmark = pytest.mark.on_late(both=True)

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2fnuz,
]


def filled(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor whose elements all differ, where the dtype can tell them apart."""
    numel = int(np.prod(shape))
    return (torch.arange(numel, dtype=torch.float64) + seed).reshape(shape).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.on_late
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    value = filled(5, 3, dtype=dtype)
    save({"w": value}, checkpoint_id=tmp_path)
    target = torch.zeros_like(value)
    load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(bits(target), bits(value))


@pytest.mark.on_late
def test_shapes_and_strides(tmp_path: Path) -> None:
    state = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": filled(5, 7).T,
        "sliced": filled(9, 9)[2:5, ::2],
        "expanded": filled(3, 1).expand(3, 4),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "large": filled(700, 1001),  # several checksum blocks, the last one partial
        "large_transposed": filled(801, 1003, seed=5).T,
        "parameter": torch.nn.Parameter(filled(4)),
    }
    save(state, checkpoint_id=tmp_path)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    target["large"] = torch.zeros(1001, 700).T  # into memory of other strides
    target["parameter"] = torch.nn.Parameter(torch.zeros(4))
    load(target, checkpoint_id=tmp_path)
    for name, value in state.items():
        assert torch.equal(target[name], value), name
    assert target["parameter"].requires_grad


def test_values_that_are_not_tensors(tmp_path: Path) -> None:
    values = {
        "nothing": None,
        "text": "long " * 2000,  # too large for the manifest
        "pair": (1, (2.5, "x")),
        "names": {"a", "b"},
        "by_number": {1: "one", (2, 3): "pair"},
        "huge": 2**100,
        "dtype": torch.bfloat16,
        "array": np.arange(4, dtype=np.int16),
        "scalar": np.float32(1.5),
        "random": random.getstate(),
        "empty": {},
        "list": [1, [2, 3]],
        "mixed": [1, filled(3), {"deep": filled(2)}],
    }
    save({"v": values}, checkpoint_id=tmp_path)
    target = {"v": dict.fromkeys(values)}
    target["v"]["mixed"] = [None, torch.zeros(3), {"deep": torch.zeros(2)}]
    target["v"]["by_number"] = {1: None, (2, 3): None}
    load(target, checkpoint_id=tmp_path)
    loaded = target["v"]
    assert torch.equal(loaded["mixed"][1], filled(3)) and loaded["mixed"][0] == 1
    assert np.array_equal(loaded["array"], values["array"]) and loaded["array"].dtype == np.int16
    for name in values.keys() - {"mixed", "array"}:
        assert loaded[name] == values[name] and type(loaded[name]) is type(values[name]), name


class Counter:
    """A user's own stateful object, with a nested state."""

    def __init__(self) -> None:
        self.state = {"n": 0, "history": torch.zeros(2)}
        self.loads = 0

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state_dict):
        self.state = state_dict
        self.loads += 1


@pytest.mark.on_late
def test_stateful_objects_at_any_depth(tmp_path: Path) -> None:
    model, counter = torch.nn.Linear(3, 2), Counter()
    counter.state = {"n": 7, "history": filled(2)}
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save({"app": {"model": model, "counter": counter}, "optimizer": optimizer}, checkpoint_id=tmp_path)

    other, other_counter = torch.nn.Linear(3, 2), Counter()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    other(torch.ones(1, 3)).sum().backward()
    other_optimizer.step()
    load({"app": {"model": other, "counter": other_counter}, "optimizer": other_optimizer}, checkpoint_id=tmp_path)
    assert torch.equal(other.weight, model.weight)
    assert other_counter.loads == 1 and other_counter.state["n"] == 7
    assert torch.equal(other_counter.state["history"], filled(2))
    assert str(other_optimizer.state_dict()) == str(optimizer.state_dict())


@pytest.mark.on_late
def test_all_that_does_not_fit_is_one_error_and_nothing_changes(tmp_path: Path) -> None:
    save({"a": filled(4), "b": filled(2, 2), "c": filled(3), "o": 1}, checkpoint_id=tmp_path)
    target = {
        "a": torch.zeros(5),
        "b": torch.zeros(2, 2, dtype=torch.int8),
        "c": torch.zeros(3),
        "o": torch.zeros(1),
        "missing": torch.zeros(1),
        "also_missing": 0,
    }
    with pytest.raises(CheckpointMismatchError) as caught:
        load(target, checkpoint_id=tmp_path)
    for name in ("a: ", "b: ", "o: ", "missing: ", "also_missing: "):
        assert name in str(caught.value)
    assert caught.value.missing == ("missing", "also_missing")
    assert not target["c"].any()


@pytest.mark.on_late
def test_partial_load_leaves_absent_values_alone(tmp_path: Path) -> None:
    save({"a": filled(4)}, checkpoint_id=tmp_path)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    target = {"a": torch.zeros(4), "new": torch.full((2,), 9.0), "step": 5}
    load(target, checkpoint_id=tmp_path, planner=planner)
    assert torch.equal(target["a"], filled(4)) and target["new"].tolist() == [9, 9] and target["step"] == 5
    assert planner.missing == ("new", "step")


@pytest.mark.on_late
def test_dtypes_convert_if_nothing_is_lost_or_if_allowed(tmp_path: Path) -> None:
    save({"w": filled(300, 7, dtype=torch.bfloat16)}, checkpoint_id=tmp_path)
    wide = torch.zeros(300, 7)
    load({"w": wide}, checkpoint_id=tmp_path)
    assert torch.equal(wide, filled(300, 7, dtype=torch.bfloat16).float())
    narrow = torch.zeros(300, 7, dtype=torch.int32)
    load({"w": narrow}, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_lossy_dtype=True))
    assert torch.equal(narrow, filled(300, 7, dtype=torch.bfloat16).int())


class Plain:
    """A class that has no typed form."""


def test_objects_without_a_typed_form_are_refused_by_name(tmp_path: Path) -> None:
    state = {"good": 1, "bad": {"inner": [Plain()]}, "worse": Plain()}
    with pytest.raises(UnsupportedValueError, match=r"(?s)bad.inner.*worse"):
        save(state, checkpoint_id=tmp_path / "a")
    save(state, checkpoint_id=tmp_path / "b", planner=DefaultSavePlanner(allow_pickle=True))
    with pytest.raises(UnsupportedValueError, match="allow_pickle"):
        load({"worse": None}, checkpoint_id=tmp_path / "b")
    target = {"worse": None}
    load(target, checkpoint_id=tmp_path / "b", planner=DefaultLoadPlanner(allow_pickle=True))
    assert type(target["worse"]).__name__ == "Plain"


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.b"):
        save({"a": {"b": 1}, "a.b": 2}, checkpoint_id=tmp_path)


@pytest.mark.on_late
def test_overwriting(tmp_path: Path) -> None:
    save({"w": filled(4)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointExistsError):
        save({"w": filled(4)}, storage_writer=FileSystemWriter(tmp_path, overwrite=False))
    save({"w": filled(4, seed=10)}, checkpoint_id=tmp_path)
    target = torch.zeros(4)
    load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(target, filled(4, seed=10))
    assert len(os.listdir(tmp_path)) == 2  # the manifest and one data file


def test_writer_options_and_deprecated_names(tmp_path: Path) -> None:
    state = {f"w{i}": filled(50, i + 1) for i in range(7)} | {"big": filled(900, 500)}
    for number, options in enumerate(
        [{"single_file_per_rank": False}, {"thread_count": 3}, {"sync_files": False}, {"single_file_per_rank": True}]
    ):
        path = tmp_path / str(number)
        with pytest.warns(FutureWarning):
            save_state_dict(state, FileSystemWriter(path, **options))
        target = {name: torch.zeros_like(value) for name, value in state.items()}
        with pytest.warns(FutureWarning):
            load_state_dict(target, FileSystemReader(path))
        assert all(torch.equal(target[name], state[name]) for name in state)
        assert len(list(path.glob("*.safetensors"))) == (8 if number == 0 else 1)


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointNotFoundError):
            load({"w": torch.zeros(1)}, checkpoint_id=path)
    with pytest.raises(CheckpointError, match="checkpoint_id"):
        save({"w": torch.zeros(1)})


def test_data_files_are_valid_safetensors(tmp_path: Path) -> None:
    state = {f"t{i}": filled(4, 3, dtype=dtype) for i, dtype in enumerate(DTYPES)}
    state["page"] = filled(1024)
    save(state, checkpoint_id=tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    loaded = load_file(path)
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(bits(loaded[name]), bits(value)), name
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    assert header % 4096 == 0


# ------------------------------------------------------------------ many ranks

SHAPES = {"even": (8, 12), "uneven": (7, 5), "short": (2, 9), "cube": (5, 6, 7), "long": (1 << 17, 3)}
LAYOUTS = {
    "rows": (("x",), [Shard(0)]),
    "columns": (("x",), [Shard(1)]),
    "whole": (("x",), [Replicate()]),
    "hybrid": (("x", "y"), [Replicate(), Shard(0)]),
    "grid": (("x", "y"), [Shard(1), Shard(0)]),
    "twice": (("x", "y"), [Shard(0), Shard(0)]),
}


def distributed_state(layout: str, fill: bool) -> dict:
    names, placements = LAYOUTS[layout]
    world = dist.get_world_size()
    shape = (world,) if len(names) == 1 else (2, world // 2)
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=names)
    state = {}
    for i, (name, size) in enumerate(SHAPES.items()):
        dtype = torch.bfloat16 if name == "cube" else torch.float32
        whole = filled(*size, dtype=dtype, seed=i) if fill else torch.zeros(size, dtype=dtype)
        state[name] = distribute_tensor(whole, mesh, placements)
    state["plain"] = filled(33) if fill else torch.zeros(33)
    state["step"] = 12 if fill else 0
    return state


def save_distributed(path: str, layout: str) -> list[str]:
    metadata = save(distributed_state(layout, fill=True), checkpoint_id=path)
    return sorted(metadata.state_dict_metadata)


def load_distributed(path: str, layout: str) -> None:
    state = distributed_state(layout, fill=False)
    load(state, checkpoint_id=path)
    wanted = distributed_state(layout, fill=True)
    for name, value in wanted.items():
        if isinstance(value, DTensor):
            assert torch.equal(state[name].to_local(), value.to_local()), (name, layout)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name
        else:
            assert state[name] == value


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = {}
    for layout in LAYOUTS:
        paths[layout] = str(tmp_path_factory.mktemp(layout))
        names = run_ranks(4, save_distributed, paths[layout], layout)
        assert names == [sorted([*SHAPES, "plain", "step"])] * 4
    return paths


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_four_ranks_saved_loads_in_every_layout(saved_by_four: dict[str, str], layout: str) -> None:
    path = saved_by_four[layout]
    for target in LAYOUTS:
        run_ranks(4, load_distributed, path, target)
    for target in ("rows", "columns"):
        run_ranks(2, load_distributed, path, target)
    whole = {
        name: torch.zeros(size, dtype=torch.bfloat16 if name == "cube" else torch.float32)
        for name, size in SHAPES.items()
    }
    load(whole, checkpoint_id=path)
    for i, (name, size) in enumerate(SHAPES.items()):
        assert torch.equal(whole[name], filled(*size, dtype=whole[name].dtype, seed=i))


def test_replicated_bytes_are_written_once_and_balance(saved_by_four: dict[str, str], tmp_path: Path) -> None:
    sizes = [path.stat().st_size for path in Path(saved_by_four["whole"]).glob("*.safetensors")]
    data = sum(int(np.prod(s)) * (2 if n == "cube" else 4) for n, s in SHAPES.items()) + 33 * 4
    assert data < sum(sizes) < data + len(sizes) * 8192
    run_ranks(4, save_large_replicated, str(tmp_path))
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(sizes) == 4 and max(sizes) < 1.05 * min(sizes)
    target = torch.zeros(1001, 64)
    load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(target, filled(1001, 64))


def save_large_replicated(path: str) -> None:
    save({"w": filled(1001, 64)}, checkpoint_id=path, planner=DefaultSavePlanner(split_from=100_000))


def save_differing(path: str, kind: str) -> str:
    rank = dist.get_rank()
    state = {"same": filled(3), "rng": torch.tensor([rank]), "position": {"sample": [rank]}}
    planner = None
    if kind == "declared":
        state |= {"rng": PerRank(state["rng"]), "position": PerRank(state["position"])}
    elif kind == "named":
        planner = DefaultSavePlanner(per_rank=["rng", "position.*"])
    elif kind == "lowest":
        planner = DefaultSavePlanner(lowest_rank_wins=["rng", "position.*"])
    try:
        save(state, checkpoint_id=path, planner=planner)
    except DivergentValueError as error:
        return str(error)
    target = {"rng": torch.tensor([-1]), "position": {"sample": None}}
    if kind == "declared":
        target |= {"rng": PerRank(target["rng"]), "position": PerRank()}
    load(target, checkpoint_id=path)
    values = [v.value if isinstance(v, PerRank) else v for v in (target["rng"], target["position"])]
    return f"{values[0].item()} {values[1]['sample'][0]}"


def save_what_commonly_differs(path: str) -> tuple[list[str], dict]:
    rank = dist.get_rank()
    norm = torch.nn.BatchNorm1d(3)
    norm(torch.randn(5 + rank, 3) + rank)
    state = {"model": norm, "loss": 0.5 + rank, "step": 7, "note": None if rank else "first", "kept": PerRank(rank)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            save(state, checkpoint_id=path)
    target = {"model": torch.nn.BatchNorm1d(3), "loss": None, "step": None, "note": None, "kept": PerRank()}
    load(target, checkpoint_id=path)
    same = torch.equal(target["model"].running_var, norm.running_var)
    return [str(w.message) for w in told if w.category is DivergentValueWarning], {
        "loss": target["loss"],
        "step": target["step"],
        "note": target["note"],
        "kept": target["kept"].value,
        "same": same,
    }


def test_of_what_commonly_differs_the_lowest_ranks_is_saved_and_said_once(tmp_path: Path) -> None:
    for rank, (told, found) in enumerate(run_ranks(2, save_what_commonly_differs, str(tmp_path))):
        assert found == {"loss": 0.5, "step": 7, "note": "first", "kept": rank, "same": rank == 0}
        (text,) = told
        assert all(name in text for name in ("'loss'", "'note'", "'model.running_mean'", "PerRank")), text
        assert "'step'" not in text and "num_batches" not in text


def test_values_that_differ_between_ranks(tmp_path: Path) -> None:
    errors = run_ranks(2, save_differing, str(tmp_path / "a"), "undeclared")
    assert all("'rng'" in error and "'position.sample'" in error and "'same'" not in error for error in errors)
    assert not list((tmp_path / "a").iterdir())
    assert run_ranks(2, save_differing, str(tmp_path / "b"), "declared") == ["0 0", "1 1"]
    assert run_ranks(2, save_differing, str(tmp_path / "c"), "named") == ["0 0", "1 1"]
    assert run_ranks(2, save_differing, str(tmp_path / "d"), "lowest") == ["0 0", "0 0"]
    with pytest.raises(CheckpointMismatchError, match="rng"):  # the checkpoint has no value for a rank 4
        planner = DefaultLoadPlanner()
        planner.set_up_ranks = lambda rank, ranks: setattr(planner, "rank", 4)  # type: ignore[method-assign]
        load({"rng": torch.tensor([0])}, checkpoint_id=tmp_path / "c", planner=planner)


def test_what_is_declared_per_rank_only_when_it_is_loaded_is_the_same_for_all(tmp_path: Path) -> None:
    save({"w": filled(3), "step": 7, "own": PerRank(1)}, checkpoint_id=tmp_path, no_dist=True)
    target = {"w": PerRank(torch.zeros(3)), "step": PerRank(), "own": 0}
    load(target, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target["w"].value, filled(3)) and target["step"].value == 7 and target["own"] == 1
    with pytest.raises(CheckpointMismatchError, match="other: not in the checkpoint"):
        load({"other": PerRank()}, checkpoint_id=tmp_path, no_dist=True)


def save_pipeline_stages(path: str) -> None:
    rank = dist.get_rank()
    state = {f"stage{rank}": filled(5, seed=rank), "shared": filled(3), f"object{rank % 2}": rank % 2}
    save(state, checkpoint_id=path)
    target = {f"stage{rank}": torch.zeros(5)}
    if rank == 3:
        target = {"absent": torch.zeros(1)}
        with pytest.raises(CheckpointMismatchError):
            load(target, checkpoint_id=path)
    else:  # ranks do not wait for the one that failed
        load(target, checkpoint_id=path)
        assert torch.equal(target[f"stage{rank}"], filled(5, seed=rank))


def test_ranks_may_have_different_keys(tmp_path: Path) -> None:
    run_ranks(4, save_pipeline_stages, str(tmp_path))
    target = {f"stage{rank}": torch.zeros(5) for rank in range(4)} | {"shared": torch.zeros(3), "object1": None}
    load(target, checkpoint_id=tmp_path)
    assert all(torch.equal(target[f"stage{rank}"], filled(5, seed=rank)) for rank in range(4))
    assert target["object1"] == 1


class Ragged:
    """A user's own distributed tensor: this rank's rows, several chunks, no mesh."""

    def __init__(self, rows: list[int], width: int) -> None:
        self.rows = rows
        self.data = {row: torch.zeros(1, width) for row in rows}
        self.dtype = torch.float32
        self.width = width

    def size(self) -> torch.Size:
        return torch.Size([6, self.width])

    def __create_chunk_list__(self):
        from terrazzo.checkpoint import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, self.width])) for row in self.rows]

    def __get_tensor_shard__(self, index):
        return self.data[index.offset[0]]

    def to_local(self):
        return self.data[self.rows[0]]


def save_ragged(path: str, duplicate: bool) -> str:
    rank = dist.get_rank()
    value = Ragged([[0, 1, 5], [2, 3, 4, 1] if duplicate else [2, 3, 4]][rank], 4)
    for row, data in value.data.items():
        data.fill_(row)
    save({"r": value}, checkpoint_id=path)
    other = Ragged([[4, 2, 0], [1]][rank], 4)
    load({"r": other}, checkpoint_id=path)
    return str({row: data[0, 0].item() for row, data in other.data.items()})


@pytest.mark.parametrize("duplicate", [False, True])
def test_anything_with_a_chunk_list_is_a_distributed_tensor(tmp_path: Path, duplicate: bool) -> None:
    """A chunk that two ranks hold without saying so is written once."""
    loaded = run_ranks(2, save_ragged, str(tmp_path), duplicate)
    assert loaded == ["{4: 4.0, 2: 2.0, 0: 0.0}", "{1: 1.0}"]


def save_incomplete(path: str) -> list[str]:
    mesh = init_device_mesh(device_type(), (2,))
    errors = []
    for state in (
        {"w": distribute_tensor(filled(4), mesh, [Shard(0)])},  # alone, so the other half is missing
        {"w": DTensor.from_local(filled(4), mesh, [Partial()])},
        {"w": filled(4 + dist.get_rank())},
    ):
        with pytest.raises(CheckpointError) as caught:
            save(state, checkpoint_id=f"{path}/{dist.get_rank()}" if not errors else path, no_dist=not errors)
        errors.append(str(caught.value))
    return errors


def test_what_cannot_be_a_checkpoint_is_refused(tmp_path: Path) -> None:
    for missing, partial, shapes in run_ranks(2, save_incomplete, str(tmp_path)):
        assert "w: 2 of 4 elements were not written" in missing or "only" in missing
        assert "partial" in partial.lower()
        assert "'w'" in shapes and "[4]" in shapes and "[5]" in shapes
    assert not list(tmp_path.glob("**/*.safetensors"))


def save_in_group(path: str) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[dist.get_rank() % 2]
    kind = dist.get_rank() % 2
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("a", "b"))["a"]
    state = {"w": distribute_tensor(filled(6, seed=kind), mesh, [Shard(0)]), "kind": kind}
    save(state, checkpoint_id=f"{path}/{kind}", process_group=mine)


def test_sub_groups_save_apart(tmp_path: Path) -> None:
    run_ranks(4, save_in_group, str(tmp_path))
    for kind in (0, 1):
        target = {"w": torch.zeros(6), "kind": None}
        load(target, checkpoint_id=tmp_path / str(kind))
        assert torch.equal(target["w"], filled(6, seed=kind)) and target["kind"] == kind


def save_and_load_across_libraries(path: str) -> None:
    import terrazzo.tensor as ours

    mesh = init_device_mesh(device_type(), (2, dist.get_world_size() // 2), mesh_dim_names=("x", "y"))
    whole = filled(7, 9)
    mine = ours.distribute_tensor(whole, mesh, [ours.Replicate(), ours.Shard(1)])
    theirs = distribute_tensor(whole, mesh, [Shard(1), Shard(0)])
    save({"mine": torch.nn.Parameter(mine), "theirs": theirs}, checkpoint_id=path)
    target = {
        "mine": distribute_tensor(torch.zeros(7, 9), mesh, [Shard(0), Replicate()]),
        "theirs": torch.nn.Parameter(ours.distribute_tensor(torch.zeros(7, 9), mesh, [ours.Shard(0), ours.Shard(0)])),
    }
    load(target, checkpoint_id=path)
    assert torch.equal(target["mine"].full_tensor(), whole)
    assert torch.equal(target["theirs"].full_tensor(), whole)


def test_our_distributed_tensors_and_torchs_load_each_other(tmp_path: Path) -> None:
    run_ranks(4, save_and_load_across_libraries, str(tmp_path))
    data = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert data < 2 * 7 * 9 * 4 + 4 * 4096 + 4  # each element once


# ------------------------------------------------------------------ loading as one


class Tampering(FileSystemReader):
    """Replaces the checkpoint when this rank has learned what is in it, or cannot read its root."""

    replace_on = -1
    no_root_on = -1

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        super().set_up_storage_reader(metadata, is_coordinator)
        if dist.get_rank() == self.replace_on:
            save({"w": torch.full((300, 300), 2.0)}, checkpoint_id=self.path, no_dist=True)

    def read_metadata(self) -> Metadata:
        if dist.get_rank() == self.no_root_on:
            raise AssertionError("the root was asked for on this rank")
        return super().read_metadata()


def load_as_one(path: str, replace_on: int, no_root_on: int) -> tuple[str, list[float]]:
    reader = Tampering(path)
    reader.replace_on, reader.no_root_on = replace_on, no_root_on
    state = {"w": torch.zeros(300, 300)}
    error = ""
    try:
        load(state, storage_reader=reader, together=True)
    except CheckpointException as raised:
        error = f"{sorted(raised.failures)} {raised}"
    return error, state["w"].unique().tolist()


def test_ranks_that_load_as_one_are_given_the_root(tmp_path: Path) -> None:
    save({"w": torch.full((300, 300), 1.0)}, checkpoint_id=tmp_path)
    assert run_ranks(2, load_as_one, str(tmp_path), -1, 1) == [("", [1.0])] * 2


def test_a_checkpoint_that_is_replaced_while_ranks_load_it_as_one_is_the_same_error_for_all(tmp_path: Path) -> None:
    save({"w": torch.full((300, 300), 1.0)}, checkpoint_id=tmp_path)
    (first, values), (second, others) = run_ranks(2, load_as_one, str(tmp_path), 1, 1)
    assert first == second and "was the checkpoint replaced or removed while it was read?" in first
    assert 2.0 not in values + others  # nobody has a part of the other checkpoint


def test_a_root_that_cannot_be_had_is_the_same_error_for_all(tmp_path: Path) -> None:
    (first, _), (second, _) = run_ranks(2, load_as_one, str(tmp_path), -1, 1)
    assert first == second and first.startswith("[0]") and "no committed checkpoint" in first


class Dead(MemoryStore):
    """An endpoint that does not answer."""

    location = "s3://dead"

    def exists(self, key: str) -> bool:
        raise ConnectionRefusedError(111, "Connection refused")

    def list(self, prefix: str = "") -> list[Any]:
        raise ConnectionRefusedError(111, "Connection refused")

    def get(self, key: str, most: int = 0) -> Any:
        raise ConnectionRefusedError(111, "Connection refused")


class WithGlobalStep(DefaultLoadPlanner):
    def create_global_plan(self, global_plan: Any) -> Any:
        return super().create_global_plan(global_plan)


def load_what_one_rank_cannot_open(path: str) -> list[str]:
    """Rank 1 cannot open the checkpoint: each kind of collective load fails on both ranks, and the next one works."""
    rank = dist.get_rank()
    gone, dead = f"{path}/only-on-rank-0", Dead()
    texts: list[str] = []
    for collective in ({"together": True}, {"read": "once_per_node"}, {"planner": WithGlobalStep()}):
        for kind, text, there in (
            (CheckpointNotFoundError, f"rank 1: CheckpointNotFoundError: there is nothing at {gone}", gone),
            (CheckpointIOError, "rank 1: CheckpointIOError: .*s3://dead.*Connection refused", dead),
            (CheckpointError, "rank 1: CheckpointError: load needs a place", None),
        ):
            place = {"store" if isinstance(there, Dead) else "checkpoint_id": there if rank == 1 else path}
            place = place if rank == 1 else {"checkpoint_id": path}
            state = {"w": torch.zeros(3)}
            with pytest.raises(CheckpointException, match=text) as caught:
                load(state, **place, **collective)
            assert isinstance(caught.value, kind) and list(caught.value.failures) == [1]
            texts.append(str(caught.value))
            assert not state["w"].any()
            load(state, checkpoint_id=path, **collective)
            assert state["w"].tolist() == [1, 1, 1]
    # By default ranks do not wait for each other, and the error is that of one rank.
    for place in ({"checkpoint_id": gone}, {"store": dead}):
        if rank == 1:
            with pytest.raises(CheckpointException, match="rank 1: ") as caught:
                load({"w": torch.zeros(3)}, **place)
            assert isinstance(caught.value, CheckpointNotFoundError if "checkpoint_id" in place else CheckpointIOError)
    return texts


def test_a_checkpoint_that_one_rank_cannot_open_is_the_same_error_for_all(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    first, second = run_ranks(2, load_what_one_rank_cannot_open, str(tmp_path))
    assert first == second


def continue_with_new_objects(path: str, make: str, sharded: bool) -> None:
    """A run that goes on in new objects, whose optimizer has not stepped, against one that is not interrupted."""

    def objects() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        if sharded:
            fully_shard(model)
        options = {"momentum": 0.9} if make == "SGD" else {}
        return model, getattr(torch.optim, make)(model.parameters(), lr=0.1, **options)

    def train(model: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first = objects()
    train(*first, range(2))
    save({"model": first[0], "optimizer": first[1]}, checkpoint_id=path)
    wanted = train(*first, range(2, 5))
    again = objects()
    load({"model": again[0], "optimizer": again[1]}, checkpoint_id=path)
    assert train(*again, range(2, 5)) == wanted


@pytest.mark.parametrize("make", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_that_has_not_stepped_gets_its_state(tmp_path, make, world):
    run_ranks(world, continue_with_new_objects, str(tmp_path / "checkpoint"), make, world > 1)


def test_what_an_object_does_not_name_is_told(tmp_path, caplog):
    save({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}, checkpoint_id=tmp_path, no_dist=True)
    load({"model": nn.Sequential(nn.Linear(2, 2))}, checkpoint_id=tmp_path, no_dist=True)
    assert "model.1.weight" in caplog.text


class Container(torch.optim.Optimizer):
    """Several optimizers behind one, whose state dict is flat and by names, as torchtitan's container has it."""

    def __init__(self, model: nn.Module) -> None:
        self.named = dict(model.named_parameters())
        self.inner = {name: torch.optim.AdamW([parameter]) for name, parameter in self.named.items()}
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.inner.values():
            optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {
            f"state.{name}.{key}": value
            for name, optimizer in self.inner.items()
            for key, value in optimizer.state[self.named[name]].items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            _, parameter, key = name.split(".")
            self.inner[parameter].state[self.named[parameter]][key] = value


def test_an_optimizer_with_a_form_of_its_own_names_what_it_wants(tmp_path, caplog):
    model = nn.Linear(2, 2)
    first, again, new = Container(model), Container(model), Container(model)
    model(torch.ones(2)).sum().backward()
    first.step()
    again.step()
    for name, parameter in model.named_parameters():
        again.inner[name].state[parameter]["exp_avg"].zero_()
    save({"optimizer": first}, checkpoint_id=tmp_path, no_dist=True)
    load({"optimizer": again}, checkpoint_id=tmp_path, no_dist=True)
    for name, value in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert "not restored" not in caplog.text
    load({"optimizer": new}, checkpoint_id=tmp_path, no_dist=True)
    assert "optimizer.state.weight.exp_avg" in caplog.text


def test_names_of_a_container_of_optimizers_are_its_own():
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"Container.state_dict\(\) is not of the form"):
        get_optimizer_state_dict(model, Container(model))


class WithoutChunks:
    """A distributed tensor of which this rank has no chunk, of a dtype that cannot be stored."""

    dtype = torch.quint8

    def size(self) -> torch.Size:
        return torch.Size((4, 3))

    def __create_chunk_list__(self) -> list[Any]:
        return []


def test_a_dtype_that_cannot_be_stored_is_refused_without_a_chunk_of_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="quint8 tensors cannot be stored"):
        save({"w": WithoutChunks()}, checkpoint_id=tmp_path)
