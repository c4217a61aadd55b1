"""The public surface as text: what each public module exports, with signatures, read from the sources by griffe.

    python tests/public_surface.py --write        makes tests/public_surface.txt, which the tests compare with

A line that goes or changes there is a break for somebody: whoever writes the file anew has decided that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = Path(__file__).with_suffix(".txt")
PUBLIC = (
    "terrazzo",
    "terrazzo.checkpoint",
    "terrazzo.checkpoint.format_utils",
    "terrazzo.checkpoint.formats.convert",
    "terrazzo.checkpoint.hf_storage",
    "terrazzo.checkpoint.manager",
    "terrazzo.checkpoint.run.events",
    "terrazzo.checkpoint.state_dict",
    "terrazzo.checkpoint.stores",
    "terrazzo.checkpoint.stores.fsspec_store",
    "terrazzo.checkpoint.stores.object_store",
    "terrazzo.comm",
    "terrazzo.comm.collectives",
    "terrazzo.comm.differentiable",
    "terrazzo.deepspeed",
    "terrazzo.deepspeed.checkpointing",
    "terrazzo.deepspeed.comm",
    "terrazzo.deepspeed.moe.layer",
    "terrazzo.deepspeed.moe.utils",
    "terrazzo.deepspeed.pipe",
    "terrazzo.deepspeed.utils",
    "terrazzo.deepspeed.utils.zero_to_fp32",
    "terrazzo.deepspeed.zero",
    "terrazzo.engine",
    "terrazzo.errors",
    "terrazzo.fsdp",
    "terrazzo.graphs",
    "terrazzo.integrations.accelerate",
    "terrazzo.integrations.huggingface",
    "terrazzo.integrations.installing",
    "terrazzo.integrations.lightning",
    "terrazzo.integrations.ray",
    "terrazzo.integrations.slurm",
    "terrazzo.launch",
    "terrazzo.layout",
    "terrazzo.notebook",
    "terrazzo.optim",
    "terrazzo.publish",
    "terrazzo.tensor",
    "terrazzo.tensor.debug",
    "terrazzo.tensor.experimental",
    "terrazzo.tensor.libraries",
    "terrazzo.tensor.parallel",
    "terrazzo.tensor.policy",
    "terrazzo.testing",
    "terrazzo.testing.late",
    "terrazzo.view",
)
"""Modules whose names users rely on; each has a place in docs/api."""


def surface(sources: Path = ROOT / "src", modules: tuple[str, ...] = PUBLIC) -> list[str]:
    """One line for each public name, sorted."""
    package = griffe.load(modules[0].partition(".")[0], search_paths=[sources], allow_inspection=False)
    lines: set[str] = set()
    for name in modules:
        module = package[name.partition(".")[2]] if "." in name else package
        for exported in module.exports if module.exports is not None else _own_names(module):
            lines.update(_lines_of(f"{name}.{exported}", module.members.get(str(exported))))
    return sorted(lines)


def _own_names(module: griffe.Module | griffe.Alias) -> list[str]:
    """Of a module without `__all__`: what it defines itself."""
    return [name for name, member in module.members.items() if not name.startswith("_") and not member.is_alias]


def _lines_of(path: str, member: griffe.Object | griffe.Alias | None) -> Iterator[str]:
    if member is None:
        yield f"{path}: at run time"
        return
    if member.is_alias:
        try:
            member = member.final_target
        except griffe.AliasResolutionError:
            yield f"{path} = {member.target_path}"
            return
    if member.is_function:
        yield f"{path}{_signature(member)}"
    elif member.is_attribute:
        yield f"{path}: {member.annotation or member.value or 'value'}"
    elif member.is_module:
        yield f"{path}: module"
    elif member.is_class:
        yield f"class {path}({', '.join(str(base) for base in member.bases)})"
        if not any("Enum" in str(base) for base in member.bases) and member.parameters:
            yield f"{path}.__init__{_parameters(list(member.parameters))}"
        for name, inner in member.members.items():
            if not name.startswith("_") and not inner.is_alias:
                yield from _lines_of(f"{path}.{name}", inner)


def _signature(function: griffe.Function) -> str:
    returns = f" -> {function.returns}" if function.returns is not None else ""
    return _parameters(list(function.parameters)) + returns


def _parameters(parameters: list[griffe.Parameter]) -> str:
    parts, keyword_only, positional = [], False, False
    for each in parameters:
        if each.kind is griffe.ParameterKind.positional_only:
            positional = True
        elif positional:
            parts.append("/")
            positional = False
        if each.kind is griffe.ParameterKind.var_positional:
            keyword_only = True
        elif each.kind is griffe.ParameterKind.keyword_only and not keyword_only:
            parts.append("*")
            keyword_only = True
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(each.kind, "")
        text = f"{stars}{each.name}" + (f": {each.annotation}" if each.annotation is not None else "")
        has_default = each.default is not None and not stars
        parts.append(f"{text} = {each.default}" if has_default else text)
    return f"({', '.join(parts + ['/'] * positional)})"


def main() -> None:
    """Print the surface, or write it."""
    lines = surface()
    if "--write" in sys.argv:
        SNAPSHOT.write_text("\n".join(lines) + "\n")
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
