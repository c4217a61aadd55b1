"""The file that describes a run: TOML or JSON, typed and checked before any rank starts."""

from __future__ import annotations

import json
import os
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from terrazzo._meant import meant_beside, refused
from terrazzo.checkpoint import CheckpointManager
from terrazzo.checkpoint.manager import Best, Keep, Save
from terrazzo.checkpoint.manager.selection import Agreed, Count, Seconds
from terrazzo.checkpoint.native.names import named_by_latest, step_of_name
from terrazzo.checkpoint.stores import Place, is_url
from terrazzo.engine.checked import convert
from terrazzo.engine.config import read_config
from terrazzo.engine.marks import tell_of_config_errors
from terrazzo.errors import CheckpointFormatError, EngineConfigError, RunConfigError


class RanksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[ranks]`: how many there are, on which hosts, and how often they are restarted."""

    per_host: Count | None = None  # None: one for each accelerator, or without accelerators for each core
    min_per_host: Count | None = None  # on one host: with how many it goes on when a rank is lost for good
    hosts: Count = 1
    min_hosts: Count | None = None  # with how many hosts it starts and goes on; None: with all
    endpoint: str | None = None  # where several hosts meet: an address of one of them, and a free port
    name: str = "terrazzo"  # of the meeting; runs that share an endpoint need different ones
    restarts: Annotated[int, msgspec.Meta(ge=0)] = 3
    grace: Count = 120  # seconds in which ranks may save after SIGTERM
    spare: bool = True  # whether a process waits on each host from which ranks that are restarted are forked
    stuck_after: Seconds | None = None  # without a step, a rank is ended; None: never


class CheckpointsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[checkpoints]`: where they are, which steps are saved and which are kept, for a `CheckpointManager`."""

    folder: str = "checkpoints"
    save: Count | Save | None = None
    keep: Count | Keep | None = None
    best: str | Best | None = None
    local: str | None = None  # a folder on each host, relative to the file's folder
    copy_every: Count = 1
    keep_local: Count | Keep | None = 2
    replicas: Annotated[int, msgspec.Meta(ge=0)] = 1


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of the file."""

    script: str | None = None  # a Python file, or
    entry: str | None = None  # `module:function`
    arguments: tuple[str, ...] = ()
    checkpoints: str | CheckpointsConfig = "checkpoints"
    ranks: RanksConfig = RanksConfig()
    engine: dict[str, Any] = {}  # the config for `terrazzo.engine.initialize`


class Run:
    """A run as its file describes it. Paths in the file are relative to the file's folder.

    Attributes:
        path: the path of the file.
        config: its contents.
    """

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self.config = config

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def saving(self) -> CheckpointsConfig:
        """The file's `[checkpoints]`."""
        told = self.config.checkpoints
        return CheckpointsConfig(folder=told) if isinstance(told, str) else told

    @property
    def checkpoints(self) -> Path | str:
        """The folder, or the URL, for `Engine.save_checkpoint` and `Engine.load_checkpoint`."""
        folder = self.saving.folder
        return folder if is_url(folder) else self.path.parent / folder

    def manager(self, stop: Agreed | None = None, **changes: Any) -> CheckpointManager:
        """The manager of the run's checkpoints, as the file describes it; all ranks create it together.

        Args:
            stop: a `StopSignal`: the step in which the job is told to end is saved, too.
            changes: arguments of `CheckpointManager` that replace those from the file.
        """
        arguments = msgspec.structs.asdict(self.saving) | {"local": self.local, "stop": stop}
        del arguments["folder"]
        return CheckpointManager(self.checkpoints, **{**arguments, **changes})

    @property
    def local(self) -> Path | None:
        """The folder on this host in which checkpoints are saved first, if the file names one."""
        return None if self.saving.local is None else self.path.parent / self.saving.local

    @property
    def engine(self) -> dict[str, Any]:
        """The config for `terrazzo.engine.initialize`."""
        return self.config.engine

    @property
    def script(self) -> Path | None:
        """The Python file that every rank runs; None if it is a function."""
        return None if self.config.script is None else self.path.parent / self.config.script

    def latest(self) -> str | None:
        """The tag of the last committed checkpoint, in the folder or on this host; None if there is none."""
        tags = []
        for folder in (self.checkpoints, *([] if self.local is None else [self.local])):
            with suppress(CheckpointFormatError):  # ranks raise it, if they load from there
                tags += [place.name for place in named_by_latest(Place(folder))[:1]]
        return max(tags, key=lambda tag: -1 if (step := step_of_name(tag)) is None else step, default=None)


def is_run_file(path: str) -> bool:
    """Whether this is the file of a run, rather than a folder or a URL."""
    return Path(path).suffix in (".toml", ".json") and Path(path).is_file()


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the file of a run.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "train.py").write_text("...")
    >>> _ = (folder / "run.toml").write_text('script = "train.py"\\n[engine]\\ntrain_batch_size = 8')
    >>> run = read_run(folder / "run.toml")
    >>> run.engine, run.checkpoints == folder / "checkpoints"
    ({'train_batch_size': 8}, True)
    """
    tell_of_config_errors()
    path = Path(path).absolute()
    try:
        config = convert(_parsed(path), RunConfig)
    except msgspec.ValidationError as error:
        raise RunConfigError(f"{path}: {error}") from error
    return _checked(Run(path, config))


def with_ranks(run: Run, **changes: Any) -> Run:
    """The run with other values of keys in the file's `[ranks]`, checked as the file's are."""
    ranks = msgspec.structs.replace(run.config.ranks, **changes)
    return _checked(Run(run.path, msgspec.structs.replace(run.config, ranks=ranks)))


def fewer_ranks(run: Run, count: int) -> int | None:
    """The number of ranks with which the run can go on if one of `count` is lost: the largest that the file allows and
    that divides the engine's batch; None if there is none."""
    for fewer in range(count - 1, (run.config.ranks.min_per_host or count) - 1, -1):
        with suppress(EngineConfigError):
            if run.engine:
                read_config(run.engine)[0].batch(fewer)
            return fewer
    return None


def check_batch(run: Run, count: int) -> str:
    """Raise if the engine's batch fits no number of data-parallel ranks among `count`; returns what is wrong unless the
    script divides the model among ranks, or nothing."""
    if not run.engine:
        return ""
    engine = read_config(run.engine)[0]
    most = count // (engine.sequence_parallel_size * max(engine.tensor_parallel.autotp_size, 1))
    try:
        engine.batch(max(most, 1))
        return ""
    except EngineConfigError as error:
        wrong = f"{run.path}: engine: {str(error).removeprefix('config: ')}"
        for fewer in (fewer for fewer in range(1, most) if most % fewer == 0):
            with suppress(EngineConfigError):
                engine.batch(fewer)
                return f"{wrong}. Unless {run.config.script or run.config.entry} divides the model, it fails"
        raise RunConfigError(wrong) from error


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise RunConfigError(f"{path} cannot be read: {error.strerror}{refused(error)}{meant_beside(path)}") from error
    except (ValueError, RecursionError) as error:
        if path.suffix == ".py":
            raise RunConfigError(
                f"{path} is a program: write a file of the run beside it, as run.toml with script = {path.name!r}, and "
                "name that; or start the program by torchrun"
            ) from error
        raise RunConfigError(f"{path} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error


def _checked(run: Run) -> Run:
    config, path = run.config, run.path
    if (config.script is None) == (config.entry is None):
        raise RunConfigError(f"{path}: set exactly one of script and entry, which is what every rank runs")
    if run.script is not None and not run.script.is_file():
        raise RunConfigError(f"{path}: the script {run.script} does not exist{meant_beside(run.script)}")
    if config.entry is not None and not all(config.entry.partition(":")[::2]):
        raise RunConfigError(f"{path}: entry must have the form module:function, got {config.entry!r}")
    endpoint = config.ranks.endpoint
    if config.ranks.hosts > 1 and endpoint is None:
        raise RunConfigError(f"{path}: ranks.hosts is {config.ranks.hosts}: set ranks.endpoint, where the hosts meet")
    if endpoint is not None and not (endpoint.rpartition(":")[0] and endpoint.rpartition(":")[2].isdigit()):
        raise RunConfigError(f"{path}: ranks.endpoint must have the form host:port, got {endpoint!r}")
    if config.engine:
        try:
            read_config(config.engine)
        except EngineConfigError as error:
            raise RunConfigError(f"{path}: engine: {str(error).removeprefix('config: ')}") from error
    return run
