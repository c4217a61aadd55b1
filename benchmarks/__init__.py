"""Benchmarks of terrazzo against PyTorch and plain tensors. `python -m benchmarks` runs them."""
