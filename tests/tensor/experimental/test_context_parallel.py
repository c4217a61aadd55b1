"""Attention over sequences spread over ranks, against attention on one device."""

from unittest import mock

import pytest
import torch
import torch.nn.attention.flex_attention
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as by_another_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ranks import device_type, run_ranks
from terrazzo._torch.attention import kernel_for
from terrazzo.errors import DTensorError
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.experimental import context_parallel, context_parallel_unshard, local_map, set_rotate_method
from terrazzo.tensor.experimental.ring_attention import TILE_ROWS, _tiles, head_tail
from terrazzo.tensor.ops import attention

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


WAYS = [("ring", "alltoall"), ("ring", "allgather"), ("ulysses", "alltoall")]


def masks(*shapes):
    """A mask of each kind: what is seen, what is added, a padded batch; some queries see no key."""
    seen, added, padding = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3 for shape in shapes)
    seen[..., 1, :] = False
    return seen, torch.zeros(added.shape).masked_fill(~added, torch.finfo(torch.float32).min), padding


def check_plain(world):
    mesh = init_device_mesh(device_type(), (world,))
    n = 4 * world
    seen, added, padding = masks((n, n), (2, 4, n, n), (2, 1, 1, n))
    far = torch.zeros(n, n).masked_fill(~seen, -1e6)  # one query sees every key alike, from far away
    added[:, :, :, 0] = 0.5  # a query that sees nothing would have the mean of the values on one device
    cases = [
        (torch.float32, (2, 4, 8 * world, 5), (2, 4, 8 * world, 5), {"is_causal": True}),
        (torch.float32, (2, 4, 2 * world, 5), (2, 4, 6 * world, 5), {"scale": 0.3}),
        (torch.bfloat16, (1, 4, n, 8), (1, 4, n, 8), {"is_causal": True}),
        (torch.float64, (2, 8, n, 3), (2, 2, n, 3), {"enable_gqa": True, "is_causal": True}),
        (torch.float32, (4, n, 3), (4, n, 3), {"is_causal": True}),
        (torch.float32, (2, 4, n, 5), (2, 4, n, 5), {"attn_mask": seen}),
        (torch.float32, (2, 4, n, 5), (2, 4, n, 5), {"attn_mask": added}),
        (torch.float64, (2, 4, n, 5), (2, 2, n, 5), {"attn_mask": padding, "enable_gqa": True}),
        (torch.float32, (2, 4, n, 5), (2, 4, n, 5), {"attn_mask": far}),
    ]
    for method, rotate in WAYS:
        set_rotate_method(rotate)
        for dtype, q_shape, kv_shape, options in cases:
            q, k, v, weight = make(q_shape, kv_shape, kv_shape, q_shape, dtype=dtype)
            mask = options.get("attn_mask")
            if mask is far and (world == 1 or method == "ulysses"):
                continue  # PyTorch's attention, where in float32 such a query's scores are rounded away
            reference = {**options, "attn_mask": mask.double() if mask is added or mask is far else mask}
            expected = one_device(q, k, v, weight, **reference)
            kept = [t.clone() for t in (q, k, v)]
            buffers = [q, k, v, weight]
            if mask is not None and mask.shape[-2] > 1:
                buffers.append(mask)
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[-2] * len(buffers), method=method):
                assert q.shape[-2] * world == q_shape[-2]
                for t in (q, k, v):
                    t.requires_grad_()
                out = F.scaled_dot_product_attention(q, k, v, **options)
                (out * weight).sum().backward()
                results = [out, q.grad, k.grad, v.grad]
                whole = context_parallel_unshard(mesh, results, [-2] * 4)
                for t in (q, k, v):
                    t.requires_grad_(False).grad = None
            for actual, expect in zip(whole, expected, strict=True):
                close(actual, expect, dtype)
            assert all(torch.equal(a, b) for a, b in zip((q, k, v), kept, strict=True))
    set_rotate_method("alltoall")


def check_dropout(world):
    """With Ulysses each rank has whole rows, so what attention drops is what one device drops of its heads."""
    mesh = init_device_mesh(device_type(), (world,))
    q, k, v = make(*[(1, world, 4 * world, 4)] * 3)
    whole = [t.clone() for t in (q, k, v)]
    torch.manual_seed(3)
    rank = mesh.get_local_rank()
    expected = F.scaled_dot_product_attention(*[t.chunk(world, 1)[rank] for t in whole], dropout_p=0.5, is_causal=True)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3, method="ulysses"):
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)
        (out,) = context_parallel_unshard(mesh, [out], [2])
    torch.testing.assert_close(out.chunk(world, 1)[rank], expected)
    with pytest.raises(NotImplementedError, match="allgather"):
        set_rotate_method("broadcast")


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
    seen, added, padding = masks((5, 9), (3, 2, 6, 6), (3, 1, 1, 6))
    added[..., 0] = 0.5
    cases += [
        (mesh, [Shard(2)], (1, 2, 5, 4), (1, 2, 9, 4), False, {"attn_mask": seen}),
        (square, [Shard(0), Shard(2)], (3, 2, 6, 4), (3, 2, 6, 4), False, {"attn_mask": added}),
        (square, [Shard(2), Shard(0)], (3, 2, 6, 4), (3, 2, 6, 4), False, {"attn_mask": padding}),
    ]
    for case, (method, rotate) in [(case, way) for case in cases for way in WAYS]:
        set_rotate_method(rotate)
        on, placements, q_shape, kv_shape, causal, options = case
        q, k, v, weight = make(q_shape, kv_shape, kv_shape, q_shape)
        mask = options.get("attn_mask")
        options = dict(options)
        expected_options = {**options, "attn_mask": mask.double() if mask is added else mask}
        expected = one_device(q, k, v, weight, is_causal=causal, **expected_options)
        if mask is not None:
            options["attn_mask"] = distribute_tensor(mask, on)
        dq, dk, dv = (distribute_tensor(t, on, placements).requires_grad_() for t in (q, k, v))
        with context_parallel(mesh, method=method):
            out = F.scaled_dot_product_attention(dq, dk, dv, is_causal=causal, **options)
        assert type(out) is DTensor and out.placements[-1] != Partial() and out.shape == q.shape
        (out * distribute_tensor(weight, on, out.placements)).sum().backward()
        for actual, expect in zip((out, dq.grad, dk.grad, dv.grad), expected, strict=True):
            close(actual.full_tensor(), expect, torch.float32)
    set_rotate_method("alltoall")
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


def check_dropout_of_dtensors(at_once):
    """The values do not depend on placements, nor on how many queries are computed at a time where nothing drops."""
    mesh = init_device_mesh(device_type(), (2,))
    before, attention.SCORES_AT_ONCE = attention.SCORES_AT_ONCE, at_once
    try:
        length = 48
        q, k, v, weight = make(*[(2, 2, length, 4)] * 4)
        seen = torch.rand(length, length, generator=torch.Generator().manual_seed(2)) > 0.4
        for causal, mask, p in ((True, None, 1e-9), (False, seen, 1e-9), (False, None, 0.5), (True, None, 0.5)):
            found = []
            for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
                dq, dk, dv = (distribute_tensor(t, mesh, [placement]).requires_grad_() for t in (q, k, v))
                placed = None if mask is None else distribute_tensor(mask, mesh)
                torch.manual_seed(5)
                with LargestTensor() as largest:
                    out = F.scaled_dot_product_attention(dq, dk, dv, placed, p, causal)
                    (out * distribute_tensor(weight, mesh, out.placements)).sum().backward()
                if at_once < length * length:
                    assert largest.elements < 4 * length * length, "no scores of all queries"
                found.append([t.full_tensor() for t in (out.detach(), dq.grad, dk.grad, dv.grad)])
            for other in found[1:]:
                for a, b in zip(other, found[0], strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            if p < 0.1:
                for a, b in zip(found[0], one_device(q, k, v, weight, attn_mask=mask, is_causal=causal), strict=True):
                    torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
            else:
                assert (found[0][0] - one_device(q, k, v, weight, is_causal=causal)[0]).abs().max() > 0.1
        prime = distribute_tensor(q[:, :, :47], mesh, [Shard(2)])
        with mock.patch.object(attention, "_attend_rows", wraps=attention._attend_rows) as attend:
            F.scaled_dot_product_attention(prime, prime, prime, dropout_p=0.5)
        assert attend.call_count == 1, "not once for each query"
    finally:
        attention.SCORES_AT_ONCE = before


@pytest.mark.parametrize("at_once", [1 << 20, 48 * 8])
def test_dropout_of_dtensors(at_once):
    run_ranks(2, check_dropout_of_dtensors, at_once)


class Flex(nn.Module):
    """A block of `fully_shard` that calls it on plain tensors."""

    def __init__(self, flex, score):
        super().__init__()
        self.flex, self.score, self.weight = flex, score, nn.Parameter(torch.eye(16))

    @torch.no_grad()
    def forward(self, q, k, v):
        return self.flex(q @ self.weight, k, v, self.score, enable_gqa=True)


def check_flex(world):
    """PyTorch has no backward of it on a CPU, and none of it on the late device."""
    if device_type() != "cpu":
        return
    module = torch.nn.attention.flex_attention
    by_name = module.flex_attention
    mesh = init_device_mesh("cpu", (world,))
    length, heads = 128 * world, 4
    slopes = torch.linspace(0, 1, heads)

    def score(s, b, h, i, j):
        return s + slopes[h] * (j - i)

    q, k, v = make((2, heads, length, 16), (2, 2, length, 16), (2, 2, length, 16))
    masks = [
        None,
        module.create_block_mask(lambda b, h, i, j: i >= j + h * b, 2, heads, length, length, device="cpu"),
    ]
    for mask in masks:
        expected = by_name(q, k, v, score, mask, enable_gqa=True)
        for method in ("ring", "ulysses"):
            with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3, method=method):
                out = module.flex_attention(q, k, v, score, mask, enable_gqa=True)
                (out,) = context_parallel_unshard(mesh, [out], [2])
                with pytest.raises(DTensorError, match="imported before"):
                    by_name(q, k, v)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert module.flex_attention is by_name
    parts = [distribute_tensor(t, mesh, [Shard(0)]) for t in (q, k, v)]
    with pytest.raises(DTensorError, match="local_map"):
        by_name(*parts, score, enable_gqa=True)
    mapped = local_map(by_name, [Shard(0)], ([Shard(0)],) * 3 + (None,) * 4)
    torch.testing.assert_close(
        mapped(*parts, score, None, None, True).full_tensor(), by_name(q, k, v, score, enable_gqa=True)
    )
    expected = Flex(by_name, score)(q, k, v)
    sharded = fully_shard(Flex(torch.compile(by_name, backend="aot_eager", fullgraph=True), score))
    torch.testing.assert_close(sharded(q, k, v), expected, rtol=1e-4, atol=1e-5)


def test_flex_attention():
    run_ranks(2, check_flex, 2)


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
        x = torch.ones(1, 1, 4, 2)
        with pytest.raises(DTensorError, match=r"mask has shape \(4, 4\).*4, this rank's queries.*8, the keys"):
            F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4))
        with pytest.raises(DTensorError, match="attn_mask or is_causal"):
            F.scaled_dot_product_attention(x, x, x, torch.ones(4, 8), is_causal=True)
        with pytest.raises(DTensorError, match="dropout_p"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        with pytest.raises(DTensorError, match="enable_gqa is False"):
            F.scaled_dot_product_attention(q.expand(1, 2, 3, 2), q, q)
        d = distribute_tensor(q, mesh, [Shard(2)])
        with pytest.raises(DTensorError, match="all be DTensors"):
            F.scaled_dot_product_attention(d, d, q)
    entering("'ring' or 'ulysses'", method="both")
    with context_parallel(mesh, method="ulysses"), pytest.raises(DTensorError, match="2 ranks can share evenly"):
        F.scaled_dot_product_attention(q, q, q)
    x = torch.ones(2, 8)
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


def test_dropout():
    run_ranks(2, check_dropout, 2)


def test_distributed_tensors():
    run_ranks(4, check_distributed)


def test_in_models():
    run_ranks(2, check_in_models)


def test_memory_falls_with_the_ranks():
    two, four = (run_ranks(world, check_memory, world) for world in (2, 4))
    assert len(set(two)) == len(set(four)) == 1
    assert four[0][0] <= two[0][0] * 0.55 and four[0][1] <= two[0][1] * 0.55, (two, four)
    assert two[0][0] <= 2 * 2 * 1024 * 8 * 2  # both halves of a packed block of 2 heads, not scores of 1024 x 1024


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
    q = torch.zeros(1, 1, 310, 4)
    fused, products = kernel_for(q, q, False), kernel_for(q, q[..., :2], False)
    assert fused.fused and not products.fused
    length = 600
    for queries, keys in (
        (((3, 300), (700, 10)), ((0, 5), (290, length - 5))),
        (((0, 300), (700, 10)), ((0, 300), (700, 10))),
    ):
        q_at = torch.tensor([p for start, n in queries for p in range(start, start + n)])
        k_at = torch.tensor([p for start, n in keys for p in range(start, start + n)])
        for is_causal in (False, True):
            expected = q_at[:, None] >= k_at if is_causal else torch.ones(len(q_at), len(k_at), dtype=torch.bool)
            for kernel in (fused, products):
                seen = torch.zeros(len(q_at), len(k_at))
                for tile in _tiles(queries, keys, is_causal, kernel):
                    part = seen[tile.rows, tile.keys]
                    bias = tile.bias(None, q)
                    assert kernel.fused or part.shape[0] <= TILE_ROWS
                    visible = torch.ones_like(part) if bias is None else bias[0, 0].exp()
                    part += visible.tril() if tile.causal else visible
                assert torch.equal(seen, expected.float())
