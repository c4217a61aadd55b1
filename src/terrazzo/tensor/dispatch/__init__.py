"""How a call on DTensors becomes a call on local tensors.

`DTensor.__torch_function__` makes a key (`keys`) and runs the route that is cached for it. The first time:

    calls       decides how a function runs for these layouts, and caches the route
    names       one name for the many functions that are one operation
    spec        what a rule (`terrazzo.tensor.ops`) says about a call
    planner     from a rule and the operands' layouts to the layouts that operands are redistributed to
    routes      plans as closures
    fallback    replicate and run, where nothing else applies

The other modules are parts of these: `overrides` holds users' own rules and runs what C++ calls, `outside_mesh` runs
calls on ranks outside the mesh, `empties` checks whether a function accepts empty shards, `shapes` whether it accepts
the global shapes, `plain` describes the arguments, `structure` maps nested results.
"""
