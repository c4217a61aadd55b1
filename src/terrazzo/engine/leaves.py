"""Leaf modules: each is gathered and reduced as one, and nothing inside it on its own.

Ranks may use different parts of a leaf, such as different experts of a mixture: they all gather the whole leaf before
its forward, and reduce the gradients of all its parameters, with zeros for those that a rank did not use.

The mark is DeepSpeed's attribute, so a model that was marked by one of these functions is marked for both.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from terrazzo.engine.config import LeafConfig
from terrazzo.errors import DivergedRanksError, EngineConfigError
from terrazzo.fsdp import FSDPModule

LOGGER = logging.getLogger("terrazzo.engine")

_MARK = "_z3_leaf"

_ADVICE = (
    "If ranks use different parts of a module, such as different experts, mark this module as a leaf before "
    "initialize: with terrazzo.deepspeed.utils.set_z3_leaf_modules(model, [...]) or the config's "
    "zero_optimization.leaf_module"
)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is marked as a leaf."""
    return bool(getattr(module, _MARK, False))


def leaves_in(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost leaves inside a module."""
    for child in module.children():
        if is_leaf(child):
            yield child
        else:
            yield from leaves_in(child)


def mark_leaves(modules: Iterable[nn.Module], flag: bool = True) -> None:
    """Mark modules as leaves, or no longer."""
    for module in modules:
        if any(isinstance(inner, FSDPModule) for inner in module.modules()):
            warnings.warn(
                f"{type(module).__name__} is sharded already, so marking it as a leaf has no effect: mark modules "
                "before initialize",
                stacklevel=3,
            )
        setattr(module, _MARK, flag)


def of_classes(model: nn.Module, classes: Sequence[type | str]) -> list[nn.Module]:
    """The modules of these classes, which may be given by name, with or without the module in which they are defined.

    >>> of_classes(nn.Sequential(nn.Linear(1, 1)), ["Linear"])
    [Linear(in_features=1, out_features=1, bias=True)]
    """

    def wanted(module: nn.Module) -> bool:
        kind = type(module)
        names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        return any(c in names if isinstance(c, str) else isinstance(module, c) for c in classes)

    return _inner_first(model, wanted)


def of_names(model: nn.Module, names: Sequence[str]) -> tuple[list[nn.Module], list[str]]:
    """The modules of these names in `named_modules()`, and the names that no module has."""
    known = dict(model.named_modules())
    return [known[name] for name in names if name in known], [name for name in names if name not in known]


def of_suffixes(model: nn.Module, suffixes: Sequence[str]) -> tuple[list[nn.Module], list[str]]:
    """The modules whose names end with one of these, and the suffixes that no name has."""
    known = dict(model.named_modules())
    found = {suffix: [name for name in known if name.endswith(suffix)] for suffix in suffixes}
    modules = dict.fromkeys(known[name] for names in found.values() for name in names)
    return list(modules), [suffix for suffix, names in found.items() if not names]


def mark_configured(model: nn.Module, config: LeafConfig) -> None:
    """Mark the leaves that the config names; a name of its own that the model does not have is warned about."""
    by_class = of_classes(model, config.classes)
    by_name, no_names = of_names(model, config.names)
    by_suffix, no_suffixes = of_suffixes(model, config.name_suffixes)
    mark_leaves(dict.fromkeys([*by_class, *by_name, *by_suffix]))
    missing = [*no_names, *no_suffixes]
    if config.classes != LeafConfig().classes and not by_class:  # the default's are not in every model
        missing += config.classes
    if missing:
        LOGGER.warning(
            "config: zero_optimization.leaf_module names %s, but the model has no such module", ", ".join(missing)
        )


def refuse_without_forward(model: nn.Module) -> None:
    """Raise for a leaf that is never called: nothing would gather its parameters."""
    names = {module: name for name, module in model.named_modules()}
    for module in leaves_in(model):
        if type(module).forward is nn.Module.forward:
            raise EngineConfigError(
                f"the leaf module {names[module]!r} ({type(module).__name__}) has no forward, before which its "
                "parameters would be gathered: mark the module that contains it as a leaf, with set_z3_leaf_modules or "
                "zero_optimization.leaf_module"
            )


@contextmanager
def advising() -> Iterator[None]:
    """A block in which an error that ranks ran different modules says what a leaf does about it."""
    try:
        yield
    except DivergedRanksError as error:
        error.args = (f"{error}\n{_ADVICE}", *error.args[1:])
        raise


def _inner_first(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """In the order of `nn.Module.apply`."""
    found: list[nn.Module] = []
    model.apply(lambda module: found.append(module) if wanted(module) else None)
    return found
