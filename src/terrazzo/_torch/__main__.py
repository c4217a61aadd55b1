"""`python -m terrazzo._torch`: what terrazzo uses of torch's inside, and whether this torch has it."""

from terrazzo._torch.declared import as_text

print(as_text())
