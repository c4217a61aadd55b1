"""Every exception that terrazzo raises on purpose.

All derive from `TerrazzoError`. Each also derives from the built-in type that PyTorch raises for the same operation,
so that existing `except` clauses keep working. A message says what happened, to which name, on which rank, and what to
do.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from traceback import StackSummary
from types import MappingProxyType

from terrazzo._meant import by_text


class TerrazzoError(Exception):
    """The base class of terrazzo's exceptions."""


class PrivateHelperError(TerrazzoError, TypeError):
    """Under `terrazzo.install()` a private function of PyTorch got an object of terrazzo's that it cannot use."""


class TorchMovedError(TerrazzoError, ImportError):
    """The installed torch lacks private names that terrazzo needs; the message lists them."""


# ------------------------------------------------------------------ layouts


class LayoutError(TerrazzoError, ValueError):
    """A placement, box or layout that does not fit its tensor."""


class PlacementsError(LayoutError, RuntimeError, AssertionError):
    """Placements that do not fit their mesh or tensor, or that are not terrazzo's.

    In such cases PyTorch raises a ValueError, a RuntimeError or an AssertionError, depending on the function.
    """


# ------------------------------------------------------------------ communication


class CommError(TerrazzoError, RuntimeError):
    """Communication between ranks failed.

    `missing` has the global ranks that did not answer, as far as that is known. `reports` says, for each of them and
    for each rank that gave up, what is known about it.
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

    `failures` has one entry per rank that failed. On such a rank `__cause__` is its own exception.
    """

    def __init__(self, failures: tuple[RankFailure, ...], what: str = "") -> None:
        self.failures = failures
        self.what = what
        count = f"{len(failures)} rank" + ("s" if len(failures) != 1 else "")
        lines = by_text((failure.rank, f"{failure.type}: {failure.message}") for failure in failures)
        super().__init__("\n  ".join([f"{what or 'work done together'} failed on {count}:", *lines]))

    def __reduce__(self) -> tuple[type[RankError], tuple[tuple[RankFailure, ...], str]]:
        return type(self), (self.failures, self.what)


# ------------------------------------------------------------------ distributed tensors


class DTensorError(TerrazzoError, RuntimeError):
    """An operation on a distributed tensor that is not possible."""


class DTensorArgumentError(DTensorError, ValueError, AssertionError):
    """An argument that a function of distributed tensors does not accept.

    For such arguments PyTorch raises a ValueError, a RuntimeError or an AssertionError, depending on the function.
    """


class DTensorTypeError(DTensorError, TypeError):
    """A DTensor cannot be used as such an object."""


class CaptureError(DTensorError):
    """`terrazzo.compile` cannot make a graph of a program.

    `operation` is the operation that prevents it; `file` and `line` are where the program calls it, as far as known.
    """

    def __init__(self, message: str, *, operation: str = "", file: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.operation = operation
        self.file = file
        self.line = line


class RandomStateError(DTensorError):
    """The random generators of the ranks are not in the same state."""


class MixedTensorError(DTensorError, ValueError):
    """Plain tensors and DTensors were mixed in one operation.

    PyTorch raises a RuntimeError, or a ValueError where `loss_parallel` needs a DTensor.
    """


class ParallelPlanError(DTensorArgumentError):
    """A plan for parallel modules does not fit the module, or its inputs and outputs."""


class ParallelPlanTypeError(ParallelPlanError, TypeError):
    """A plan for parallel modules that is neither a style nor a dict of styles."""


class UnsupportedCallError(DTensorError, NotImplementedError):
    """A form of a call that works on one device but is not supported for distributed tensors."""


class UnsupportedModuleError(UnsupportedCallError):
    """A parallel style was applied to a kind of module that it does not support."""


# ------------------------------------------------------------------ fully_shard


class FSDPError(TerrazzoError, RuntimeError):
    """A module that cannot be sharded, or a sharded module that is used in an unsupported way."""


class FSDPValueError(FSDPError, ValueError, AssertionError):
    """An argument that `fully_shard` or a method of a sharded module does not accept.

    It has both of the types that PyTorch raises for these.
    """


class FSDPTypeError(FSDPError, TypeError):
    """An argument of the wrong type for a method of a sharded module."""


class DivergedRanksError(FSDPError, CommError):
    """Ranks called different collectives; the message says for each rank where it was."""


class OptimError(TerrazzoError, RuntimeError):
    """Tensors that an optimizer of `terrazzo.optim`, or `Owners`, does not accept."""


class OptimValueError(OptimError, ValueError):
    """An argument that an optimizer of `terrazzo.optim` does not accept; PyTorch's raise a ValueError for it."""


class CommPolicyError(DTensorError):
    """An operation would communicate more than `terrazzo.tensor.policy.communication_policy` allows.

    `kind` is the collective, `bytes` what it would move, and `operation` the operation that needs it, as far as known.
    """

    def __init__(self, message: str, *, kind: str = "", bytes: int = 0, operation: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.bytes = bytes
        self.operation = operation


class LocalMapError(DTensorError, AssertionError):
    """The arguments or results of a function under `local_map` are not as declared."""


class PlacementMismatchError(DTensorArgumentError):
    """A DTensor does not have the placements that a function requires, and may not be redistributed."""


# ------------------------------------------------------------------ checkpoints


class CheckpointError(TerrazzoError, RuntimeError):
    """Saving, loading or inspecting a checkpoint failed."""


class CheckpointException(CheckpointError):
    """Ranks that save or load together failed; all of them raise it, with the same text.

    Where every rank that failed raised one of terrazzo's exceptions, this is an exception of that type, too, and a
    `CheckpointIOError` where the system refused something: `except CheckpointCorruptError` and `except CommTimeout`
    catch it. It is also PyTorch's exception of this name, if `torch.distributed.checkpoint.api` has been imported.
    """

    def __init__(self, msg: str, failures: dict[int, tuple[BaseException, StackSummary]]) -> None:
        super().__init__(msg)
        self._failures = failures

    @property
    def failures(self) -> dict[int, tuple[BaseException, StackSummary]]:
        """For each global rank that failed: the exception, and where on that rank it was raised."""
        return self._failures

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointIOError(CheckpointError, OSError):
    """A file of a checkpoint could not be read or written; `__cause__` is the system's error."""

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at the path, or a file that it refers to is missing."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is a checkpoint at the path already, and it may not be overwritten."""


class ConflictError(CheckpointError, FileExistsError):
    """Another process has replaced the checkpoint since this save began, or another live job has the run's folder.

    What the other one has saved is left as it is.
    """


class CheckpointCorruptError(CheckpointError):
    """Stored bytes differ from the bytes that were written."""


class CheckpointFormatError(CheckpointError):
    """The files at the path have no format, or no version of a format, that this release can read."""


class CheckpointManagerError(CheckpointError, ValueError):
    """A checkpoint manager got a policy, a step or metrics that it does not accept, or is used after `close`."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The state dict to load does not fit the checkpoint; the message lists everything that does not fit."""

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
    """A planner's index does not exist in the state dict."""


class CheckpointIndexError(CheckpointError, IndexError, ValueError):
    """An index that a stored tensor does not have.

    PyTorch raises an IndexError, or a ValueError for a slice that goes backwards.
    """


class CheckpointNameError(CheckpointError, KeyError):
    """A name that a checkpoint does not have."""

    __str__ = Exception.__str__  # KeyError would show the repr of its argument


class CheckpointValueError(CheckpointError, ValueError):
    """An argument that a function of checkpoints does not accept."""


class DivergentValueError(CheckpointError, ValueError):
    """Ranks hold different values under one name whose value must be the same on all ranks."""


class DivergentValueWarning(UserWarning):
    """Ranks hold different values under one name, of a kind for which the lowest rank's value is stored."""


class UnsupportedValueError(CheckpointError, TypeError):
    """A value that cannot be stored as typed data, or was stored as a pickle that may not be loaded."""


class UnsafePickleError(UnsupportedValueError, pickle.UnpicklingError):
    """A pickle refers to a class or function that is not known to be plain data; nothing of it was run."""


# ------------------------------------------------------------------ publishing weights


class PublishError(TerrazzoError, RuntimeError):
    """Weights that cannot be published or received as they are, or a publisher or receiver that cannot work."""


class PublishValueError(PublishError, ValueError):
    """An argument that a publisher or a receiver does not accept."""


# ------------------------------------------------------------------ the training engine


class EngineError(TerrazzoError, RuntimeError):
    """The training engine was used in an unsupported way."""


class EngineConfigError(EngineError, ValueError):
    """A config with an option that is unknown, of the wrong type, or that contradicts another one."""


class EngineValueError(EngineError, ValueError):
    """A value that does not fit the model that the engine trains."""


class EngineCallError(EngineError, AssertionError):
    """A method of the engine was called where it may not be; DeepSpeed raises an AssertionError for such a call."""


class StateFileError(EngineError, OSError):
    """Optimizer state could not be read from its files, or written there."""


class LossScaleError(EngineError, FloatingPointError):
    """Gradients overflow at the smallest loss scale."""


class UnfinishedError(EngineError):
    """A step or a load failed halfway, so the run cannot be saved or continued until a checkpoint is loaded."""


class StateNameError(EngineError, KeyError):
    """The client state of a checkpoint uses names that the engine uses itself."""

    __str__ = Exception.__str__  # KeyError would show the repr of its argument


# ------------------------------------------------------------------ starting runs


class LaunchError(TerrazzoError, RuntimeError):
    """The ranks of a run could not be started."""


class RunConfigError(TerrazzoError, ValueError):
    """The file of a run lacks an option, or has one that is unknown or of the wrong type."""


class DemoError(TerrazzoError, RuntimeError):
    """The demo did not go as it should."""


# ------------------------------------------------------------------ the viewer


class ViewError(TerrazzoError, ValueError):
    """Something that the viewer cannot show, or a page that cannot be made here."""


# ------------------------------------------------------------------ testing


class LateDeviceError(TerrazzoError, RuntimeError):
    """The device `late` of `terrazzo.testing` was used in an unsupported way."""


class DeviceBuildError(LateDeviceError, ImportError):
    """The device `late` cannot be compiled here; the message says what to install."""


class RaceError(LateDeviceError, AssertionError):
    """A program accessed memory in an order that nothing guarantees; `races` has one entry per pair of accesses."""

    def __init__(self, message: str, races: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.races = races

    def __reduce__(self) -> tuple[type[RaceError], tuple[str, tuple[object, ...]]]:
        return type(self), (str(self), self.races)
