"""How a call on DTensors becomes a call on local tensors.

`DTensor.__torch_function__` makes a key (`keys`) and runs the plan that is known for it.  The first time:

    calls       finds the way for a function and these layouts, and remembers the plan
    names       one name for the many functions that are one operation
    spec        what a rule (`terrazzo.tensor.ops`) says about a call
    planner     from a rule and the operands' layouts to the layouts they are brought to
    runners     plans as closures
    aten        composites without a rule, taken apart by PyTorch's C++
    fallback    replicate and run: what is left

The others are parts of these: `overrides` holds users' own rules, `absent` runs ranks outside the mesh, `empties` looks
whether an operation takes empty shards, `bounds` checks index values, `structure` walks nested results.
"""
