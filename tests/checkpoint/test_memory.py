"""Tensors whose elements are not memory of their own are refused by name, in saves and loads: nothing is written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map

import terrazzo.tensor
from ranks import run_ranks
from terrazzo.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    async_save,
    load,
    save,
)
from terrazzo.checkpoint.formats.dcp import DCPReader, DCPWriter
from terrazzo.errors import CheckpointException, UnsupportedValueError
from terrazzo.publish.parts import parts_of

ATEN = torch.ops.aten


class Wrap(torch.Tensor):
    """Eight-bit numbers that other code sees as float32, as quantised weights are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrap":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> "Wrap":
        return Wrap(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (ATEN.detach.default, ATEN.alias.default, ATEN.view.default, ATEN.view_as.default):
            return Wrap(args[0].inner)

        def plain(x: Any) -> Any:
            return x.inner.float() * 0.5 if isinstance(x, Wrap) else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def freed(tensor: torch.Tensor, nbytes: int = 0) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def wrapped() -> torch.Tensor:
    return Wrap(torch.arange(6, dtype=torch.int8).reshape(2, 3))


FREED = "its memory was freed"
BAD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "wrapper": (wrapped, "a Wrap cannot be stored; store the tensors that it wraps"),
    "freed": (lambda: freed(torch.zeros(2, 3)), FREED),
    "cut": (lambda: freed(torch.zeros(2, 3), 20), FREED),
    "view": (lambda: freed(torch.zeros(4, 3)[2:], 24), FREED),
    "columns": (lambda: freed(torch.zeros(2, 6)[:, ::2], 24), FREED),
}


def locals_of_dtensors(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    kept = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    save({"a": {"w": kept}}, checkpoint_id=f"{path}/there")
    for kind in (DTensor, terrazzo.tensor.DTensor):
        placements = [Shard(0) if kind is DTensor else terrazzo.tensor.Shard(0)]
        for case, (make, text) in (*BAD.items(), ("meta", (lambda: torch.zeros(2, 3, device="meta"), "meta device"))):
            if case == "columns":  # of a tensor with gaps, only what is copied or read is checked
                continue
            local = make() if dist.get_rank() == 1 else torch.zeros(2, 3)
            bad = kind.from_local(local, mesh, placements, run_check=False)
            for call in (save, lambda *a, **k: async_save(*a, **k).result()):
                with pytest.raises(CheckpointException, match=f"(?s)rank 1: .*'a.w': .*{text}") as caught:
                    call({"a": {"w": bad}, "b": torch.ones(3)}, checkpoint_id=f"{path}/new")
                assert isinstance(caught.value, UnsupportedValueError)
            if case != "meta" and dist.get_rank() == 1:
                with pytest.raises(UnsupportedValueError, match=f"'a.w': .*{text}"):
                    load({"a": {"w": bad}}, checkpoint_id=f"{path}/there", no_dist=True)
    dist.barrier()
    assert not os.path.exists(f"{path}/new/manifest.terrazzo")


def test_local_tensors_without_memory_of_their_own_are_refused(tmp_path: Path) -> None:
    run_ranks(2, locals_of_dtensors, str(tmp_path))


@pytest.mark.parametrize("case", BAD)
def test_plain_tensors_without_memory_of_their_own_are_refused(case: str, tmp_path: Path) -> None:
    make, text = BAD[case]
    save({"a": {"w": torch.ones(2, 3)}}, checkpoint_id=tmp_path / "there")
    for call in (save, lambda *a, **k: async_save(*a, **k).result()):
        with pytest.raises(UnsupportedValueError, match=f"a.w: .*{text}"):
            call({"a": {"w": make()}}, checkpoint_id=tmp_path / "new")
    with pytest.raises(UnsupportedValueError, match=text):
        parts_of({"w": make()}, None)
    assert not (tmp_path / "new" / "manifest.terrazzo").exists()
    if case != "columns":
        target, first = make(), torch.zeros(2, 3)
        with pytest.raises(UnsupportedValueError, match=f"'a.w': .*{text}"):
            load({"a": {"w": target}}, checkpoint_id=tmp_path / "there")
        assert not first.any()


class Returns(DefaultSavePlanner):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def resolve_data(self, write_item: Any) -> Any:
        return self.tensor


class Fills(DefaultLoadPlanner):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.tensor


@pytest.mark.parametrize("case", BAD)
def test_what_a_planner_returns_needs_memory(case: str, tmp_path: Path) -> None:
    make, text = BAD[case]
    for name, writer, reader in (
        ("own", None, FileSystemReader(tmp_path / "own")),
        ("dcp", DCPWriter(tmp_path / "dcp"), DCPReader(tmp_path / "dcp")),
    ):
        place = {"checkpoint_id": tmp_path / name} if writer is None else {"storage_writer": writer}
        with pytest.raises(UnsupportedValueError, match=f"'w': what the planner's resolve_data returned: .*{text}"):
            save({"w": torch.ones(2, 3)}, planner=Returns(make()), **place)
        save({"w": torch.ones(2, 3)}, **place)
        with pytest.raises(UnsupportedValueError, match=f"'w': what the planner's resolve_tensor returned: .*{text}"):
            load({"w": torch.ones(2, 3)}, planner=Fills(make()), storage_reader=reader)


def test_tensors_within_values_need_memory(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=f"t: .*{FREED}"):
        save({"t": (1, freed(torch.zeros(3)))}, checkpoint_id=tmp_path)


def test_tensors_with_gaps_overlaps_and_no_elements_are_stored(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    state = {"gaps": whole[:, ::2], "turned": whole.t(), "repeated": torch.ones(1).expand(5), "none": whole[4:]}
    save(state, checkpoint_id=tmp_path)
    target = {name: torch.zeros(value.shape) for name, value in state.items()}
    load(target, checkpoint_id=tmp_path)
    assert all(torch.equal(target[name], value) for name, value in state.items())
    gaps = torch.zeros(4, 6)
    load({"gaps": gaps[:, ::2]}, checkpoint_id=tmp_path)
    assert torch.equal(gaps[:, ::2], whole[:, ::2])


@pytest.mark.filterwarnings("ignore")
def test_every_kind_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])
    state = {
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": nested,
        "lazy": UninitializedParameter(),
        "sparse": torch.eye(3).to_sparse(),
        "fine": torch.ones(3),
    }
    with pytest.raises(UnsupportedValueError) as caught:
        save(state, checkpoint_id=tmp_path)
    lines = str(caught.value).splitlines()
    for name, text in (
        ("quantised", "torch.qint8 tensors cannot be stored"),
        ("nested", "a nested tensor cannot be stored"),
        ("lazy", "run the module once first"),
        ("sparse", "make it dense"),
    ):
        assert any(line.strip().startswith(f"{name}: ") and text in line for line in lines), (name, lines)
        with pytest.raises(UnsupportedValueError, match=name):
            async_save({name: state[name]}, checkpoint_id=tmp_path).result()
    save({name: torch.ones(3) for name in state}, checkpoint_id=tmp_path)
    with pytest.raises(UnsupportedValueError, match="'nested': a nested tensor"):
        load({"nested": nested}, checkpoint_id=tmp_path)
