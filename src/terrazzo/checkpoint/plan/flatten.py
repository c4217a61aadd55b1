"""Nested state dicts as flat ones, and back.

A flat state dict has one name per value: the path to it, joined with dots (`optim.state.w.exp_avg`), as in PyTorch's
checkpoints. Dicts are flattened; lists are if they contain, at any depth, a tensor or a dict; everything else is one
value.

A checkpoint holds one value per name, so a value that differs from rank to rank (a random state, a position in a data
set) must be declared: either wrapped in `PerRank`, or named by the `per_rank` patterns of the save planner. Rank r's
value of `rng` is stored under `rng@r`, and each rank gets its own back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.native.containers import Paths, form_of, is_plain
from terrazzo.checkpoint.native.objects import Containers
from terrazzo.errors import CheckpointError, UnsupportedValueError

OBJ_PATH: TypeAlias = tuple[Any, ...]
FLATTEN_MAPPING: TypeAlias = dict[str, OBJ_PATH]
_DEEPEST = 100  # levels of a state dict that Python certainly can walk


def flatten_state_dict(state_dict: STATE_DICT_TYPE) -> tuple[STATE_DICT_TYPE, FLATTEN_MAPPING]:
    """The flat form of a nested state dict, and the path of each of its names.

    >>> flatten_state_dict({"optim": {"lr": 0.1, "groups": [{"wd": 0.0}]}, "betas": [1, 2]})[0]
    {'optim.lr': 0.1, 'optim.groups.0.wd': 0.0, 'betas': [1, 2]}
    """
    return flattened(state_dict, torch.Tensor)


def flattened(state_dict: STATE_DICT_TYPE, tensor: type) -> tuple[STATE_DICT_TYPE, FLATTEN_MAPPING]:
    """The same of a state dict whose tensors are of the class `tensor`."""
    flat: STATE_DICT_TYPE = {}
    paths: FLATTEN_MAPPING = {}
    with walking(state_dict):
        for path, value in _leaves((), state_dict, {}, tensor, {}, Containers(state_dict)):
            name = path[0] if len(path) == 1 and type(path[0]) is str else ".".join(map(str, path))
            if name in flat:
                raise CheckpointError(
                    f"two values of the state dict have the name {name!r}: "
                    f"at {list(paths[name])} and at {list(path)}: rename one"
                )
            flat[name] = value
            paths[name] = path
    check_names(flat)
    return flat, paths


def check_names(names: Iterable[str]) -> None:
    """Raise if a name is no text that a file can hold, because it has half of a surrogate pair."""
    try:
        "".join(map(str, names)).encode()
    except UnicodeEncodeError:
        wrong = next(name for name in map(str, names) if name.encode(errors="ignore").decode() != name)
        raise UnsupportedValueError(
            f"{wrong!r} cannot be the name of a value: half of a surrogate pair is no text; rename it"
        ) from None


@contextmanager
def walking(state: Any) -> Iterator[None]:
    """Inside of this context, say where a state contains itself, instead of that Python's recursion is too deep."""
    try:
        yield
    except RecursionError as error:
        found = _endless(state)
        if found is None:
            raise
        raise UnsupportedValueError(
            f"the value at {list(found[:5])}{' and deeper' if found[5:] else ''} contains itself, or has more than "
            f"{_DEEPEST} levels of dicts and lists: a state dict must end"
        ) from error


def _endless(
    value: Any, path: OBJ_PATH = (), above: frozenset[int] = frozenset(), seen: dict[int, tuple[int, Any]] | None = None
) -> OBJ_PATH | None:
    """Where a state contains itself, or is deeper than Python can walk; `seen` has the levels of what was walked."""
    seen = {} if seen is None else seen
    if id(value) in above or len(path) > _DEEPEST:
        return path
    known, _ = seen.get(id(value), (_DEEPEST + 1, None))
    if not isinstance(value, Mapping | list | tuple) or known + len(path) <= _DEEPEST:
        return None
    levels = 0
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        found = _endless(item, (*path, key), above | {id(value)}, seen)
        if found is not None:
            return found
        levels = max(levels, seen.get(id(item), (0, None))[0])
    seen[id(value)] = levels + 1, value
    return None


_Walked: TypeAlias = dict[int, tuple[list[Any], bool]]  # with the list, which a mapping may have made for one look


def _leaves(
    path: OBJ_PATH, value: Any, simple: dict[type, bool], tensor: type, walked: _Walked, entered: Containers
) -> Iterator[tuple[OBJ_PATH, Any]]:
    """The values that are not walked; `simple` remembers of which types none is, `walked` which lists are."""
    if isinstance(value, Mapping):
        if value or not path:
            entered.enter()
            for key, item in value.items():
                kind = type(item)
                leaf = simple.get(kind)
                if leaf is None:
                    leaf = simple[kind] = not issubclass(kind, (Mapping, list)) and item.__class__ is kind
                if leaf:
                    yield (*path, key), item
                else:
                    yield from _leaves((*path, key), item, simple, tensor, walked, entered)
            return
    elif isinstance(value, list) and _is_walked(value, tensor, walked):
        entered.enter()
        for index, item in enumerate(value):
            yield from _leaves((*path, index), item, simple, tensor, walked, entered)
        return
    yield path, value


def _is_walked(items: list[Any], tensor: type, walked: _Walked) -> bool:
    known = walked.get(id(items))
    if known is None:
        found = any(
            isinstance(item, (tensor, Mapping))
            or hasattr(type(item), "__create_chunk_list__")
            or (isinstance(item, list) and _is_walked(item, tensor, walked))
            for item in items
        )
        known = walked[id(items)] = items, found
    return known[1]


def paths_to_store(nested: Mapping[str, Any], paths: FLATTEN_MAPPING) -> Paths:
    """Paths from which the nested dict can be rebuilt: numbers are indices of lists, keys of dicts are text.

    A number that is a key of a dict (in an optimizer's `state`) becomes text, as in PyTorch's checkpoints, because it
    would look like an index of a list. The forms that come with the paths say what it was.

    >>> nested = {"state": {0: {"x": 1}}, "groups": [{"lr": 2}]}
    >>> paths_to_store(nested, flatten_state_dict(nested)[1])
    {'state.0.x': ('state', '0', 'x'), 'groups.0.lr': ('groups', 0, 'lr')}
    """
    stored = Paths()
    others: dict[OBJ_PATH, Any] = {}  # by their paths: dicts that are not plain
    plain, odd = {}, {}  # by id: the dicts themselves, because a mapping may have made one for a single look
    if not is_plain(nested):
        others[()] = nested
    for name, path in paths.items():
        if len(path) == 1:
            stored[name] = (str(path[0]),)
            continue
        container: Any = nested
        keys: list[Any] = []
        for key in path:
            if type(container) is dict or isinstance(container, Mapping):
                if id(container) not in plain:
                    if id(container) in odd or not is_plain(container):
                        odd[id(container)] = others[tuple(keys)] = container
                    else:
                        plain[id(container)] = container
                keys.append(str(key))
            else:
                keys.append(key)
            container = container[key]
        stored[name] = tuple(keys)
    forms = ((path, form_of(container, path)) for path, container in others.items())
    stored.forms = {path: form for path, form in forms if form is not None}
    return stored


def set_element(root: MutableMapping[str, Any], path: OBJ_PATH, value: Any) -> None:
    """Set `value` at `path`, creating missing dicts and lists.

    >>> root = {}
    >>> set_element(root, ("a", 1, "b"), 5); root
    {'a': [None, {'b': 5}]}
    """
    if type(path) not in (tuple, list) or not path or not _are_keys(path):
        raise CheckpointError(f"{path!r} is no path of a value in the state dict: it must be a tuple of keys")
    container: Any = root
    for key, following in zip(path, path[1:], strict=False):
        container = _descend(container, key, [] if type(following) is int else {})
    last = path[-1]
    if isinstance(container, list):
        _extend_to(container, last)
    elif not isinstance(container, MutableMapping):
        raise _contradiction(last)
    container[last] = value


def _are_keys(path: OBJ_PATH) -> bool:
    try:
        hash(tuple(path))
    except TypeError:
        return False
    return True


def _descend(container: Any, key: Any, default: Any) -> Any:
    if isinstance(container, list):
        _extend_to(container, key)
        if container[key] is None:
            container[key] = default
        return container[key]
    if not isinstance(container, MutableMapping):
        raise _contradiction(key)
    return container.setdefault(key, default)


def _contradiction(key: object) -> CheckpointError:
    return CheckpointError(f"the paths of names contradict each other: {key!r} is not a key of the value before it")


def _extend_to(items: list[Any], index: Any) -> None:
    if type(index) is not int or index < 0:
        raise _contradiction(index)
    items.extend([None] * (index + 1 - len(items)))


class PerRank:
    """A value that is this rank's own.

    To load one, pass a `PerRank` again: a tensor is filled in place, any other value replaces `value`.

    >>> state = {"position": PerRank(12)}
    >>> state["position"].value
    12
    """

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def name_on_rank(name: str, rank: int) -> str:
    """Where rank `rank`'s value of `name` is stored."""
    return f"{name}@{rank}"


def as_pattern(name: str) -> str:
    """The pattern that matches this name alone.

    >>> matches_any("layers[0].mean", [as_pattern("layers[0].mean")])
    True
    """
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether `name` matches one of the shell-style patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
