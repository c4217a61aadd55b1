"""Packages that import the modules of their names when these are asked for (PEP 562).

Code that needs no tensors, such as that which lists a checkpoint, should not wait for the import of PyTorch. So the
packages that it goes through import nothing that they do not need themselves.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def late(package: str, modules: Iterable[str] = ()) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, which calls this: of the names that it imports from its own modules.

    The package imports them under `if TYPE_CHECKING`, so that these lines do not run, and tools that read them know all
    names. Here they are found in its source. The modules themselves (and `modules` beside them) are attributes
    too, as they are once they have been imported. `dir` of the package, which has to have `__all__`, shows these and
    what is public.
    """
    file = Path(sys.modules[package].__file__ or "")
    places: dict[str, str] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}."):
            if "._" not in node.module:
                places |= {each.name: node.module.removeprefix(f"{package}.") for each in node.names}
    inner = {module.partition(".")[0] for module in (*places.values(), *modules)}

    def get(name: str) -> Any:
        if name in places:
            value = getattr(importlib.import_module(f"{package}.{places[name]}"), name)
            setattr(sys.modules[package], name, value)  # from now on it is found at once
            return value
        if name in inner:
            return importlib.import_module(f"{package}.{name}")
        hint = "" if name.startswith("_") else _hint(package, name, modules, [*places, *inner])
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    def names_of_package() -> list[str]:
        there = vars(sys.modules[package])
        return sorted({*there["__all__"], *inner, *(name for name in there if name.startswith("__"))})

    return get, names_of_package


def _hint(package: str, name: str, modules: Iterable[str], known: list[str]) -> str:
    """Which packages in this one have the name, found without importing them; or the name that may be meant."""
    from terrazzo._meant import meant

    folder = Path(sys.modules[package].__file__ or "").parent
    files = {module: folder / module / "__init__.py" for module in modules}
    having = [module for module, file in files.items() if file.is_file() and f'"{name}"' in file.read_text()]
    if having:
        return f"; there is {' and '.join(f'{package}.{module}.{name}' for module in having)}"
    return meant(name, known)
