"""Whatever PyTorch's public modules for these things have, terrazzo has: names, parameters, attributes of classes.

The modules are found in the installed torch: `torch.distributed.tensor`, `.fsdp` and `.checkpoint` with all that is
public below them, and the modules in which `terrazzo.install()` replaces names. `LEFT_OUT` says what terrazzo does not
have, and why.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch
import torch.distributed

import terrazzo
from terrazzo.integrations.installing import MODULES

BELOW = "torch.distributed."
ROOTS = ("tensor", "checkpoint", "fsdp")

FSDP1 = "FSDP1, which terrazzo does not have: it shards flat parameters of wrapped modules (docs/migrate/fsdp1.md)"
PRIVATE = "of a private module, and stays PyTorch's under install(), for terrazzo's tensors where it takes any"
CONSTANT = "a constant of a private module, which this one imports"
CONTEXT_PARALLEL = "private parts of PyTorch's context_parallel, which is built otherwise here"
SHARD_ORDER = "an order of cuts other than that of the mesh dims is in the placements here, as _StridedShard"

# Patterns of what `missing` finds, and why it is missing.
LEFT_OUT = {
    "tensor.DTensor(args)": "PyTorch's constructor is in C, and names no parameters",
    "tensor.DTensor(kwargs)": "the same",
    "tensor.parallel.fsdp.DTensorExtensions": FSDP1,
    "tensor.parallel.loss.customized_loss_ops": "operators in PyTorch's dispatcher, which these tensors do not use",
    "fsdp.UnshardHandle(+group)": "made by unshard() alone",
    "fsdp.[BCFLMOS]*": FSDP1,
    "fsdp.api.*": FSDP1,
    "fsdp.fully_sharded_data_parallel.*": FSDP1,
    "fsdp.sharded_grad_scaler.*": FSDP1,
    "fsdp.wrap.*": "policies for FSDP1, which see modules and no parameters; they are PyTorch's with terrazzo, too",
    "checkpoint.state_dict.FSDP_WRAPPED_MODULE": FSDP1,
    "checkpoint.state_dict.HYBRID_SHARDING_STRATEGIES": FSDP1,
    "checkpoint.filesystem.*": CONSTANT,
    "checkpoint.hf_storage.*": CONSTANT,
    "checkpoint.format_utils.BroadcastingTorchSaveReader.prepare_global_plan(*": "PyTorch's other readers say `plans`",
    "checkpoint.logg*.DCP_LOGGER_NAME": "PyTorch's logger of its own steps; here events are in checkpoint.run.events",
    "checkpoint.staging.DefaultStager(config)": "None is the default StagingOptions",
    "checkpoint.utils.[TR]": "type variables",
    "checkpoint.utils.ENABLE_PROFILE": "a switch of PyTorch's profiler",
    "checkpoint._consolidate_hf_safetensors.*": CONSTANT,
    "checkpoint._fsspec_filesystem.FileSystem": "what FsspecWriter uses; here that is stores.fsspec_store.FsspecStore",
    "tensor._dtensor_spec.dtype_abbrs": CONSTANT,
    "_tensor.placement_types.dtype_abbrs": CONSTANT,
    "tensor._dtensor_spec.ShardOrderEntry": SHARD_ORDER,
    "tensor.*DTensorSpec?*": SHARD_ORDER,
    "tensor._redistribute.*": PRIVATE,
    "tensor._utils.*": PRIVATE,
    "_tensor.*": "variables of a loop",
    "*tensor.experimental._attention._*": CONTEXT_PARALLEL,
}

# Private names that programs use.
ALSO = {
    "tensor.DTensor": "__create_chunk_list__ __create_write_items__ __get_tensor_shard__ _local_tensor _spec "
    "_raise_if_contains_partial_placements",
    "tensor.Shard": "_split_tensor _select_split_tensor _shard_tensor _to_replicate_tensor _replicate_to_shard",
    "fsdp.FSDPModule": "_set_unshard_async_op",
}

# ------------------------------------------------------------------ what there is


def modules() -> dict[str, tuple[ModuleType, ModuleType | None]]:
    """PyTorch's modules, by their names below torch.distributed, each with terrazzo's."""
    names = list(ROOTS)
    for root in ROOTS:
        package = importlib.import_module(BELOW + root)
        found = [info.name.removeprefix(BELOW) for info in pkgutil.walk_packages(package.__path__, f"{BELOW}{root}.")]
        names += [name for name in found if not any(part.startswith("_") for part in name.split("."))]
    pairs = {}
    for name in dict.fromkeys([*names, *MODULES]):
        theirs = _module(BELOW + name)
        if theirs is not None:
            pairs[name] = (theirs, _module(MODULES.get(name, f"terrazzo.{name}")))
    return pairs


def _module(name: str) -> ModuleType | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of modules that are deprecated
            return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def public_names(module: ModuleType) -> list[str]:
    """What `__all__` has, what the module defines, and what a package shows of its modules."""
    names = dict.fromkeys(name for name in getattr(module, "__all__", ()) if hasattr(module, name))
    homes = (f"{module.__name__}.",) if hasattr(module, "__path__") else ()
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None)
        is_own = home == module.__name__ or (home or "").startswith(homes or ("no module",))
        is_constant = home is None and isinstance(value, str | int | float | list | dict | tuple | set)
        if (
            name != "TYPE_CHECKING"
            and not name.startswith("_")
            and not isinstance(value, ModuleType)
            and (is_own or is_constant)
        ):
            names[name] = None
    return list(names)


def attributes(kind: type) -> list[str]:
    """The public attributes that PyTorch's classes for these things define: of bases from elsewhere, none."""
    names: dict[str, None] = {}
    for base in kind.__mro__:
        if base.__module__.startswith(BELOW):
            names |= dict.fromkeys([*vars(base), *getattr(base, "__annotations__", ())])
    return [name for name in names if not name.startswith("_")]


EMPTY = repr(inspect.Parameter.empty)
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters(call: Any) -> dict[str, tuple[Any, str]] | None:
    try:
        found = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return None
    return {name: (p.kind, _default(p.default)) for name, p in found.items()}


def _default(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__  # ours may have more fields
    return repr(value)


def missing() -> Iterator[str]:
    """What terrazzo does not have: `module.name`, `module.Class.attribute`, `module.call(parameter)`."""
    compared = set()
    for name, (theirs, ours) in modules().items():
        for public in public_names(theirs):
            value, other = getattr(theirs, public), getattr(ours, public, None)
            if other is None and value is not None:
                yield f"{name}.{public}"
            elif value is not other and callable(value) and (value, other) not in compared:
                compared.add((value, other))
                yield from of_call(f"{name}.{public}", value, other)
                if isinstance(value, type):
                    yield from of_class(f"{name}.{public}", value, other)


def of_class(path: str, theirs: type, ours: Any) -> Iterator[str]:
    fields = {name for base in ours.__mro__ for name in getattr(base, "__annotations__", ())}
    for name in attributes(theirs):
        if name not in fields and not hasattr(ours, name):
            yield f"{path}.{name}"
            continue
        value, other = inspect.getattr_static(theirs, name, None), getattr(ours, name, None)
        if isinstance(value, enum.Enum):
            if value.value != other.value:
                yield f"{path}.{name}={value.value}"
        elif callable(getattr(theirs, name, None)) and callable(other):
            yield from of_call(f"{path}.{name}", getattr(theirs, name), other)


def of_call(path: str, theirs: Any, ours: Any) -> Iterator[str]:
    expected, found = parameters(theirs), parameters(ours)
    if expected is None or found is None:
        return
    for name, wanted in expected.items():
        there = found.get(name)
        if there is None or there[0] != wanted[0] or (there != wanted and wanted[1] != EMPTY):
            yield f"{path}({name})"
    by_position = [name for name, (kind, _) in expected.items() if kind in POSITIONAL]
    if [name for name in found if name in by_position] != by_position:
        yield f"{path}({', '.join(by_position)})"
    for name, (kind, default) in found.items():
        takes_any = kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if name not in expected and default == EMPTY and not takes_any:
            yield f"{path}(+{name})"


def test_nothing_is_missing_but_what_is_left_out_for_a_reason() -> None:
    found = list(missing())
    kept = {pattern: [each for each in found if fnmatchcase(each, pattern)] for pattern in LEFT_OUT}
    unknown = sorted(set(found).difference(*kept.values()))
    assert not unknown, (
        f"torch {torch.__version__} has what terrazzo does not have, and LEFT_OUT has no reason: {unknown}"
    )
    stale = [pattern for pattern, names in kept.items() if not names]
    assert not stale, f"nothing that these patterns are for is missing any more: {stale}"


def test_private_names_that_programs_use_are_there() -> None:
    for path, names in ALSO.items():
        module, _, kind = path.rpartition(".")
        theirs, ours = (getattr(_module(f"{package}{module}"), kind) for package in (BELOW, "terrazzo."))
        for name in names.split():
            assert hasattr(ours, name), f"{path} has no {name}"
            if callable(getattr(theirs, name, None)):
                assert list(of_call(f"{path}.{name}", getattr(theirs, name), getattr(ours, name))) == []


def test_what_install_replaces_takes_the_same_arguments() -> None:
    """Private functions too: of the modules above, those that `install` shows as terrazzo's or calls for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = terrazzo.install()
    try:
        pairs = [
            (f"{module}.{name}", vars(sys.modules[module])[name], getattr(sys.modules[module], name))
            for names in (done.replaced, done.translated)
            for module, there in names.items()
            for name in there
            if name != "_MaskPartial"  # which raises, whatever it is called with
        ]
    finally:
        terrazzo.uninstall()
    assert len(pairs) > 300
    once = {(id(theirs), id(ours)): (path, theirs, ours) for path, theirs, ours in reversed(pairs)}
    found = [each.removeprefix(BELOW) for path, theirs, ours in once.values() for each in of_call(path, theirs, ours)]
    assert not [each for each in found if not any(fnmatchcase(each, pattern) for pattern in LEFT_OUT)]


if __name__ == "__main__":
    print(torch.__version__, *missing(), sep="\n")
