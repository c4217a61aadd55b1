"""Tools for looking at checkpoints: a lazy mapping, a comparison of two, and a check of every byte."""
