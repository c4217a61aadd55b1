"""`install()` when a program first imports something that it changes: what `TERRAZZO_INSTALL=1` does.

`install` imports PyTorch's modules for distributed tensors, `fully_shard` and checkpoints, which takes longer than
`import torch`. Processes that use none of them, such as a data loader's workers or torchrun's own, do not wait for it.
The names are replaced when the first import statement that has loaded one of these modules ends, before the program
can read a name from it. The imports inside of that statement have ended by then, so `install` finds whole modules.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import terrazzo

# Packages of which a program has to have imported a part to see names that `install` changes, or to have what they get.
_NEEDED: Final = (
    *("_composable", "_composable_state", "_state_dict_utils", "_tensor", "checkpoint", "fsdp", "pipelining", "tensor"),
)
_OURS: Final = ("terrazzo.checkpoint", "terrazzo.fsdp", "terrazzo.tensor")
_MODULES: Final = (*(f"torch.distributed.{name}" for name in _NEEDED), *_OURS)


def install_when_needed() -> None:
    """Call `terrazzo.install()` now, if one of the modules is imported already, or once one has been imported."""
    if not _install_if_needed():
        sys.meta_path.insert(0, _Finder())


def _install_if_needed() -> bool:
    needed = not sys.modules.keys().isdisjoint(_MODULES)
    if needed:
        terrazzo.install()
    return needed


class _Finder(threading.local):
    """Finds the modules of torch and terrazzo as the other finders do, and notices when an import of one ends.

    Each thread has its own `within`: another thread's imports end by themselves.
    """

    within = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """The spec of a module whose import is not within another one's, with a loader that looks afterwards."""
        if self.within or not name.startswith(("torch.", "terrazzo.")):
            return None
        spec = self._found_by_others(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if self.within:  # found before an import began in which it is needed, too
                    run(module)
                    return
                self.within = True
                try:
                    run(module)
                    if _install_if_needed() and self in sys.meta_path:
                        sys.meta_path.remove(self)
                finally:
                    self.within = False

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec

    def _found_by_others(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        return next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
