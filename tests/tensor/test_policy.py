"""Which communication a policy lets happen: forward and backward, threads and nesting, asked for or not."""

import gc
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks import run_ranks
from terrazzo.comm import observe
from terrazzo.errors import CommPolicyError
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, policy
from terrazzo.tensor.policy import CommPolicyWarning, communication_policy


def sharded(mesh, *shape, dim=0, grad=True):
    return distribute_tensor(
        torch.arange(24.0)[: torch.Size(shape).numel()].view(shape), mesh, [Shard(dim)]
    ).requires_grad_(grad)


def policies_end(mesh):
    """Policies live as long as graphs do: errors keep frames, which keep graphs, and gloo its last task for a while."""
    deadline = time.monotonic() + 20
    while policy._alive and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    sharded(mesh, 4, 6).full_tensor()
    return not observe.observers


class Scale(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x * self.weight


def check_forward():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rows, columns = sharded(mesh, 4, 6), sharded(mesh, 4, 6, dim=1)
    with communication_policy("error"):
        with pytest.raises(
            CommPolicyError, match=r"all_to_all of \d+ bytes.*mul, called at .*test_policy.py:\d+ in Scale"
        ) as error:
            Scale(rows)(columns)
        assert (error.value.kind, error.value.operation) == ("all_to_all", "mul") and error.value.bytes > 0
        assert "dp" in str(error.value) and "redistribute" in str(error.value)
        rows * 2 + rows  # nothing moves
        total = rows.sum()
        with pytest.raises(CommPolicyError, match="exp"):
            total.exp()
        # What is asked for by name is free, inside and outside of calculations.
        assert float(total) == total.full_tensor() == 276
        rows.redistribute(placements=[Replicate()]), rows.full_tensor(), total.item()
        DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=True)
        distribute_tensor(torch.ones(3), mesh, [Shard(0)])
        late = rows.redistribute(placements=[Shard(1)], async_op=True)
        (late + columns).to_local()
    rows * columns
    with communication_policy("error", above=error.value.bytes):
        rows * columns
    with communication_policy("error", above=error.value.bytes - 1), pytest.raises(CommPolicyError):
        rows * columns
    # Decompositions redistribute by name, but on behalf of the operation.
    with communication_policy("error"), pytest.raises(CommPolicyError, match="logsumexp"):
        rows.logsumexp(0)
    del error, total
    assert policies_end(mesh)


def check_backward():
    mesh = init_device_mesh("cpu", (2,))
    x = sharded(mesh, 4, 6)
    w = distribute_tensor(torch.ones(6), mesh).requires_grad_()
    with communication_policy("error"):
        loss = (x * w).sum()
        with pytest.raises(
            CommPolicyError, match=r"all_reduce of 24 bytes.*the backward of mul, called at .*test_policy.py"
        ):
            loss.backward()
    outside = (x * w).sum()
    with communication_policy("error"):
        covered = (x * w).sum()
        with pytest.raises(CommPolicyError, match="before this policy"):
            outside.backward()
        with communication_policy("allow"):
            allowed = (x * w).sum()
        allowed.backward()
        explicit = x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(1)])
        (explicit * explicit).sum().backward()
        x.full_tensor(grad_placements=[Partial()]).sum().backward()
    # The policy of an operation is in force in its backward, wherever that runs.
    failures = []

    def run():
        try:
            covered.backward()
        except CommPolicyError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert len(failures) == 1
    allowed = (x * w).sum()
    allowed.backward()
    covered = loss = outside = None
    failures.clear()
    assert policies_end(mesh)


def check_recomputed_and_second_order():
    mesh = init_device_mesh("cpu", (2,))
    rows, columns = sharded(mesh, 4, 6), sharded(mesh, 4, 6, dim=1)
    out = checkpoint(torch.mul, rows, columns, use_reentrant=False)
    loss = out.sum()
    with communication_policy("error"), pytest.raises(CommPolicyError, match="mul, called at"):
        loss.backward()
    w = distribute_tensor(torch.ones(6), mesh).requires_grad_()
    with communication_policy("allow"):
        (first,) = torch.autograd.grad((rows * w * w).sum(), w, create_graph=True)
    first.sum().backward()
    del first, out, loss, w
    assert policies_end(mesh)


def check_warnings():
    mesh = init_device_mesh("cpu", (2,))
    rows, columns = sharded(mesh, 4, 6), sharded(mesh, 4, 6, dim=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with communication_policy("warn"):
            for _ in range(3):
                rows * columns
            rows.full_tensor()
        with communication_policy("warn", above=10**6):
            rows * columns
    mine = [w for w in caught if issubclass(w.category, CommPolicyWarning)]
    assert len(mine) == 1 and mine[0].filename.endswith("test_policy.py") and "all_to_all" in str(mine[0].message)


def check_threads():
    mesh = init_device_mesh("cpu", (2,))
    rows, columns = sharded(mesh, 4, 6), sharded(mesh, 4, 6, dim=1)
    results = []
    with communication_policy("error"):
        thread = threading.Thread(target=lambda: results.append(rows * columns))
        thread.start()
        thread.join(30)
        with pytest.raises(ZeroDivisionError), communication_policy("allow"):
            raise ZeroDivisionError
        with pytest.raises(CommPolicyError):
            rows * columns
    assert len(results) == 1 and policies_end(mesh)


def check_exchange_agrees():
    """Ranks that send different amounts decide alike."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0), Shard(0)])
    y = DTensor.from_local(x.to_local(), mesh, x.placements, shape=(5,)).redistribute(
        placements=[Replicate(), Shard(0)]
    )
    sent = []
    observe.add_observer(sent.append)
    x + y
    observe.remove_observer(sent.append)
    own = [e.bytes for e in sent]
    every = [None] * 4
    dist.all_gather_object(every, own)
    largest = max((max(b) for b in every if b), default=0)
    raised = None
    with communication_policy("error", above=max(largest - 1, 0)):
        try:
            x + y
        except CommPolicyError as error:
            raised = error.bytes
    dist.all_gather_object(every, raised)
    assert len(set(every)) == 1, every


def test_forward():
    run_ranks(2, check_forward)


def test_backward():
    run_ranks(2, check_backward)


def test_recomputed_and_second_order():
    run_ranks(2, check_recomputed_and_second_order)


def test_warnings():
    run_ranks(2, check_warnings)


def test_threads():
    run_ranks(2, check_threads)


def test_exchange():
    run_ranks(4, check_exchange_agrees)


def test_arguments():
    with pytest.raises(ValueError, match="'allow', 'warn' or 'error'"):
        communication_policy("forbid")  # at once, not first in a `with`
    with pytest.raises(ValueError, match="bytes"):
        communication_policy("warn", above=-1)
