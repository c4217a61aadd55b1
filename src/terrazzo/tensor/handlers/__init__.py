"""Operations and entry points that no rule can describe: lists, indexing, in-place and random operations, optimizers,
autograd's functions, transforms and compilation.

Each module registers what it handles when it is imported, or has an `install` that `terrazzo.tensor` calls.
"""
