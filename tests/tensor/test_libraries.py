"""What libraries read of PyTorch's DTensors they can read of terrazzo's, with PyTorch's own as the judge."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from torch.distributed.tensor._dtensor_spec import DTensorSpec as TheirSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TheirMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor as their_redistribute
from torch.distributed.tensor._utils import compute_global_tensor_info as their_info
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as their_offset

from ranks import run_ranks
from terrazzo.errors import DTensorArgumentError, DTensorError, PlacementsError
from terrazzo.layout.placement import _StridedShard
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, interop
from terrazzo.tensor.libraries import (
    DTensorSpec,
    TensorMeta,
    compute_global_tensor_info,
    compute_local_shape_and_global_offset,
    redistribute_local_tensor,
)

ONE = [Replicate(), Shard(0), Shard(1), Partial()]
FACTS = ("shape", "stride", "ndim", "num_shards", "num_shards_map", "sums", "dim_map")


def outcome(call: Any) -> Any:
    try:
        return call()
    except (ValueError, RuntimeError) as error:
        return "raised", isinstance(error, (ValueError, RuntimeError))


def specs() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for placed in product(ONE, ONE):
        x = distribute_tensor(torch.arange(48.0).reshape(6, 8).t().contiguous().t(), mesh, placed)
        spec = x._spec
        their = interop.to_torch_dtensor(x)._spec
        assert spec.mesh is x.device_mesh and spec.device_mesh is spec.mesh and spec.placements == x.placements
        assert spec.tensor_meta == TensorMeta(*their.tensor_meta)
        for fact in FACTS:
            assert outcome(lambda: getattr(spec, fact)) == outcome(lambda: getattr(their, fact)), (placed, fact)  # noqa: B023
        assert spec.is_replicated() == their.is_replicated() and spec.is_sharded() == their.is_sharded()
        assert spec == x.clone()._spec and hash(spec) == hash(x.clone()._spec)
        # The constructor makes the same tensor of the same part, as a leaf.
        again = DTensor(x.to_local(), spec, True)
        assert again._layout is x._layout and again.requires_grad and again.is_leaf
        assert torch.equal(again.to_local(), x.to_local())
        (again * 2).sum().backward()
        assert torch.equal(again.grad.full_tensor(), torch.full((6, 8), 2.0))
        with pytest.warns(UserWarning, match="To construct a DTensor"):
            assert not DTensor(x.to_local().requires_grad_(), spec, requires_grad=False).requires_grad
        if spec.is_sharded() and len({p for p in placed if p.is_shard()}) == sum(p.is_shard() for p in placed):
            assert DTensorSpec.from_dim_map(mesh, spec.dim_map, spec.sums, spec.tensor_meta) == spec
        for other in product(ONE, ONE):
            target = DTensorSpec(mesh, other, spec.tensor_meta)
            mine = redistribute_local_tensor(x.to_local(), spec, target)
            their_target = TheirSpec(mesh, interop.to_torch_placements(other, (2, 2)), TheirMeta(*their.tensor_meta))
            if not any(p.is_partial() for p in (*other,)):  # terms are divided in another way
                expected = their_redistribute(x.to_local(), their, their_target)
                torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def helpers() -> None:
    for shape, mesh in (((4,), init_device_mesh("cpu", (4,))), ((2, 2), init_device_mesh("cpu", (2, 2)))):
        for placed in product(ONE, repeat=len(shape)):
            torchs = interop.to_torch_placements(placed, shape)
            for size in ((8, 4), (5, 3), (1, 2), (0, 4)):
                args = size, mesh
                assert compute_local_shape_and_global_offset(*args, placed) == their_offset(*args, torchs)
                local = torch.empty(size, device="meta")
                assert compute_global_tensor_info(local, mesh, placed) == their_info(local, mesh, torchs)
    packed = [_StridedShard(0, split_factor=2)]
    mesh = init_device_mesh("cpu", (4,))
    torchs = [theirs.placement_types._StridedShard(0, split_factor=2)]
    assert compute_local_shape_and_global_offset((16, 3), mesh, packed) == their_offset((16, 3), mesh, torchs)
    for length, pads in product((8, 5, 1, 0), (True, False)):
        x = torch.arange(2.0 * length).reshape(2, length)
        mine, padded = Shard(1)._split_tensor(x, 4, with_padding=pads)
        expected, their_padded = theirs.Shard(1)._split_tensor(x, 4, with_padding=pads)
        assert padded == their_padded
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def methods_of_shard() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for shape, dim, m in product(((7, 4), (1, 3), (8, 5)), (0, 1), (0, 1)):
        x = torch.arange(prod(shape)).reshape(shape) + 100 * torch.distributed.get_rank()
        mine, other = Shard(dim), theirs.Shard(dim)
        for source in (0, 1, None):
            part = mine._shard_tensor(x, mesh, m, source)
            torch.testing.assert_close(part, other._shard_tensor(x, mesh, m, source), rtol=0, atol=0)
        part = mine._shard_tensor(x, mesh, m)
        whole = mine._to_replicate_tensor(part, mesh, m, shape)
        torch.testing.assert_close(whole, other._to_replicate_tensor(part, mesh, m, shape), rtol=0, atol=0)
        kept = mine._replicate_to_shard(whole, mesh, m, coordinate[m])
        torch.testing.assert_close(kept, other._replicate_to_shard(whole, mesh, m, coordinate[m]), rtol=0, atol=0)
        for index, pads in product(range(3), (True, False)):
            piece = mine._select_split_tensor(x, 3, index, with_padding=pads)
            torch.testing.assert_close(
                piece, other._select_split_tensor(x, 3, index, with_padding=pads), rtol=0, atol=0
            )
    for placed in product(ONE, ONE):
        x = distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, placed)
        items = []
        for tensor in (x, interop.to_torch_dtensor(x)):
            try:
                tensor._raise_if_contains_partial_placements()
                made = tensor.__create_write_items__("w", tensor)
            except ValueError:
                items.append("partial")
                continue
            items.append([(i.index.fqn, i.index.offset, i.type.name, i.tensor_data.size) for i in made])
            items[-1] += [(i.tensor_data.chunk.offsets, i.tensor_data.chunk.sizes) for i in made]
        assert items[0] == items[1], placed


def refuses() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with pytest.raises(FrozenInstanceError):
        x._spec.placements = (Replicate(),)
    with pytest.raises(AttributeError):
        x._spec = x._spec
    with pytest.raises(DTensorArgumentError, match="not this rank's part"):
        DTensor(torch.ones(4, 2), x._spec, requires_grad=False)
    with pytest.raises(DTensorArgumentError, match="float64"):
        DTensor(torch.ones(2, 2).double(), x._spec, requires_grad=False)
    with pytest.raises(ValueError, match="no tensor_meta"):
        DTensor(torch.ones(2, 2), DTensorSpec(mesh, (Shard(0),)), requires_grad=False)
    with pytest.raises(PlacementsError, match="PyTorch's own Shard"):
        DTensorSpec(mesh, (theirs.Shard(0),))
    with pytest.raises(DTensorError, match="one mesh"):
        redistribute_local_tensor(
            x.to_local(), x._spec, DTensorSpec(init_device_mesh("cpu", (1, 2)), (Replicate(),) * 2, x._spec.tensor_meta)
        )


def test_a_spec_says_what_pytorchs_says_and_makes_the_same_tensor():
    run_ranks(4, specs)


def test_helpers_answer_as_pytorchs():
    run_ranks(4, helpers)


def test_private_methods_are_pytorchs():
    run_ranks(4, methods_of_shard)


def test_what_would_be_wrong_raises():
    run_ranks(2, refuses)


def test_placements_are_printed_as_pytorchs():
    """Under `install()`, PyTorch prints graphs by the class that is in its own place."""
    for pair in product(ONE, repeat=2):
        theirs_of = [getattr(theirs, type(p).__name__)(*([p.dim] if isinstance(p, Shard) else [])) for p in pair]
        assert DTensorSpec.format_shard_order_str(pair, None) == TheirSpec.format_shard_order_str(tuple(theirs_of))
