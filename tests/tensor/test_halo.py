"""Convolutions and pooling of images whose rows or columns are sharded: as one device, and for the bytes of a halo."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ranks import run_ranks
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.dispatch.fallback import ReplicationWarning

CONVOLUTIONS = {
    1: (F.conv1d, (9,), (3,)),
    2: (F.conv2d, (10, 9), (3, 2)),
    3: (F.conv3d, (6, 5, 7), (2, 3, 3)),
}
OPTIONS = [
    {},
    {"padding": 1},
    {"stride": 2, "padding": 1},
    {"stride": 3},
    {"dilation": 2, "padding": 2},
    {"padding": "same"},
    {"padding": "same", "dilation": 2},
    {"padding": "valid", "stride": 2},
    {"padding": 1, "groups": 2},
    {"stride": 2, "padding": 1, "dilation": 2},
]


def compare(f, tensors, placements, mesh, name, second_order=False):
    """`f` of distributed tensors is `f` of whole ones, and so are its gradients; nothing is gathered for it."""
    whole = [t.clone().requires_grad_() for t in tensors]
    parts = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(tensors, placements, strict=True)]
    expected = f(*whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        result = f(*parts)
    torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")
    generator = torch.Generator().manual_seed(5)
    cotangent = torch.randn(expected.shape, generator=generator)
    given = distribute_tensor(cotangent, mesh, [Replicate()] * mesh.ndim)
    mine = torch.autograd.grad(result, parts, given, create_graph=second_order)
    theirs = torch.autograd.grad(expected, whole, cotangent, create_graph=second_order)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-4, atol=1e-4, msg=lambda m: f"gradient of {name}: {m}")
    if second_order:
        mine = torch.autograd.grad(sum((g * g).sum() for g in mine), parts)
        theirs = torch.autograd.grad(sum((g * g).sum() for g in theirs), whole)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.full_tensor(), b, rtol=1e-3, atol=1e-3, msg=lambda m: f"second {name}: {m}")
    return result


def check_convolutions(n: int) -> None:
    f, size, kernel = CONVOLUTIONS[n]
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    for options in OPTIONS:
        x = torch.randn(2, 4, *size)
        w, b = torch.randn(6, 4 // options.get("groups", 1), *kernel), torch.randn(6)
        last = 1 + n
        layouts = [(line, [Shard(2)]), (line, [Shard(last)]), (square, [Shard(0), Shard(2)])]
        if n == 2:  # what does not depend on the number of dims
            layouts += [(square, [Shard(2), p]) for p in (Shard(2), Replicate(), Shard(1))]
        if n > 1:
            layouts += [(square, [Shard(2), Shard(3)]), (square, [Shard(3), Shard(2)])]
        for mesh, placements in layouts:
            name = f"{f.__name__} {options} {placements}"
            whole = [Replicate()] * mesh.ndim
            result = compare(
                lambda x, w, b, options=options: f(x, w, b, **options),
                [x, w, b],
                [placements, whole, whole],
                mesh,
                name,
            )
            spatial = [p for p in placements if p.is_shard() and p.dim >= 2]
            assert [p for p in result.placements if p in spatial] == spatial, name


def check_what_is_small() -> None:
    """Rows fewer than ranks, windows larger than shards or in the padding alone, empty batches, weights in parts."""
    mesh, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    torch.manual_seed(1)
    for rows, kernel, stride, padding in product((1, 2, 3, 5), (1, 2, 5), (1, 2, 4), (0, 1, 5)):
        if rows + 2 * padding < kernel:
            continue
        x, w = torch.randn(2, 3, rows, 4), torch.randn(2, 3, kernel, 3)
        compare(
            lambda x, w, s=stride, p=padding: F.conv2d(x, w, None, s, (p, 1)),
            [x, w], [[Shard(2)], [Replicate()]], mesh,
            f"{rows} rows, kernel {kernel}, stride {stride}, padding {padding}",
        )  # fmt: skip
    image = torch.randn(3, 7, 6)
    compare(
        lambda x, w: F.conv2d(x, w, padding=1),
        [image, torch.randn(2, 3, 3, 3)],
        [[Shard(1)], [Replicate()]],
        mesh,
        "one",
    )
    empty = distribute_tensor(torch.randn(0, 3, 7, 6), mesh, [Shard(2)])
    weight = distribute_tensor(torch.randn(2, 3, 3, 3), mesh, [Replicate()])
    assert F.conv2d(empty, weight, padding=1).shape == (0, 2, 7, 6)
    x, w, b = torch.randn(2, 4, 9, 5), torch.randn(6, 4, 3, 3), torch.randn(6)
    out_cut = compare(
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        [x, w, b], [[Shard(2), Replicate()], [Replicate(), Shard(0)], [Replicate(), Shard(0)]], square,
        "columns of weights",
    )  # fmt: skip
    assert out_cut.placements == (Shard(2), Shard(1))
    in_cut = compare(
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        [x, w, b], [[Shard(2), Shard(1)], [Replicate(), Shard(1)], [Replicate()] * 2], square, "rows of weights",
    )  # fmt: skip
    assert in_cut.placements == (Shard(2), Partial())


def check_pools() -> None:
    mesh, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    torch.manual_seed(2)
    pools = [
        (lambda x: F.max_pool2d(x, 2), 2),
        (lambda x: F.max_pool2d(x, 3, 2, 1), 2),
        (lambda x: F.max_pool2d(x, (3, 2), stride=1, padding=1, dilation=2), 2),
        (nn.MaxPool2d(3, 2, padding=1), 2),
        (lambda x: F.avg_pool2d(x, 2), 2),
        (nn.AvgPool2d(3, 2, padding=1), 2),
        (lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=5), 2),
        (lambda x: F.avg_pool2d(x, 3, 2, count_include_pad=False), 2),
        (lambda x: F.max_pool1d(x, 3, 2), 1),
        (lambda x: F.avg_pool1d(x, 3, 2, 1), 1),
        (nn.MaxPool3d(2, padding=1), 3),
        (lambda x: F.avg_pool3d(x, 2), 3),
    ]
    for pool, n in pools:
        for rows in (4, 9, 16):
            x = torch.randn(2, 3, *(rows, 8, 6)[:n])
            for m, placements in (
                (mesh, [Shard(2)]),
                (square, [Shard(2), Shard(1 + n)]),
                (square, [Shard(0), Shard(2)]),
            ):
                result = compare(pool, [x], [placements], m, f"{pool} {rows} {placements}")
                assert result.placements == tuple(placements)


def check_second_order_and_terms() -> None:
    square = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(3)
    x, w, b = torch.randn(2, 3, 8, 5), torch.randn(4, 3, 3, 3), torch.randn(4)
    whole = [Replicate()] * 2
    compare(
        lambda x, w, b: F.conv2d(x, w, b, padding=1).tanh(), [x, w, b], [[Shard(2), Shard(3)], whole, whole], square,
        "twice", second_order=True,
    )  # fmt: skip
    w, b = w[:2], b[:2]  # fewer channels: cheaper to add up afterwards
    terms = DTensor.from_local(
        x[:, :, 4 * square.get_coordinate()[0] :][:, :, :4] * (0.25, 0.75)[square.get_coordinate()[1]],
        square, [Shard(2), Partial()], shape=x.shape,
    )  # fmt: skip
    result = F.conv2d(terms, distribute_tensor(w, square, whole), distribute_tensor(b, square, whole), padding=1)
    assert result.placements == (Shard(2), Partial())
    torch.testing.assert_close(result.full_tensor(), F.conv2d(x, w, b, padding=1), rtol=1e-5, atol=1e-5)


def small_network() -> nn.Module:
    return nn.Sequential(
        *[nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(8, 8, 5, stride=2, padding=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.AvgPool2d(2)],
        *[nn.Flatten(1), nn.Linear(64, 3)],
    )


def check_bytes_and_a_network() -> None:
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(4)
    x = torch.randn(2, 3, 32, 16)
    weight = distribute_tensor(torch.randn(5, 3, 3, 3), mesh, [Replicate()])
    with CommDebugMode() as seen:
        F.conv2d(distribute_tensor(x, mesh, [Shard(2)]), weight, padding=1)
    row = 2 * 3 * 16 * 4
    at_an_end = mesh.get_local_rank() in (0, 3)
    assert seen.get_comm_bytes()["exchange"] == (row if at_an_end else 2 * row)

    network, alone = small_network(), small_network()
    alone.load_state_dict(network.state_dict())
    network = distribute_module(network, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (network, alone)]
    for _ in range(4):
        x, y = torch.randn(6, 3, 32, 16), torch.randn(6, 3)
        mine = F.mse_loss(network(distribute_tensor(x, mesh, [Shard(2)])), distribute_tensor(y, mesh, [Replicate()]))
        theirs = F.mse_loss(alone(x), y)
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-4, atol=1e-5)
        for loss, optimizer in zip((mine, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for (name, a), b in zip(network.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("n", [n if n == 2 else pytest.param(n, marks=pytest.mark.long) for n in CONVOLUTIONS])
def test_convolutions(n):
    run_ranks(4, check_convolutions, n)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check_what_is_small, marks=pytest.mark.long),
        check_pools,
        check_second_order_and_terms,
        check_bytes_and_a_network,
    ],
)
def test_halo(check):
    run_ranks(4, check)
