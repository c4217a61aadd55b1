"""Convert a training engine's checkpoint, of any format and any number of ranks, to DeepSpeed's layout.

Tensors are read in pieces while their file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from terrazzo.checkpoint.formats.deepspeed.files import understood
from terrazzo.checkpoint.formats.deepspeed.partitions import Placed, refuse_experts
from terrazzo.checkpoint.formats.deepspeed.writing import (
    NewFolder,
    RunLayout,
    loss_scaler,
    model_states,
    optim_states,
    param_group,
    write_file,
)
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.formats.torch_save import UnwrittenTensor
from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.native.tensors import bytes_of
from terrazzo.checkpoint.plan.flatten import set_element
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointFormatError, UnsupportedValueError

_PIECE: Final = 16 << 20  # bytes in memory at a time
_MOST_RANKS: Final = 1 << 20
# Values without which the order of parameters is unknown.
_NEEDED: Final = ("param_shapes", "shared_params", "global_steps", "dp_world_size", "ds_config")
# Values of an engine's checkpoint that are not copied. Positions in the data are terrazzo's own.
_TAKEN_APART: Final = frozenset(
    {
        "module",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "loss_scaler",
        "data_sampler",
        "random_ltd",
        "dp_world_size",
        "mp_world_size",
        "version",
        "ds_version",
        "ds_config",
    }
)


def write_deepspeed(
    source: Source, target: Place, stage: int | None, ranks: int | None, progress: Callable[[str, int], None] | None
) -> None:
    """Write the folder of a tag. None: the stage and the number of ranks of the saved run."""
    folder = NewFolder(target)
    if folder.is_taken():
        raise folder.refusal()
    with understood(source.metadata, "a training engine's"):
        _write(source, folder, stage, ranks, progress)


def _write(
    source: Source, folder: NewFolder, stage: int | None, ranks: int | None, progress: Callable[[str, int], None] | None
) -> None:
    values = _values(source)
    config = values["ds_config"]
    layout = _layout(source, values, stage, values["dp_world_size"] if ranks is None else ranks)
    fp16 = config.get("fp16") or {}
    scaler = loss_scaler(values.get("loss_scaler") or {}, fp16)
    zero = {**(config.get("zero_optimization") or {}), "stage": layout.stage}
    config = {**config, "zero_optimization": zero}
    rest = {name: value for name, value in values.items() if name not in _TAKEN_APART}
    tensors = _Streamed(source, progress)
    folder.prepare()
    try:
        for rank in range(layout.ranks):
            clip = float(config.get("gradient_clipping") or 0.0)
            write_file(folder.store, layout.optim_file(rank), optim_states(layout, tensors, rank, scaler, clip, config))
            name = layout.model_file(rank)
            if name is not None:
                states = model_states(layout, tensors, rank, {**rest, "ds_config": config})
                write_file(folder.store, name, states)
        folder.commit(layout.files())
    except BaseException:
        folder.discard()
        raise


def _values(source: Source) -> dict[str, Any]:
    """Everything except the model and the optimizer's state of parameters, nested as it was saved."""
    nested: dict[str, Any] = {}
    for name in source.metadata.state_dict_metadata:
        path = source.paths.get(name, (name,))
        if path[0] == "module" or path[:2] == ("optimizer", "state") or str(path[0]).startswith("rng@"):
            continue
        set_element(nested, path, source.whole(name))
    absent = [name for name in _NEEDED if name not in nested]
    if absent or not nested.get("optimizer", {}).get("param_groups"):
        raise CheckpointFormatError(
            f"not a checkpoint of a training engine (it has no {', '.join(absent) or 'optimizer.param_groups'}), so "
            "the order of parameters in DeepSpeed's partitions is unknown: convert it to another format"
        )
    return nested


def _layout(source: Source, values: Mapping[str, Any], stage: int | None, ranks: int) -> RunLayout:
    config = values["ds_config"]
    zero = config.get("zero_optimization") or {}
    stage = max(int(zero.get("stage", 0)), 1) if stage is None else stage
    if stage not in (1, 2, 3) or not 0 < ranks <= _MOST_RANKS:
        raise UnsupportedValueError(
            f"DeepSpeed's layout needs ZeRO stage 1, 2 or 3 and at least one rank, not stage {stage} on {ranks} ranks"
        )
    shapes: dict[str, Sequence[int]] = {name: shape for named in values["param_shapes"] for name, shape in named}
    refuse_experts(shapes)
    kept = _kept(source)
    groups = []
    for options in values["optimizer"]["param_groups"]:
        named = {name: shapes[name] for name in options["params"] if name in shapes}
        if named:
            groups.append(param_group(named, options, kept))
    model = _model(source)
    buffers = set(values.get("buffer_names") or ())
    frozen = {
        name: shape for name, shape in model.items() if shape is not None and name not in shapes and name not in buffers
    }
    left_out = not frozen and values.get("frozen_param_shapes") is None
    shared = values["shared_params"] or {}
    return RunLayout(
        stage=stage,
        ranks=ranks,
        dtype=_dtype(config),
        groups=tuple(groups),
        frozen=None if left_out else frozen,
        shared=shared,
        model=[*model, *(name for name in shared if name not in model)],
        settings=zero,
    )


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype in which the run computes."""
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if (config.get(key) or {}).get("enabled") is True:
            return dtype
    return torch.float32


def _model(source: Source) -> dict[str, tuple[int, ...] | None]:
    """The names in the model's state, with the shapes of tensors."""
    found: dict[str, tuple[int, ...] | None] = {}
    for name, path in source.paths.items():
        if path[0] == "module":
            entry = source.metadata.state_dict_metadata[name]
            found[str(path[1])] = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
    return found


def _kept(source: Source) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter: tensors without data, and values."""
    kept: dict[str, dict[str, Any]] = {}
    for name, path in source.paths.items():
        if path[:2] != ("optimizer", "state"):
            continue
        _, _, parameter, key = path
        entry = source.metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata) and key != "step":
            value: Any = torch.empty(entry.size, device="meta")
        else:
            value = source.whole(name)
        kept.setdefault(str(parameter), {})[str(key)] = value
    return kept


class _Streamed:
    """The tensors of a checkpoint, which are read while they are written."""

    def __init__(self, source: Source, progress: Callable[[str, int], None] | None) -> None:
        self._source = source
        self._progress = progress

    def flat(self, kind: str, placed: Sequence[Placed], rank: int, length: int, dtype: torch.dtype) -> UnwrittenTensor:
        """A rank's flat tensor."""
        return UnwrittenTensor(dtype, (length,), lambda: self._flat(kind, placed, rank, length, dtype))

    def whole(self, name: str, dtype: torch.dtype | None) -> Any:
        """A value of the model's state."""
        stored = f"module.{name}"
        entry = self._source.metadata.state_dict_metadata[stored]
        if not isinstance(entry, TensorStorageMetadata):
            return self._source.whole(stored)
        own = entry.properties.dtype
        wanted = dtype if dtype is not None and own.is_floating_point else own
        return UnwrittenTensor(
            wanted, tuple(entry.size), lambda: self._source.pieces(stored, self._progress, dtype=wanted)
        )

    def _flat(
        self, kind: str, placed: Sequence[Placed], rank: int, length: int, dtype: torch.dtype
    ) -> Iterator[memoryview]:
        position, entries = 0, self._source.metadata.state_dict_metadata
        for where in placed:
            stored = f"module.{where.name}" if kind == "module" else f"optimizer.state.{where.name}.{kind}"
            start = 0
            for run in where.runs:
                if run.rank == rank:
                    yield from _zeros(run.start - position, dtype)
                    if isinstance(entries.get(stored), TensorStorageMetadata):
                        elements = (start, start + run.length)
                        yield from self._source.pieces(stored, self._progress, elements, dtype)
                    else:  # optimizer state that does not exist yet
                        yield from _zeros(run.length, dtype)
                    position = run.start + run.length
                start += run.length
        yield from _zeros(length - position, dtype)


def _zeros(count: int, dtype: torch.dtype) -> Iterator[memoryview]:
    limit = _PIECE // dtype.itemsize
    while count > 0:
        data = torch.zeros(min(count, limit), dtype=dtype, device="cpu")
        yield bytes_of(data)
        count -= limit
