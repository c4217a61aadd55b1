"""Models train on the device as on the CPU: what has no kernel of its own runs PyTorch's CPU kernel, late."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from late_ranks import run_late

pytestmark = pytest.mark.long


def draw(*sizes, device, grad=True):
    x = torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(device)
    return x.requires_grad_(grad)


def as_on_cpu(function, device, tolerance=1e-4):
    """Compare all tensors that `function` returns with those that it returns on the CPU."""
    expected, found = (values_of(function, where) for where in (torch.device("cpu"), device))
    assert len(expected) == len(found) > 0
    for want, got in zip(expected, found, strict=True):
        assert got.device == device
        torch.testing.assert_close(got.detach().cpu(), want.detach().to(got.dtype), atol=tolerance, rtol=tolerance)


def values_of(function, device):
    torch.manual_seed(0)
    values = function(device)
    return values if isinstance(values, (list, tuple)) else [values]


# ------------------------------------------------------------------ layers

LAYERS = (
    (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)),
        (2, 3, 8, 8),
    ),
    (lambda: nn.Conv1d(3, 4, 2, bias=False), (2, 3, 8)),
    (lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), (2, 3, 5, 5)),
    (lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True), (3, 2, 4)),
    (lambda: nn.LSTM(4, 5, bias=False), (3, 2, 4)),
    (lambda: nn.GRU(4, 5), (3, 2, 4)),
    (lambda: nn.RNN(4, 5), (3, 2, 4)),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (3, 2, 8)),
    (lambda: nn.BatchNorm1d(4), (6, 4)),
    (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    (lambda: nn.LayerNorm(4), (3, 4)),
    (lambda: nn.RMSNorm(4), (3, 4)),
)


def check_layers(device):
    for make, sizes in LAYERS:

        def trained(where, make=make, sizes=sizes):
            layer, x = make().to(where), draw(*sizes, device=where)
            y = layer(x)
            y = y[0] if isinstance(y, tuple) else y
            (y * y.sin()).sum().backward()
            return [y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]

        as_on_cpu(trained, device)


def check_losses(device):
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.binary_cross_entropy_with_logits):
        for reduction in ("mean", "sum", "none"):

            def value(where, loss=loss, reduction=reduction):
                x = draw(3, 4, device=where)
                y = loss(x, draw(4, 3, device=where, grad=False).t().sigmoid(), reduction=reduction)
                y.sum().backward()
                return y, x.grad

            as_on_cpu(value, device)


def check_what_kernels_resize(device):
    def many(where):
        x = draw(4, 3, device=where, grad=False)
        evaluated = nn.BatchNorm1d(3).to(where).eval()(x)
        z = x.to(torch.complex64)
        out = torch.empty(0, device=where)
        torch.add(x, x, out=out)
        both = torch.empty(0, device=where), torch.empty(0, dtype=torch.long, device=where)
        return [
            *(evaluated, out, torch.linalg.lstsq(x, x)[0], *torch.sort(x, out=both)),
            *(z.conj().resolve_conj(), z.conj() + 1, z.conj() @ z.mT, z.imag.neg(), torch.fft.hfft(x)),
        ]

    as_on_cpu(many, device)


def check_embeddings(device):
    for make in (nn.Embedding, nn.EmbeddingBag):

        def embedded(where, make=make):
            layer = make(10, 4).to(where)
            y = layer(torch.randint(0, 10, (3, 5), generator=torch.Generator().manual_seed(0)).to(where))
            (y * y).sum().backward()
            return y, layer.weight.grad

        as_on_cpu(embedded, device)


def check_attention(device):
    def attention(where):
        q, k, v = (draw(2, 2, 8, 4, device=where) for _ in range(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        (y * y).sum().backward()
        return y, q.grad, k.grad, v.grad

    as_on_cpu(attention, device)


def check_operations(device):
    def many(where):
        x, index = draw(6, 5, device=where, grad=False), torch.tensor([1, 2], device=where)
        listed = [draw(3, n, device=where, grad=False) for n in (1, 2, 3)]
        torch._foreach_mul_(listed, 2.0)
        return [
            *(
                x.nonzero(),
                x[x > 0],
                x.topk(2)[0],
                x.unique(),
                x.cumsum(0),
                x.sort(1)[0],
                x.roll(1, 0),
                x.flip(0),
                x.sum(),
            ),
            *(torch.einsum("ij,kj->ik", x, x), torch.linalg.qr(x)[1].abs(), torch.fft.fft(x).abs(), torch.tril(x)),
            *(torch.cat([x, x]), torch.stack([x, x]), torch.where(x > 0, x, 0), x.index_select(0, index), x[index]),
            *(x[:, ::2].contiguous(), x.view(torch.int32), x.t().reshape(-1), x.unfold(0, 2, 1), F.pad(x, (1, 1))),
            *(x.to(torch.bfloat16), x.to(torch.complex64).abs(), copy.deepcopy(x), F.one_hot(index, 4), x.max(1)[1]),
            *(torch.arange(5, device=where), torch.full((2,), 3, device=where), torch.tensor([1.0, 2.0], device=where)),
            *(
                x.clone().fill_diagonal_(1.0),
                F.interpolate(x[None, None], scale_factor=2.0),
                x.clone().index_fill_(0, index, 7),
            ),
            *(*listed, *torch._foreach_norm(listed), *torch._foreach_add(listed, listed)),
        ]

    as_on_cpu(many, device)


def check_randomness(device):
    x = torch.ones(10000, device=device, requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert torch.equal(y, x.grad) and abs((y == 0).float().mean().item() - 0.25) < 0.02
    torch.manual_seed(5)
    first, state = torch.randn(5, device=device), torch.late.get_rng_state(device)
    second, host = torch.rand(5, device=device), torch.randn(5)
    torch.late.set_rng_state(state, device)
    assert torch.equal(second, torch.rand(5, device=device)) and not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(host, torch.randn(5)), "numbers of the device are not taken from the host's"
    generators = [torch.Generator(device).manual_seed(3) for _ in range(2)]
    assert torch.equal(*(torch.randn(4, device=device, generator=g) for g in generators))


def check_errors_are_those_of_the_cpu(device):
    for bad in (
        lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
        lambda d: torch.ones(2, device=d).view(3),
    ):
        with pytest.raises(RuntimeError) as expected:
            bad("cpu")
        with pytest.raises(RuntimeError) as found:
            bad(device)
        assert str(found.value).partition("\n")[0] == str(expected.value).partition("\n")[0]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device=device) + torch.ones(2)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device=device) + torch.ones(2, device="late:1")
    F.embedding(torch.tensor([7], device=device), torch.ones(3, 2, device=device))
    with pytest.raises(RuntimeError, match="an error of an earlier operation, (embedding|index_select)"):
        torch.accelerator.synchronize()  # as on CUDA: the values were not known before


def test_layers_and_operations_are_those_of_the_cpu():
    run_late(
        1, check_layers, check_losses, check_what_kernels_resize, check_embeddings, check_attention, check_operations,
        check_randomness,
        check_errors_are_those_of_the_cpu, modes=("eager", "needed"),
    )  # fmt: skip


# ------------------------------------------------------------------ training


def check_optimizers(device):
    for cls, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.Adagrad, {}),
    ):

        def trained(where, cls=cls, options=options):
            layer = nn.Linear(8, 8).to(where)
            optimizer = cls(layer.parameters(), lr=0.1, **options)
            for _ in range(3):
                layer(draw(4, 8, device=where, grad=False)).square().sum().backward()
                nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return list(layer.parameters())

        as_on_cpu(trained, device)


def check_autocast(device):
    def trained(where):
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).to(where)
        with torch.autocast(where.type, dtype=torch.bfloat16):
            hidden = model[0](draw(5, 8, device=where))
            logits = model[3](model[2](model[1](hidden)))
            loss = F.cross_entropy(logits.float(), torch.zeros(5, dtype=torch.long, device=where))
        loss.backward()
        return loss, model[0].weight.grad

    as_on_cpu(trained, device, tolerance=3e-2)
    with torch.autocast("late", dtype=torch.bfloat16):  # the policies are CUDA's
        x, half = torch.ones(2, 2, device=device), torch.ones(2, 2, device=device, dtype=torch.bfloat16)
        dtypes = [
            y.dtype
            for y in (
                x @ x,
                F.layer_norm(half, (2,)),
                half.softmax(0),
                half.sum(),
                torch.addcmul(x, half, half),
                half + 1,
            )
        ]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.float32, torch.float32, torch.bfloat16]
    assert torch.autocast("late").fast_dtype in torch.late.get_amp_supported_dtype()


def check_loss_scaling(device):
    def trained(where):
        layer = nn.Linear(4, 4).to(where)
        optimizer, scaler = torch.optim.SGD(layer.parameters(), 0.1), torch.amp.GradScaler(where.type, init_scale=2.0)
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(layer(draw(2, 4, device=where, grad=False)).square().sum() * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*layer.parameters(), torch.tensor(scaler.get_scale(), device=where)]

    as_on_cpu(trained, device)


def check_recomputation(device):
    """As with CUDA, it runs in a thread of autograd."""
    threads = []

    def part(x, layer):
        threads.append(threading.get_ident())
        return F.dropout(layer(x), 0.5)

    layer, x = nn.Linear(8, 8).to(device), draw(4, 8, device=device)
    y = checkpoint(part, x, layer, use_reentrant=False)
    y.sum().backward()
    assert threads[0] != threads[1]
    mask = (y != 0).float()
    torch.testing.assert_close(x.grad, (mask * 2) @ layer.weight)


def check_compiled(device):
    def trained(where):
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).to(where)
        x = draw(5, 8, device=where)
        y = torch.compile(model, backend="aot_eager")(x)
        y.square().sum().backward()
        return y, x.grad, model[0].weight.grad

    as_on_cpu(trained, device)


def check_moves_and_files(device):
    x = draw(4, 4, device=device, grad=False)
    y = x.to("late:1", non_blocking=True).to("late:2") + 0
    assert y.device == torch.device("late", 2) and torch.equal(y.cpu(), x.cpu()) and y.is_late
    layer, file = nn.Linear(3, 3).to(device), io.BytesIO()
    torch.save({"x": x, "layer": layer.state_dict()}, file)
    for where in (None, "cpu", "late:3"):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded["x"].device == (device if where is None else torch.device(where))
        assert torch.equal(loaded["x"].cpu(), x.cpu())
    nn.Linear(3, 3).to(device).load_state_dict(loaded["layer"])
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the memory of this tensor was freed"):
        x + 1


def test_models_train_as_on_the_cpu():
    run_late(
        1,
        check_optimizers,
        check_autocast,
        check_loss_scaling,
        check_recomputation,
        check_compiled,
        check_moves_and_files,
    )
