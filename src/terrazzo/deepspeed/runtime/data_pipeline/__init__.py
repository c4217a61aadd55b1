"""Curriculum learning, under the names of DeepSpeed's modules."""
