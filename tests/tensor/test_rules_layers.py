"""The layers and losses of transformers and convnets: equal to one device, and without a needless byte."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ranks import run_ranks
from terrazzo.comm.observe import CommEvent, add_observer, remove_observer
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh

R = Replicate()


@contextmanager
def watched():
    events: list[CommEvent] = []
    add_observer(events.append)
    try:
        yield events
    finally:
        remove_observer(events.append)


def line():
    return init_device_mesh("cpu", (4,))


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.detach().full_tensor()
    return type(value)(whole(v) for v in value) if isinstance(value, (tuple, list)) else value.detach()


def close(mine: Any, theirs: Any, message: str = "") -> None:
    if isinstance(theirs, (tuple, list)):
        for a, b in zip(mine, theirs, strict=True):
            close(a, b, message)
        return
    torch.testing.assert_close(whole(mine), theirs.detach(), rtol=1e-4, atol=2e-5, msg=lambda m: f"{message}: {m}")


# ------------------------------------------------------------------ layers, the batch sharded


@dataclass(frozen=True)
class Layer:
    """A module or function, the shapes of its inputs, and what its forward may move (bytes per rank, four ranks)."""

    make: Callable[[], nn.Module]
    shapes: list[tuple[int, ...]]
    forward_bytes: int = 0
    integer: bool = False
    parameters_move: bool = True
    dims: tuple[int, ...] = field(default=(0,))


class Do(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


IMAGE = [(8, 4, 6, 6)]
# Of a tensor that all four ranks reduce, each sends 2 * 3/4.
EACH_ALL_REDUCED = 4 * 2 * 3 // 4

LAYERS: dict[str, Layer] = {
    "linear": Layer(lambda: nn.Linear(6, 3), [(8, 6)]),
    "embedding": Layer(lambda: nn.Embedding(10, 4, padding_idx=3), [(8, 5)], integer=True),
    "embedding bag": Layer(lambda: nn.EmbeddingBag(10, 4), [(8, 5)], integer=True),
    "layer norm": Layer(lambda: nn.LayerNorm(6), [(8, 5, 6)]),
    "rms norm": Layer(lambda: nn.RMSNorm(6), [(8, 5, 6)]),
    "group norm": Layer(lambda: nn.GroupNorm(2, 4), IMAGE),
    "instance norm": Layer(lambda: nn.InstanceNorm2d(4, affine=True), IMAGE),
    "batch norm": Layer(lambda: nn.BatchNorm2d(4), IMAGE, forward_bytes=2 * 4 * EACH_ALL_REDUCED),
    "conv1d": Layer(lambda: nn.Conv1d(4, 6, 3), [(8, 4, 9)]),
    "conv2d": Layer(lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), IMAGE),
    "conv2d, groups": Layer(lambda: nn.Conv2d(4, 8, 3, groups=2), IMAGE),
    "conv transposed": Layer(lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), IMAGE),
    "max pool": Layer(lambda: nn.MaxPool2d(2), IMAGE),
    "avg pool": Layer(lambda: nn.AvgPool2d(3, 2, ceil_mode=True), IMAGE),
    "adaptive pool": Layer(lambda: nn.AdaptiveAvgPool2d(1), IMAGE),
    "adaptive max pool": Layer(lambda: nn.AdaptiveMaxPool2d((2, 3)), IMAGE),
    "upsample": Layer(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "pad": Layer(lambda: nn.ReflectionPad2d(1), IMAGE),
    "zero pad": Layer(lambda: nn.ZeroPad2d((1, 0, 2, 1)), IMAGE),
    "pixel shuffle": Layer(lambda: nn.PixelShuffle(2), IMAGE),
    "patches": Layer(lambda: nn.Unfold(2), IMAGE),
    "flatten": Layer(lambda: nn.Flatten(), IMAGE),
    "gelu": Layer(lambda: nn.GELU(), [(8, 5)]),
    "swiglu": Layer(lambda: Do(lambda x: F.silu(x[..., :3]) * x[..., 3:]), [(8, 5, 6)]),
    "glu": Layer(lambda: nn.GLU(), [(8, 6)]),
    "softmax": Layer(lambda: nn.Softmax(-1), [(8, 6)]),
    "attention": Layer(lambda: Do(F.scaled_dot_product_attention), [(8, 2, 5, 4)] * 3),
    "causal attention": Layer(
        lambda: Do(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), [(8, 2, 5, 4)] * 3
    ),
    "grouped queries": Layer(
        lambda: Do(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)),
        [(8, 4, 5, 4), (8, 2, 5, 4), (8, 2, 5, 4)],
    ),
    # The mean of the attention's weights, a number, is reduced.
    "multi-head attention": Layer(lambda: SelfAttention(), [(8, 5, 6)], forward_bytes=EACH_ALL_REDUCED),
    "encoder layer": Layer(lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), [(8, 5, 6)]),
    "lstm": Layer(lambda: First(nn.LSTM(4, 3, 2, batch_first=True)), [(8, 5, 4)]),
    "gru": Layer(lambda: First(nn.GRU(4, 3, bidirectional=True, batch_first=True)), [(8, 5, 4)]),
    "rnn": Layer(lambda: First(nn.RNN(4, 3)), [(5, 8, 4)], dims=(1,)),
    "weight norm": Layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), [(8, 6)]),
}


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weights = self.attention(x, x, x)
        return y + weights.mean()


class First(nn.Module):
    """The first of a module's results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> torch.Tensor:
        first: torch.Tensor = self.module(*args)[0]
        return first


def layer_equals_one_device(name: str, uneven: bool) -> None:
    layer = LAYERS[name]
    mesh = line()
    torch.manual_seed(0)
    reference = layer.make()
    model = distribute_module(copy.deepcopy(reference), mesh)
    at = layer.dims[0]
    shapes = [(*s[:at], 5, *s[at + 1 :]) if uneven else s for s in layer.shapes]
    if layer.integer:
        plain = [torch.randint(0, 10, s) for s in shapes]
    else:
        plain = [torch.randn(s).requires_grad_() for s in shapes]
    placed = [distribute_tensor(t.detach(), mesh, [Shard(at)]).requires_grad_(t.requires_grad) for t in plain]
    expected = reference(*plain)
    with watched() as events:
        result = model(*placed)
    assert isinstance(result, DTensor)
    close(result, expected, name)
    if not uneven:
        moved = sum(e.bytes for e in events)
        assert moved <= layer.forward_bytes, (moved, [(e.kind, e.bytes) for e in events])
    cotangent = torch.randn(expected.shape)
    placed_cotangent = distribute_tensor(cotangent, mesh, [Shard(at)])
    expected.backward(cotangent)
    with watched() as events:
        result.backward(placed_cotangent)
    for a, b in zip(placed, plain, strict=True):
        if b.requires_grad:
            close(a.grad, b.grad, f"{name}, gradient of an input")
    parameters = 0
    for (key, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        close(p.grad, q.grad, f"{name}, gradient of {key}")
        parameters += p.numel()
    for (key, p), (_, q) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        close(p, q, f"{name}, {key}")
    if not uneven:
        # Each parameter's gradient is reduced once; batch norm's moments pass backward as well.
        assert sum(e.bytes for e in events) <= parameters * EACH_ALL_REDUCED + layer.forward_bytes


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven and empty"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_a_sharded_batch(name, uneven):
    run_ranks(4, layer_equals_one_device, name, uneven)


# ------------------------------------------------------------------ what is cut along the dim that it works on


def cross_entropies(classes: int) -> None:
    """Every form, with logits sharded over samples and over classes."""
    mesh = line()
    torch.manual_seed(0)
    logits = torch.randn(8, classes, 3)
    indices = torch.randint(0, classes, (8, 3))
    indices[2] = -100
    shares = torch.rand(8, classes, 3).softmax(1)
    weight = torch.rand(classes)
    for target, options in (
        (indices, {}),
        (indices, {"weight": weight}),
        (indices, {"label_smoothing": 0.2}),
        (indices, {"label_smoothing": 0.2, "weight": weight}),
        (indices.clamp(min=0), {"ignore_index": 1}),
        (shares, {}),
        (shares, {"label_smoothing": 0.1, "weight": weight}),
    ):
        for reduction in ("mean", "sum", "none"):
            plain = logits.clone().requires_grad_()
            expected = F.cross_entropy(plain, target, reduction=reduction, **options)
            expected.sum().backward()
            for dim in (0, 1, 2):
                placed = distribute_tensor(logits, mesh, [Shard(dim)]).requires_grad_()
                others = {k: distribute_tensor(v, mesh, [R]) for k, v in options.items() if k == "weight"}
                with watched() as events:
                    loss = F.cross_entropy(
                        placed, distribute_tensor(target, mesh, [R]), reduction=reduction, **(options | others)
                    )
                message = f"{classes} classes, {sorted(options)}, {reduction}, dim {dim}"
                close(loss, expected, message)
                loss.sum().backward()
                close(placed.grad, plain.grad, message)
                gathered = sum(e.bytes for e in events if e.kind == "all_gather" and e.bytes >= logits.nbytes // 2)
                assert not gathered, f"{message}: {gathered} bytes of logits moved"


# The fewest leave a rank without any.
@pytest.mark.parametrize("classes", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (7, 12))])
def test_cross_entropy_never_gathers_the_logits(classes):
    run_ranks(4, cross_entropies, classes)


def rows_that_are_cut() -> None:
    """Along a sharded dim two numbers a row are exchanged."""
    mesh = line()
    torch.manual_seed(0)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda x: F.softmax(x, -1),
        "log_softmax": lambda x: x.log_softmax(1),
        "softmax to double": lambda x: torch.softmax(x, 1, dtype=torch.float64),
        "logsumexp": lambda x: x.logsumexp(1),
        "layer norm": lambda x: F.layer_norm(x, x.shape[1:], eps=1e-3),
        "rms norm": lambda x: F.rms_norm(x, x.shape[1:]),
        "var": lambda x: x.var(1),
        "norm": lambda x: x.norm(dim=1),
        "max": lambda x: x.amax(1),
    }
    for width in (40, 7, 2):
        for dtype in (torch.float32, torch.bfloat16):
            values = (torch.randn(4, width) * 5).to(dtype)
            for name, function in functions.items():
                if name == "var" and dtype is torch.bfloat16:
                    continue  # of one device's own rounding in between
                plain = values.clone().requires_grad_()
                expected = function(plain)
                cotangent = torch.randn(expected.shape).to(expected.dtype)
                expected.backward(cotangent)
                placed = distribute_tensor(values, mesh, [Shard(1)]).requires_grad_()
                with watched() as events:
                    result = function(placed)
                assert result.dtype == expected.dtype
                tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
                torch.testing.assert_close(whole(result), expected.detach(), **tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023
                result.backward(distribute_tensor(cotangent, mesh, [R]))
                torch.testing.assert_close(whole(placed.grad), plain.grad, **tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023
                # Two all-reduces of one number a row.
                number = max(4, expected.element_size())
                assert sum(e.bytes for e in events) <= 2 * 4 * number * EACH_ALL_REDUCED // 4, (name, events)


def test_rows_that_are_cut_exchange_two_numbers_each():
    run_ranks(4, rows_that_are_cut)


def encoder_without_gradients() -> None:
    mesh = line()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    reference = nn.TransformerEncoder(layer, 2).eval()
    model = distribute_module(copy.deepcopy(reference), mesh).eval()
    x = torch.randn(8, 5, 6)
    padding = torch.zeros(8, 5, dtype=torch.bool)
    padding[:, 4] = True
    with torch.no_grad():
        for mask in (None, padding):
            placed = None if mask is None else distribute_tensor(mask, mesh, [Shard(0)])
            result = model(distribute_tensor(x, mesh, [Shard(0)]), src_key_padding_mask=placed)
            expected = reference(x, src_key_padding_mask=mask)
            close(result[:, :4], expected[:, :4], "encoder")


def test_encoder_in_evaluation():
    run_ranks(4, encoder_without_gradients)
