"""DTensors on the device: one device's values, in every schedule, and no races."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from device_ranks import run_on_devices
from late_ranks import run_late
from terrazzo.errors import DTensorError
from terrazzo.optim import Muon
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.experimental import (
    context_parallel,
    context_parallel_unshard,
    implicit_replication,
    set_rotate_method,
)
from terrazzo.tensor.parallel import (
    ColwiseParallel,
    ExpertParallel,
    MixtureOfExperts,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from terrazzo.testing import late

PLACEMENTS = (Shard(0), Shard(1), Replicate())


def draw(*sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def mesh_of_all(device):
    return init_device_mesh(device.type, (dist.get_world_size(),))


def same(found, expected):
    found = [x.full_tensor() if isinstance(x, DTensor) else x for x in found]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach(), atol=1e-5, rtol=1e-4)


def check_products(device):
    mesh, a, b = mesh_of_all(device), draw(7, 12), draw(12, 9)
    for one in PLACEMENTS:
        for two in PLACEMENTS:

            def values(x, w):
                y = F.layer_norm(F.gelu(x.requires_grad_() @ w.requires_grad_()), (9,)).softmax(-1)
                (y * y).sum().backward()
                return y, x.grad, w.grad

            expected = values(a.clone(), b.clone())
            same(
                values(distribute_tensor(a.to(device), mesh, [one]), distribute_tensor(b.to(device), mesh, [two])),
                expected,
            )


def check_redistribution(device):
    mesh, a = mesh_of_all(device), draw(7, 12)
    for one in PLACEMENTS:
        for two in PLACEMENTS:
            x = distribute_tensor(a.to(device), mesh, [one])
            moved = (x * 2).redistribute(placements=[two]) + 1
            later = (x * 2).redistribute(placements=[two], async_op=True)
            found = [
                moved,
                later + 1,
                x.sum(0),
                x.cumsum(0),
                x.sort(1)[0],
                x[2:5],
                torch.cat([x, x]),
                x.amax(),
                x.norm(),
            ]
            expected = [
                a * 2 + 1,
                a * 2 + 1,
                a.sum(0),
                a.cumsum(0),
                a.sort(1)[0],
                a[2:5],
                torch.cat([a, a]),
                a.amax(),
                a.norm(),
            ]
            same(found, expected)


def check_parallel_styles(device):
    def trained(where, mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        model.to(where)
        if mesh is not None:
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer, losses = torch.optim.AdamW(model.parameters(), foreach=True), []
        for step in range(3):
            loss = model(draw(5, 8 + 0 * step).to(where)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *model.parameters()]

    same(trained(device, mesh_of_all(device)), trained("cpu", None))


def check_random_numbers(device):
    x = distribute_tensor(torch.zeros(8, 8, device=device), mesh_of_all(device), [Shard(0)])
    torch.manual_seed(3)
    first = x.normal_().full_tensor().cpu()
    torch.manual_seed(3)
    assert torch.equal(first, x.normal_().full_tensor().cpu()) and first.unique().numel() > 60
    dropped = F.dropout(x, 0.5).full_tensor()
    assert ((dropped == 0) | (dropped == 2 * x.full_tensor())).all().item()
    bits = []  # the same as the CPU's, bit by bit
    for kind in ("cpu", device.type):
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        big = distribute_tensor(torch.zeros(3, 1, dtype=torch.int64, device=kind), mesh, [Shard(0)])
        torch.manual_seed(5)
        rows = [
            big.clone().random_(-(1 << 63), None),
            distribute_tensor(torch.zeros(5, 7, device=kind), mesh, [Shard(1)]),
        ]
        rows[1].uniform_()
        bits.append([x.full_tensor().cpu() for x in rows])
    assert all(torch.equal(one, two) for one, two in zip(*bits, strict=True))


def check_muon(device):
    torch.manual_seed(0)
    mesh, weight = mesh_of_all(device), draw(16, 32)
    parameters = [nn.Parameter(weight.clone()), nn.Parameter(distribute_tensor(weight.to(device), mesh, [Shard(0)]))]
    for parameter in parameters:
        optimizer = Muon([parameter], lr=0.02)
        for _ in range(2):
            parameter.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(parameters[1].full_tensor().cpu(), parameters[0].data, atol=2e-2, rtol=2e-2)


def check_context_parallel(device):
    """In the dtype and at the sizes for which accelerators have kernels of their own."""
    mesh, shape = mesh_of_all(device), (1, 4, 256, 64)
    whole = [draw(*shape).roll(n, 2).bfloat16() for n in range(4)]
    expected = [x.float().requires_grad_() for x in whole[:3]]
    attended = F.scaled_dot_product_attention(*expected, is_causal=True)
    (attended * whole[3]).sum().backward()
    for method, rotate in (("ring", "allgather"), ("ulysses", "alltoall"), ("ring", "alltoall")):
        set_rotate_method(rotate)  # the last is the default
        buffers = [x.to(device) for x in whole]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, method=method):
            *inputs, weight = buffers
            for x in inputs:
                x.requires_grad_()
            found = F.scaled_dot_product_attention(*inputs, is_causal=True)
            (found * weight).sum().backward()
            parts = [found.detach(), *(x.grad for x in inputs)]
            results = context_parallel_unshard(mesh, parts, [2] * 4)
            for x in inputs:
                x.requires_grad_(False).grad = None
        for got, want in zip(results, [attended, *(x.grad for x in expected)], strict=True):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.cpu().float(), want.detach(), atol=3e-2, rtol=3e-2)


def check_experts(device):
    """Uneven numbers of tokens, none for the last expert, in the dtype that accelerators multiply in groups."""
    mesh, rank = mesh_of_all(device), dist.get_rank()
    torch.manual_seed(0)
    model = MixtureOfExperts(64, 128, 8, top_k=2).bfloat16()
    reference = copy.deepcopy(model).float()
    parallelize_module(model.to(device).experts, mesh, ExpertParallel())
    tokens = [draw(1, 5 + 3 * each, 64).bfloat16() for each in range(dist.get_world_size())]
    for module, x in [(reference, torch.cat(tokens, 1).float()), (model, tokens[rank].to(device))]:
        module(x)[0].square().sum().backward()
    for p, q in zip(model.experts.parameters(), reference.experts.parameters(), strict=True):
        assert (p.grad.full_tensor().float().cpu() - q.grad).norm() < 3e-2 * q.grad.norm()


def check_settings_hold_in_autograds_threads(device):
    """There recomputations and hooks run."""
    mesh, plain = mesh_of_all(device), torch.full((4, 4), 2.0, device=device)
    for reentrant in (False, True):
        for inside in (False, True):
            w = distribute_tensor(draw(4, 4).to(device), mesh, [Shard(0)]).requires_grad_()
            with implicit_replication():
                loss = checkpoint(lambda x: (x * plain).sin(), w, use_reentrant=reentrant).sum()
                if inside:
                    w.register_hook(lambda gradient: gradient * plain)
                    loss.backward()
            if not inside:
                loss.backward()
            same([w.grad], [(4 if inside else 2) * (2 * draw(4, 4)).cos()])
        layer = nn.Linear(8, 10).to(device)
        parallelize_module(layer, mesh, ColwiseParallel(use_local_output=False))
        x, target = draw(5, 8).to(device).requires_grad_(), torch.arange(5, device=device)
        with loss_parallel():
            loss = checkpoint(lambda z: F.cross_entropy(layer(z), target).to_local(), x, use_reentrant=reentrant)  # noqa: B023
        loss.backward()
        expected = draw(5, 8).requires_grad_()
        weight, bias = (p.full_tensor().detach().cpu() for p in (layer.weight, layer.bias))
        F.cross_entropy(F.linear(expected, weight, bias), target.cpu()).backward()
        same([x.grad], [expected.grad])


def check_graphs_with_random_numbers(device):
    """A graph of the device would repeat the number that the host has drawn."""
    x = distribute_tensor(torch.ones(8, 8, device=device), mesh_of_all(device), [Shard(0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.late, "is_current_stream_capturing", lambda: True, raising=False)
        assert F.dropout(x, 0.0).sum().item() == 64
        with pytest.raises(DTensorError, match="cannot be captured in a CUDA graph: every replay would have the same"):
            F.dropout(x, 0.5)
    assert F.dropout(x, 0.5).shape == (8, 8)


def test_random_numbers_are_not_captured():
    run_late(2, check_graphs_with_random_numbers)


CHECKS = (
    check_products, check_redistribution, check_parallel_styles, check_random_numbers, check_muon,
    check_context_parallel, check_experts, check_settings_hold_in_autograds_threads,
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS)
def test_dtensors_have_no_races_in_any_mode(check):
    run_late(2, check, modes=late.MODES)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_dtensors_on_accelerators_have_one_devices_values(check):
    run_on_devices(check)
