"""A `_StridedShard` that says no order of mesh dims: each of several equal pieces of a dim is cut.

It is how plans for tensor parallelism place weights in which several projections are packed. What a rank holds was
computed here by cutting the pieces; PyTorch's DTensor, in one process, agrees on what it is.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from torch import nn

import terrazzo.checkpoint as checkpoint
from ranks import run_ranks
from terrazzo.errors import LayoutError, PlacementsError
from terrazzo.fsdp import fully_shard
from terrazzo.layout.placement import _StridedShard
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, interop
from terrazzo.tensor.debug import CommDebugMode


def part(whole: torch.Tensor, dim: int, pieces: int, ranks: int, rank: int) -> torch.Tensor:
    return torch.cat([piece.chunk(ranks, dim)[rank] for piece in whole.chunk(pieces, dim)], dim)


def moves() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh.get_local_rank("tp")
    whole = torch.arange(16.0 * 8).reshape(16, 8)
    packed = _StridedShard(0, split_factor=4)
    for dp, source in product((Replicate(), Shard(1)), (0, None)):
        x = distribute_tensor(whole, mesh, [dp, packed], src_data_rank=source)
        mine = part(whole, 0, 4, 2, tp)
        mine = mine if dp.is_replicate() else mine.chunk(2, 1)[mesh.get_local_rank("dp")]
        assert x.placements == (dp, packed) and torch.equal(x.to_local(), mine)
        assert torch.equal(x.full_tensor(), whole)
        again = DTensor.from_local(x.to_local(), mesh, x.placements, shape=(16, 8), stride=(8, 1))
        assert again._layout is x._layout
        assert DTensor.from_local(x.to_local(), mesh, x.placements)._layout is x._layout
        their = interop.to_torch_dtensor(x)
        assert their.placements[1] == theirs.placement_types._StridedShard(0, split_factor=4)
        assert torch.equal(their.full_tensor(), whole) and interop.from_torch_dtensor(their)._layout is x._layout
    others = [
        [Replicate(), packed],
        [Shard(0), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Shard(1), packed],
        [packed, Shard(1)],
        [Replicate(), _StridedShard(1, split_factor=2)],
        [_StridedShard(1, split_factor=2), packed],
        [Shard(0), Replicate()],
        [Partial(), packed],
        [Replicate(), Partial()],
    ]
    weights = torch.randn(16, 8)
    for before, after in product(others, others):
        leaf = distribute_tensor(whole, mesh, before).requires_grad_()
        moved = leaf.redistribute(placements=after)
        assert list(moved.placements) == after
        assert torch.equal(moved.full_tensor(), whole)
        (moved * distribute_tensor(weights, mesh, [Replicate()] * 2)).sum().backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), weights, rtol=0, atol=0)
    # Where an extreme lies, of rows that another mesh dim cuts.
    x = distribute_tensor(weights, mesh, [packed, Shard(1)], src_data_rank=0)
    weights = x.full_tensor()
    for call in (torch.Tensor.max, torch.Tensor.argmin, torch.Tensor.argmax):
        for dims in ((1,), ()) if call is not torch.Tensor.max else ((1,),):
            found, expected = call(x, *dims), call(weights, *dims)
            for a, b in zip(found, expected, strict=True) if isinstance(found, tuple) else ((found, expected),):
                assert torch.equal(a.full_tensor(), b)


def trains() -> None:
    """A feed-forward layer whose gate and up projections are one weight trains as on one device."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(8, 32)
            self.down = nn.Linear(16, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = self.both(x)
            if isinstance(both, DTensor):
                assert both.placements == (_StridedShard(2, split_factor=2),)
                gate, up = both.to_local().chunk(2, -1)  # of one chunk of the features each
                hidden = DTensor.from_local(F.silu(gate) * up, mesh, [Shard(2)])
            else:
                gate, up = both.chunk(2, -1)
                hidden = F.silu(gate) * up
            return self.down(hidden)

    alone = Gated()
    model = copy.deepcopy(alone)
    packed = _StridedShard(0, split_factor=2)
    for name, placement in (("both.weight", packed), ("both.bias", packed), ("down.weight", Shard(1))):
        module, _, own = name.rpartition(".")
        parameter = distribute_tensor(model.get_parameter(name).detach(), mesh, [placement])
        setattr(model.get_submodule(module), own, nn.Parameter(parameter))
    for foreach in (False, True):
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=foreach) for m in (model, alone)]
        for step in range(3):
            x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))
            with CommDebugMode() as seen:
                out = model(distribute_tensor(x, mesh, [Replicate()]))
                out.square().mean().backward()
            assert seen.get_total_counts() <= 2  # as a column and a row parallel layer do
            expected = alone(x)
            expected.square().mean().backward()
            torch.testing.assert_close(out.full_tensor(), expected)
            for m, optimizer in zip((model, alone), optimizers, strict=True):
                norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                if m is model:
                    mine = norm
                with CommDebugMode() as seen:
                    optimizer.step()
                assert seen.get_total_counts() == 0
                optimizer.zero_grad()
            torch.testing.assert_close(mine, norm)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), alone.get_parameter(name))
    assert model.both.weight.placements == (packed,)


OPERATIONS = {
    "chunk": lambda x, w: x.chunk(2, 0)[0],
    "slice": lambda x, w: x[3:9],
    "flip": lambda x, w: x.flip(0),
    "cumsum": lambda x, w: x.cumsum(0),
    "sum": lambda x, w: x.sum(0),
    "argmax": lambda x, w: x.argmax(0),
    "softmax": lambda x, w: x.softmax(0),
    "view": lambda x, w: x.reshape(4, 4, 8),
    "transpose": lambda x, w: x.t() * 2,
    "mm": lambda x, w: w @ x,
    "norm": lambda x, w: x.norm(),
    "cat": lambda x, w: torch.cat([x, x]),
    "take": lambda x, w: x[torch.tensor([3, 1])] if not isinstance(x, DTensor) else x[w[:2, 0].long() * 0 + 3],
    "add": lambda x, w: x + w[0, :8],
    "layer_norm": lambda x, w: F.layer_norm(x, (16, 8)),
    "sort": lambda x, w: x.sort(0)[0],
    "unfold": lambda x, w: x.unfold(0, 4, 2),
    "roll": lambda x, w: x.roll(1, 0),
    "tril": lambda x, w: x.tril(),
    "where": lambda x, w: torch.where(x > 3, x, -x),
    "in place": lambda x, w: x.clone().mul_(2).add_(x),
    "copy": lambda x, w: x.clone().copy_(x * 3),
    "write": lambda x, w: x.clone().index_fill_(0, w[:1, 0].long() * 0 + 2, 7.0),
    "var": lambda x, w: x.var(0),
    "view of another dtype": lambda x, w: x.view(torch.int16).view(torch.float32),
    "median": lambda x, w: x.median(0)[0],
    "std": lambda x, w: x.std(),
    "logsumexp": lambda x, w: x.logsumexp(0),
    "prod": lambda x, w: x.prod(0),
    "any": lambda x, w: (x > 0).any(0),
    "aminmax": lambda x, w: x.aminmax(dim=0).max,
    "argmin of all": lambda x, w: x.argmin(),
    "topk": lambda x, w: x.topk(3, 0)[1],
    "cummax": lambda x, w: x.cummax(0)[1],
    "cross entropy": lambda x, w: F.cross_entropy(x, (w[:, 1] * 5).long()),
    "nll loss": lambda x, w: F.nll_loss(x.t(), (w[:8, 1] * 9).long()),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x, w: F.group_norm(x.t(), 2),
    "conv": lambda x, w: F.conv1d(x.unsqueeze(0), w[:4, :16].reshape(4, 16, 1)),
    "pool": lambda x, w: F.max_pool1d(x, 2),
    "set": lambda x, w: set_rows(x.clone()),
    "scatter": lambda x, w: x.scatter(0, (w[:2, :8] * 3).long(), 7.0),
    "gather": lambda x, w: x.gather(0, (w[:2, :8] * 3).long()),
    "stack": lambda x, w: torch.stack([x, x * 2]),
    "repeat": lambda x, w: x.repeat(2, 1),
    "interleave": lambda x, w: x.repeat_interleave(2, 0),
    "diagonal": lambda x, w: x.diagonal(),
    "unbind": lambda x, w: x.unbind(0)[3],
    "pad": lambda x, w: F.pad(x, (0, 0, 1, 2)),
    "glu": lambda x, w: F.glu(x, 0),
    "expand": lambda x, w: x.expand(2, 16, 8),
    "dropout in evaluation": lambda x, w: F.dropout(x, 0.5, training=False),
    "embedding": lambda x, w: F.embedding((w[:, 0] * 0 + 5).long(), x),
}


def set_rows(x: torch.Tensor) -> torch.Tensor:
    x[3:5] = 1.0
    return x


def computes() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole, w = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), torch.ones(16, 16)
    for name, operation in OPERATIONS.items():
        for placement in (_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=4)):
            x = distribute_tensor(whole, mesh, [placement])
            mine = operation(x, distribute_tensor(w, mesh, [Replicate()]))
            expected = operation(whole, w) if name != "take" else whole[torch.tensor([3, 3])]
            assert mine.shape == expected.shape, name
            torch.testing.assert_close(mine.full_tensor(), expected, msg=lambda m, name=name: f"{name}: {m}")
        # What is drawn depends on the seed and on the element alone.
        torch.manual_seed(3)
        mine = F.dropout(x, 0.5), torch.rand_like(x)
        torch.manual_seed(3)
        replicated = x.redistribute(placements=[Replicate()])
        expected = F.dropout(replicated, 0.5), torch.rand_like(replicated)
        for a, b in zip(mine, expected, strict=True):
            assert torch.equal(a.full_tensor(), b.to_local())


def refuses() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(0), _StridedShard(0, split_factor=4)], [Replicate(), _StridedShard(1, split_factor=4)]):
        with pytest.raises(PlacementsError, match="equal pieces"):
            distribute_tensor(torch.ones(16, 6), mesh, placements)
    x = distribute_tensor(torch.ones(16, 6), mesh, [Replicate(), _StridedShard(-2, split_factor=4)])
    assert x.placements[1].dim == 0 and x._repr_html_() is None and "sf=4" in repr(x)
    with pytest.raises(LayoutError, match="not one box"):
        x._layout.box()


def saves(path: str) -> None:
    """A checkpoint has the tensor as it is, whatever placed it."""
    mesh = init_device_mesh("cpu", (2, 2))
    packed = _StridedShard(1, split_factor=3)
    whole = torch.randn(4, 12, 6, generator=torch.Generator().manual_seed(2))
    placements = [
        (Shard(0), packed),
        (packed, Replicate()),
        (_StridedShard(2, split_factor=3), packed),
        (Shard(1), Shard(1)),
        (Replicate(), Replicate()),
    ]
    checkpoint.save({str(i): distribute_tensor(whole, mesh, p) for i, p in enumerate(placements)}, checkpoint_id=path)
    for i, after in product(range(len(placements)), placements):
        x = distribute_tensor(torch.zeros_like(whole), mesh, after)
        checkpoint.load({str(i): x}, checkpoint_id=path)
        assert torch.equal(x.full_tensor(), whole), (placements[i], after)
    plain = {str(i): torch.zeros_like(whole) for i in range(len(placements))}
    checkpoint.load(plain, checkpoint_id=path)
    assert all(torch.equal(x, whole) for x in plain.values())


def shards_on() -> None:
    """`fully_shard` of a packed weight, along another dim, trains as one device; along the same dim it is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    alone = nn.Linear(6, 8, bias=False)
    model = copy.deepcopy(alone)
    weight = distribute_tensor(model.weight.detach(), mesh["tp"], [_StridedShard(1, split_factor=3)])
    model.weight = nn.Parameter(weight)
    fully_shard(model, mesh=mesh["dp"])
    assert model.weight.placements == (Shard(0), _StridedShard(1, split_factor=3))
    for step in range(2):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        for m, given in ((model, distribute_tensor(x, mesh["tp"], [Replicate()])), (alone, x)):
            m(given).square().mean().backward()
            torch.optim.SGD(m.parameters(), 0.5).step()
            m.zero_grad()
        torch.testing.assert_close(model.weight.full_tensor(), alone.weight)
    other = nn.Linear(6, 8, bias=False)
    other.weight = nn.Parameter(
        distribute_tensor(other.weight.detach(), mesh["tp"], [_StridedShard(0, split_factor=2)])
    )
    with pytest.raises(PlacementsError, match="no other mesh dim may cut"):
        fully_shard(other, mesh=mesh["dp"])


def test_it_is_what_its_name_says_and_moves_to_and_from_all_others():
    run_ranks(4, moves)


def test_a_layer_with_packed_weights_trains_as_on_one_device():
    run_ranks(4, trains)


def test_operations_compute_what_one_device_computes():
    run_ranks(2, computes)


def test_checkpoints_have_the_tensor_whatever_placed_it(tmp_path):
    run_ranks(4, saves, str(tmp_path / "packed"))


def test_fully_shard_cuts_another_dim():
    run_ranks(4, shards_on)


def test_what_it_cannot_be_raises():
    run_ranks(4, refuses)
