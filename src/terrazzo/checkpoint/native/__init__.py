"""The native format, version 1, as specified in docs/format.md."""
