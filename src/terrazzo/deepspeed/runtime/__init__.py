"""Modules that scripts import from inside DeepSpeed."""
