"""Attributes are facts: one rank may ask for any of them alone, and values are PyTorch's."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from terrazzo._torch.dispatching import names_of_attributes
from terrazzo.errors import DTensorError
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.parallel import ColwiseParallel, parallelize_module

# Views, which are operations like others.
OPERATIONS = {"H", "T", "mH", "mT", "real", "imag"}
METHODS = ["dense_dim", "sparse_dim", "is_distributed", "_is_view", "dim", "numel", "element_size", "get_device"]


def ask_alone() -> dict[str, Any]:
    """The first rank asks for everything, the second for nothing."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = nn.Parameter(torch.randn(5, 4))
    x = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
    (x * x).sum().backward()
    plain.grad = x.grad.full_tensor()
    if dist.get_rank() == 1:
        return {}
    wrong: dict[str, Any] = {}
    with warnings.catch_warnings(), CommDebugMode() as counted:
        warnings.simplefilter("ignore")  # of `volatile`
        for name in names_of_attributes():
            if name in OPERATIONS or name in ("data", "_cdata", "_python_dispatch"):
                continue
            mine, other = getattr(x, name), getattr(plain, name)
            if isinstance(mine, DTensor):
                assert mine is x.grad
            elif mine != other and not (mine is other is None) and name not in ("_version", "_backward_hooks"):
                wrong[name] = mine, other
        for name in METHODS:
            mine, other = getattr(x, name)(), getattr(plain, name)()
            if mine != other:
                wrong[name] = mine, other
        assert sum(p.nbytes for p in nn.ParameterList([x])) == 80
        assert x._cdata != x.to_local()._cdata
        y = x.detach()[:, 1:]
        assert y._is_view() and not x.detach().clone()._is_view()
        try:
            y._base  # noqa: B018  # that it raises is what is tested
        except DTensorError:
            pass
        else:
            wrong["_base"] = y._base
    assert counted.get_total_counts() == 0
    return wrong


def test_one_rank_may_ask_for_any_attribute() -> None:
    assert run_ranks(2, ask_alone)[0] == {}


def check_hooks_and_grad_dtype() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(4, 4, dtype=torch.bfloat16)
    for placement in (Shard(0), Replicate()):
        x = nn.Parameter(distribute_tensor(whole, mesh, [placement]))
        assert x._backward_hooks is None and x._post_accumulate_grad_hooks is None
        handle = x.register_hook(lambda grad: grad * 3)
        assert len(x._backward_hooks) == 1
        handle.remove()
        assert not x._backward_hooks
        x.register_post_accumulate_grad_hook(lambda p: None)
        assert len(x._post_accumulate_grad_hooks) == 1
        outlived, seen = nn.Parameter(x.detach().clone()), []
        outlived.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.full_tensor()))
        loss = (outlived * 2).sum()
        del outlived
        loss.backward()
        assert torch.equal(seen[0], torch.full_like(whole, 2))
        assert x.grad_dtype == torch.bfloat16
        x.grad_dtype = torch.float32
        reference = nn.Parameter(whole.clone())
        reference.grad_dtype = torch.float32
        for p in (x, reference):
            (p * p).sum().backward()
        assert x.grad.dtype == torch.float32 and torch.equal(x.grad.full_tensor(), reference.grad)
        x._grad = None
        assert x.grad is None


def check_hooks_on_tensor_parallel_parameters() -> None:
    """`fully_shard` asks for them, and says that it does not call them."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for hooked in (False, True):
        model = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh["tp"], {"0": ColwiseParallel()})
        if hooked:
            model[0].weight.register_hook(lambda grad: grad * 0)
            model[0].bias.register_post_accumulate_grad_hook(lambda p: None)
        with warnings.catch_warnings(record=True) as caught, CommDebugMode() as counted:
            warnings.simplefilter("always")
            fully_shard(model, mesh=mesh["dp"])
        text = "\n".join(str(each.message) for each in caught)
        assert ("hooks" in text) == hooked and "no sharding rule" not in text, text
        assert counted.get_total_counts() == 0


def test_hooks_and_the_dtype_of_gradients() -> None:
    run_ranks(2, check_hooks_and_grad_dtype)
    run_ranks(2, check_hooks_on_tensor_parallel_parameters)
