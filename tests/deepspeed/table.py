"""The tables of docs/deepspeed.md: `python tests/deepspeed/table.py --write docs/deepspeed.md`; needs DeepSpeed."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepspeed.runtime.engine import DeepSpeedEngine as TheirEngine
from deepspeed.runtime.pipe.engine import PipelineEngine as TheirPipeline

import deepspeed
import terrazzo.deepspeed as ours
from terrazzo.deepspeed.settings import SETTINGS
from terrazzo.engine import Engine
from terrazzo.engine.deepspeed_keys import AUTO, KEYS

importlib.import_module("terrazzo.deepspeed.utils.zero_to_fp32")  # loaded when it is asked for

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

MODULES = (
    *("", "comm", "utils", "utils.zero_to_fp32", "zero", "pipe", "checkpointing"),
    *("ops.adam", "ops.lamb", "ops.lion"),
)


def table_of_keys() -> list[str]:
    lines = ["### Keys", "", "| key | what becomes of it | |", "|---|---|---|"]
    for path, key in KEYS.items():
        auto = f'; `"auto"`: {AUTO[path]!r}' if AUTO.get(path) is not None else ""
        lines.append(f"| `{path}` | {key.fate} | {key.why}{auto} |")
    return lines


def functions(module: str) -> tuple[list[str], list[str]]:
    """Those of DeepSpeed's module that there are, and those that there are not."""
    theirs, mine = deepspeed, ours
    for name in module.split(".") if module else ():
        theirs, mine = getattr(theirs, name), getattr(mine, name)
    names = [
        name
        for name, value in vars(theirs).items()
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value))
        and getattr(value, "__module__", "").startswith("deepspeed")
    ]  # fmt: skip
    here = sorted(name for name in names if hasattr(mine, name))
    return here, sorted(set(names) - set(here))


def engine_names() -> tuple[list[str], list[str]]:
    names = {n for c in (TheirEngine, TheirPipeline) for n in vars(c) if not n.startswith("_")}
    have = {*dir(ours.DeepSpeedEngine), *dir(ours.PipelineEngine), *dir(Engine), *SETTINGS}
    return sorted(names & have), sorted(names - have)


def tables() -> str:
    lines = table_of_keys()
    lines += ["", "### Calls", "", "| of | there are | there are not |", "|---|---|---|"]
    rows = [("the engine", *engine_names())]
    rows += [(f"`deepspeed{'.' if m else ''}{m}`", *functions(m)) for m in MODULES]
    for name, here, absent in rows:
        shown = [", ".join(f"`{n}`" for n in names) for names in (here, absent)]
        lines.append(f"| {name} | {shown[0]} | {shown[1]} |")
    return "\n".join([BEGIN, "", *lines, "", END])


def with_tables(page: str) -> str:
    before, rest = page.split(BEGIN)
    return before + tables() + rest.split(END)[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    path = parser.parse_args().write
    if path is None:
        print(tables())
    else:
        path.write_text(with_tables(path.read_text()))
