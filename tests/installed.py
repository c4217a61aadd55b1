"""Skipping the tests of a module that need a library, without importing the library: that takes seconds."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*libraries: str) -> None:
    """Skip this module unless these are installed. Each test imports what it uses, most of them in other processes."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed", allow_module_level=True)
