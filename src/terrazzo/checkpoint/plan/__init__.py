"""Who saves and reads what: state dicts and tensors seen as chunks, and the default planners."""
