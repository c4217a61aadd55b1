"""`python -m terrazzo.launch.entry RUN.toml [ARGUMENTS]`: one rank of a run whose `entry` is a function.

The function gets the `Run` and the arguments. Modules are searched beside the run's file first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from terrazzo.errors import RunConfigError
from terrazzo.launch.config import Run, read_run


def find(run: Run) -> Callable[..., Any]:
    """The function that the run's file names."""
    module, _, name = (run.config.entry or "").partition(":")
    sys.path.insert(0, str(run.path.parent))
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        raise RunConfigError(f"{run.path}: entry: the module {module} does not exist") from error
    if not callable(found):
        raise RunConfigError(f"{run.path}: entry: the module {module} has no function {name}")
    return found


def main() -> None:
    """Call the function with the run and the rest of the command line."""
    run = read_run(sys.argv[1])
    find(run)(run, *sys.argv[2:])


if __name__ == "__main__":
    main()
