"""Load a name-keyed state dict into optimizers, and report what is missing and what does not fit.

It may be flattened, a dict from dotted keys to values:

    state.<parameter>.<key>[.<key>...]      and      param_groups.<parameter>.<hyperparameter>

Hyperparameters are repeated for every parameter of a group, so that dicts of pipeline stages can be merged and split
by parameter. A group without parameters is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from terrazzo.checkpoint.state_dict.lazy_state import initial_state
from terrazzo.checkpoint.state_dict.names import Names
from terrazzo.checkpoint.state_dict.options import StateDictOptions
from terrazzo.checkpoint.state_dict.tensors import broadcast_state, is_distributed, laid_out_like, write_full
from terrazzo.errors import CheckpointError, CheckpointMismatchError

STATE = "state"
GROUPS = "param_groups"
PARAMS = "params"
# Has one entry per parameter of the group, so it is not a hyperparameter of one parameter.
POSITIONAL = frozenset({PARAMS, "param_names"})


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The flat form of {"state": ..., "param_groups": ...}.

    >>> flatten({"state": {"w": {"step": 3}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]})
    {'state.w.step': 3, 'param_groups.w.lr': 0.1}
    """
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                add(f"{prefix}.{key}", item)
        elif prefix in flat:
            raise CheckpointError(f"two entries of the optimizer state would both have the name {prefix!r}: rename one")
        else:
            flat[prefix] = value

    for name, entries in nested[STATE].items():
        for key, value in entries.items():
            add(f"{STATE}.{name}.{key}", value)
    for group in nested[GROUPS]:
        for name in group[PARAMS]:
            flat.update({f"{GROUPS}.{name}.{key}": group[key] for key in group if key not in POSITIONAL})
    return flat


def unflatten(flat: Mapping[str, Any], known: Iterable[str], shapes: Mapping[str, Mapping[Any, Any]]) -> dict[str, Any]:
    """The inverse of `flatten`, with one group per parameter.

    Args:
        known: the names of parameters, which cannot be found by splitting keys, because they contain dots.
        shapes: for each parameter a state whose nesting and key types are used if they match.
    """
    names = set(known)
    state: dict[str, dict[Any, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, rest = key.partition(".")
        name, entry = _split(rest, names)
        if section == GROUPS:
            groups.setdefault(name, {PARAMS: [name]})[entry] = value
        elif section == STATE:
            _insert(state.setdefault(name, {}), entry, value, shapes.get(name, {}))
        else:
            raise CheckpointError(f"{key!r} is not a key of a flattened optimizer state dict")
    return {STATE: state, GROUPS: list(groups.values())}


def renamed(nested: Mapping[str, Any], name_of: Callable[[Any], str]) -> dict[str, Any]:
    """The nested form with other names of the parameters."""
    return {
        STATE: {name_of(key): copy.copy(entries) for key, entries in nested[STATE].items()},
        GROUPS: [{**group, PARAMS: [name_of(key) for key in group[PARAMS]]} for group in nested[GROUPS]],
    }


def _split(rest: str, names: set[str]) -> tuple[str, str]:
    """The parameter's name and the entry, by the longest known name; for an unknown name the entry is the last word."""
    cut = len(rest)
    while (cut := rest.rfind(".", 0, cut)) > 0:
        if rest[:cut] in names:
            return rest[:cut], rest[cut + 1 :]
    name, _, entry = rest.rpartition(".")
    return name, entry


def _insert(into: dict[Any, Any], entry: str, value: Any, like: Mapping[Any, Any]) -> None:
    """Set `value` at `entry`, which is split at dots; keys are those of `like` if it has them."""
    by_text = {str(key): key for key in like}
    if entry in by_text or "." not in entry:
        into[by_text.get(entry, entry)] = value
        return
    head, _, tail = entry.partition(".")
    key = by_text.get(head, head)
    inner = like.get(key)
    _insert(into.setdefault(key, {}), tail, value, inner if isinstance(inner, Mapping) else {})


class Setter:
    """One `set_optimizer_state_dict`: finds all faults first, then loads."""

    def __init__(self, names: Names, optimizers: tuple[torch.optim.Optimizer, ...], options: StateDictOptions) -> None:
        self._optimizers = optimizers
        self._options = options
        self._params = names.aliases()
        self._aliases: dict[int, list[str]] = {}
        for name, tensor in self._params.items():
            self._aliases.setdefault(id(tensor), []).append(name)
        self._faults: list[str] = []
        self._taken: set[int] = set()

    def load(self, given: Mapping[str, Any]) -> None:
        if self._options.broadcast_from_rank0:
            # Each rank keeps the part of every tensor that its own parameter of that name has.
            given = broadcast_state(lambda: dict(self._named(given)), self._own_part)
        else:
            given = self._named(given)
        nested = self._nested(given)
        loads = [(optimizer, self._for_optimizer(optimizer, nested)) for optimizer in self._optimizers]
        if self._options.strict:
            listed = set(nested[STATE]).union(*(group[PARAMS] for group in nested[GROUPS]))
            unknown = sorted(listed.difference(self._params))
            self._faults += [f"{name}: unexpected, not a parameter of the model" for name in unknown]
        if self._faults:
            raise CheckpointMismatchError(
                "the optimizer state dict does not fit:\n  "
                + "\n  ".join(self._faults)
                + "\nStateDictOptions(strict=False) loads the entries that match"
            )
        for optimizer, (state, groups) in loads:
            _install(optimizer, state, groups)

    # -------------------------------------------------------------- finding the entries of each parameter

    def _nested(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if STATE in given and GROUPS in given:
            return {STATE: dict(given[STATE]), GROUPS: list(given[GROUPS])}
        current = {
            name: optimizer.state[param]
            for optimizer in self._optimizers
            for name, param in self._params.items()
            if param in optimizer.state
        }
        return unflatten(given, self._params, current)

    def _named(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state dict with names instead of the numbers that an optimizer's own `state_dict` has."""
        if STATE not in given or GROUPS not in given:
            return given
        numbers = [number for group in given[GROUPS] for number in group[PARAMS]]
        if not any(isinstance(key, int) for key in (*given[STATE], *numbers)):
            return given
        if len(self._optimizers) != 1 or not all(isinstance(key, int) for key in (*given[STATE], *numbers)):
            raise CheckpointError(
                "the optimizer state dict numbers its parameters: for several optimizers, or together with names, it "
                "must name them, as that of get_optimizer_state_dict does"
            )
        (optimizer,) = self._optimizers
        params = [param for group in optimizer.param_groups for param in group[PARAMS]]
        sizes = [len(group[PARAMS]) for group in given[GROUPS]]
        if sizes != [len(group[PARAMS]) for group in optimizer.param_groups]:
            raise CheckpointMismatchError(
                f"the groups of the optimizer state dict have {sizes} parameters, but those of the optimizer "
                f"{[len(group[PARAMS]) for group in optimizer.param_groups]}"
            )
        names = {number: self._find(param, {}) for number, param in zip(numbers, params, strict=True)}
        unknown = [number for number in given[STATE] if number not in names]
        if unknown:
            raise CheckpointMismatchError(f"the optimizer state dict has state for {unknown}, which no group has")
        return renamed(given, names.__getitem__)

    def _for_optimizer(
        self, optimizer: torch.optim.Optimizer, nested: Mapping[str, Any]
    ) -> tuple[dict[int, dict[Any, Any]], list[dict[str, Any]]]:
        """State by parameter index and new groups, for one optimizer."""
        source_of = {name: group for group in nested[GROUPS] for name in group[PARAMS]}
        empty_sources = [group for group in nested[GROUPS] if not group[PARAMS]]
        state: dict[int, dict[Any, Any]] = {}
        groups: list[dict[str, Any]] = []
        index = 0
        for group in optimizer.param_groups:
            found = [self._find(param, source_of) for param in group[PARAMS]]
            sources = {name: source_of[name] for name in found if name in source_of}
            if not group[PARAMS] and len(empty_sources) == 1:
                sources = {"a group without parameters": empty_sources[0]}
            merged = self._merge_group(group, sources)
            groups.append({**merged, PARAMS: list(range(index, index + len(found)))})
            for param, name in zip(group[PARAMS], found, strict=True):
                if name not in source_of and self._options.strict:
                    self._faults.append(f"{name}: missing from {GROUPS}")
                entries = self._entries(optimizer, param, merged, name, nested[STATE])
                if entries:
                    state[index] = entries
                index += 1
        return state, groups

    def _find(self, param: torch.Tensor, listed: Mapping[str, Any]) -> str:
        """The name of `param` in the dict; its first name if the dict has none of its names."""
        aliases = self._aliases.get(id(param))
        if aliases is None:
            raise CheckpointError(
                f"an optimizer has a parameter of shape {tuple(param.shape)} that is not in the model"
            )
        return next((alias for alias in aliases if alias in listed), aliases[0])

    def _merge_group(self, group: dict[str, Any], sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The optimizer's group with the saved hyperparameters of its parameters, which must agree."""
        merged = dict(group)
        seen: dict[str, tuple[str, Any]] = {}
        for name, source in sources.items():
            for key, value in source.items():
                if key in POSITIONAL:
                    continue
                first, agreed = seen.setdefault(key, (name, value))
                if agreed is not value and not _same(agreed, value):
                    self._faults.append(
                        f"{first} and {name} are in one parameter group, but were saved with {key} {agreed!r} "
                        f"and {value!r}"
                    )
        merged.update({key: _as_kind_of(group.get(key), value) for key, (_, value) in seen.items()})
        return merged

    def _entries(
        self,
        optimizer: torch.optim.Optimizer,
        param: torch.Tensor,
        group: dict[str, Any],
        name: str,
        saved: Mapping[str, Mapping[Any, Any]],
    ) -> dict[Any, Any]:
        """The saved state of one parameter, in the layout that the optimizer uses."""
        current: Mapping[Any, Any] = optimizer.state.get(param) or {}
        given = next((saved[alias] for alias in (name, *self._aliases[id(param)]) if alias in saved), {})
        expected = current
        if not current or set(current) - set(given):
            expected = initial_state(optimizer, param, group)
        absent = [key for key in expected if key not in given]
        if absent and self._options.strict:
            what = "all of its state" if len(absent) == len(expected) else ", ".join(map(str, absent))
            self._faults.append(f"{name}: {what} is missing from {STATE}")
        if not given:
            return dict(current)
        entries = {key: current.get(key, expected[key]) for key in absent}
        for key, value in given.items():
            like = current.get(key, expected.get(key))
            entries[key] = self._fitted(f"{STATE}.{name}.{key}", value, like, param)
        return entries

    def _fitted(self, where: str, value: Any, like: Any, param: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not isinstance(like, torch.Tensor):
            like = param
        elif like.shape != value.shape and like.dim() > 0:
            self._faults.append(
                f"{where}: shape {tuple(value.shape)} in the state dict, {tuple(like.shape)} in the optimizer"
            )
            return value
        return self._unshared(laid_out_like(value, like, where))

    def _unshared(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy if the tensor is used twice: FSDP1 uses one `step` tensor for all parameters of a module, which the
        optimizer would increase for each."""
        if id(tensor) in self._taken:
            return tensor.clone()
        self._taken.add(id(tensor))
        return tensor

    # -------------------------------------------------------------- broadcasting

    def _own_part(self, path: tuple[Any, ...], whole: torch.Tensor) -> Any:
        """This rank's part of a broadcast tensor, as a distributed tensor if its parameter is one."""
        name = self._parameter_in(path)
        param = self._params.get(name) if name is not None else None
        if param is None and name is not None:
            return None  # another rank's parameter
        if param is None or not is_distributed(param) or param.shape != whole.shape:
            return whole
        part = torch.empty_like(param, dtype=whole.dtype, requires_grad=False)
        write_full(part, whole, ".".join(map(str, path)))
        return part

    def _parameter_in(self, path: tuple[Any, ...]) -> str | None:
        """The name of the parameter in a path; None for a hyperparameter that is a tensor."""
        if path[0] == STATE:
            return str(path[1])
        section, _, rest = str(path[0]).partition(".")
        if section == GROUPS:
            return None
        return max((name for name in self._params if rest.startswith(f"{name}.")), key=len, default=rest)


def _install(optimizer: torch.optim.Optimizer, state: dict[int, dict[Any, Any]], groups: list[dict[str, Any]]) -> None:
    """`optimizer.load_state_dict`, but without casting every floating-point tensor to the parameter's dtype.

    The cast would round the float32 moments of bfloat16 parameters.
    """
    optimizer.load_state_dict({STATE: state, GROUPS: groups})
    params = [param for group in optimizer.param_groups for param in group[PARAMS]]
    for index, entries in state.items():
        installed = optimizer.state[params[index]]
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and key in installed and installed[key].dtype != value.dtype:
                installed[key] = value.to(installed[key].device)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))
    return bool(_plain(a) == _plain(b))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _as_kind_of(live: Any, value: Any) -> Any:
    """A saved hyperparameter, converted to the type in the optimizer's group: a tensor, a tuple."""
    if isinstance(live, torch.Tensor) and not isinstance(value, torch.Tensor):
        return torch.as_tensor(value, dtype=live.dtype, device=live.device)
    if isinstance(live, torch.Tensor):
        return value.detach().to(live.device, copy=True)
    if isinstance(value, torch.Tensor) and isinstance(live, (int, float)):
        return value.item()
    if isinstance(live, tuple) and isinstance(value, list):
        return tuple(value)
    return value
