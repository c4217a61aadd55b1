"""Lamb under the name of DeepSpeed's kernel."""

from terrazzo.engine.optimizers import Lamb as FusedLamb

__all__ = ["FusedLamb"]
