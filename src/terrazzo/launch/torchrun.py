"""Starting the ranks of this host with torchrun, and how they ended."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import determine_local_world_size, get_args_parser, parse_args
from torch.distributed.run import run as run_torchrun

from terrazzo._torch.launching import started_by, wait_for_ranks
from terrazzo.errors import LaunchError, RunConfigError
from terrazzo.launch.cluster import cluster_of
from terrazzo.launch.config import Run, check_batch, fewer_ranks, with_ranks
from terrazzo.launch.network import address_towards, is_here
from terrazzo.launch.recovery import HostRanks, Recovery, how_ended, was_told

ENVIRONMENT: Final = {
    # Ranks share the cores; torchrun would set the same value, with a warning each time.
    "OMP_NUM_THREADS": "1",
    # Otherwise PyTorch 2.13 gives restarted ranks the store of the dead ones, in which gloo finds their addresses.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


# The signals that torchrun passes on to its ranks: its default, and those that Slurm and submitit can be set to send.
_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
# How long ranks may save when they are told to end; PyTorch 2.11 has no option for it.
GRACE: Final = "--shutdown-timeout"
HAS_GRACE: Final = GRACE in get_args_parser().format_help()
# Seconds to wait for a cluster to make the first host's name known.
_PATIENCE: Final = 300.0
_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
# How soon a host that is lost is missed: 2 seconds, five times; then others may join for 10 seconds more.
_ELASTIC: Final = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=10"


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
    hosts = cluster.hosts if cluster else str(ranks.hosts)
    if ranks.min_hosts is not None:
        hosts = f"{ranks.min_hosts}:{hosts.rpartition(':')[2]}"
    _check_least(run, hosts, per_host)
    arguments = [
        f"--nnodes={hosts}",
        f"--nproc-per-node={per_host or 'auto'}",
        f"--max-restarts={ranks.restarts}",
        *([f"{GRACE}={ranks.grace}"] if HAS_GRACE else []),
        f"--signals-to-handle={_SIGNALS}",
    ]
    if cluster is not None and hosts != "1":
        address = address_towards(cluster.endpoint, _PATIENCE)
        arguments += _meeting(cluster.endpoint, cluster.job, cluster.index == 0, address, hosts)
    elif ranks.endpoint is not None:
        address = address_towards(ranks.endpoint)
        arguments += _meeting(ranks.endpoint, ranks.name, is_here(ranks.endpoint), address, hosts)
    else:
        arguments.append("--standalone")
    what = ["-m", "terrazzo.launch.entry"] if run.script is None else [str(run.script)]
    return [*arguments, *what, str(run.path), *run.config.arguments]


def _check_least(run: Run, hosts: str, per_host: int | None) -> None:
    ranks, most = run.config.ranks, int(hosts.rpartition(":")[2])
    if ranks.min_per_host is not None and most > 1:
        raise RunConfigError(f"{run.path}: ranks.min_per_host is for one host; on {most} hosts set ranks.min_hosts")
    for name, least, number in (("min_hosts", ranks.min_hosts, most), ("min_per_host", ranks.min_per_host, per_host)):
        if least is not None and number is not None and least > number:
            raise RunConfigError(f"{run.path}: ranks.{name} must be at most {number}, the number of all, not {least}")


def _meeting(endpoint: str, name: str, is_host: bool, address: str, hosts: str) -> list[str]:
    """The arguments that say where hosts meet, and how many."""
    elastic = f",{_ELASTIC}" if ":" in hosts else ""
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={name}",
        f"--rdzv-conf=is_host={int(is_host)}{elastic}",
        f"--local-addr={address}",
    ]


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        status: 0, or the exit status of the rank that failed first (128 and more: by a signal).
        why: what happened, if it is not 0.
        lost: the rank that failed first, unless it was told to end.
    """

    status: int
    why: str = ""
    lost: int | None = None


_MISCONFIGURED: Final = Ending(1, "the config is wrong (the error is above), so the ranks were not started again")


def start(
    run: Run, tell: Callable[[Recovery], object] = lambda _: None, say: Callable[[str], object] = lambda _: None
) -> Ending:
    """Run the ranks of this host until all have ended.

    After a failure all ranks are restarted, as often as the run's file allows, and then with fewer ranks if it allows
    that; `tell` gets how long the recovery took, on the host of the first rank, and `say` what else there is to know.
    """
    ranks = run.config.ranks
    if not HAS_GRACE:
        wait_for_ranks(ranks.grace)
    spare = ranks.spare and (ranks.restarts > 0 or ranks.min_per_host is not None)
    with HostRanks(tell, say, spare=spare, stuck_after=ranks.stuck_after, folder=run.checkpoints) as here:
        while True:
            arguments = torchrun_arguments(run)
            count = run.config.ranks.per_host or determine_local_world_size("auto")
            if arguments[0] == "--nnodes=1" and (doubt := check_batch(run, count)):
                say(doubt)
            not_met = f"{ranks.hosts} hosts did not meet at {ranks.endpoint}"
            ending = start_torchrun(arguments, not_met, here)
            fewer = None if ending.lost is None else fewer_ranks(run, count)
            if ending.lost is None or fewer is None:
                return ending
            say(f"{ending.why}, and all restarts are used: the run goes on with {fewer} of {count} ranks")
            if torch.cuda.is_available():
                os.environ[_DEVICES] = without_device(ending.lost, os.environ.get(_DEVICES), torch.cuda.device_count())
            run = with_ranks(run, per_host=fewer)


def without_device(rank: int, visible: str | None, count: int) -> str:
    """The devices that ranks may use without that of a rank that is lost.

    >>> without_device(1, None, 4), without_device(0, "2,3", 2)
    ('0,2,3', '3')
    """
    devices = visible.split(",") if visible else [str(number) for number in range(count)]
    return ",".join(devices[:rank] + devices[rank + 1 :])


def start_torchrun(arguments: list[str], not_met: str, ranks: HostRanks) -> Ending:
    """Run torchrun with these arguments until all ranks of this host have ended; `not_met` is the error if hosts do not
    meet."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        args = parse_args(arguments)
        # Ctrl-C ends the ranks by SIGTERM, for which they may save, and of which they print no traceback.
        args.signals_to_handle = ",".join(name for name in args.signals_to_handle.split(",") if name != "SIGINT")
        with started_by(ranks.start):
            run_torchrun(args)
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)
    except LaunchError:
        if not ranks.misconfigured:
            raise
        return _MISCONFIGURED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if ranks.misconfigured:
            return _MISCONFIGURED
        lost = None if was_told(code) else rank
        return Ending(128 - code if code < 0 else code, how_ended(rank, code), lost)
    except SignalException as error:
        return _ended_by(error.sigval)
    except RendezvousError as error:
        raise LaunchError(f"{not_met}: {error}; start the same command on all of them") from error
    return Ending(0)


def _ended_by(number: int) -> Ending:
    return Ending(128 + number, f"it was ended by {signal.Signals(number).name}")
