"""The options and the host file of DeepSpeed's command: which ranks run on which hosts."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from terrazzo.errors import RunConfigError

HOST_FILE = "/job/hostfile"


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command; what follows the script is passed on to it.

    >>> parse_args(["--num_gpus", "2", "train.py", "--lr", "1"]).user_args
    ['--lr', '1']
    """
    parser = argparse.ArgumentParser(prog="terrazzo deepspeed", description="Start a script on all ranks.")
    parser.add_argument("-H", "--hostfile", default=HOST_FILE, help="lines of the form: NAME slots=NUMBER")
    parser.add_argument("-i", "--include", default="", help="use only these: HOST[:SLOT,...][@HOST...]")
    parser.add_argument("-e", "--exclude", default="", help="do not use these")
    parser.add_argument("--num_nodes", type=int, default=-1, help="use the first hosts of the file, so many")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on each host")
    parser.add_argument("--master_addr", default="", help="where hosts meet; by default the first one")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--no_ssh", action="store_true", help="start only this host's ranks: see --node_rank")
    parser.add_argument("--node_rank", type=int, default=-1, help="with --no_ssh: the number of this host")
    parser.add_argument("--ssh_port", type=int)
    parser.add_argument("--force_multi", action="store_true", help="use ssh for one host, too")
    parser.add_argument("--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("--no_python", action="store_true", help="the script is a command")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def fetch_hostfile(hostfile_path: str | os.PathLike[str]) -> dict[str, int] | None:
    """The hosts of a file and the number of slots of each; None if there is no such file."""
    try:
        with open(hostfile_path, encoding="utf-8") as file:
            return _parse_hostfile(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:  # ranks must not run on this host alone
        raise RunConfigError(f"the host file {os.fspath(hostfile_path)} cannot be read: {error}") from error


def _parse_hostfile(hostfile_lines: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, line in enumerate(hostfile_lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.match(r"\s*(\S+)\s+slots=(\d+)", line)
        if match is None:
            raise RunConfigError(f"line {number} of the host file must have the form NAME slots=NUMBER: {line.strip()}")
        if match[1] in found:
            raise RunConfigError(f"line {number} of the host file has the host {match[1]} again: keep one line")
        found[match[1]] = int(match[2])
    if not found:
        raise RunConfigError("the host file has no host: add lines of the form NAME slots=NUMBER")
    return found


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The hosts and their slots that are left by `--include` or `--exclude`.

    >>> parse_resource_filter({"a": [0, 1], "b": [0, 1]}, exclude_str="a@b:1")
    {'b': [0]}
    """
    if include_str and exclude_str:
        raise RunConfigError("--include and --exclude were both given: use one of them")
    named: dict[str, set[int]] = {}
    for part in (include_str or exclude_str).split("@") if include_str or exclude_str else []:
        host, _, slots = part.strip().partition(":")
        if host not in host_info:
            raise RunConfigError(f"there is no host {host!r}; there are {', '.join(host_info)}")
        try:
            chosen = {int(slot) for slot in slots.split(",")} if slots else set(host_info[host])
        except ValueError as error:
            raise RunConfigError(f"{part!r} must have the form HOST or HOST:SLOT,SLOT") from error
        if absent := chosen - set(host_info[host]):
            raise RunConfigError(f"host {host} has no slot {min(absent)}; it has {list(host_info[host])}")
        named.setdefault(host, set()).update(chosen)
    if include_str:
        return {host: sorted(slots) for host, slots in named.items()}
    left = {host: [slot for slot in slots if slot not in named.get(host, ())] for host, slots in host_info.items()}
    return {host: slots for host, slots in left.items() if slots}


def hosts_of(args: argparse.Namespace) -> dict[str, list[int]]:
    """The hosts on which ranks run, and the slots of each: numbers of its accelerators."""
    if (args.num_nodes >= 0 or args.num_gpus >= 0) and (args.include or args.exclude):
        raise RunConfigError("--num_nodes and --num_gpus cannot be combined with --include or --exclude")
    pool = fetch_hostfile(args.hostfile)
    if pool is None:
        if args.hostfile != HOST_FILE:
            raise RunConfigError(f"there is no host file {args.hostfile}")
        pool = {"localhost": max(torch.accelerator.device_count(), args.num_gpus, 1)}
    slots = parse_resource_filter({host: list(range(n)) for host, n in pool.items()}, args.include, args.exclude)
    if args.num_nodes > len(slots):
        raise RunConfigError(f"--num_nodes is {args.num_nodes}, but there are {len(slots)} hosts: {', '.join(slots)}")
    chosen = list(slots)[: args.num_nodes] if args.num_nodes > 0 else list(slots)
    if not chosen:
        raise RunConfigError("--exclude leaves no host")
    return {host: list(range(args.num_gpus)) if args.num_gpus > 0 else slots[host] for host in chosen}


__all__ = ["fetch_hostfile", "hosts_of", "parse_args", "parse_resource_filter"]
