"""The C++ part of the device, compiled when it is first needed and kept in the user's cache.

The folder's name is a digest of the sources, the flags, torch's version, Python's and the compiler's, so a library is
never used with another torch than the one that it was built for. Processes that need it at the same time wait for the
first one.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

from terrazzo.errors import DeviceBuildError

_NAME = "terrazzo_late"
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    *("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-w"),
    *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-DTORCH_API_INCLUDE_EXTENSION_H", f"-DTORCH_EXTENSION_NAME={_NAME}"),
)

# torch's headers take most of the time, so sources are compiled together, in as many parts as a laptop has cores.
_UNITS = (
    ("group", "module", "scheduler", "races", "site"),
    ("operators", "copies", "cells", "autocast", "memory", "device"),
)


@functools.cache
def load() -> ModuleType:
    """The compiled module, which is built if there is none for this torch, Python and compiler."""
    path = built()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built() -> Path:
    """The compiled library; raises `DeviceBuildError` if it cannot be compiled."""
    compiler = _compiler()
    folder = cache_folder() / _digest(compiler)
    library = folder / f"{_NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also if this process is killed
        if not library.exists():
            _compile(compiler, library)
    return library


def cache_folder() -> Path:
    """Where compiled libraries are kept: in `TERRAZZO_CACHE`, or in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TERRAZZO_CACHE") or Path(base) / "terrazzo") / "late"


def _compiler() -> str:
    asked = os.environ.get("CXX", "g++")
    found = shutil.which(asked)
    if found is None:
        raise DeviceBuildError(
            f"The device `late` is written in C++ and needs a compiler, but there is no {asked!r} in PATH: "
            "install g++ 11 or newer (Debian: `apt-get install g++`), or set CXX to a compiler."
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise DeviceBuildError(
            f"The device `late` is compiled with Python's headers, but there is no {header}: "
            "install them (Debian: `apt-get install python3-dev`)."
        )
    return found


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for part in (torch.__version__, str(sysconfig.get_config_var("SOABI")), compiler, version, *_FLAGS):
        digest.update(part.encode() + b"\0")
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, library: Path) -> None:
    """Compile the sources side by side, and put the library into place when it is whole."""
    from torch.utils import cpp_extension  # which asks CUDA for its devices: then this process cannot fork their users

    include = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:

        def compiled(number: int) -> str:
            source, target = f"{folder}/{number}.cpp", f"{folder}/{number}.o"
            Path(source).write_text("".join(f'#include "{name}.cpp"\n' for name in _UNITS[number]))
            _run([compiler, *_FLAGS, abi, *include, f"-I{_SOURCES}", "-c", source, "-o", target])
            return target

        jobs = int(os.environ.get("MAX_JOBS", 0)) or len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(compiled, range(len(_UNITS))))
        paths = [f"-L{path}" for path in cpp_extension.library_paths()]
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        _run([compiler, "-shared", *objects, *paths, *libraries, "-o", f"{folder}/library"])
        os.replace(f"{folder}/library", library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DeviceBuildError(
            f"The device `late` could not be compiled for torch {torch.__version__}: {command[0]} ended with "
            f"{done.returncode}. Set CXX to g++ 11 or newer.\n{' '.join(command)}\n{done.stderr[-4000:]}"
        )
