"""`terrazzo doctor`: is everything here that training needs, and what is to be mended?"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from terrazzo.cli.screen import Json, print_json, say

_WIDTH = 18  # of the longest name of a check
_FILES = 4096  # that a rank with many loaders and a store of small files has open at once
_TASKS = 4096  # processes and threads of a user, with ranks that load data and compute on all cores
_SHARED = 1 << 30  # bytes of shared memory, for data loaders and saves in the background
_TRIED = 4 << 20  # bytes that are written to a folder of checkpoints, and removed
_SHM = Path("/dev/shm")
_PORT = 29500  # where torchrun's ranks meet if nothing is said


_Check = tuple[str, Callable[[], list["Finding"]]]


@dataclass(frozen=True)
class Finding:
    """What one check found; `mend` says what to do, if anything."""

    check: str
    found: str
    mend: str = ""


def doctor(
    folders: Annotated[
        list[str] | None,
        typer.Argument(help="Folders or URLs for checkpoints, which are written to.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Check this installation and this machine, in seconds, and say what to mend.

    The exit status is 1 if there is something to mend.
    """
    findings: list[Finding] = []
    of_folders: list[_Check] = [(folder, partial(_store, folder)) for folder in folders or ()]
    for name, check in (*_CHECKS, *of_folders):
        found = _made(name, check)
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


def _made(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # a check that fails is a finding: the others go on
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
    wanted = os.environ.get("TERRAZZO_INSTALL", "0")
    if wanted not in ("", "0", "1"):
        findings.append(Finding("TERRAZZO_INSTALL", f"set to {wanted!r}", "set it to 1 or to 0"))
    elif wanted == "1":
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
    return [Finding("accelerator", f"{count} of type {found.type}; ranks communicate with {backend}")]


def _nccl() -> list[Finding]:
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None:
        return []
    if not dist.is_nccl_available():
        return [Finding("nccl", "missing", "install a PyTorch that is built with NCCL")]
    try:
        number = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # of the loader, of many kinds
        mend = "look for another libnccl.so.2 in LD_LIBRARY_PATH and LD_PRELOAD, or install PyTorch again"
        return [Finding("nccl", f"cannot be loaded: {error}", mend)]
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl.so" in line}
    return [Finding("nccl", " ".join([number, *(f"from {path}" for path in sorted(loaded))]))]


def _limits() -> list[Finding]:
    findings = [
        _limit("open files", resource.RLIMIT_NOFILE, _FILES, "n", "nofile"),
        _limit("processes", resource.RLIMIT_NPROC, _TASKS, "u", "nproc"),
    ]
    if not _SHM.is_dir():
        mend = "mount it, since saves in the background and data loaders use it: mount -t tmpfs tmpfs /dev/shm"
        return [*findings, Finding("/dev/shm", "missing", mend)]
    free, mend = shutil.disk_usage(_SHM).free, ""
    if free < _SHARED:
        mend = (
            "give it more (docker run --shm-size=8g, or an emptyDir with medium: Memory), or remove what was left in it"
        )
    if not os.access(_SHM, os.W_OK):
        mend = "make it writable for this user: chmod 1777 /dev/shm"
    return [*findings, Finding("/dev/shm", f"{free / 2**30:.1f} GiB free", mend)]


def _limit(name: str, which: int, needed: int, letter: str, key: str) -> Finding:
    soft, hard = resource.getrlimit(which)
    found = "no limit" if soft < 0 else f"at most {soft}"
    if not 0 <= soft < needed:
        return Finding(name, found)
    if hard < 0 or hard >= needed:
        return Finding(
            name, found, f"raise it before training: ulimit -{letter} {min(hard, 65536) if hard > 0 else 65536}"
        )
    mend = f"only root can raise it above {hard}: {key} in /etc/security/limits.conf, docker run --ulimit {key}=65536"
    return Finding(name, found, mend)


def _temporary() -> list[Finding]:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        return [Finding("temporary files", str(error), "set TMPDIR to a folder that can be written to")]
    return [Finding("temporary files", f"{folder}, {shutil.disk_usage(folder).free / 2**30:.1f} GiB free")]


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
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("", _PORT))
        except OSError as error:
            mend = "if it is no run of yours that is to go on: torchrun --standalone, or --master-port with another one"
            findings.append(Finding("torchrun's port", f"{_PORT}: {error.strerror}", mend))
    interfaces = sorted(interface for _, interface in socket.if_nameindex())
    adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    named = {"GLOO_SOCKET_IFNAME": interfaces, "NCCL_SOCKET_IFNAME": interfaces, "NCCL_IB_HCA": adapters}
    for variable, there in named.items():
        wanted = os.environ.get(variable, "")
        if absent := _absent(wanted, there, all_needed=variable.startswith("GLOO")):
            mend = f"there is no {', '.join(absent)}: unset it, or name what is there ({', '.join(there) or 'nothing'})"
            findings.append(Finding(variable, wanted, mend))
    return findings


def _absent(wanted: str, there: list[str], *, all_needed: bool) -> list[str]:
    """What a variable names that is not there, if that matters: gloo needs each, by its name; NCCL one that begins so,
    or with `=` has this name, and what `^` excludes may be absent.

    >>> _absent("eth0,lo", ["lo"], all_needed=True), _absent("eth,ib", ["ib0"], all_needed=False)
    (['eth0'], [])
    >>> _absent("=ib", ["ib0"], all_needed=False), _absent("^docker", ["ib0"], all_needed=False)
    (['ib'], [])
    """
    if not wanted or (wanted.startswith("^") and not all_needed):
        return []
    names = [name.partition(":")[0] for name in wanted.removeprefix("=").split(",")]
    whole = all_needed or wanted.startswith("=")
    absent = [name for name in names if not any(name == each if whole else each.startswith(name) for each in there)]
    return absent if all_needed or len(absent) == len(names) else []


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


def _store(place: str) -> list[Finding]:
    """What a save does at this place, or in the folder in which it would be made: write, read again, and remove."""
    from terrazzo.checkpoint.stores import Place

    folder = Place(place)
    while folder.local is not None and not folder.exists():
        folder = folder.parent
    name, data, back = f"doctor-{uuid.uuid4().hex}", os.urandom(_TRIED), bytearray(_TRIED)
    try:
        began = time.perf_counter()
        folder.store.put(name, data)
        written = time.perf_counter()
        folder.store.read_at(name, 0, memoryview(back))
        read = time.perf_counter()
        folder.store.delete([name])
    except Exception as error:  # of many kinds: files, permissions, networks, credentials
        at_url = "check the address, and the credentials and region in the environment"
        mend = at_url if folder.local is None else "name a folder in which this user can write, with space"
        return [Finding(place, f"{type(error).__name__}: {error}", mend)]
    if back != data:
        return [Finding(place, "what was read is not what was written", "do not save here: this storage is broken")]
    speed = [f"{_TRIED / 1e6 / seconds:.0f}" for seconds in (written - began, read - written)]
    free = "" if folder.local is None else f"; {shutil.disk_usage(folder.local).free / 2**30:.1f} GiB free"
    return [Finding(place, f"written, read and removed ({' and '.join(speed)} MB/s){free}")]


_CHECKS: tuple[_Check, ...] = (
    ("versions", _versions),
    ("accelerator", _accelerator),
    ("nccl", _nccl),
    ("limits", _limits),
    ("temporary files", _temporary),
    ("network", _network),
    ("store and gloo", _store_and_gloo),
)
