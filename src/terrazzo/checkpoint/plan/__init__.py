"""Plan saves and loads: state dicts and tensors as chunks, and the default planners."""
