"""Random programs of views, indices, writes and redistributions are as on one device, or raise a typed error.

Here few run, and those that were wrong once. `make proofs` runs ten thousand; `python -m tests.tensor.fuzz` runs
others, or one from a file.
"""

from __future__ import annotations

import pytest

from tests.tensor.fuzz.program import Program
from tests.tensor.fuzz.run import Finding, make, run, shrink, verdict_of


@pytest.mark.parametrize("programs", [30, pytest.param(150, marks=pytest.mark.long)])
def test_programs_are_as_on_one_device(programs):
    found = [Finding(program, v.fault, v.at) for program, v in run(make(programs)) if v.fault]
    assert not found, "\n\n".join(map(str, found[:3]))


WERE_WRONG: list[tuple[tuple[int, ...], tuple[str, ...]]] = [
    (
        (2, 2),
        (
            "v4 = leaf((2, 4), 'float32', Shard(0), Shard(1), grad=True)",
            "v6 = v4.contiguous(memory_format=torch.contiguous_format)",
        ),
    ),
    (
        (4,),
        (
            "v0 = leaf((1,), 'float32', Shard(0))",
            "v1 = v0[None, 0] * 2",
            "v2 = leaf((1, 3), 'float32', Shard(0))[None, 0]",
        ),
    ),
    ((4,), ("v1 = leaf((8, 3), 'float32', Shard(1))", "torch.reshape(v1[:8, 0:0], (0,)).cumsum_(-1)")),
    (
        (2, 2),
        (
            "v2 = leaf((4, 5, 6), 'float32', Shard(1), Shard(1))",
            "torch.nn.init.ones_(torch.flatten(v2.moveaxis(1, -3), start_dim=-2))",
        ),
    ),
    (
        (2, 2),
        (
            "v0 = leaf((3, 3), 'float32', Shard(0), Shard(1))",
            "v3 = v0.T[:2,]",
            "v3.unsqueeze(dim=0).contiguous().scatter_(-1, index([[[2], [2]]], Replicate(), Replicate()), 8)",
        ),
    ),
    (
        (2, 2),
        (
            "v0 = leaf((3, 4, 3), 'float32', Shard(0), Shard(2))",
            "v1 = v0.permute(2, 0, 1)",
            "v1.contiguous().zero_()",
            "v1.permute(1, 2, 0).contiguous().neg_()",
            "v1.transpose(0, 1).reshape(-1).zero_()",
        ),
    ),
    (
        (2, 2),
        (
            "v0 = leaf((3, 3), 'float32', Shard(0), Shard(1), grad=True)",
            "v1 = (v0 * 2).T",
            "v1.mul_(3)",
            "v1.contiguous().mul_(2)",
            "v2 = v1.exp().movedim(0, 1)",
            "v2.contiguous().mul_(2)",
        ),
    ),
    (
        (4,),
        (
            "v2 = leaf((5, 1, 4), 'float32', Shard(0))",
            "with torch.no_grad(): v2.tensor_split([1], -1)[0].to(torch.int64).detach_()",
        ),
    ),
    (
        (2,),
        (
            "v0 = leaf((2,), 'float32', Replicate(), grad=True)",
            "v11, *_ = torch.chunk(v0 * 1, chunks=2, dim=-1)",
            "v11[[0, 1]] = 9",
        ),
    ),
    (
        (4,),
        (
            "v2 = leaf((2,), 'bfloat16', Shard(0))",
            "v3 = torch.broadcast_to(v2, (2, -1)).view(torch.int32)",
            "q = v3.is_contiguous()",
        ),
    ),
    ((2,), ("v0 = leaf((8, 3), 'float32', Replicate())", "torch.unsafe_chunk(v0, 1)[0].detach_()")),
    (
        (2,),
        (
            "v4 = leaf((6,), 'float32', Replicate(), grad=True)",
            "v7, v8, *_ = v4.split([4, 2], dim=-1)",
            "with torch.no_grad(): torch.neg_(torch.unsafe_chunk(v7, 1)[0])",
        ),
    ),
    ((4,), ("v2 = leaf((2, 6, 4), 'float32', Shard(0))", "v2.swapaxes(-1, 1).roll(1, -1).view(2, 24).zero_()")),
    (
        (2,),
        (
            "v0 = leaf((1, 1, 3), 'float32', Shard(0))",
            "v2 = v0[torch.Size([0])]",
            "v3 = torch.reshape(v0, (-1, 1, 1, 3))",
            "v3.unsqueeze_(0)",
            "v3.data[-1, -1, 0, :0:3] = leaf((3,), 'float32', Replicate())",
        ),
    ),
    ((2,), ("v0 = leaf((3, 6), 'float32', Shard(0))", "v1 = v0.T.exp()", "v1.contiguous().zero_()")),
    ((2,), ("v0 = leaf((3, 6), 'float32', Shard(0))", "v1 = v0.T + v0.T", "v1.reshape(-1).zero_()")),
    ((2,), ("v0 = leaf((3, 6), 'float32', Shard(0))", "v1 = torch.copysign(v0.T, v0[0, 0])", "v1.flatten().neg_()")),
    ((2,), ("v0 = leaf((3, 6), 'float32', Shard(0), grad=True)", "v1 = v0.T.relu() * 2", "v1.contiguous().mul_(3)")),
    (
        (2, 2),
        (
            "v0 = leaf((3, 3), 'float32', Replicate(), Shard(1))",
            "v3 = v0.T[:2,]",
            "v3.unsqueeze(dim=0).contiguous().scatter_(-1, index([[[2], [2]]], Replicate(), Replicate()), 8)",
        ),
    ),
    ((2,), ("v0 = leaf((1, 4), 'float32', Shard(1))", "v0[-1, None] = v0")),
    ((2,), ("v0 = leaf((1, 4), 'float32', Shard(1))", "v0[-1, None].add_(v0)")),
    ((2,), ("v0 = leaf((1, 4), 'float32', Shard(1))", "v0[-1, None].copy_(v0)")),
    ((2,), ("v0 = leaf((2, 4), 'float32', Shard(0))", "v0[:, None].mul_(v0[:, None])")),
    (
        (4,),
        ("v0 = leaf((5,), 'complex64', Shard(0))", "v1 = v0.real[0:4:1]", "v2 = v1.as_strided((2,), (1,))"),
    ),
    (
        (2,),
        (
            "v0 = leaf((4, 5), 'float64', Replicate())",
            "torch.where(v0 > 0, leaf((4, 5), 'float32', Replicate()), leaf((4, 5), 'float32', Replicate()), out=v0)",
        ),
    ),
    (
        (2, 2),
        (
            "v0 = leaf((2, 3), 'float32', Shard(1), Shard(0))",
            "v1 = v0[[False, True]]",
            "v2 = place(v1, Shard(1), Replicate())",
            "torch.add(leaf((2, 2, 3), 'float32', Shard(0), Replicate()), v2, out=torch.broadcast_to(v1, (2, 2, -1)))",
        ),
    ),
    ((2,), ("v0 = leaf((4, 3, 5), 'float32', Shard(0))", "torch.Tensor.zero_(v0[..., -4:][-3,].flatten())")),
    ((2,), ("v0 = leaf((4, 3, 5), 'float32', Shard(0))", "torch.Tensor.zero_(v0[-3,].flatten())")),
    (
        (4,),
        ("v0 = leaf((6, 5, 1), 'float32', Shard(1))", "v1 = v0 * 1", "v1.swapdims(-1, -2).ceil_()"),
    ),
    (
        (4,),
        (
            "v0 = leaf((4, 3), 'float64', Shard(1))",
            "v1 = v0.split(3, -1)[0].flatten()",
            "v1.swapdims(-1, -1).contiguous().clamp_(-3, 4)",
        ),
    ),
    ((2,), ("v0 = leaf((3, 4), 'bool', Shard(0))", "q = int(v0.argmax())")),
    ((2, 2), ("v0 = leaf((2,), 'complex64', Shard(0), Shard(0))", "q = v0.max().item()")),
    (
        (4,),
        (
            "v0 = leaf((6, 5), 'float32', Shard(0))",
            "torch.broadcast_to(v0, (2, -1, -1))[None].zero_()",
            "torch.broadcast_to(v0, (2, -1, -1)).fill_(7)",
            "torch.broadcast_to(v0, (2, -1, -1)).fill_(torch.tensor(3))",
            "torch.broadcast_to(v0, (2, -1, -1)).masked_fill_(v0 > 0, 3)",
        ),
    ),
    (
        (2,),
        ("v0 = leaf((6,), 'float32', Replicate(), grad=True)", "v0.diag().split([4, 2], -1)[1].swapaxes_(0, 0)"),
    ),
    ((2,), ("v0 = leaf((1, 5, 5), 'int64', Shard(0))", "v0.unfold(1, 1, 3).as_strided((2,), (1,)).clamp_(-3, 4)")),
    ((4,), ("v0 = leaf((6, 3, 5), 'float32', Replicate(), grad=True)", "with torch.no_grad(): v0[1].transpose_(0, 0)")),
    ((4,), ("v0 = leaf((3, 1), 'bool', Replicate())", "torch.movedim(v0, 1, -2)[..., -1, 1].cumsum_(0)")),
    ((4,), ("v0 = leaf((3, 5), 'int8', Shard(0))", "v0.cumprod_(0)")),
    ((2,), ("v0 = leaf((3, 1), 'float32', Shard(0))", "v1 = v0.narrow(-1, 1, 0)", "v1[(1, 0)] = 9")),
    (
        (2, 2),
        ("v0 = leaf((4, 6), 'float32', Replicate(), Replicate(), grad=True)", "v1 = v0[1:0:3,]", "v1[[1]] = 4"),
    ),
    (
        (4,),
        (
            "v0 = leaf((3, 8), 'float32', Shard(1), grad=True)",
            "v1 = v0 * 1",
            "with torch.no_grad(): v0.t_()",
            "v2 = v0 * 3",
        ),
    ),
    ((4,), ("v0 = leaf((1,), 'float32', Replicate(), grad=True)", "torch.unsqueeze(v0, dim=0).swapaxes_(-1, 0)")),
    (
        (2,),
        ("v0 = leaf((5,), 'float32', Replicate(), grad=True)", "v1 = torch.atleast_3d(v0)", "v1[[0, 1]] = 7"),
    ),
    ((2,), ("v0 = leaf((1, 3), 'complex64', Shard(0))", "q = int(v0.argmax())")),
    ((4,), ("v0 = leaf((3,), 'float32', Replicate(), grad=True)", "v0[False] = 7")),
    (
        (4,),
        (
            "v0 = leaf((4, 4, 3), 'float32', Shard(2))",
            "v0[True, [3], -4:7:3, ..., None].index_add_(-1, index([0], Replicate()), "
            "leaf((1, 2, 3, 1), 'float32', Shard(0)))",
        ),
    ),
    (
        (2, 2),
        (
            "v1 = leaf((4,), 'float32', Replicate(), Shard(0))",
            "v4 = v1[..., 0].conj_physical()",
            "F.relu(v4, inplace=True)",
        ),
    ),
    ((2,), ("v0 = leaf((3, 5, 8), 'float32', Replicate())", "v7 = v0[1.0]")),
    ((2,), ("v0 = leaf((3, 5), 'float32', Shard(1))", "v0[True] = torch.tensor(3)")),
    ((2,), ("v0 = leaf((2, 2), 'complex64', Replicate())", "v0[v0 == 3].bernoulli_(1.0)")),
    ((4,), ("v0 = leaf((4, 2), 'float32', Shard(0))", "copy.copy(v0.as_strided((2,), (1,))).abs_()")),
    ((4,), ("v0 = leaf((6, 3, 5), 'float32', Shard(2))", "torch.broadcast_to(v0, (2, 6, -1, -1)).conj_physical_()")),
    (
        (4,),
        (
            "v0 = leaf((4, 6), 'float32', Replicate(), grad=True)",
            "with torch.no_grad(): v0.squeeze_()",
        ),
    ),
    (
        (2, 2),
        (
            "v0 = leaf((4, 3), 'float32', Replicate(), Replicate(), grad=True)",
            "v0.swapaxes_(-1, 0)",
        ),
    ),
    (
        (2,),
        (
            "v0 = leaf((4, 1), 'int32', Replicate())",
            "v3 = v0.float()",
            "v0[False] = v3",
        ),
    ),
    (
        (2,),
        (
            "v0 = leaf((4, 6), 'float32', Shard(0), grad=True)",
            "v2 = v0[-1:4:1].view(6, 1).T",
            "v2[torch.Size([1, 0])] = 4",
        ),
    ),
    (
        (4,),
        (
            "v0 = leaf((8, 3, 1), 'float32', Shard(1))",
            "v1 = v0 * 1",
            "v1.zero_()",
        ),
    ),
    (
        (2, 2),
        (
            "v4 = leaf((4, 4, 2), 'float32', Replicate(), Replicate(), grad=True)",
            "v4[::-1] = 1",
        ),
    ),
    (
        (2, 2),
        (
            "v0 = leaf((2, 4), 'float32', Replicate(), Replicate(), grad=True)",
            "v0[slice(0, 2, 0)] = 1",
        ),
    ),
    (
        (2, 2),
        (
            "v4 = leaf((4, 6, 2), 'float32', Replicate(), Replicate(), grad=True)",
            "v4[3.0] = 1",
        ),
    ),
    (
        (4,),
        (
            "v0 = leaf((3, 3), 'float32', Shard(1))",
            "v0.long().add_(v0)",
        ),
    ),
    (
        (2, 2),
        (
            "v0 = leaf((2, 2), 'float32', Replicate(), Replicate(), grad=True)",
            "v1 = v0 * 1",
            "v1.bernoulli_(1.0)",
        ),
    ),
    (
        (4,),
        (
            "v0 = leaf((3, 4, 4), 'float32', Replicate())",
            "v1 = torch.Tensor.float(v0.take_along_dim(index([8], Replicate())))",
            "v4 = place(v1, Shard(0))",
            "v4.expand((2, -1))[[True, False]] = v1",
        ),
    ),
    (
        (2,),
        (
            "v0 = leaf((1, 2), 'float32', Shard(0))",
            "v3 = v0[(0, 1)]",
            "with torch.no_grad(): v0.bernoulli_(1.0)",
        ),
    ),
    (
        (2,),
        (
            "v0 = leaf((4, 8), 'complex64', Shard(1))",
            "v2 = v0.flatten()",
            "torch.squeeze(input=v0[None, -3].data).index_copy_(-1, index([3], Replicate()), "
            "leaf((1,), 'complex64', Replicate()))",
        ),
    ),
    (
        (2, 2),
        (
            "v0 = leaf((2, 8, 6), 'float32', Shard(1), Replicate())",
            "v2 = copy.copy(v0.as_strided((2,), (1,)))",
            "v2[1,] = 3",
        ),
    ),
    (
        (2, 2),
        (
            "v2 = leaf((1, 8, 8), 'float32', Replicate(), Replicate())",
            "v6 = v2[index(0, Replicate(), Replicate()), :-1:2, index([[-5], [5]], Replicate(), Replicate())]",
        ),
    ),
    (
        (4,),
        (
            "v0 = leaf((3,), 'float32', Replicate(), grad=True)",
            "v0.squeeze_()",
        ),
    ),
]


def test_what_was_wrong_once():
    found = [Finding(p, v.fault, v.at) for p, v in run([Program(mesh, steps) for mesh, steps in WERE_WRONG]) if v.fault]
    assert not found, "\n\n".join(map(str, found))


@pytest.mark.parametrize(
    "steps, fault",
    [
        # On one device there is no `_local`.
        (("v0 = leaf((4, 3), 'float32', Shard(0))", "v1 = getattr(v0, '_local', v0)"), "v1 is a Tensor"),
        (("v0 = leaf((4, 3), 'float32', Shard(0))", "v0._local.add_(1)"), "one device raises AttributeError"),
        (("v0 = leaf((4, 3), 'float32', Shard(0))", "q = getattr(v0, '_local', v0).shape"), "instead of"),
        (("v0 = leaf((4, 3), 'float32', Replicate())", "getattr(v0, '_local', v0[1:1]).add_(1)"), "v0 is [["),
        (("v0 = leaf((4, 3), 'float32', Shard(0))", "v0[:1 if hasattr(v0, '_local') else 2].zero_()"), "v0 is [["),
        (("v0 = leaf((4,), 'float32', Shard(0), grad=True)", "v1 = v0 * (1 + hasattr(v0, '_local'))"), "v1 is ["),
    ],
)
def test_what_differs_is_found(steps, fault):
    assert fault in verdict_of(Program((2,), steps)).fault


def test_a_failing_program_is_cut_down():
    steps = ("v0 = leaf((4, 3), 'float32', Shard(0))", "v1 = v0.t()[1:]", "v2 = v0 * 2", "v0._local[0].neg_()")
    assert shrink(Program((2,), steps), "").program.steps == ("v0 = leaf((4, 3), 'float32', Replicate())", "v0._local")
