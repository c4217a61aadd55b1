"""`make demo`: terrazzo at work on this machine."""
