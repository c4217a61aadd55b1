"""Tensor subclasses as locals: cut, computed with and communicated as the tensors they wrap, or refused at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from ranks import run_ranks
from terrazzo.errors import CommError, DTensorArgumentError
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

R, P = Replicate(), Partial()


class Complement(torch.Tensor):
    """Holds 1 - x, and computes with x: a sum of two is not the sum of what they hold."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Complement({1 - self.held})"

    def __tensor_flatten__(self) -> Any:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Complement(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        moves = {aten.view, aten.slice, aten.split_with_sizes, aten.cat, aten.clone, aten.detach, aten.copy_}
        moves |= {aten.new_empty, aten.empty_like, aten.expand, aten.transpose, aten.permute, aten.select, aten.alias}
        moves |= {aten.t, aten.unbind, aten.split, aten.squeeze, aten.unsqueeze, aten.narrow, aten._unsafe_view}
        if func.overloadpacket in moves:
            args, kwargs = pytree.tree_map_only(Complement, lambda x: x.held, (args, kwargs or {}))
            out = func(*args, **kwargs)
            if func.overloadpacket is aten.copy_:
                return args[0]
            return pytree.tree_map_only(torch.Tensor, Complement, out)
        args, kwargs = pytree.tree_map_only(Complement, lambda x: 1 - x.held, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, lambda t: Complement(1 - t), func(*args, **kwargs))


class Scaled(torch.Tensor):
    """Small integers with one scale for all: cut, the scale would belong to nothing."""

    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_, self.scale = values, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return "Scaled"

    def __tensor_flatten__(self) -> Any:
        return ["values_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Scaled(inner["values_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return cls(args[0].values_, args[0].scale)
        if func is torch.ops.aten.slice.Tensor:
            return Scaled(func(args[0].values_, *args[1:]), args[0].scale)
        plain = pytree.tree_map_only(Scaled, lambda x: x.values_ * x.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Opaque(torch.Tensor):
    """Does not say what it is made of."""

    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Opaque(torch.ones(args[0].shape))
        raise AssertionError(f"{func} of what was to be refused")


class Tagged(torch.Tensor):
    """Only a name for a plain tensor."""


def two(seed: int, *shape: int) -> TwoTensor:
    torch.manual_seed(seed)
    return TwoTensor(torch.randn(shape), torch.randn(shape) + 10)


def complement(seed: int, *shape: int) -> Complement:
    torch.manual_seed(seed)
    return Complement(torch.randn(shape))


def values_of(x: Any) -> list[torch.Tensor]:
    if isinstance(x, TwoTensor):
        return [x.a.detach(), x.b.detach()]
    assert isinstance(x, Complement), type(x)
    return [1 - x.held.detach()]


def same(mine: Any, theirs: Any, message: str) -> None:
    mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
    for a, b in zip(values_of(mine), values_of(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m: f"{message}: {m}")


MAKERS = {"TwoTensor": two, "Complement": complement}


def every_placement(kind: str, rows: int) -> None:
    make = MAKERS[kind]
    whole = make(0, rows, 4)
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for mesh, layouts in (
        (line, [(Shard(0),), (Shard(1),), (R,)]),
        (square, [(Shard(0), Shard(1)), (Shard(1), R), (Shard(0), Shard(0))]),
    ):
        for source in layouts:
            x = distribute_tensor(whole, mesh, source)
            assert type(x.to_local()) is type(whole)
            same(x, whole, f"{source}")
            for target in layouts:
                same(x.redistribute(mesh, target), whole, f"{source} to {target}")
        terms = DTensor.from_local(make(1, rows, 4), mesh, [P] * mesh.ndim)
        expected = make(1, rows, 4) + make(1, rows, 4) + make(1, rows, 4) + make(1, rows, 4)
        for target in layouts:
            same(terms.redistribute(mesh, target), expected, f"terms to {target}")


@pytest.mark.parametrize("kind", MAKERS)
def test_wrappers_go_from_any_placement_to_any(kind):
    for rows in (8, 5, 2):
        run_ranks(4, every_placement, kind, rows)


def compute(kind: str) -> None:
    make = MAKERS[kind]
    mesh = init_device_mesh("cpu", (4,))
    for x_at, w_at in ((Shard(0), R), (R, Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0))):
        one_x, one_w = make(0, 6, 4).requires_grad_(), make(1, 4, 8).requires_grad_()
        x = distribute_tensor(make(0, 6, 4), mesh, [x_at]).requires_grad_()
        w = distribute_tensor(make(1, 4, 8), mesh, [w_at]).requires_grad_()
        expected = torch.relu(one_x @ one_w) * 2
        result = torch.relu(x @ w) * 2
        same(result.detach(), expected.detach(), f"{x_at} @ {w_at}")
        expected.sum().backward()
        result.sum().backward()
        same(x.grad, one_x.grad, f"gradient of x, {x_at} @ {w_at}")
        same(w.grad, one_w.grad, f"gradient of w, {x_at} @ {w_at}")


@pytest.mark.parametrize("kind", MAKERS)
def test_wrappers_compute_and_have_gradients(kind):
    run_ranks(4, compute, kind)


def large() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = two(0, 700, 300)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    same(x, whole, "large")
    terms = DTensor.from_local(two(1, 700, 300), mesh, [P])
    same(terms, two(1, 700, 300) * 2, "large terms")
    async_result = x.redistribute(mesh, [Shard(1)], async_op=True)
    same(async_result, whole, "started")


def test_wrappers_too_large_for_one_round():
    run_ranks(2, large)


class Uncut(Scaled):
    """Cannot be cut: what it makes of a part is a plain tensor."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Uncut(inner["values_"], inner["scale"])


class Counted(Scaled):
    """Says how many columns it has, and is not joined by torch.cat."""

    def __tensor_flatten__(self) -> Any:
        return ["values_", "scale"], [self.values_.shape[1]]

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Counted(inner["values_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            return cls(func(args[0].values_, *args[1:]), args[0].scale)
        return super().__torch_dispatch__(func, types, args, kwargs)


def one_scale() -> None:
    """Cut and joined in all ways, with the class kept and nothing computed with the values."""
    mesh, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    values = torch.arange(64, dtype=torch.int8).view(8, 8)
    layouts: list[Any] = [(mesh, [Shard(0)]), (mesh, [Shard(1)]), (mesh, [R])]
    layouts += [(square, [Shard(0), Shard(1)]), (square, [Shard(1), R]), (square, [R, Shard(0)])]
    for on, source in layouts:
        mine = torch.distributed.get_rank() == 0
        whole = Scaled(values if mine else torch.zeros_like(values), torch.tensor(0.5 if mine else 0.0))
        x = distribute_tensor(whole, on, source)
        for other, target in layouts:
            for placed in (
                (x.redistribute(on, target), x.redistribute(on, target, async_op=True)) if on is other else ()
            ):
                assert type(placed.to_local()) is Scaled
                full = placed.full_tensor()
                assert torch.equal(full.values_, values) and full.scale == 0.5, (source, target)


def test_one_scale_for_all_goes_from_any_placement_to_any():
    run_ranks(4, one_scale)


def refused() -> list[list[str]]:
    mesh = init_device_mesh("cpu", (2,))
    scaled, uncut, counted = (c(torch.ones(4, 2, dtype=torch.int8), torch.ones(())) for c in (Scaled, Uncut, Counted))
    opaque = Opaque(torch.ones(4))

    def messages(*makes: Any) -> list[str]:
        result = []
        for make in makes:
            with pytest.raises((DTensorArgumentError, CommError)) as caught:
                make()
            result.append(str(caught.value))
        return result

    return [
        messages(lambda: DTensor.from_local(scaled, mesh, [P]).redistribute(mesh, [R])),
        messages(
            lambda: distribute_tensor(opaque, mesh, [Shard(0)]),
            lambda: DTensor.from_local(opaque, mesh, [Shard(0)]).full_tensor(),
        ),
        messages(
            lambda: distribute_tensor(uncut, mesh, [Shard(0)]),
            lambda: distribute_tensor(uncut, mesh, [Shard(0)], src_data_rank=None),
            lambda: DTensor.from_local(uncut, mesh, [R]).redistribute(mesh, [Shard(0)]),
        ),
        messages(
            lambda: distribute_tensor(counted, mesh, [Shard(1)]).full_tensor(),
            lambda: distribute_tensor(counted, mesh, [Shard(1)]).redistribute(mesh, [Shard(0)]),
        ),
    ]


def test_what_cannot_be_sent_is_refused_before_anything_is():
    for terms, opaque, uncut, counted in run_ranks(2, refused):
        assert all("its inner tensor scale has another shape, ()" in m for m in terms)
        assert all("no __tensor_flatten__" in m for m in opaque)
        assert all("DTensor.from_local" in m for m in terms + opaque)
        assert all("Uncut of shape (4, 2) cannot be cut along dim 0: its parts are of the class" in m for m in uncut)
        assert all("cannot be joined along dim 1: what __tensor_flatten__ says" in m for m in counted)


class Packed(torch.nn.Parameter):
    """Bytes, as of bitsandbytes, whose meaning is beside them."""

    quant_state: Any


def refuse_packed() -> None:
    mesh = init_device_mesh("cpu", (2,))
    packed = Packed(torch.ones(8, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = None
    assert distribute_tensor(packed, mesh, [Shard(0)]).to_local().shape == (4, 1)  # not quantized yet
    packed.quant_state = object()
    for source in (0, None):
        with pytest.raises(DTensorArgumentError, match="cannot cut a Packed: its torch.uint8 elements .* quant_state"):
            distribute_tensor(packed, mesh, [Shard(0)], src_data_rank=source)


def test_bytes_whose_meaning_is_beside_them_are_refused():
    run_ranks(2, refuse_packed)


def quantized(rank_by_itself: bool) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    values = torch.randint(-9, 9, (6, 4), dtype=torch.int8)
    x = distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [R])
    if rank_by_itself:
        part = Scaled(values.chunk(2)[mesh.get_local_rank()], torch.tensor(0.5))
        weight = DTensor.from_local(part, mesh, [Shard(0)])
    else:
        weight = distribute_tensor(Scaled(values, torch.tensor(0.5)), mesh, [Shard(0)], src_data_rank=None)
    y = torch.nn.functional.linear(x, weight)
    assert y.placements == (Shard(1),)
    return y.full_tensor() - x.full_tensor() @ (values * 0.5).T


@pytest.mark.parametrize("rank_by_itself", [True, False])
def test_one_scale_for_all_is_computed_with(rank_by_itself):
    for difference in run_ranks(2, quantized, rank_by_itself):
        assert difference.abs().max() == 0


def tagged() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).as_subclass(Tagged)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    return [x.full_tensor().tolist(), (x * 2).sum().item()]


def test_a_subclass_that_holds_its_elements_is_a_tensor():
    assert run_ranks(2, tagged) == [[[0.0, 1, 2, 3, 4, 5], 30.0]] * 2


def data_beside_a_copied_view():
    mesh = init_device_mesh("cpu", (2,))
    part = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])[1:4]  # its memory is another's: a copy
    leaf = distribute_tensor(TwoTensor(torch.ones(4), torch.ones(4)), mesh, [Shard(0)]).requires_grad_()
    assert torch.equal(leaf.data.to_local().a, torch.ones(2))
    leaf.data.mul_(2)
    assert torch.equal(leaf.to_local().b, torch.full((2,), 2.0))
    assert torch.equal(part.full_tensor(), torch.arange(1.0, 4.0))


def test_data_of_a_wrapper_that_has_no_memory():
    run_ranks(2, data_beside_a_copied_view)


class Doubled(torch.Tensor):
    """Has a `__torch_function__` of its own, as torchao's weights that quantise what they are multiplied with."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.nn.functional.linear, f"{func}: it is asked for nothing but what the user calls"
        assert types == (Doubled,), (
            "only the classes that have a function of their own, which PyTorch's DTensor has not"
        )
        x, weight = args
        return torch.nn.functional.linear(x, 2 * weight.held)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func}: nothing else is done with it")


def asked_first() -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [R])
    weight = Doubled(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    found = []
    for _ in range(2):
        y = torch.nn.functional.linear(x, weight)
        assert y.placements == (Shard(1),)
        found.append(y.sum().item())
    return found


def test_a_class_with_a_function_of_its_own_is_asked_before_distributed_tensors():
    assert run_ranks(2, asked_first) == [[336.0, 336.0]] * 2
