"""Attention over sequences spread over ranks, against attention on one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as by_another_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ranks import device_type, run_ranks
from terrazzo.errors import DTensorError
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.experimental import context_parallel, context_parallel_unshard
from terrazzo.tensor.experimental.ring_attention import TILE_ROWS, _tiles, head_tail

pytestmark = pytest.mark.on_late


def make(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def one_device(q, k, v, weight, **kwargs):
    q, k, v = (t.double().clone().requires_grad_() for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, **kwargs)
    (out * weight).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def close(actual, expected, dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-10}[dtype]
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def check_plain(world):
    mesh = init_device_mesh(device_type(), (world,))
    cases = [
        (torch.float32, True, (2, 3, 8 * world, 5), (2, 3, 8 * world, 5), {}),
        (torch.float32, False, (2, 3, 2 * world, 5), (2, 3, 6 * world, 5), {"scale": 0.3}),
        (torch.bfloat16, True, (1, 2, 4 * world, 8), (1, 2, 4 * world, 8), {}),
        (torch.float64, True, (2, 4, 4 * world, 3), (2, 2, 4 * world, 3), {"enable_gqa": True}),
        (torch.float32, True, (4, 4 * world, 3), (4, 4 * world, 3), {}),
    ]
    for dtype, causal, q_shape, kv_shape, options in cases:
        q, k, v, weight = make(q_shape, kv_shape, kv_shape, q_shape, dtype=dtype)
        expected = one_device(q, k, v, weight, is_causal=causal, **options)
        kept = [t.clone() for t in (q, k, v)]
        with context_parallel(mesh, buffers=[q, k, v, weight], buffer_seq_dims=[-2, -2, -2, len(q_shape) - 2]):
            assert q.shape[-2] * world == q_shape[-2]
            for t in (q, k, v):
                t.requires_grad_()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)
            (out * weight).sum().backward()
            results = [out, q.grad, k.grad, v.grad]
            whole = context_parallel_unshard(mesh, results, [-2] * 4)
            for t in (q, k, v):
                t.requires_grad_(False).grad = None
        for actual, expect in zip(whole, expected, strict=True):
            close(actual, expect, dtype)
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), kept, strict=True))


def check_distributed():
    mesh = init_device_mesh(device_type(), (4,))
    square = init_device_mesh(device_type(), (2, 2))
    cases = [
        (mesh, [Shard(2)], (2, 2, 7, 4), (2, 2, 7, 4), True, {}),
        (mesh, [Shard(2)], (1, 2, 5, 4), (1, 2, 9, 4), False, {}),
        (mesh, [Shard(2)], (1, 2, 3, 4), (1, 2, 3, 4), True, {}),  # a rank without rows
        (square, [Shard(0), Shard(2)], (3, 2, 6, 4), (3, 2, 6, 4), True, {}),
        (square, [Shard(2), Shard(1)], (1, 4, 6, 4), (1, 2, 6, 4), True, {"enable_gqa": True}),
        (square, [Shard(2), Shard(1)], (1, 3, 6, 4), (1, 1, 6, 4), True, {"enable_gqa": True}),
        (square, [Shard(2), Shard(2)], (1, 2, 9, 4), (1, 2, 9, 4), True, {}),
        (square, [Replicate(), Shard(2)], (1, 2, 5, 4), (1, 2, 5, 4), False, {}),
    ]
    for on, placements, q_shape, kv_shape, causal, options in cases:
        q, k, v, weight = make(q_shape, kv_shape, kv_shape, q_shape)
        expected = one_device(q, k, v, weight, is_causal=causal, **options)
        dq, dk, dv = (distribute_tensor(t, on, placements).requires_grad_() for t in (q, k, v))
        with context_parallel(mesh):
            out = F.scaled_dot_product_attention(dq, dk, dv, is_causal=causal, **options)
        assert type(out) is DTensor and out.placements[-1] != Partial() and out.shape == q.shape
        (out * distribute_tensor(weight, on, out.placements)).sum().backward()
        for actual, expect in zip((out, dq.grad, dk.grad, dv.grad), expected, strict=True):
            close(actual.full_tensor(), expect, torch.float32)
    # What is not sharded on the sequence goes the usual way.
    q, k, v = (distribute_tensor(t, mesh, [Shard(0)]) for t in make(*[(4, 2, 6, 4)] * 3))
    with CommDebugMode() as mode, context_parallel(mesh):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.placements == (Shard(0),) and mode.get_total_counts() == 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.project = nn.Linear(8, 8)
        self.recompute = False

    def attend(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (x, x * 2, x + 1))
        return by_another_name(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x):
        y = checkpoint(self.attend, x, use_reentrant=False) if self.recompute else self.attend(x)
        mixed, _ = self.attention(x, x, y, need_weights=False)
        return self.project(y + mixed)


def check_in_models():
    """Attention called by another name, from PyTorch's own modules, and again in backward."""
    mesh = init_device_mesh(device_type(), (2,))
    torch.manual_seed(0)
    model = Block().double()
    (x, weight) = make((2, 8, 8), (2, 8, 8), dtype=torch.float64)
    (model(x) * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    for recompute in (False, True):
        model.zero_grad()
        model.recompute = recompute
        with context_parallel(mesh, buffers=[x, weight], buffer_seq_dims=[1, 1]):
            (model(x) * weight).sum().backward()
        for name, p in model.named_parameters():
            total = DTensor.from_local(p.grad, mesh, [Partial()]).full_tensor()
            torch.testing.assert_close(total, expected[name], msg=name)
    assert F.scaled_dot_product_attention is by_another_name


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        found = [
            t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(result) if isinstance(t, torch.Tensor)
        ]
        self.elements = max([self.elements, *found])
        return result


def check_memory(world):
    """The largest tensor and what backward keeps fall with the ranks; no rank makes the whole score matrix."""
    mesh = init_device_mesh(device_type(), (world,))
    length, heads, features = 2048, 2, 8
    q, k, v = make(*[(1, heads, length, features)] * 3)
    kept = []

    def pack(t):
        kept.append(t.numel())
        return t

    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], no_restore_buffers={q, k, v}):
        for t in (q, k, v):
            t.requires_grad_()
        with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert q.shape[2] == length // world and q.untyped_storage().nbytes() == 4 * q.numel()
    return largest.elements, sum(kept)


def check_refusals():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("cp",))
    square = init_device_mesh(device_type(), (2, 1))
    x = torch.ones(2, 8)

    def entering(match, on=mesh, **kwargs):
        with pytest.raises(DTensorError, match=match), context_parallel(on, **kwargs):
            pass

    entering("one dim", on=square)
    entering("1 buffers, but 2", buffers=[x], buffer_seq_dims=[1, 1])
    entering("not among", buffers=[x], buffer_seq_dims=[1], no_restore_buffers={torch.ones(2)})
    entering("buffer 1 has 2 positions on dim 0.*multiple of 4", buffers=[x, x.clone()], buffer_seq_dims=[1, 0])
    entering("no dim 2", buffers=[x], buffer_seq_dims=[2])
    entering("Parameter", buffers=[nn.Parameter(x)], buffer_seq_dims=[1])
    entering("graph", buffers=[x.clone().requires_grad_() * 2], buffer_seq_dims=[1])
    q = torch.ones(1, 1, 3, 2)
    with context_parallel(mesh):
        with pytest.raises(DTensorError, match="two chunks"):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
        with pytest.raises(DTensorError, match="attn_mask"):
            F.scaled_dot_product_attention(q, q, q, torch.ones(3, 3))
        with pytest.raises(DTensorError, match="dropout_p"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        with pytest.raises(DTensorError, match="enable_gqa is False"):
            F.scaled_dot_product_attention(q.expand(1, 2, 3, 2), q, q)
        d = distribute_tensor(q, mesh, [Shard(2)])
        with pytest.raises(DTensorError, match="all be DTensors"):
            F.scaled_dot_product_attention(d, d, q)
    # An error leaves things as they were.
    with pytest.raises(ZeroDivisionError), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        assert x.shape == (2, 4)
        raise ZeroDivisionError
    assert x.shape == (2, 8) and F.scaled_dot_product_attention is by_another_name
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), q)
    out = q.clone().requires_grad_()
    with context_parallel(mesh):
        loss = F.scaled_dot_product_attention(out, q, q).sum()
    with pytest.raises(DTensorError, match="second derivative"):
        torch.autograd.grad(loss, out, create_graph=True)


def check_autocast():
    mesh = init_device_mesh(device_type(), (2,))
    q, k, v = make(*[(1, 2, 8, 4)] * 3)
    expected = F.scaled_dot_product_attention(*(t.bfloat16() for t in (q, k, v)), is_causal=True)
    half = torch.autocast(device_type(), torch.bfloat16)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]), half:
        out = F.scaled_dot_product_attention(q.requires_grad_(), k, v, is_causal=True)
        out.sum().backward()
        assert q.grad.dtype == torch.float32
        (whole,) = context_parallel_unshard(mesh, [out], [2])
    close(whole, expected.double(), torch.bfloat16)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_plain_tensors(world):
    run_ranks(world, check_plain, world)


def test_distributed_tensors():
    run_ranks(4, check_distributed)


def test_in_models():
    run_ranks(2, check_in_models)


def test_memory_falls_with_the_ranks():
    two, four = (run_ranks(world, check_memory, world) for world in (2, 4))
    assert len(set(two)) == len(set(four)) == 1
    assert four[0][0] <= two[0][0] * 0.55 and four[0][1] <= two[0][1] * 0.55, (two, four)
    assert two[0][0] <= 2 * TILE_ROWS * 1024  # heads x tile x keys of a rank, not 1024 x 1024


def test_refusals():
    run_ranks(2, check_refusals)


def test_autocast():
    run_ranks(2, check_autocast)


def test_head_and_tail_share_the_sequence_and_the_work():
    for ranks in (1, 2, 3, 4):
        held = [
            [p for start, n in head_tail(rank, ranks, 24) for p in range(start, start + n)] for rank in range(ranks)
        ]
        assert sorted(p for positions in held for p in positions) == list(range(24))
        assert len({sum(p + 1 for p in positions) for positions in held}) == 1  # pairs of a query and a key it sees


def test_tiles_cover_what_is_visible_once():
    queries, length = ((3, 300), (700, 10)), 600
    keys = ((0, 5), (290, length - 5))
    for is_causal in (False, True):
        q_at = [p for start, n in queries for p in range(start, start + n)]
        k_at = [p for start, n in keys for p in range(start, start + n)]
        expected = torch.tensor(q_at)[:, None] >= torch.tensor(k_at)[None, :] if is_causal else torch.ones(310, 600)
        seen = torch.zeros(1, len(q_at), len(k_at))
        for tile in _tiles(queries, keys, is_causal):
            rows, columns = tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start
            assert rows <= TILE_ROWS
            scores = tile.mask(torch.zeros(rows, columns), seen)
            seen[:, tile.rows, tile.keys] += scores.exp()
        assert torch.equal(seen[0], expected.float())
