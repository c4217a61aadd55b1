"""`python -m terrazzo._torch`: what terrazzo uses of torch's inside, and whether this torch has it."""

from terrazzo._torch import graphs  # noqa: F401  (not looked at before a program is compiled: it takes a second)
from terrazzo._torch.declared import as_text

print(as_text())
