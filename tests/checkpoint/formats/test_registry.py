"""Each format is recognised, read, written, and converted into each that can hold it.

What is written is read by who invented the format: `torch.distributed.checkpoint`, `torch.load`, the safetensors
library.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from checkpoint.formats.deepspeed import made
from terrazzo.checkpoint import Checkpoint, FileSystemWriter, load, save, verify
from terrazzo.checkpoint.formats import DCPWriter, Format, HuggingFaceWriter, detect, registry
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.stores import MemoryStore, Place
from terrazzo.checkpoint.tools.compare import compare
from terrazzo.cli import app
from terrazzo.errors import CheckpointExistsError, CheckpointFormatError, UnsupportedValueError

Tensors = dict[str, torch.Tensor]

FILES = {"torch_save": "file.pt", "safetensors": "any.name"}
"""Formats of one file, and a name for it; the others are folders."""


NO_SUMS = ("safetensors", "huggingface")
"""Formats without checksums, of which `verify` can only check the structure."""


def weights() -> Tensors:
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(30, 20, generator=generator)
    return {
        "wide": wide,
        "layers.0.half": wide[:7, :5].bfloat16(),
        "layers.0.row": wide[3].double(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(5, dtype=torch.int16),
        "mask": wide[0] > 0,
    }


def write(name: str, path: Path, tensors: Tensors) -> None:
    """As who invented the format writes it."""
    match name:
        case "native":
            save(tensors, checkpoint_id=path, no_dist=True)
        case "dcp":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
        case "torch_save":
            torch.save(tensors, path)
        case "safetensors":
            save_file(tensors, path)
        case "huggingface":
            path.mkdir()
            save_file(tensors, path / "model.safetensors")


def read(name: str, path: Path, like: Tensors) -> Tensors:
    """As who invented the format reads it; terrazzo's own files are safetensors."""
    match name:
        case "native":
            (file,) = path.glob("data-*.safetensors")
            return load_file(file) | {key: like[key] for key, value in like.items() if value.numel() == 0}
        case "dcp":
            found = {key: torch.full_like(value, 1) for key, value in like.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(found, checkpoint_id=path, no_dist=True)
            return found
        case "torch_save":
            loaded: Tensors = torch.load(path, weights_only=True)
            return loaded
        case "safetensors":
            return load_file(path)
        case _:
            return load_file(path / "model.safetensors")


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


PLAIN = [name for name in registry.names() if name != "deepspeed"]


def test_every_format_is_in_the_table() -> None:
    assert PLAIN == ["native", "dcp", "huggingface", "safetensors", "torch_save"]


@pytest.mark.parametrize("source", PLAIN)
def test_from_each_format_to_each(source: str, tmp_path: Path) -> None:
    tensors = weights()
    path = tmp_path / FILES.get(source, "folder")
    write(source, path, tensors)
    assert detect(path) == source
    state = {key: torch.full_like(value, 1) for key, value in tensors.items()}
    load(state, checkpoint_id=path, no_dist=True)
    assert same(state, tensors)
    for to in PLAIN:
        folder = tmp_path / to
        folder.mkdir()
        target = folder / FILES.get(to, "folder")
        told: list[tuple[str, int]] = []
        convert(path, target, to, progress=lambda *about, told=told: told.append(about))
        assert detect(target) == to
        assert sum(nbytes for key, nbytes in told if key == "wide") == 2400
        assert {key for key, _ in told} >= {key for key in tensors if tensors[key].numel()}
        assert list(compare(Checkpoint(path), Checkpoint(target))) == []
        if to != "torch_save":
            assert same(read(to, target, tensors), tensors), f"{source} to {to}"
        else:  # nested, as names are where there are no nested dicts
            found = read(to, target, tensors)
            nested = found.pop("layers", None)
            flat = {f"layers.0.{key}": value for key, value in nested["0"].items()} if nested else {}
            assert same({**found, **flat}, tensors), f"{source} to {to}"
        with pytest.raises(CheckpointExistsError):
            convert(path, target, to)
        convert(path, target, to, overwrite=True)
        assert list(compare(Checkpoint(path), Checkpoint(target))) == []
        assert [entry.name for entry in folder.iterdir()] == [target.name]
        with pytest.warns(UserWarning, match="structure") if to in NO_SUMS else nullcontext():
            assert verify(target) == []


def test_deepspeed_in_the_table(tmp_path: Path) -> None:
    state = made.write(tmp_path, 2)
    assert detect(tmp_path / "tag") == "deepspeed"
    whole = {name: tensor for name, tensor in state["module"].items() if name in (*made.SHAPES, "running")}
    for to in PLAIN:
        target = tmp_path / to / FILES.get(to, "folder")
        only = "module" if "only" in registry.named(to).options else None
        convert(tmp_path / "tag", target, to, only=only)
        if only is not None:
            found = read(to, target, {})
            assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
            continue
        before, after = Checkpoint(tmp_path / "tag"), Checkpoint(target)
        stored = [name for name in before if before.tensor(name) is not None]
        assert len(stored) == 6 + 4 * 3 and all(torch.equal(before[name][...], after[name][...]) for name in stored)
        convert(target, tmp_path / f"again_{to}", "deepspeed")
        file = "mp_rank_00_model_states.pt"
        module = torch.load(tmp_path / f"again_{to}" / file, weights_only=False)["module"]
        assert all(torch.equal(module[name], tensor) for name, tensor in whole.items())
        with pytest.raises(CheckpointExistsError):
            convert(target, tmp_path / f"again_{to}", "deepspeed", overwrite=True)


def test_the_folder_of_a_run_is_what_its_latest_names(tmp_path: Path) -> None:
    save({"w": torch.arange(3)}, checkpoint_id=tmp_path / "run" / "step-1", no_dist=True)
    (tmp_path / "run" / "latest").write_text("step-1\n")
    assert detect(tmp_path / "run") == "native" and verify(tmp_path / "run") == []
    convert(tmp_path / "run", tmp_path / "w.st", "safetensors")
    assert load_file(tmp_path / "w.st")["w"].tolist() == [0, 1, 2]


def test_a_safetensors_file_is_what_the_library_writes(tmp_path: Path) -> None:
    torch.save({"model": weights(), "step": 3}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedValueError, match=r"other values: step. Say where the weights are: only='model'"):
        convert(tmp_path / "a.pt", tmp_path / "b", "safetensors")
    assert not (tmp_path / "b").exists()
    (tmp_path / "b").write_bytes(b"old")
    convert(tmp_path / "a.pt", tmp_path / "b", "safetensors", only="model", overwrite=True)
    save_file(weights(), tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "b").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_failed_conversion_to_a_file_leaves_what_was_there(tmp_path: Path) -> None:
    store = MemoryStore()
    for name, bad in (("a", torch.zeros(3, dtype=torch.complex128)), ("b", torch.zeros(3).to(torch.int8))):
        torch.save({"w": torch.ones(2), "x": bad}, tmp_path / f"{name}.pt")
    convert(tmp_path / "b.pt", Place(store) / "file", "safetensors")
    before = bytes(store.get("file")[0])
    with pytest.raises(UnsupportedValueError, match=r"x: safetensors has no type for torch.complex128"):
        convert(tmp_path / "a.pt", Place(store) / "file", "safetensors", overwrite=True)

    def stop(name: str, nbytes: int) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        convert(tmp_path / "b.pt", Place(store) / "file", "safetensors", overwrite=True, progress=stop)
    assert [entry.key for entry in store.list()] == ["file"] and bytes(store.get("file")[0]) == before


# ------------------------------------------------------------------ a format of one's own


@pytest.fixture
def numpy_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Format]:
    """The example of docs/other-formats.md, registered."""
    monkeypatch.setattr(registry, "_formats", registry._formats)
    text = (Path(__file__).parents[3] / "docs" / "other-formats.md").read_text()
    names: dict[str, Any] = {}
    exec(text.partition("## A format of one's own")[2].partition("```python\n")[2].partition("```")[0], names)
    yield registry.named("numpy")


def test_the_format_of_the_documentation(numpy_folder: Format, tmp_path: Path) -> None:
    tensors = {key: value for key, value in weights().items() if value.dtype != torch.bfloat16}
    torch.save(tensors, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "numpy", "numpy")
    assert detect(tmp_path / "numpy") == "numpy"
    found = {path.stem: torch.from_numpy(np.load(path)) for path in (tmp_path / "numpy").glob("*.npy")}
    assert same(found, tensors)
    for to in ("native", "dcp", "safetensors", "torch_save"):
        target = tmp_path / FILES.get(to, to)
        convert(tmp_path / "numpy", target, to)
        assert list(compare(Checkpoint(tmp_path / "a.pt"), Checkpoint(target))) == []
    state = {"wide": torch.zeros(30, 20)}
    load(state, checkpoint_id=tmp_path / "numpy", no_dist=True)
    assert torch.equal(state["wide"], tensors["wide"])
    store = MemoryStore()
    convert(tmp_path / "numpy", store, "numpy")
    assert detect(store) == "numpy"
    assert np.load(io.BytesIO(bytes(store.get("wide.npy")[0]))).tolist() == tensors["wide"].tolist()

    run = CliRunner()
    listed = json.loads(run.invoke(app, ["ls", str(tmp_path / "numpy"), "--json"]).stdout)
    assert {row["name"]: row["shape"] for row in listed["values"]} == {k: list(v.shape) for k, v in tensors.items()}
    assert run.invoke(app, ["diff", str(tmp_path / "numpy"), str(tmp_path / "a.pt")]).exit_code == 0
    assert run.invoke(app, ["show", str(tmp_path / "numpy"), "scalar"]).stdout.splitlines()[1] == "begins with [5.0]"
    assert "checksums" in run.invoke(app, ["verify", str(tmp_path / "numpy")]).output
    done = run.invoke(app, ["convert", str(tmp_path / "a.pt"), str(tmp_path / "more"), "--to", "numpy"])
    assert done.exit_code == 0 and detect(tmp_path / "more") == "numpy"
    again = run.invoke(app, ["convert", str(tmp_path / "a.pt"), str(tmp_path / "more"), "--to", "numpy"])
    assert again.exit_code == 2 and "--overwrite" in again.output

    torch.save({"half": torch.ones(2).bfloat16()}, tmp_path / "half.pt")
    with pytest.raises(UnsupportedValueError, match="half"):
        convert(tmp_path / "half.pt", tmp_path / "half", "numpy")
    assert detect(tmp_path / "half") is None
    with pytest.raises(CheckpointFormatError, match="already"):
        registry.register(numpy_folder)


def test_a_format_that_is_read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Frozen(type(registry.named("torch_save"))):  # type: ignore[misc]  # a class of the registry's
        name = "frozen"
        write = Format.write

    monkeypatch.setattr(registry, "_formats", registry._formats)
    registry.register(Frozen())
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    assert detect(tmp_path / "a.pt") == "frozen", "the last that was registered is asked first"
    with pytest.raises(CheckpointFormatError, match="reads checkpoints of the format frozen, and does not write them"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", "frozen")
    with pytest.raises(CheckpointFormatError, match=r"no format 'zarr' of checkpoints; there are frozen, native, dcp"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", "zarr")


def test_formats_that_installed_packages_bring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "brings_a_format.py"
    package.write_text(
        "from terrazzo.checkpoint.formats import registry\n"
        "from terrazzo.checkpoint.formats.torch_save import TorchSave\n"
        "assert 'native' in registry.names()\n"
        "class Brought(TorchSave):\n"
        "    name = 'brought'\n"
    )
    (tmp_path / "broken_format.py").write_text("raise RuntimeError('no such library')\n")
    info = tmp_path / "brings_a_format-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brings-a-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[terrazzo.formats]\nbroken = broken_format:Broken\nbrought = brings_a_format:Brought\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_formats", registry._formats)
    monkeypatch.setattr(registry, "_asked", False)
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.warns(UserWarning, match="'broken'.*cannot be used: RuntimeError: no such library"):
        assert detect(tmp_path / "a.pt") == "brought"
    assert registry.names()[0] == "brought" and "broken" not in registry.names()


# ------------------------------------------------------------------ what is there already


@pytest.mark.parametrize("there", ["native", "dcp", "huggingface"])
def test_a_folder_has_one_format(there: str, tmp_path: Path) -> None:
    """Nothing puts a checkpoint beside one of another format that would be read in its place."""
    old, new = {"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}
    torch.save(new, tmp_path / "new.pt")

    def value(folder: Path) -> float:
        load(state := {"w": torch.zeros(3)}, checkpoint_id=folder, no_dist=True)
        return float(state["w"][0])

    for to in ("native", "dcp", "huggingface", "torch_save", "safetensors"):
        folder = tmp_path / to
        write(there, folder, old)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(CheckpointExistsError):
            convert(tmp_path / "new.pt", folder, to)
        done = CliRunner().invoke(app, ["convert", str(tmp_path / "new.pt"), str(folder), "--to", to])
        assert done.exit_code == 2 and ("--overwrite" in done.output) == (to == there)
        if to != there:
            with pytest.raises(CheckpointExistsError, match=f"format {there}.*remove that checkpoint"):
                convert(tmp_path / "new.pt", folder, to, overwrite=True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    order = ["native", "dcp", "huggingface"]
    for to, writer in (("native", FileSystemWriter), ("dcp", DCPWriter), ("huggingface", HuggingFaceWriter)):
        folder = tmp_path / f"saved_{to}"
        write(there, folder, old)
        if order.index(to) > order.index(there):
            with pytest.raises(CheckpointExistsError, match=f"format {there}, which would be read"):
                save(new, storage_writer=writer(folder), no_dist=True)
            assert value(folder) == 1
        else:
            save(new, storage_writer=writer(folder), no_dist=True)
            assert value(folder) == 2


def test_what_pytorch_saved_over_a_checkpoint_is_not_hidden(tmp_path: Path) -> None:
    write("native", tmp_path, {"w": torch.ones(3)})
    os.utime(tmp_path / "manifest.terrazzo", (1, 1))  # some time before
    write("dcp", tmp_path, {"w": torch.full((3,), 2.0)})
    for read_it in (Checkpoint, detect, lambda path: load({"w": torch.zeros(3)}, checkpoint_id=path, no_dist=True)):
        with pytest.raises(CheckpointFormatError, match="two checkpoints"):
            read_it(tmp_path)
    save({"w": torch.full((3,), 3.0)}, checkpoint_id=tmp_path, no_dist=True)
    assert Checkpoint(tmp_path)["w"][0] == 3, "what was saved last"


def test_folders_with_other_files_are_not_empty(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    target = tmp_path / "target"
    for to in ("native", "dcp", "huggingface"):
        (target / to).mkdir(parents=True)
        (target / to / "notes.txt").write_text("keep")
        with pytest.raises(CheckpointExistsError, match="has notes.txt"):
            convert(tmp_path / "a.pt", target / to, to)
        assert len(list((target / to).iterdir())) == 1
        convert(tmp_path / "a.pt", target / to, to, overwrite=True)
        assert detect(target / to) == to and (target / to / "notes.txt").read_text() == "keep"
    save({"w": torch.zeros(3)}, checkpoint_id=target / "run" / "step-1", no_dist=True)
    (target / "run" / "latest").write_text("step-1")
    for overwrite in (False, True):
        with pytest.raises(CheckpointExistsError, match="holds a checkpoint"):
            convert(tmp_path / "a.pt", target / "run", "native", overwrite=overwrite)
        with pytest.raises(CheckpointExistsError, match="is a folder"):
            (target / "empty").mkdir(exist_ok=True)
            convert(tmp_path / "a.pt", target / "empty", "torch_save", overwrite=overwrite)
