"""`terrazzo run`: a script that imports PyTorch's names runs on terrazzo's."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from terrazzo._meant import meant_beside


def run(
    script: Annotated[str, typer.Argument(help="A Python file; with -m, a module.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's.", show_default=False)] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
) -> None:
    """Run a script with terrazzo's names under torch.distributed.tensor, .fsdp and .checkpoint.

    On several ranks: torchrun --nproc-per-node=4 -m terrazzo run SCRIPT ...
    """
    from terrazzo.integrations.installing import install

    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script}{meant_beside(script)}")
    install()
    sys.argv = [script, *(arguments or [])]
    if module:
        sys.path.insert(0, "")
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
