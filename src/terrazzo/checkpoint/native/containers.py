"""Dicts of a nested state dict that are not plain ones with text as keys, such as `{1: 2}` or an `OrderedDict`.

The paths of names have text for every key of a dict, as in PyTorch's checkpoints, and say nothing of classes. For each
dict that this would change, `Paths` has a *form*: an encoded dict of the same class and keys, whose values are the
keys' texts. It is empty if all keys are text and all values tensors. `restored` makes such dicts again in a state dict
that was built from the paths. A reader that does not know forms gets plain dicts.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias

from terrazzo.checkpoint.native.objects import decode, encode
from terrazzo.errors import CheckpointCorruptError, UnsupportedValueError

Path: TypeAlias = tuple[Any, ...]
_CLASSES: Final = (dict, OrderedDict, defaultdict, Counter)


class Paths(dict[str, Path]):
    """The path of each name.

    Attributes:
        forms: by the path of a dict, what it was if it was not a plain one with text as keys.
    """

    def __init__(self, paths: Mapping[str, Path] | None = None, forms: Mapping[Path, bytes] | None = None) -> None:
        super().__init__(paths or {})
        self.forms: dict[Path, bytes] = dict(forms or {})

    def __reduce__(self) -> tuple[Any, ...]:  # PyTorch and others read pickled metadata, and do not have this class
        return dict, (dict(self),)


def forms_of(paths: Any) -> dict[Path, bytes]:
    """The forms that come with paths; none with those that other planners made."""
    return paths.forms if isinstance(paths, Paths) else {}


def merged_forms(parts: Iterable[Mapping[Path, bytes]]) -> dict[Path, bytes]:
    """The forms of all ranks. A dict of which ranks have different keys has those of all of them."""
    found: dict[Path, dict[bytes, None]] = {}
    for forms in parts:
        for path, encoded in forms.items():
            found.setdefault(path, {})[encoded] = None
    return {path: _merged(several) for path, several in found.items()}


def _merged(several: Iterable[bytes]) -> bytes:
    first, *others = several
    if not others:
        return first
    try:
        dicts = [form for form in map(decode, (first, *others)) if isinstance(form, dict)]
    except UnsupportedValueError as error:  # of an enum that only another rank has imported
        warnings.warn(f"a dict comes back with text as keys: {error}", stacklevel=2)
        return encode({})
    return encode(of_its_class(dicts[0], {key: text for form in dicts for key, text in form.items()}))


def is_plain(container: Any) -> bool:
    """Whether the paths alone say what a dict was: also of a mapping of an unknown class, which is stored as a dict."""
    return (type(container) is dict or type(container) not in _CLASSES) and all(type(key) is str for key in container)


def form_of(container: Mapping[Any, Any], path: Path) -> bytes | None:
    """The form of a dict that is not plain; None if it has none, with a warning."""
    from torch import Tensor  # here, because commands that only look at checkpoints read forms without torch

    texts = {key: str(key) for key in container}
    if all(type(key) is str for key in texts) and all(isinstance(each, Tensor) for each in container.values()):
        texts = {}  # there may be many names of tensors, which say it all but for an order
    kind, shown = type(container), f"the {type(container).__name__} at {list(path)}"
    if kind in _CLASSES:
        with suppress(UnsupportedValueError):
            return encode(of_its_class(container, texts))
    try:
        encoded = encode(texts)
    except UnsupportedValueError as error:
        warnings.warn(f"{shown} comes back with text as keys: {error}", stacklevel=2)
        return None
    if kind in _CLASSES:
        warnings.warn(f"{shown} comes back as a dict, because its default_factory cannot be stored", stacklevel=2)
    return encoded


def of_its_class(container: Mapping[Any, Any], items: Mapping[Any, Any]) -> dict[Any, Any]:
    """A dict of the class that another one has, with these items; a plain one if that is a mapping of unknown class."""
    kind: Any = type(container)
    if kind not in _CLASSES:
        return dict(items)
    made: dict[Any, Any] = kind(container.default_factory) if isinstance(container, defaultdict) else kind()
    for key, item in items.items():  # the update of a Counter would count
        made[key] = item
    return made


def restored(nested: dict[str, Any], paths: Any) -> Any:
    """The state dict that was built from these paths, its dicts as they were when it was saved."""
    root: dict[Any, Any] = {"": nested}
    for path, encoded in sorted(forms_of(paths).items(), key=lambda item: -len(item[0])):  # the inner ones first
        *above, last = ("", *path)
        holder: Any = root
        try:
            for key in above:
                holder = holder[key]
            stored = holder[last]
        except (LookupError, TypeError):
            continue  # it was not wanted
        if isinstance(stored, dict):
            holder[last] = _as_it_was(stored, encoded, path)
    return root[""]


def _as_it_was(stored: dict[Any, Any], encoded: bytes, path: Path) -> dict[Any, Any]:
    try:
        form = decode(encoded)
    except UnsupportedValueError as error:  # an enum of a program that is not this one
        warnings.warn(f"the dict at {list(path)} is read as a plain one with text as keys: {error}", stacklevel=2)
        return stored
    if not isinstance(form, dict):
        raise CheckpointCorruptError(f"the dict at {list(path)} is said to have been a {type(form).__name__}")
    left = dict(stored)
    items = {key: left.pop(text) for key, text in form.items() if type(text) is str and text in left}
    return of_its_class(form, {**items, **left})
