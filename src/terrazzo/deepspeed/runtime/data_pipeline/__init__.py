"""Curricula, by the names of DeepSpeed's modules."""
