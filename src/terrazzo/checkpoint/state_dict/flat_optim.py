"""The flattened form of an optimizer's state dict: one dict from dotted keys to values.

    state.<parameter>.<key>[.<key>...]      and      param_groups.<parameter>.<hyperparameter>

Hyperparameters are repeated for every parameter of a group, so that dicts of pipeline stages can be merged and split
by parameter.  A group without parameters has no place in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.errors import CheckpointError

STATE = "state"
GROUPS = "param_groups"
PARAMS = "params"
# Lists one entry per parameter of the live group; it says nothing about a single parameter.
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
            raise CheckpointError(f"two entries of the optimizer state would both be called {prefix!r}")
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
    """The nested form again, with one group per parameter.

    Args:
        known: the parameter names that keys may contain; names contain dots, so they cannot be told by splitting.
        shapes: per parameter, a state whose nesting and key types are to be reproduced where they match.
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
    """Parameter name and entry; the longest known name wins, an unknown one is taken to have a one-word entry."""
    cut = len(rest)
    while (cut := rest.rfind(".", 0, cut)) > 0:
        if rest[:cut] in names:
            return rest[:cut], rest[cut + 1 :]
    name, _, entry = rest.rpartition(".")
    return name, entry


def _insert(into: dict[Any, Any], entry: str, value: Any, like: Mapping[Any, Any]) -> None:
    """Put `value` where `entry` points, splitting at dots and naming keys as `like` does where it has them."""
    by_text = {str(key): key for key in like}
    if entry in by_text or "." not in entry:
        into[by_text.get(entry, entry)] = value
        return
    head, _, tail = entry.partition(".")
    key = by_text.get(head, head)
    inner = like.get(key)
    _insert(into.setdefault(key, {}), tail, value, inner if isinstance(inner, Mapping) else {})
