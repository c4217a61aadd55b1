"""Gathers and reductions that are encoded, against one device that encodes and decodes the same tensors."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.codec_losses import WAYS, ends_of
from fsdp.compare import Counted
from ranks import device_type, fresh_values, run_ranks
from terrazzo.errors import FSDPValueError
from terrazzo.fsdp import (
    MXFP8,
    NVFP4,
    Codec,
    CPUOffloadPolicy,
    Float8Rows,
    Int8Blocks,
    MixedPrecisionPolicy,
    fully_shard,
    report,
    trace,
)
from terrazzo.tensor import Shard, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode

pytestmark = pytest.mark.on_late(both=True)

WIDTHS = [34, 70, 2, 34]  # uneven on 2 and 4 ranks; of two rows two ranks of four have none
PER_RANK = 4


class Experts(nn.Module):
    """A batch of matrices as one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 34, 34) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(x @ self.weight).sum(0)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)]
    return nn.Sequential(*layers, Experts())


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def sent(codec: Codec | None, values: Tensor, cut: int = 1) -> Tensor:
    """What arrives, if the last dim is cut into so many chunks."""
    if codec is None or values.ndim < 2:
        return values
    if cut > 1:
        return torch.cat([sent(codec, chunk.contiguous()) for chunk in values.chunk(cut, -1)], -1)
    found = torch.empty_like(values)
    codec.decode(codec.encode(values), found)
    return found


def columns(p: nn.Parameter) -> Shard | None:
    return Shard(p.ndim - 1) if p.ndim > 1 else None


class OneDevice:
    """Trains on one device what ranks train, with what they would send of parameters and gradients."""

    def __init__(
        self, model: nn.Module, gather: Codec | None, reduce: Codec | None, ranks: int, replicas: int, columns: bool
    ) -> None:
        self.masters, self.model = [p.detach().clone() for p in model.parameters()], copy.deepcopy(model)
        self.gather, self.reduce, self.ranks, self.replicas = gather, reduce, ranks, replicas
        self.cut = ranks // replicas if columns else 1  # of the last dim

    def backward(self, *batches: Tensor) -> list[Tensor]:
        """The mean over the ranks of the gradients of their parts of all batches."""
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self.masters, strict=True):
                p.copy_(sent(self.gather, master, self.cut))
        found = []  # of each rank
        for rank in range(self.ranks):
            self.model.zero_grad()
            for batch in batches:
                self.model(batch[rank * PER_RANK : (rank + 1) * PER_RANK]).square().mean().backward()
            found.append([p.grad.clone() for p in self.model.parameters()])
        return [self.mean(grads) for grads in zip(*found, strict=True)]

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        """What the ranks make of their gradients of a parameter."""
        shards = self.ranks // self.replicas
        means = []  # of each replica
        for first in range(0, self.ranks, shards):
            some = grads[first : first + shards]
            terms = [self.reduced(each) for each in some] if shards > 1 else [*some]
            means.append(torch.stack(terms).mean(0))
        if self.replicas == 1:
            return means[0]
        return self.reduced(torch.stack([self.reduced(each) for each in means]).mean(0))

    def reduced(self, grad: Tensor) -> Tensor:
        return sent(self.reduce, grad, self.cut)

    def step(self, grads: list[Tensor]) -> None:
        self.masters = [p - 0.1 * grad for p, grad in zip(self.masters, grads, strict=True)]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Nearly equal: where two codes are as near, another order of additions may choose the other one."""
    assert (found - wanted).norm() <= 2e-3 * wanted.norm()


def batch_of(ranks: int, seed: int) -> Tensor:
    return torch.randn(
        PER_RANK * ranks, WIDTHS[0], generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
    ).to(device_type())


class Gathering:
    """A custom all-gather, which sees bytes."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert dtype is torch.uint8
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def own_communication(model: Any) -> None:
    model.set_separate_reduce_scatter_group()
    for layer in model:
        layer.set_custom_all_gather(Gathering())


def train(
    gather: Codec | None,
    reduce: Codec | None,
    micro: int = 1,
    replicas: int = 1,
    prepare: Callable[[Any], None] = lambda model: None,
    **options: Any,
) -> None:
    """Two steps beside one device; losses, gradients and parameters are compared."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = make()
    reference = OneDevice(model, gather, reduce, ranks, replicas, options.get("shard_placement_fn") is columns)
    policy = MixedPrecisionPolicy(gather_codec=gather, reduce_codec=reduce)
    mesh = init_device_mesh(device_type(), (ranks,) if replicas == 1 else (replicas, ranks // replicas))
    shard(model, mesh=mesh, mp_policy=policy, **options)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        batches = [batch_of(ranks, 10 * step + i) for i in range(micro)]
        for i, batch in enumerate(batches):
            model.set_requires_gradient_sync(i == micro - 1)
            model(batch[rank * PER_RANK : (rank + 1) * PER_RANK]).square().mean().backward()
        wanted = reference.backward(*batches)
        for p, grad in zip(model.parameters(), wanted, strict=True):
            assert_near(p.grad.full_tensor().to(grad.device), grad)
        optimizer.step()
        reference.step(wanted)
        optimizer.zero_grad()
    for p, master in zip(model.parameters(), reference.masters, strict=True):
        torch.testing.assert_close(p.detach().full_tensor().to(master.device), master, rtol=1e-3, atol=1e-3)


def check_codecs() -> None:
    for gather in (Int8Blocks(32), Float8Rows(), MXFP8(), NVFP4()):
        train(gather, None)
    train(None, Int8Blocks(32))
    train(MXFP8(), Float8Rows())


@pytest.mark.parametrize("world", [2, 4])
def test_like_one_device_that_encodes(world):
    run_ranks(world, check_codecs)


def check_cut_within_blocks() -> None:
    """Each rank's chunk of the columns begins with a block, also where chunks are uneven, odd or empty."""
    for gather in (MXFP8(), NVFP4(), Float8Rows()):
        train(gather, Int8Blocks(32), shard_placement_fn=columns)
    train(NVFP4(), MXFP8(), shard_placement_fn=columns, prepare=lambda model: model.set_coalesce_bytes(0))
    train(MXFP8(), Int8Blocks(32), shard_placement_fn=columns, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if dist.get_world_size() == 4:
        train(MXFP8(), Float8Rows(), replicas=2, shard_placement_fn=columns)


@pytest.mark.parametrize("world", [2, 4])
def test_columns_are_cut_within_blocks(world):
    run_ranks(world, check_cut_within_blocks)


def check_settings() -> None:
    both = MXFP8(), Int8Blocks(32)
    train(*both, reshard_after_forward=False)
    train(*both, reshard_after_forward=2)
    train(*both, micro=3)
    train(*both, offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(*both, replicas=2, micro=2)
    train(*both, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else None)
    train(*both, prepare=lambda model: model.set_coalesce_bytes(0))
    train(*both, prepare=own_communication)
    train(*both, prepare=lambda model: model.set_double_buffers(), micro=2, reshard_after_forward=2)


def check_on_replicas() -> None:
    """Over replicas gradients are encoded, too, also where there is nothing else; all replicas have the same, and as
    many bytes are sent as is told."""
    train(Float8Rows(), Int8Blocks(32), replicas=2, reshard_after_forward=True)
    train(None, MXFP8(), replicas=4)
    ranks, width = 4, 64
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    policy = MixedPrecisionPolicy(reduce_codec=Int8Blocks(32))
    shard(model, mesh=init_device_mesh(device_type(), (2, 2)), mp_policy=policy, reshard_after_forward=True)
    x = torch.randn(4, width) + dist.get_rank()
    model(x).sum().backward()
    with CommDebugMode() as seen, trace(model) as steps:
        model(x).sum().backward()
    grad = model[0].weight.grad.to_local()
    others = [torch.empty_like(grad) for _ in range(ranks)]
    dist.all_gather(others, grad)
    rank = dist.get_rank()
    assert torch.equal(others[rank], others[(rank + 2) % ranks]), "the replicas' bits differ"
    assert steps.total_bytes() == report(model).moved
    if device_type() == "cpu":
        encoded = 4 * (width * width * 36 // 32 + width * 4)  # a matrix in blocks of 32, and a bias
        flags = 8 * 2  # a byte for each parameter and rank of a mesh dim
        gathers, reduction = 2 * 4 * 4 * (width + 1) * width // 2, (encoded + flags) // 2
        over_replicas = 2 * (encoded // 2 + flags) // 2
        assert seen.get_total_bytes() == gathers + reduction + over_replicas


def test_settings_and_replicas():
    run_ranks(4, check_settings)
    run_ranks(4, check_on_replicas)


def check_bytes() -> None:
    """The model is one message each time, and as many bytes are sent as the codecs say."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_codec=MXFP8(), reduce_codec=Int8Blocks(32))
    shard(model, mesh=init_device_mesh(device_type(), (ranks,)), mp_policy=policy, reshard_after_forward=True)
    model.set_coalesce_bytes(4 << 20)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    model(x).sum().backward()
    with Counted() as kinds, CommDebugMode() as seen, trace(model) as steps:
        model(x).sum().backward()
    assert kinds.count("all_to_all") == 1 and kinds.count("all_gather") == 2 and "reduce_scatter" not in kinds
    gathered = 4 * (64 * 64 * 33 // 32 + 64 * 2)
    reduced = 4 * (64 * 64 * 36 // 32 + 64 * 4) + 8 * ranks  # and a byte for each parameter says that it has a gradient
    if device_type() != "cpu":
        gathered, reduced = (-(-each // (128 * ranks)) * 128 * ranks for each in (gathered, reduced))
    wanted = (2 * gathered + reduced) * (ranks - 1) // ranks
    assert abs(report(model).moved - wanted) <= 128 * ranks * (device_type() != "cpu")
    assert steps.total_bytes() == report(model).moved
    if device_type() == "cpu":  # ranks exchange more on others when they compare what they ran
        assert seen.get_total_bytes() == wanted
    assert rank == 0 or model[0].weight.to_local().dtype is torch.float32


def test_bytes_and_messages():
    run_ranks(2, check_bytes)
    run_ranks(4, check_bytes)


def live() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


class Returning:
    """The number of live tensors at some points, to which it has to return each time that one is reached.

    Gloo's threads wake who waits for a collective before they drop its tensors, which may be much later when cores are
    busy; so tensors are counted until they are as few as before.
    """

    def __init__(self) -> None:
        self.fewest: dict[str, int] = {}

    def reach(self, point: str) -> None:
        found = live()
        most = self.fewest.get(point, found)
        for _ in range(300):
            if found <= most:
                break
            time.sleep(0.01)
            found = live()
        assert found <= most, f"{found} tensors {point}, after {most}"
        self.fewest[point] = found


def train_and_count(policy: MixedPrecisionPolicy, mesh: Any, tensors: Returning) -> weakref.ref[nn.Module]:
    """A model that has done some steps, and is gone."""
    model = shard(make(), mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        model.set_requires_gradient_sync(step % 2 == 0)
        model(torch.randn(2, WIDTHS[0], dtype=policy.param_dtype)).square().mean().backward()
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        tensors.reach("with gradients that are kept" if step % 2 else "after a step")
    return weakref.ref(model)


def check_nothing_stays() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    for codecs in ({}, {"gather_codec": NVFP4(), "reduce_codec": Int8Blocks(32)}):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, **codecs)
        tensors = Returning()
        for _ in range(4):
            gone = train_and_count(policy, mesh, tensors)
            tensors.reach("without a model")
            assert gone() is None


@pytest.mark.cpu_only("the device keeps tensors of its own a while")
def test_steps_and_models_leave_no_tensors():
    fresh_values(2, check_nothing_stays)  # ranks that have run other tests may still drop what these left


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 34))
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.weight[:, 3] = 5.0
        return x @ self.weight.T


def check_full_precision() -> None:
    """Shards and state dicts never have what was decoded; a write in forward changes what was written only."""
    torch.manual_seed(0)
    for reshard, cut in ((True, 1), (False, 1), (True, 2)):
        model = Writing()
        before = model.weight.detach().clone()
        policy = MixedPrecisionPolicy(gather_codec=NVFP4())
        mesh, place = init_device_mesh(device_type(), (2,)), None if cut == 1 else columns
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=place)
        seen: list[Tensor] = []
        model.register_forward_hook(lambda module, args, out, seen=seen: seen.append(module.weight.detach().clone()))
        model(torch.randn(2, 34)).sum().backward()
        assert torch.equal(seen[0], sent(NVFP4(), before, cut)) and not torch.equal(seen[0], before)
        assert torch.equal(model.state_dict()["weight"].full_tensor(), before)
        model.writes = True
        model(torch.randn(2, 34)).sum().backward()
        before[:, 3] = 5.0
        assert torch.equal(model.state_dict()["weight"].full_tensor(), before)


def test_shards_keep_their_precision():
    run_ranks(2, check_full_precision)


def check_half() -> None:
    """In float16, with sums that would overflow, from the meta device; an overflow arrives as one."""
    with torch.device("meta"):
        model = nn.Linear(8, 6, bias=False)
    policy = MixedPrecisionPolicy(torch.float16, torch.float16, gather_codec=Float8Rows(), reduce_codec=Int8Blocks())
    fully_shard(model, mesh=init_device_mesh(device_type(), (2,)), mp_policy=policy)
    model.to_empty(device=device_type())
    nn.init.ones_(model.weight)
    model(torch.full((1, 8), 4e4, dtype=torch.float16)).float().sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((6, 8), 4e4), rtol=1e-2, atol=0)
    model.zero_grad()
    x = torch.full((1, 8), torch.inf if dist.get_rank() else 1.0, dtype=torch.float16)
    model(x).sum().backward()
    assert not model.weight.grad.full_tensor().isfinite().any()


def test_half_precision_and_overflow():
    run_ranks(2, check_half)


def check_refused() -> None:
    mesh = init_device_mesh(device_type(), (2,))

    def layer(**options: Any) -> None:
        policy = MixedPrecisionPolicy(**{key: options.pop(key) for key in [*options] if key.endswith("codec")})
        fully_shard(nn.Linear(5, 4, **options.pop("made", {})), mesh=mesh, mp_policy=policy, **options)

    layer(gather_codec=NVFP4(), reduce_codec=NVFP4())  # two values share a byte, of five in a row
    with pytest.raises(FSDPValueError, match=r"'weight', torch.float64.*float32, bfloat16 and float16"):
        layer(gather_codec=MXFP8(), made={"dtype": torch.float64})
    model = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_codec=Int8Blocks()))
    with pytest.raises(FSDPValueError, match="reduce_codec"):
        model.set_custom_reduce_scatter(lambda **more: None)
    model(torch.ones(2, 4, device=device_type())).sum().backward()
    with pytest.raises(FSDPValueError, match=r"Int8Blocks.*'weight', torch.float64.*float32, bfloat16 and float16"):
        model.double()


def test_refused():
    run_ranks(2, check_refused)


@pytest.mark.proof
def test_losses_after_200_steps():
    """As in docs/codec-losses.md: a model learns with every codec, and with all of 8 bits as well as in bfloat16."""
    _, reference, sent = ends_of("bfloat16")
    for name in list(WAYS)[1:]:
        first, last, moved = ends_of(name)
        assert last < 0.75 * first and moved < 0.8 * sent, name
        assert abs(last - reference) < (0.1 if name == "NVFP4" else 0.02), name
