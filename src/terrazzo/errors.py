"""Every exception that terrazzo raises on purpose.

All derive from `TerrazzoError`, and each also from the built-in type that a caller of the same operation in
PyTorch would have caught, so that existing `except` clauses keep working.  A message says what happened, to
which name, on which rank, and what to do.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from traceback import StackSummary
from types import MappingProxyType


class TerrazzoError(Exception):
    """The root of terrazzo's exceptions."""


class TorchMovedError(TerrazzoError, ImportError):
    """The installed torch lacks private names that terrazzo uses; the message lists them."""


# ------------------------------------------------------------------ layouts


class LayoutError(TerrazzoError, ValueError):
    """A placement, box or layout that cannot describe the tensor it was given for."""


class PlacementsError(LayoutError, RuntimeError, AssertionError):
    """Placements that do not fit their mesh or tensor, or are not placements of terrazzo.

    PyTorch raises a ValueError, a RuntimeError or an AssertionError here, depending on who is called.
    """


# ------------------------------------------------------------------ communication


class CommError(TerrazzoError, RuntimeError):
    """Communication between ranks failed.

    `missing` holds the global ranks that nobody has heard of, as far as that is known, and `reports` says for each of
    them and for each rank that gave up what is known of it.
    """

    missing: tuple[int, ...] = ()
    reports: Mapping[int, str] = MappingProxyType({})


class CommTimeout(CommError, TimeoutError):
    """Communication between ranks did not finish within its time limit."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What went wrong on one rank."""

    rank: int
    type: str  # the name of the exception's class
    message: str


class RankError(CommError):
    """Work that ranks do together failed on some of them; every rank raises the same error.

    `failures` has one entry per rank that failed.  On such a rank `__cause__` is its own exception.
    """

    def __init__(self, failures: tuple[RankFailure, ...], what: str = "") -> None:
        self.failures = failures
        self.what = what
        count = f"{len(failures)} rank" + ("s" if len(failures) != 1 else "")
        lines = [f"rank {failure.rank}: {failure.type}: {failure.message}" for failure in failures]
        super().__init__("\n  ".join([f"{what or 'work done together'} failed on {count}:", *lines]))

    def __reduce__(self) -> tuple[type[RankError], tuple[tuple[RankFailure, ...], str]]:
        return type(self), (self.failures, self.what)


# ------------------------------------------------------------------ distributed tensors


class DTensorError(TerrazzoError, RuntimeError):
    """An operation on a distributed tensor that cannot be carried out."""


class DTensorArgumentError(DTensorError, ValueError, AssertionError):
    """An argument that a function of distributed tensors cannot take.

    For such arguments PyTorch raises a ValueError, a RuntimeError or an AssertionError, depending on the function.
    """


class CaptureError(DTensorError):
    """A program of which `terrazzo.compile` can make no graph.

    `operation` is what stands in the way, `file` and `line` are where the program asks for it, as far as known.
    """

    def __init__(self, message: str, *, operation: str = "", file: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.operation = operation
        self.file = file
        self.line = line


class RandomStateError(DTensorError):
    """The random generators of the ranks are not in step."""


class MixedTensorError(DTensorError, ValueError):
    """Plain tensors and DTensors met in one operation.

    PyTorch raises a RuntimeError, and a ValueError where `loss_parallel` needs a DTensor.
    """


class ParallelPlanError(DTensorArgumentError):
    """A plan for parallel modules does not fit the module, or its inputs and outputs."""


class ParallelPlanTypeError(ParallelPlanError, TypeError):
    """A plan for parallel modules that is neither a style nor a dict of styles."""


class UnsupportedCallError(DTensorError, NotImplementedError):
    """A form of a call that works on one device and not on distributed tensors."""


class UnsupportedModuleError(UnsupportedCallError):
    """A parallel style was given a kind of module that it cannot cut."""


# ------------------------------------------------------------------ fully_shard


class FSDPError(TerrazzoError, RuntimeError):
    """A module that cannot be sharded, or a sharded module used in a way that cannot work."""


class FSDPValueError(FSDPError, ValueError, AssertionError):
    """An argument that `fully_shard` or one of its module's methods cannot take.

    It is of both types that PyTorch has for these.
    """


class FSDPTypeError(FSDPError, TypeError):
    """An argument of another type than a method of a sharded module takes."""


class DivergedRanksError(FSDPError, CommError):
    """Ranks asked for different collectives; the message names each rank and where it was."""


class OptimError(TerrazzoError, RuntimeError):
    """Tensors that an optimizer of `terrazzo.optim`, or what these are built on, cannot take."""


class CommPolicyError(DTensorError):
    """An operation would communicate more than `terrazzo.tensor.policy.communication_policy` allows.

    `kind` is the collective, `bytes` what it would move, and `operation` the one that asked for it, as far as known.
    """

    def __init__(self, message: str, *, kind: str = "", bytes: int = 0, operation: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.bytes = bytes
        self.operation = operation


class LocalMapError(DTensorError, AssertionError):
    """What went into or came out of a function under `local_map` is not what was declared."""


class PlacementMismatchError(DTensorArgumentError):
    """A DTensor is placed otherwise than a function requires, and nobody allowed to redistribute it."""


# ------------------------------------------------------------------ checkpoints


class CheckpointError(TerrazzoError, RuntimeError):
    """Saving, loading or inspecting a checkpoint failed."""


class CheckpointException(CheckpointError):
    """Ranks that save or load together failed; all of them raise it, with the same text.

    Where every rank that failed did so with one of terrazzo's exceptions, this is an exception of that type too:
    `except CheckpointCorruptError` and `except CommTimeout` see it.  It is also PyTorch's exception of this name, where
    `torch.distributed.checkpoint.api` has been imported.
    """

    def __init__(self, message: str, failures: dict[int, tuple[BaseException, StackSummary]]) -> None:
        super().__init__(message)
        self._failures = failures

    @property
    def failures(self) -> dict[int, tuple[BaseException, StackSummary]]:
        """By global rank: the exception, and where on that rank it was raised."""
        return self._failures

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointIOError(CheckpointError, OSError):
    """A file of a checkpoint could not be read; `__cause__` is what the system said."""

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at the path, or a file that it refers to is gone."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is a checkpoint at the path already and overwriting it was forbidden."""


class ConflictError(CheckpointError, FileExistsError):
    """Somebody else has replaced a checkpoint since this save began: theirs stays, and nothing of it was touched."""


class CheckpointCorruptError(CheckpointError):
    """Stored bytes are not the bytes that were written."""


class CheckpointFormatError(CheckpointError):
    """What lies at the path is of no format, or of no version of a format, that this release can read."""


class CheckpointManagerError(CheckpointError, ValueError):
    """A checkpoint manager was given a policy, a step or metrics that it cannot work with, or is used after its end."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The state dict to be loaded does not fit the checkpoint; all that does not fit is listed."""

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        mismatched: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.mismatched = mismatched


class IndexMismatchError(CheckpointError, ValueError):
    """A planner's index means nothing in the state dict."""


class DivergentValueError(CheckpointError, ValueError):
    """Ranks hold different values under one name that is meant to be the same everywhere."""


class DivergentValueWarning(UserWarning):
    """Ranks hold different values under one name, of a kind of which the lowest rank's is kept."""


class UnsupportedValueError(CheckpointError, TypeError):
    """A value that cannot be stored as typed data, or was stored as code and may not be run."""


class UnsafePickleError(UnsupportedValueError, pickle.UnpicklingError):
    """A pickle refers to a class or function that is not known to be plain data; nothing of it was run."""


# ------------------------------------------------------------------ publishing weights


class PublishError(TerrazzoError, RuntimeError):
    """Weights that cannot be published or received as they are, or a publisher or receiver that cannot work."""


class PublishValueError(PublishError, ValueError):
    """An argument that a publisher or a receiver cannot take."""


# ------------------------------------------------------------------ the training engine


class EngineError(TerrazzoError, RuntimeError):
    """The training engine was used in a way that cannot work."""


class EngineConfigError(EngineError, ValueError):
    """A config with an option that is unknown, of the wrong type, or in contradiction to another one."""


class EngineValueError(EngineError, ValueError):
    """A value that does not fit what the engine trains."""


class LossScaleError(EngineError, FloatingPointError):
    """Gradients overflow at the smallest loss scale."""


class StateNameError(EngineError, KeyError):
    """The client state of a checkpoint uses names that are the engine's own."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument
        return str(self.args[0])


# ------------------------------------------------------------------ starting runs


class LaunchError(TerrazzoError, RuntimeError):
    """The ranks of a run could not be started."""


class RunConfigError(TerrazzoError, ValueError):
    """The file that says how a run is started lacks an option, or has one that is unknown or of the wrong type."""


class DemoError(TerrazzoError, RuntimeError):
    """The demo did not go as it should."""


# ------------------------------------------------------------------ the viewer


class ViewError(TerrazzoError, ValueError):
    """Something that the viewer cannot show, or a page that cannot be made here."""
