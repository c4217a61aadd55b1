"""Modules that scripts import from `deepspeed.runtime`."""
