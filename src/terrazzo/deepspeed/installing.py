"""`terrazzo.deepspeed.install()`: libraries that import DeepSpeed get this package.

Its modules are put into `sys.modules` below the name `deepspeed`, too, and a finder does so with those that are
imported later. Libraries that ask whether DeepSpeed is installed, and which version, are told that it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any, Final

from terrazzo.deepspeed.git_version_info import version
from terrazzo.errors import EngineError

_OURS: Final = "terrazzo.deepspeed"
_THEIRS: Final = "deepspeed"


def install() -> None:
    """Make `import deepspeed` import `terrazzo.deepspeed`, in libraries as well, until the process ends.

    Call it before anything imports DeepSpeed, which need not be installed. Calling it again does nothing.

        import terrazzo.deepspeed
        terrazzo.deepspeed.install()

        trainer = transformers.Trainer(model, TrainingArguments(..., deepspeed="ds.json"), train_dataset=data)
    """
    if sys.modules.get(_THEIRS) is sys.modules[_OURS]:
        return
    if _THEIRS in sys.modules:
        raise EngineError(
            "terrazzo.deepspeed.install() came too late: DeepSpeed has been imported; call it before the libraries "
            "that import DeepSpeed"
        )
    for name, module in list(sys.modules.items()):
        if name == _OURS or name.startswith(f"{_OURS}."):
            sys.modules[name.removeprefix("terrazzo.")] = module
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds our modules by DeepSpeed's names, and says that the distribution `deepspeed` is there."""

    def __init__(self) -> None:
        self._specs: dict[str, Any] = {}  # those that modules had

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """A spec for a module of DeepSpeed; the error for one that there is not says what to use instead."""
        if not name.startswith(f"{_THEIRS}."):
            return None
        importlib.import_module(f"terrazzo.{name}")
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Our module itself, so that its classes are the same under both names."""
        module = sys.modules[f"terrazzo.{spec.name}"]
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already; importing has replaced its spec."""
        name = module.__spec__.name if module.__spec__ is not None else ""
        module.__spec__ = self._specs.pop(name)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """What `importlib.metadata` is told."""
        return [_Installed()] if context.name == _THEIRS else []


class _Installed(Distribution):
    """The distribution `deepspeed`, of the version whose API this is."""

    def read_text(self, filename: str) -> str | None:
        """The metadata; there are no other files."""
        return f"Metadata-Version: 2.1\nName: {_THEIRS}\nVersion: {version}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """No file is listed."""
        raise FileNotFoundError(path)
