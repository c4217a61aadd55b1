"""An `autograd.Function` of plain tensors that returns DTensors, as reentrant checkpointing of a parallel block is."""

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ranks import run_ranks
from terrazzo.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

BLOCKS = {
    "one": lambda x, w: (w * x).sin(),
    "terms": lambda x, w: (w * x).sin().sum(0),
    "terms of a mean": lambda x, w: (w * x).sin().mean(),
    "several": lambda x, w: ((w * x).sin(), x.cos(), (w * x).mean(1)),
    "no graph": lambda x, w: (w.detach() * 2, (w * x).sin()),
}


def gradients(block, w, how):
    x = torch.tensor(0.5, requires_grad=True)
    w = w.detach().requires_grad_()
    found = how(lambda x: block(x, w), x)
    out = found if isinstance(found, tuple) else (found,)
    other = w.detach().sum().requires_grad_()
    (sum(o.sum() for o in out) * other).backward()
    assert other.grad is not None
    return [x.grad, w.grad.full_tensor() if hasattr(w.grad, "full_tensor") else w.grad]


def check_functions():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    for name, block in BLOCKS.items():
        expected = gradients(block, whole, lambda block, x: block(x))
        for placement in (Shard(0), Shard(1), Replicate()):
            w = distribute_tensor(whole, mesh, [placement])
            for reentrant in (False, True):
                found = gradients(block, w, lambda block, x, again=reentrant: checkpoint(block, x, use_reentrant=again))
                for got, want in zip(found, expected, strict=True):
                    torch.testing.assert_close(got, want, msg=f"{name}, {placement}, reentrant {reentrant}")
    out = checkpoint(lambda x: w * x, torch.tensor(0.5, requires_grad=True), use_reentrant=True)
    out.mul_(2).sum().backward()  # written like any other result


def test_functions_of_plain_tensors_that_return_dtensors():
    run_ranks(2, check_functions)
