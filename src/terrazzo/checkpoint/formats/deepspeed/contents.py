"""The contents of a DeepSpeed checkpoint, under the names of terrazzo's engine.

module.<name>                    float32 weights from the optimizer's partitions; other tensors as in the model's file
optimizer.state.<name>.<key>     the optimizer's state, by parameter instead of by partition
optimizer.param_groups.<i>.<key>
global_steps, lr_scheduler.<key>, ...  and the client state, under its own names
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from terrazzo.checkpoint.formats.deepspeed.files import OpenFile, entry, in_file
from terrazzo.checkpoint.formats.torch_archive import StoredTensor, replace_tensors
from terrazzo.errors import CheckpointFormatError

# Keys of the model's files that are converted here, and therefore not passed on.
_TAKEN_APART: Final = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "lr_scheduler",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
    }
)

Shapes = Mapping[str, Sequence[int]]


@dataclass
class Contents:
    """Everything in a checkpoint, by flat name.

    Attributes:
        values: a `FileTensor`, a tensor, or any other value.
        paths: the path of each name in the nested state dict.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def add(self, path: tuple[Any, ...], value: Any) -> None:
        """Add a value at a path."""
        name = ".".join(map(str, path))
        self.values[name] = value
        self.paths[name] = path

    def add_param_groups(self, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> None:
        """Add the optimizer's options, with the names of their parameters."""
        for number, (options, members) in enumerate(zip(groups, names, strict=True)):
            for key, value in options.items():
                if key not in ("params", "step"):
                    self.add(("optimizer", "param_groups", number, key), value)
            self.add(("optimizer", "param_groups", number, "params"), list(members))

    def add_loss_scaler(self, scaler: Any) -> None:
        """Add the state of the loss scaler, if there is one."""
        if isinstance(scaler, Mapping):
            self.add(("loss_scaler",), dict(scaler))

    def add_untrained(self, file: OpenFile, known: set[str]) -> None:
        """Add what the model's file has besides `known`: buffers, and parameters that were not trained."""
        shared = file.value.get("shared_params") or {}
        for name, value in file.get("module", dict).items():
            if name in known or name in shared:
                continue
            self.add(("module", name), in_file(file, value))

    def add_rest(self, files: Sequence[OpenFile], renamed: Sequence[Mapping[str, str]] | None = None) -> None:
        """Add everything that is neither the model nor the optimizer; for a pipeline, the joined lists of names.

        Args:
            files: a file of each stage.
            renamed: for each stage, new names.
        """
        stages = [file.value for file in files]
        with_names = list(zip(stages, renamed or [{}] * len(stages), strict=True))
        shapes: dict[int, dict[str, Any]] = {}
        for stage, names in with_names:
            for number, named in enumerate(stage.get("param_shapes") or []):
                shapes.setdefault(number, {}).update((names.get(name, name), shape) for name, shape in named.items())
        self.add(("param_shapes",), [_pairs(shapes[number]) for number in sorted(shapes)])
        frozen = [stage.get("frozen_param_shapes") for stage in stages]  # None: untrained parameters may be left out
        together = {name: shape for named in frozen if named is not None for name, shape in named.items()}
        self.add(("frozen_param_shapes",), None if None in frozen else _pairs(together))
        buffers = [names.get(name, name) for stage, names in with_names for name in stage.get("buffer_names") or []]
        self.add(("buffer_names",), list(dict.fromkeys(buffers)))
        file, model = files[0], stages[0]
        scheduler = model.get("lr_scheduler")
        if isinstance(scheduler, dict) and scheduler:
            for key, value in scheduler.items():
                self.add(("lr_scheduler", key), replace_tensors(value, file.archive.tensor))
        else:
            self.add(("lr_scheduler",), None)
        for name, value in model.items():
            if name not in _TAKEN_APART:
                plain = sorted(value) if isinstance(value, set) else value
                self.add((name,), replace_tensors(plain, file.archive.tensor))


def shapes_of(file: OpenFile) -> list[Shapes]:
    """The shapes of the trained parameters, for each group that shares a flat tensor."""
    found = file.get("param_shapes", list)
    for named in found:
        sound = isinstance(named, dict) and all(isinstance(name, str) for name in named)
        if not sound or not all(_is_shape(shape) for shape in named.values()):
            raise CheckpointFormatError(f"{file.where}: param_shapes is not a list of names with shapes")
    return found


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(type(size) is int and size >= 0 for size in value)


def names_by_group(shapes: Sequence[Iterable[str]], groups: Sequence[Mapping[str, Any]], where: str) -> list[list[str]]:
    """The parameters of each param group: in stage 3 several groups of `shapes` may belong to one."""
    names: list[list[str]] = [[] for _ in groups]
    for number, named in enumerate(shapes):
        names[group_of(groups, number, where)] += named
    return names


def group_of(groups: Sequence[Mapping[str, Any]], number: int, where: str) -> int:
    """The param group of the flat tensor with this number."""
    for group, options in enumerate(groups):
        if number in entry(options, "params", list, where):
            return group
    raise CheckpointFormatError(f"{where}: no param group of the optimizer has the flat tensor {number}")


def step_of(steps: Any, file: OpenFile) -> torch.Tensor:
    """The optimizer's step count as a tensor; some of DeepSpeed's optimizers have a number."""
    count = file.archive.tensor(steps) if isinstance(steps, StoredTensor) else torch.tensor(float(steps), device="cpu")
    return count.detach().reshape(()).float()


def steps_in(state: Mapping[str, Any], options: Mapping[str, Any], file: OpenFile) -> Iterator[tuple[str, Any]]:
    """The step count of a parameter; some optimizers have one for each group."""
    steps = state.get("step", options.get("step"))
    if steps is not None:
        yield "step", step_of(steps, file)


def _pairs(named: Mapping[str, Sequence[int]]) -> list[list[Any]]:
    return [[name, list(shape)] for name, shape in named.items()]
