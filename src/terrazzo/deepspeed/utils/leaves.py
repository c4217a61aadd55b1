"""Leaf modules under DeepSpeed's names: each is gathered and reduced as one, so ranks may use different parts of it.

Mark them before `initialize`. They are leaves in every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from terrazzo.engine.leaves import is_leaf, mark_leaves, of_classes, of_names, of_suffixes
from terrazzo.errors import EngineConfigError


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes as leaves, and return them.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> set_z3_leaf_modules(model, ["Linear"])
    [Linear(in_features=2, out_features=2, bias=True)]
    >>> get_z3_leaf_modules(model)
    [Linear(in_features=2, out_features=2, bias=True)]

    Args:
        model: The model, or a part of it.
        leaf_module_classes: Classes, or their names, with or without the module in which they are defined.
        raise_if_not_found: Whether to raise an error if the model has none.
    """
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def _set(model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    strange = [each for each in classes if not isinstance(each, type | str)]
    if isinstance(classes, str) or strange:
        raise EngineConfigError(f"leaf_module_classes must be a list of classes or of their names, not {classes!r}")
    found = of_classes(model, classes)
    if raise_if_not_found and not found:
        raise EngineConfigError(f"the model has no module of the classes {list(classes)}; it is {model}")
    mark_leaves(found, flag)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names in `named_modules()`; returns them, and the names that no module has."""
    found, missing = of_names(model, module_names)
    if raise_if_not_found and missing:
        raise EngineConfigError(f"the model has no modules named {missing}; it is {model}")
    mark_leaves(found, flag)
    return found, missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end with one of these; returns them, and the suffixes that no name has."""
    found, missing = of_suffixes(model, module_name_suffixes)
    if raise_if_not_found and missing:
        raise EngineConfigError(f"the model has no modules whose names end with {missing}; it is {model}")
    mark_leaves(found, flag)
    return found, missing


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark a module as a leaf, or no longer."""
    mark_leaves([model], flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are marked as leaves."""
    return [module for module in model.modules() if is_leaf(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked as a leaf."""
    return is_leaf(model)


def z3_leaf_parameter(model: Tensor) -> bool:
    """Whether a parameter of a model that is sharded belongs to a leaf, which is then its `ds_z3_leaf_module`."""
    return hasattr(model, "ds_z3_leaf_module")
