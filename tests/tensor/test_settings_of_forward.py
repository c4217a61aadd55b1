"""Settings of the forward hold where its graph is run: outside their block, and on another thread than the forward's.

What one device computes is expected. On an accelerator backward runs on a thread of autograd's: see tests/testing/late.
"""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ranks import run_ranks
from terrazzo.errors import CommPolicyError, MixedTensorError
from terrazzo.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.experimental import context_parallel, context_parallel_unshard, implicit_replication
from terrazzo.tensor.parallel import loss_parallel
from terrazzo.tensor.policy import communication_policy


def here(function):
    function()


def elsewhere(function):
    """Call it on another thread, which has made no settings."""
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    for error in errors:
        raise error


WAYS = [(reentrant, run) for reentrant in (False, True) for run in (here, elsewhere)]


def draw(*sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),))


class TimesPlain(torch.autograd.Function):
    """Multiplies by a plain tensor in both directions."""

    @staticmethod
    def forward(ctx, x, plain):
        ctx.plain = plain
        return x * plain

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.plain, None


def check_replication():
    mesh, plain = mesh_of_all(), draw(4, 4)
    expected = draw(4, 4).requires_grad_()
    (expected * plain).sin().sum().backward()
    for reentrant, run in WAYS:
        w = distribute_tensor(draw(4, 4), mesh, [Shard(0)]).requires_grad_()
        x = torch.ones((), requires_grad=True)  # as the only argument: a plain tensor, and the DTensor is the closure's
        with implicit_replication():
            loss = checkpoint(lambda x, w=w: (w * plain * x).sin().sum().to_local(), x, use_reentrant=reentrant)
            of_argument = checkpoint(lambda w: (w * plain).sin(), w, use_reentrant=reentrant).sum()
        run(loss.backward)
        torch.testing.assert_close(w.grad.full_tensor(), expected.grad)
        run(of_argument.backward)
        torch.testing.assert_close(w.grad.full_tensor(), 2 * expected.grad)
        with pytest.raises(MixedTensorError):
            run(lambda w=w: w * plain)
    for run in (here, elsewhere):
        w = distribute_tensor(draw(4, 4), mesh, [Shard(0)]).requires_grad_()
        with implicit_replication():
            loss = TimesPlain.apply(w, plain).sum()
        run(loss.backward)
        torch.testing.assert_close(w.grad.full_tensor(), plain)


def check_one_threads_settings_are_not_anothers():
    w = distribute_tensor(draw(4, 4), mesh_of_all(), [Shard(0)]).requires_grad_()
    with pytest.raises(MixedTensorError), implicit_replication():
        elsewhere(lambda: w * draw(4, 4))
    # Nor is what the thread of the backward has set the forward's.
    counts = []

    def recomputed(w):
        try:
            return (w * draw(4, 4)).sin()
        except MixedTensorError:
            counts.append(1)
            return (w * 2.0).sin()

    loss = checkpoint(recomputed, w, use_reentrant=False).sum()
    with implicit_replication():
        loss.backward()
    assert len(counts) == 2
    torch.testing.assert_close(w.grad.full_tensor(), 2 * (2 * draw(4, 4)).cos())


def check_loss():
    mesh, target = mesh_of_all(), torch.tensor([1, 0, 7, 2])
    everywhere = distribute_tensor(target, mesh, [Replicate()])
    expected = draw(4, 8).requires_grad_()
    F.cross_entropy(expected * 2, target).backward()
    for reentrant, run in WAYS:
        x = distribute_tensor(draw(4, 8), mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss = checkpoint(lambda x: F.cross_entropy(x * 2, target), x, use_reentrant=reentrant)
        with CommDebugMode() as seen:
            run(loss.backward)
        assert seen.get_total_counts() and not any("gather" in str(kind) for kind in seen.get_comm_counts())
        torch.testing.assert_close(x.grad.full_tensor(), expected.grad)
        # A forward outside of the block is recomputed as it was.
        sent = []
        for block in (nullcontext(), loss_parallel()):
            x = distribute_tensor(draw(4, 8), mesh, [Shard(1)]).requires_grad_()
            loss = checkpoint(lambda x: F.cross_entropy(x * 2, everywhere), x, use_reentrant=reentrant)
            with block, CommDebugMode() as seen:
                run(loss.backward)
            torch.testing.assert_close(x.grad.full_tensor(), expected.grad)
            sent.append(seen.get_comm_counts())
        assert sent[0] == sent[1]


def check_policy():
    mesh = mesh_of_all()
    rows = distribute_tensor(draw(4, 6), mesh, [Shard(0)])
    for reentrant, run in WAYS:
        columns = distribute_tensor(draw(4, 6), mesh, [Shard(1)]).requires_grad_()
        # Under the policy of the forward, whatever that of the backward is.
        with communication_policy("allow"):
            loss = checkpoint(lambda x: (x * rows).sin(), columns, use_reentrant=reentrant).sum()
        with communication_policy("error"):
            run(loss.backward)
        assert columns.grad is not None
        # Where the forward had none, that of the backward that its thread starts.
        loss = checkpoint(lambda x: (x * rows).sin(), columns, use_reentrant=reentrant).sum()
        with communication_policy("error"):
            if run is here:
                with pytest.raises(CommPolicyError):
                    run(loss.backward)
            else:
                run(loss.backward)


def check_attention():
    mesh = mesh_of_all()
    q, k, v = (draw(1, 2, 8, n).requires_grad_() for n in (4, 4, 4))
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sin().sum().backward()
    for reentrant, run in WAYS:
        buffers = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(buffers)):
            out = checkpoint(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True).sin(), *buffers,
                use_reentrant=reentrant,
            )  # fmt: skip
        run(out.sum().backward)
        found = context_parallel_unshard(mesh, [b.grad for b in buffers], [2, 2, 2])
        for got, want in zip(found, (q, k, v), strict=True):
            torch.testing.assert_close(got, want.grad)


CHECKS = (check_replication, check_one_threads_settings_are_not_anothers, check_loss, check_policy, check_attention)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_settings_of_the_forward_hold_in_backward(check):
    run_ranks(2, check)
