"""`terrazzo deepspeed`: starts a script on the ranks of a host file, with the options of DeepSpeed's command."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.screen import errors

_TO_END = 10.0  # seconds for commands that were terminated


def deepspeed(
    arguments: Annotated[list[str], typer.Argument(help="Options, the script and its arguments.", show_default=False)],
) -> None:
    """Start a script on all ranks, with the options of DeepSpeed's command.

    Among them are --hostfile, --num_nodes, --num_gpus, --include, --exclude, --master_addr, --master_port, --module,
    --no_local_rank, --no_ssh with --node_rank. Other hosts are reached by ssh, in the same folder with the same Python.
    The exit status is that of the rank that failed.
    """
    from terrazzo.deepspeed.launcher.runner import hosts_of, parse_args
    from terrazzo.errors import RunConfigError
    from terrazzo.launch.recovery import HostRanks
    from terrazzo.launch.torchrun import start_torchrun

    with errors():
        args = parse_args(arguments)
        hosts = hosts_of(args)
        if args.no_ssh and not 0 <= args.node_rank < len(hosts):
            raise RunConfigError(
                f"--no_ssh needs --node_rank, the number of this host, from 0 to {len(hosts) - 1}, not {args.node_rank}"
            )
        if args.no_ssh or (len(hosts) == 1 and not args.force_multi):
            number = max(args.node_rank, 0)
            os.environ.update(_devices(args, list(hosts.values())[number]))
            with HostRanks() as ranks:
                not_met = f"{len(hosts)} hosts did not meet"
                ending = start_torchrun(torchrun_arguments(args, hosts, number), not_met, ranks)
            if ending.why:
                typer.echo(ending.why, err=True)
            status = ending.status
        else:
            status = _over_ssh([ssh_command(args, hosts, number) for number in range(len(hosts))])
    raise typer.Exit(status)


def torchrun_arguments(args: Namespace, hosts: Mapping[str, Sequence[int]], number: int) -> list[str]:
    """The arguments of torchrun on the host of this number. Ranks are numbered in the order of the hosts."""
    kind = "module" if args.module else "command" if args.no_python else "script"
    meeting = ["--standalone"]
    if len(hosts) > 1:
        meeting = [f"--node-rank={number}", f"--master-addr={args.master_addr or next(iter(hosts))}"]
        meeting.append(f"--master-port={args.master_port}")
    script = [kind, args.user_script, *(["--no_local_rank"] if args.no_local_rank else []), *args.user_args]
    return [
        *(f"--nnodes={len(hosts)}", f"--nproc-per-node={len(list(hosts.values())[number])}", "--max-restarts=0"),
        *(*meeting, "-m", "terrazzo.deepspeed.launcher.launch", *script),
    ]


def ssh_command(args: Namespace, hosts: Mapping[str, Sequence[int]], number: int) -> list[str]:
    """The command that starts the ranks of the host of this number."""
    from terrazzo.launch.torchrun import ENVIRONMENT

    host, slots = list(hosts.items())[number]
    passed = {name: value for name, value in os.environ.items() if name.startswith(("NCCL", "PYTHON", "UCX"))}
    settings = {**passed, **_settings(), **ENVIRONMENT, **_devices(args, slots)}
    run = [sys.executable, "-m", "torch.distributed.run", *torchrun_arguments(args, hosts, number)]
    line = shlex.join(["env", *(f"{name}={value}" for name, value in settings.items()), *run])
    port = [] if args.ssh_port is None else ["-p", str(args.ssh_port)]
    # With a terminal, so that what runs there ends with the connection.
    return ["ssh", "-tt", "-o", "BatchMode=yes", *port, host, f"cd {shlex.quote(os.getcwd())} && exec {line}"]


def _devices(args: Namespace, slots: Sequence[int]) -> dict[str, str]:
    """What has ranks see only some accelerators of their host."""
    chosen = args.include or args.exclude
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))} if chosen else {}


def _settings() -> dict[str, str]:
    """The variables of the file `.deepspeed_env`, in this folder or at home."""
    for folder in (Path.cwd(), Path.home()):
        if (path := folder / ".deepspeed_env").is_file():
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {}


def _over_ssh(commands: Sequence[list[str]]) -> int:
    """Run the commands until all have ended, or one has failed, which ends the others; returns its status."""
    running = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
    try:
        while True:
            ended = [process.poll() for process in running]
            if failed := [status for status in ended if status]:
                return failed[0] if failed[0] > 0 else 128 - failed[0]
            if None not in ended:
                return 0
            time.sleep(0.2)
    finally:
        for process in running:
            process.terminate()
        limit = time.monotonic() + _TO_END
        for process in running:
            try:
                process.wait(max(limit - time.monotonic(), 0))
            except subprocess.TimeoutExpired:  # torchrun, say, which waits for a host that has failed
                process.kill()
                process.wait()
