"""Starting the ranks of this host with torchrun, and how they ended."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import parse_args
from torch.distributed.run import run as run_torchrun

from terrazzo._torch.launching import started_by
from terrazzo.errors import LaunchError
from terrazzo.launch.cluster import cluster_of
from terrazzo.launch.config import Run
from terrazzo.launch.network import address_towards, is_here
from terrazzo.launch.recovery import Recovery, Watch

ENVIRONMENT: Final = {
    # Ranks share the cores; torchrun would set the same value, with a warning each time.
    "OMP_NUM_THREADS": "1",
    # Otherwise PyTorch 2.13 gives restarted ranks the store of the dead ones, in which gloo finds their addresses.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


# The signals that torchrun passes on to its ranks: its default, and those that Slurm and submitit can be set to send.
_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
# Seconds to wait for a cluster to make the first host's name known.
_PATIENCE: Final = 300.0


def torchrun_line(run: Run) -> str:
    """The command that starts the run by hand on this host."""
    settings = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    return shlex.join([*settings, "torchrun", *torchrun_arguments(run)])


def torchrun_arguments(run: Run, environment: Mapping[str, str] | None = None) -> list[str]:
    """The arguments of `torchrun` that start the run on this host.

    The script gets the path of the run's file as its first argument. If the file has no endpoint, the environment of
    the cluster says which hosts there are.
    """
    ranks = run.config.ranks
    cluster = cluster_of(os.environ if environment is None else environment) if ranks.endpoint is None else None
    per_host = ranks.per_host or (cluster.per_host if cluster else None)
    arguments = [
        f"--nnodes={cluster.hosts if cluster else ranks.hosts}",
        f"--nproc-per-node={per_host or 'auto'}",
        f"--max-restarts={ranks.restarts}",
        f"--shutdown-timeout={ranks.grace}",
        f"--signals-to-handle={_SIGNALS}",
    ]
    if cluster is not None and cluster.hosts != "1":
        arguments += _meeting(
            cluster.endpoint, cluster.job, cluster.index == 0, address_towards(cluster.endpoint, _PATIENCE)
        )
    elif ranks.endpoint is not None:
        arguments += _meeting(ranks.endpoint, ranks.name, is_here(ranks.endpoint), address_towards(ranks.endpoint))
    else:
        arguments.append("--standalone")
    what = ["-m", "terrazzo.launch.entry"] if run.script is None else [str(run.script)]
    return [*arguments, *what, str(run.path), *run.config.arguments]


def _meeting(endpoint: str, name: str, is_host: bool, address: str) -> list[str]:
    """The arguments that say where hosts meet."""
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={name}",
        f"--rdzv-conf=is_host={int(is_host)}",
        f"--local-addr={address}",
    ]


@dataclass(frozen=True)
class Ending:
    """How a run ended: 0, or the exit status of the rank that failed first (128 and more: by a signal), and why."""

    status: int
    why: str = ""


def start(
    run: Run, tell: Callable[[Recovery], object] = lambda _: None, say: Callable[[str], object] = lambda _: None
) -> Ending:
    """Run the ranks of this host until all have ended.

    After a failure all ranks are restarted, as often as the run's file allows; `tell` gets how long the recovery took,
    on the host of the first rank, and `say` what else there is to know.
    """
    ranks = run.config.ranks
    spare = ranks.spare and ranks.restarts > 0
    watch = Watch(tell, say, spare=spare, stuck_after=ranks.stuck_after, folder=run.checkpoints)
    return start_torchrun(torchrun_arguments(run), f"{ranks.hosts} hosts did not meet at {ranks.endpoint}", watch)


def start_torchrun(arguments: list[str], not_met: str, watch: Watch | None = None) -> Ending:
    """Run torchrun with these arguments until all ranks of this host have ended; `not_met` is the error if hosts do not
    meet."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with watch or Watch() as watching, started_by(watching.start):
            run_torchrun(parse_args(arguments))
    except ChildFailedError as error:
        return _first_failure(error)
    except SignalException as error:
        return Ending(128 + error.sigval, f"it was ended by {signal.Signals(error.sigval).name}")
    except RendezvousError as error:
        raise LaunchError(f"{not_met}: {error}; start the same command on all of them") from error
    return Ending(0)


def _first_failure(error: ChildFailedError) -> Ending:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        return Ending(128 - failure.exitcode, f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}")
    return Ending(failure.exitcode, f"rank {rank} ended with status {failure.exitcode}")
