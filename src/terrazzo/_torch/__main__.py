"""`python -m terrazzo._torch`: the private names of torch that terrazzo uses, and whether this torch has them."""

from terrazzo._torch import graphs  # noqa: F401  (not looked at before a program is compiled: it takes a second)
from terrazzo._torch.declared import as_text

print(as_text())
