"""The flattened form of an optimizer's state dict: a dict from dotted keys to values.

    state.<parameter>.<key>[.<key>...]      and      param_groups.<parameter>.<hyperparameter>

Hyperparameters are repeated for every parameter of a group, so that dicts of pipeline stages can be merged and split
by parameter. A group without parameters is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.errors import CheckpointError

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
