"""`python -m terrazzo._torch`: the private names of torch that terrazzo uses, and whether this torch has them."""

from terrazzo._torch import flex, graphs, launching  # noqa: F401  (looked at when they are needed: it takes a second)
from terrazzo._torch.declared import as_text

print(as_text())
