"""What is written to one name shows in the others as on one device, or raises a typed error; it is never lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks
from terrazzo.errors import DTensorError
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor


def part_of_part(x):
    first, *_ = x
    second, *_ = first
    torch.detach(second).mul_(2)


def flattened_part_of_transposed(x):
    part, *_ = x.t().split(3, 1)
    part.flatten().zero_()


WRITES = {
    "float": lambda x: x[1].float().zero_(),
    "to the same dtype": lambda x: x[1].to(torch.float32).zero_(),
    "to, copy": lambda x: x.to(torch.float32, copy=True).zero_(),
    "to by keyword, copy": lambda x: x[1].to(dtype=torch.float32, copy=True).zero_(),
    "type_as": lambda x: x[1].type_as(x).zero_(),
    "cpu": lambda x: x.cpu()[1].zero_(),
    "contiguous": lambda x: x[1].contiguous().zero_(),
    "contiguous of a transposed": lambda x: x.t().contiguous().zero_(),
    "plus": lambda x: (+x[1]).zero_(),
    "real": lambda x: x[1].real.zero_(),
    "conj": lambda x: x.conj().zero_(),
    "flatten of one dim": lambda x: x[1].flatten().zero_(),
    "flatten": lambda x: x.flatten().zero_(),
    "ravel of a part": lambda x: torch.ravel(x[:, 1:2]).zero_(),
    "reshape of a part": lambda x: x[:, :3].reshape(-1).zero_(),
    "reshape of a transposed": lambda x: x.t().reshape(-1).zero_(),
    "view of a transposed": lambda x: x.t().view(-1).zero_(),
    "view": lambda x: x.view(-1).zero_(),
    "view of a dtype": lambda x: x.view(torch.int32).zero_(),
    "view of a dtype of a row": lambda x: x[1].view(torch.int32).zero_(),
    "detach": lambda x: x[1].detach().zero_(),
    "part of a part": part_of_part,
    "flattened part of a transposed": flattened_part_of_transposed,
    "identity permutation by name": lambda x: torch.permute(x[1], dims=[0]).mul_(2),
    "tensor_split": lambda x: x.tensor_split(3)[1].zero_(),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, False).zero_(),
    "relu in place": lambda x: F.relu(x, True),
    "index by a number of numpy": lambda x: x[np.int64(1)].zero_(),
    "index by a tensor without dims": lambda x: x[torch.tensor(1)].zero_(),
    "index by a list": lambda x: x[[0, 2]].zero_(),
    "index by an array": lambda x: x[np.array([0, 2])].zero_(),
    "index by nothing": lambda x: x[[]].zero_(),
    "diagonal": lambda x: x.diagonal().zero_(),
    "unfold": lambda x: x.unfold(0, 2, 1).zero_(),
    "as_strided": lambda x: x.as_strided((2,), (1,)).zero_(),
    "expanded": lambda x: x[:, :1].expand(-1, 3).add_(1),
    "broadcast": lambda x: torch.broadcast_tensors(x)[0].zero_(),
    "shift in place": lambda x: x.view(torch.int32).__ilshift__(1),
    "new shape in place": lambda x: x.flatten(0, 0).t_(),
}


def written(mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    line = [[Shard(0)], [Shard(1)], [Replicate()]]
    placed = line if len(mesh_shape) == 1 else [[*a, *b] for a in line for b in line]
    for shape in ((5, 6), (8, 4), (2, 6)):
        whole = torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
        for placements in placed:
            for name, write in WRITES.items():
                expected, x = whole.clone(), distribute_tensor(whole, mesh, placements)
                refused = None
                try:
                    write(expected)
                except (RuntimeError, IndexError, TypeError) as error:
                    refused = type(error)
                try:
                    write(x)
                except DTensorError:
                    continue
                except (RuntimeError, IndexError, TypeError) as error:
                    assert refused is type(error), (name, shape, placements, error)
                    continue
                assert refused is None, (name, shape, placements)
                assert x.shape == expected.shape, (name, shape, placements)
                assert torch.equal(x.full_tensor(), expected), (name, shape, placements)


@pytest.mark.parametrize("mesh_shape", [(4,), pytest.param((2, 2), marks=pytest.mark.long)])
def test_writes_through_aliases_are_as_on_one_device(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(4, written, mesh_shape)


def own_memory() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).reshape(4, 6)
    for placement in (Shard(0), Shard(1)):
        x = distribute_tensor(whole, mesh, [Replicate()])
        y = x.redistribute(mesh, [placement])
        y.zero_()
        assert torch.equal(x.full_tensor(), whole)
        assert y.to_local().is_contiguous()
        assert y.to_local().untyped_storage().nbytes() == 4 * y.to_local().numel(), "it keeps no more than its part"


def test_redistribution_gives_memory_of_its_own() -> None:
    run_ranks(2, own_memory)


def same_objects() -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(30.0).reshape(5, 6)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(whole, mesh, [placement])
        for function in (
            lambda t: t.float(), lambda t: t.to(torch.float32), lambda t: t.contiguous(), lambda t: +t,
            lambda t: t.cpu(), lambda t: t.real,
            lambda t: t.conj(), lambda t: t.flatten(1), lambda t: t.type_as(t), lambda t: t.double(),
            lambda t: t.to(torch.float32, copy=True), lambda t: t.t().contiguous(), lambda t: t.reshape(5, 6),
        ):  # fmt: skip
            assert (function(x) is x) == (function(whole) is whole)
        for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, :3], lambda t: t[:1], lambda t: t[1:2].t()):
            assert view(x).is_contiguous() == view(whole).is_contiguous()
        line, few = torch.arange(2.0), distribute_tensor(torch.arange(2.0), mesh, [Shard(0)])  # some rank has none
        for alike in (lambda t: t, lambda t: t.detach(), lambda t: t.data, lambda t: t.view(torch.int32)):
            assert not alike(line.expand(2, -1)).is_contiguous() and not alike(few.expand(2, -1)).is_contiguous()
        parts = DTensor.from_local(whole.chunk(2, 1)[0], init_device_mesh("cpu", (4,)), [Replicate()])
        assert not parts.is_contiguous() and parts.contiguous() is not parts


def test_what_has_nothing_to_do_returns_its_argument() -> None:
    run_ranks(4, same_objects)


def diagonals_of_einsums() -> None:
    """The first argument of an einsum is no tensor; where one is gathered for it, what it gives is a copy of a view."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(48.0).reshape(3, 4, 4)
    x = distribute_tensor(whole, mesh, [Shard(1)])
    for equation in ("baa->ba", "baa->ab", "bac->bca"):
        for operands in (lambda t: (t,), lambda t: ([t],)):
            expected = torch.einsum(equation, *operands(whole))
            assert torch.equal(torch.einsum(equation, *operands(x)).full_tensor(), expected)
    assert torch.equal(torch.einsum(x, [0, 1, 1], [0, 1]).full_tensor(), torch.einsum("baa->ba", whole))


def test_diagonals_of_einsums() -> None:
    run_ranks(2, diagonals_of_einsums)


def expanded_and_written() -> None:
    """What is expanded may not be written, on any rank: also on those that are too thin to see it."""
    mesh = init_device_mesh("cpu", (4,))
    for shape, placement in (((1, 3), Shard(1)), ((3, 1), Shard(0))):
        whole = torch.zeros(shape)
        x = distribute_tensor(whole, mesh, [placement])
        wide = x.expand(3, 3)
        with pytest.raises(RuntimeError, match="single memory location"):
            wide[:2, :2] = 1.0
        plain = whole.clone()
        plain.expand(3, 3)[:1, :1] = 1.0
        plain.expand(3, 3)[0:0] = 2.0
        wide[:1, :1] = 1.0
        wide[0:0] = 2.0
        assert torch.equal(x.full_tensor(), plain)
    # Through a copy it could not be passed on: said before anything is written.
    copied = distribute_tensor(torch.zeros(1, 3), mesh, [Shard(1)]).expand(4, 3).split([2, 1], dim=-1)[0]
    with pytest.raises(DTensorError, match="expanded"):
        copied[0] = 1.0
    # The parts of `unsafe_chunk` count writes by themselves in C++; a copy of one must hear of them all the same.
    chunked = distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, [Shard(1)])
    half = torch.unsafe_chunk(input=chunked, chunks=1)[0].tensor_split(2, -1)[0]
    chunked[0] = -1.0
    with pytest.raises(DTensorError, match="written to"):
        half + 1
    turned = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(0)])
    turned.swapaxes_(1, 0)
    turned.detach_()  # it is no view, of which C++ would refuse that
    assert turned.shape == (4, 2)


def test_expanded_and_written() -> None:
    run_ranks(4, expanded_and_written)
