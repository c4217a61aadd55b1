"""Autograd: its engine, its nodes, forward mode and functorch's transforms."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from terrazzo._torch.declared import attribute, private

current_node: Callable[[], Any] = private(
    "torch._C._current_autograd_node", "policies, debug modes and observers tell backward from forward"
)

node_count: Callable[[], int] = private(
    "torch._C._autograd._get_sequence_nr", "debug modes find the module that a backward node belongs to"
)

attribute("torch._C._FunctionBase._sequence_nr", "debug modes find the module that a backward node belongs to")


def number_of(node: Any) -> int:
    """The sequence number of a node, which it got when it was created."""
    return node._sequence_nr()


profiling: Callable[[], bool] = private(
    "torch._C._autograd._profiler_enabled", "operations get names in a profile, and cost nothing without one"
)

current_backward: Callable[[], int] = private(
    "torch._C._current_graph_task_id", "the number of the backward that this thread runs, its final callbacks included"
)


def in_backward() -> bool:
    """Whether this thread is running a backward, including callbacks that run at its end."""
    return current_backward() != -1


_will_run: Callable[[Any], bool] = private(
    "torch._C._will_engine_execute_node", "the engine tells loss.backward() from torch.autograd.grad"
)


def adds_to_leaves() -> bool:
    """Whether the backward that runs adds to `.grad` of a leaf, as those of `torch.autograd.grad` do not.

    Called in a hook of a tensor, of which the leaves below it count. If none is seen, as where all of them are in
    checkpointed functions that run a backward of their own, they may get gradients.
    """
    todo = [current_node()]
    seen, leaves = set(todo), False
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            leaves = True
            try:
                if _will_run(node):
                    return True
            except RuntimeError:  # it is one of the inputs of `torch.autograd.grad`
                pass
        below = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= below
        todo += below
    return not leaves


run_backward: Any = private(
    "torch.autograd.Variable._execution_engine.run_backward", "backward of one DTensor, without torch's checks"
)

at_end_of_backward: Any = private(
    "torch.autograd.Variable._execution_engine.queue_callback", "fully_shard reduces what is left when backward ends"
)

attribute("torch.autograd.forward_ad._current_level", "communication refuses forward-mode derivatives")


def forward_mode_active() -> bool:
    """Whether forward-mode derivatives are being computed."""
    return forward_ad._current_level >= 0


functorch_active: Callable[[], bool] = private(
    "torch._C._are_functorch_transforms_active", "communication refuses torch.func's transforms"
)

innermost_transform: Callable[[], Any] = private(
    "torch._C._functorch.peek_interpreter_stack", "operations inside torch.func's transforms keep the thread's state"
)

outside_transforms: Callable[[], AbstractContextManager[Any]] = private(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "fully_shard gathers parameters inside torch.func's transforms",
)

is_transformed: Callable[[Tensor], bool] = private(
    "torch._C._functorch.is_functorch_wrapped_tensor", "tensors of torch.func's transforms beside DTensors are refused"
)

_inner: Callable[[Tensor], Tensor] = private(
    "torch._C._functorch.get_unwrapped",
    "backward through modules of fully_shard that ran inside torch.func's transforms",
)


def with_graphs(tensor: Tensor) -> list[Tensor]:
    """The tensors of which autograd has a graph: this one, and those that `torch.func`'s transforms have wrapped in it,
    as in a gradient by `torch.func.grad` with respect to inputs, which depends on parameters."""
    found = [tensor] if tensor.requires_grad else []
    while is_transformed(tensor):
        tensor = _inner(tensor)
        if tensor.requires_grad:
            found.append(tensor)
    return found


default_setup_context: Any = private(
    "torch.autograd.function._SingleLevelFunction.setup_context", "which autograd.Functions define setup_context"
)

attribute("torch.Tensor._backward_hooks", "hooks of sharded parameters run on their reduced gradients")
attribute("torch.Tensor._post_accumulate_grad_hooks", "hooks of sharded parameters run after accumulation")


def gradient_hooks(tensor: Tensor) -> Mapping[int, Callable[[Tensor], Tensor | None]] | None:
    """The hooks that `register_hook` has added to a leaf."""
    return tensor._backward_hooks


attribute(
    "torch._C._FunctionBase._register_hook_dict",
    "hooks on inputs and outputs of sharded modules take a fifth of the time of register_hook",
)


def watch_gradient(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """`register_hook` without a handle, for hooks that are never removed."""
    if type(tensor) is not Tensor or tensor._backward_hooks is not None or tensor.grad_fn is None:
        tensor.register_hook(hook)
        return
    tensor._backward_hooks = OrderedDict([(-1, hook)])  # handles' keys are not negative
    tensor.grad_fn._register_hook_dict(tensor)


def have_hooks(tensors: Iterable[Tensor]) -> bool:
    """Whether there is any of either kind on some of these leaves."""
    for tensor in tensors:
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            return True
    return False


def accumulation_hooks(tensor: Tensor) -> Mapping[int, Callable[[Tensor], None]] | None:
    """The hooks that `register_post_accumulate_grad_hook` has added to a leaf."""
    return tensor._post_accumulate_grad_hooks


def leaves_of(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """The leaves that the graphs of these tensors reach, by their ids."""
    found = {id(tensor): tensor for tensor in tensors if tensor.is_leaf}
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        waiting += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return found
