"""`terrazzo doctor`: is everything here that training needs, and what is to be mended?"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

from terrazzo.cli.screen import Json, print_json, say

_WIDTH = 18  # of the longest name of a check
_FILES = 4096  # that a rank with many loaders and a store of small files has open at once
_SHARED = 1 << 30  # bytes of shared memory, for data loaders and saves in the background


@dataclass(frozen=True)
class Finding:
    """What one check found; `mend` says what to do, if anything."""

    check: str
    found: str
    mend: str = ""


def doctor(json: Json = False) -> None:
    """Check this installation and this machine, in seconds, and say what to mend.

    The exit status is 1 if there is something to mend.
    """
    findings: list[Finding] = []
    for check in _CHECKS:
        found = _made(check)
        findings += found
        if not json:
            for finding in found:
                _show(finding)
    wrong = [finding for finding in findings if finding.mend]
    if json:
        print_json(findings)
    else:
        say(f"{len(wrong)} of {len(findings)} to mend" if wrong else f"{len(findings)} checks, nothing to mend")
    raise typer.Exit(1 if wrong else 0)


def _show(finding: Finding) -> None:
    mend = finding.mend
    say(f"{'!' if mend else ' '} {finding.check:{_WIDTH}}  {finding.found}", style="red" if mend else None)
    if mend:
        say(f"  {'':{_WIDTH}}  -> {mend}")


def _made(check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # a check that fails is a finding: the others go on
        name = check.__name__.strip("_").replace("_", " ")
        return [Finding(name, f"{type(error).__name__}: {error}", "see the error; other checks go on")]


def _versions() -> list[Finding]:
    import torch

    from terrazzo import __version__
    from terrazzo._torch.declared import check

    findings = [Finding("python", f"{sys.version.split()[0]}, {sys.executable}"), Finding("terrazzo", __version__)]
    check()  # raises if this PyTorch lacks what terrazzo needs
    findings.append(Finding("pytorch", str(torch.__version__)))
    for name in ("torchao", "safetensors", "cloudpickle", "deepspeed"):
        try:
            findings.append(Finding(name, version(name)))
        except PackageNotFoundError:
            continue
    if os.environ.get("TERRAZZO_INSTALL", "0") not in ("", "0"):
        works = any(type(finder).__name__ == "WithTorch" for finder in sys.meta_path)  # terrazzo-install.pth
        said = "programs that import PyTorch's names get terrazzo's" if works else "no effect"
        mend = "" if works else "install terrazzo with pip, which puts terrazzo-install.pth there; or use terrazzo run"
        findings.append(Finding("TERRAZZO_INSTALL", f"set: {said}", mend))
    return findings


def _accelerator() -> list[Finding]:
    import torch
    import torch.distributed as dist

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        missing = torch.version.cuda is not None and Path("/proc/driver/nvidia").exists()
        mend = "PyTorch does not see the GPUs of this machine: check the driver with nvidia-smi" if missing else ""
        return [Finding("accelerator", "none: ranks run on the CPU", mend)]
    count = torch.accelerator.device_count()
    backend = dist.get_default_backend_for_device(found)
    findings = [Finding("accelerator", f"{count} of type {found.type}; ranks communicate with {backend}")]
    if found.type == "cuda":
        there = dist.is_nccl_available()
        shown = ".".join(map(str, torch.cuda.nccl.version())) if there else "missing"
        findings.append(Finding("nccl", shown, "" if there else "install a PyTorch that is built with NCCL"))
    return findings


def _limits() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < _FILES
    mend = f"raise it before training: ulimit -n {min(hard, 65536) if hard > 0 else 65536}" if few else ""
    findings = [Finding("open files", "no limit" if soft < 0 else f"at most {soft}", mend)]
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return [*findings, Finding("/dev/shm", "missing", "mount it: saves in the background and data loaders use it")]
    free = shutil.disk_usage(shared).free
    mend = "give it more: docker run --shm-size=8g, or an emptyDir with medium: Memory" if free < _SHARED else ""
    if not os.access(shared, os.W_OK):
        mend = "make it writable for this user"
    return [*findings, Finding("/dev/shm", f"{free / 2**30:.1f} GiB free", mend)]


def _network() -> list[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        findings = [Finding("host", f"{name} is {address}")]
    except OSError as error:
        mend = "ranks of several hosts find each other by name: add it to /etc/hosts, or give an address"
        findings = [Finding("host", f"{name} has no address ({error})", mend)]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        findings.append(Finding("ports", f"a free one on 127.0.0.1 is {listening.getsockname()[1]}"))
    there = sorted(interface for _, interface in socket.if_nameindex())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "")
        prefixes = tuple(wanted.lstrip("^=").split(","))
        if wanted and not any(interface.startswith(prefixes) for interface in there):
            findings.append(Finding(variable, wanted, f"there is no such interface; there are {', '.join(there)}"))
    return findings


def _store_and_gloo() -> list[Finding]:
    """Two ranks in this process connect by a store on loopback, and add numbers."""
    import torch
    from torch.distributed import ProcessGroupGloo, TCPStore

    from terrazzo._threads import results_of

    limit = timedelta(seconds=10)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)

    def rank(number: int) -> float:
        own = TCPStore("127.0.0.1", store.port, is_master=False, timeout=limit)
        gloo: Any = ProcessGroupGloo(own, number, 2, limit)
        x = torch.full((4,), float(number + 1), device="cpu")
        gloo.allreduce([x]).wait()
        return float(x[0])

    sums = results_of([lambda number=number: rank(number) for number in range(2)], 2, "doctor")  # type: ignore[misc]
    if sums != [3.0, 3.0]:
        return [Finding("store and gloo", f"the sum of 1 and 2 is {sums}", "reinstall PyTorch: its gloo is broken")]
    return [Finding("store and gloo", "two ranks met and added")]


_CHECKS: tuple[Callable[[], list[Finding]], ...] = (_versions, _accelerator, _limits, _network, _store_and_gloo)
