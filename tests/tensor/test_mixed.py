"""What is mixed with DTensors is named, each kind with its own cure, which works."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.tensor as torch_tensor
from torch import nn

from ranks import run_ranks
from terrazzo.errors import MixedTensorError
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.experimental import implicit_replication
from terrazzo.tensor.interop import from_torch_dtensor


def check_kinds() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(12.0).reshape(4, 3)
    x = distribute_tensor(values, mesh, [Shard(0)])

    with pytest.raises(MixedTensorError, match=r"argument 1 is a plain Tensor of shape \(4, 3\).*implicit_replication"):
        x + values
    with implicit_replication():
        torch.testing.assert_close((x + values).full_tensor(), 2 * values)

    theirs = torch_tensor.distribute_tensor(values, mesh, [torch_tensor.Shard(0)])
    with pytest.raises(MixedTensorError, match=r"is a DTensor of torch.distributed.tensor.*from_torch_dtensor") as told:
        x + theirs
    assert "plain" not in str(told.value)
    torch.testing.assert_close((x + from_torch_dtensor(theirs)).full_tensor(), 2 * values)

    model = fully_shard(nn.Linear(3, 2))
    with pytest.raises(MixedTensorError, match=r"a parameter of shape \(2, 3\) that fully_shard has .*to_local"):
        model(x)
    torch.testing.assert_close(model(x.full_tensor())[:2], model(values[:2]))
    model(x.to_local()).sum().backward()

    state = {
        name: torch_tensor.distribute_tensor(p.detach().full_tensor(), mesh, [torch_tensor.Shard(0)])
        for name, p in model.named_parameters()
    }
    with pytest.raises(RuntimeError, match=r"fully_shard from terrazzo.fsdp, or convert it with") as told:
        model.load_state_dict(state)
    assert "call the module itself" not in str(told.value)  # which is the cure for another mistake


def test_each_kind_has_its_cure():
    run_ranks(2, check_kinds)
