"""`torch.func.grad` and `grad_and_value` over DTensors.

functorch wraps each tensor in a plain one. A DTensor inside such a wrapper would be taken for a plain tensor by the
DTensors in the same call. Gradients do not need the wrapper: the differentiated arguments are replaced by views of
them, and autograd computes the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from terrazzo._torch.dispatching import tree_flatten, tree_map, tree_unflatten
from terrazzo.errors import DTensorError
from terrazzo.tensor.dtensor import DTensor


def grad_and_value(func: Callable[..., Any], argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """`torch.func.grad_and_value` if there are DTensors among the differentiated arguments."""
    single = isinstance(argnums, int)
    positions: tuple[int, ...] = (argnums,) if single else tuple(argnums)
    outer_grad = torch.is_grad_enabled()
    with torch.enable_grad():
        arguments = list(args)
        for i in positions:
            arguments[i] = tree_map(lambda x: _own(x, outer_grad), arguments[i])
        chosen = arguments[positions[0]] if single else tuple(arguments[i] for i in positions)
        flat, spec = tree_flatten(chosen)
        output = func(*arguments, **kwargs)
        aux = None
        if has_aux:
            output, aux = output
        if not isinstance(output, torch.Tensor) or output.dim() != 0:
            shape = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output)
            raise DTensorError(f"torch.func.grad: the function must return a 0-d tensor, but it returned {shape}")
        tensors = [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]
        found = iter(torch.autograd.grad(output, tensors, create_graph=True, materialize_grads=True))
        grads = [next(found) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in flat]
    if not outer_grad or not _depends_on_others([output, *grads], tensors):
        output, aux, grads = tree_map(_detached, (output, aux, grads))
    result = tree_unflatten(grads, spec)
    return (result, (output, aux)) if has_aux else (result, output)


def _own(x: Any, outer_grad: bool) -> Any:
    """A view of `x` to differentiate by: it has `x`'s graph, but `x`'s own gradient is not affected."""
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.view_as(x) if outer_grad and x.requires_grad else x.detach().requires_grad_()


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _depends_on_others(results: Iterable[Any], own: Iterable[torch.Tensor]) -> bool:
    """Whether the graph of `results` reaches a leaf outside `own`: then an outer computation still needs the graph."""
    known = {id(_local(x)) for x in own}
    waiting = [_local(x).grad_fn for x in results if isinstance(x, torch.Tensor)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            return True
        waiting.extend(next_node for next_node, _ in node.next_functions)
    return False


def _local(x: torch.Tensor) -> torch.Tensor:
    return x._local if isinstance(x, DTensor) else x
