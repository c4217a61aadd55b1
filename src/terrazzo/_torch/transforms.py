"""`torch.func.grad`, `torch.func.jvp` and the like: functorch wraps each tensor in a plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo._torch.autograd import functorch_active
from terrazzo._torch.declared import like, private, replace
from terrazzo._torch.dispatching import tree_leaves

_GRAD = "torch._functorch.eager_transforms.grad_and_value_impl"
_JVP = "torch._functorch.eager_transforms._jvp_with_argnums"
_grad: Any = private(_GRAD, "torch.func.grad and grad_and_value work over DTensors", patched=True)
_jvp: Any = private(_JVP, "torch.func.jvp over DTensors would be wrong, so it is refused", patched=True)


def install(is_ours: type, grad_and_value: Callable[..., Any], refuse_jvp: Callable[[], Any]) -> None:
    """Call `grad_and_value(func, argnums, has_aux, args, kwargs)` if the differentiated arguments contain a tensor of
    class `is_ours`, and `refuse_jvp()` if a jvp of one is asked for."""

    def there(tree: Any) -> bool:
        return any(isinstance(leaf, is_ours) for leaf in tree_leaves(tree))

    def grad_and_value_impl(func: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
        positions = (argnums,) if isinstance(argnums, int) else argnums
        # In another transform, which wraps tensors, functorch differentiates the operators of the DTensors inside. It
        # is asked last: torch.compile would put the question into the graph of every program.
        if there([args[i] for i in positions if -len(args) <= i < len(args)]) and not functorch_active():
            return grad_and_value(func, argnums, has_aux, args, kwargs)
        return _grad(func, argnums, has_aux, args, kwargs)

    def _jvp_with_argnums(func: Any, primals: Any, tangents: Any, *args: Any, **kwargs: Any) -> Any:
        if there((primals, tangents)):
            refuse_jvp()
        return _jvp(func, primals, tangents, *args, **kwargs)

    replace(_GRAD, like(grad_and_value_impl, _grad))
    replace(_JVP, like(_jvp_with_argnums, _jvp))
