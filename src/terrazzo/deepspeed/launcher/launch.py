"""`python -m terrazzo.deepspeed.launcher.launch KIND SCRIPT [ARGUMENTS]`: one rank of a script that DeepSpeed started.

KIND is `script`, `module` or `command`. An argument `--local_rank=N` comes first, unless it is `--no_local_rank`.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the script in this process, as Python would."""
    kind, script, *arguments = sys.argv[1:]
    if arguments[:1] == ["--no_local_rank"]:
        del arguments[0]
    else:
        arguments.insert(0, f"--local_rank={os.environ['LOCAL_RANK']}")
    if kind == "command":
        os.execvp(script, [script, *arguments])
    sys.argv = [script, *arguments]
    if kind == "module":
        sys.path.insert(0, "")
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
