"""The table of features: for each, ten steps on 2 and on 4 ranks have the losses, gradient norms and parameters of a
single process.  Those of torch's fully_shard, which is like a single process as well, are compared on most ranks, and
in half precision on all, where the two libraries are nearer to each other than to a single process.

A feature is a program that is run three times: by one process on the whole batch, and by all ranks with either library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo.fsdp as our_fsdp
import terrazzo.tensor as our_tensor
import terrazzo.tensor.parallel as our_parallel
from fsdp.compare import INPUTS, OUTPUTS, PER_RANK, WIDTH, Block, Model, adamw, batches, whole
from fsdp.test_api import Tied
from ranks import run_ranks
from terrazzo.checkpoint.state_dict import StateDictOptions, set_model_state_dict


def names_of(*modules: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


OURS = names_of(our_parallel, our_tensor, our_fsdp)
TORCHS = names_of(torch_parallel, torch_tensor, torch_fsdp)


def by_blocks(f: Any, model: Any, **options: Any) -> Any:
    for block in model.blocks:
        f.fully_shard(block, **options)
    return f.fully_shard(model, **options)


def one_backward(f: Any, model: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
    loss = ((model(x).float() - y) ** 2).mean()
    loss.backward()
    return loss.detach()


def same_parts() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


@dataclass(frozen=True)
class Feature:
    """What to train, how to shard it with the library `f`, and what a step does."""

    shard: Callable[[Any, Any], Any] = by_blocks
    model: Callable[[], Any] = Model
    backward: Callable[[Any, Any, Tensor, Tensor, int], Tensor] = one_backward
    part: Callable[[], tuple[int, int]] = same_parts  # this rank's part of the batch, of how many
    worlds: tuple[int, ...] = (2, 4)
    torch: bool = True  # whether torch's can do it, on gloo
    clip: bool = True  # torch's cannot, where parameters are on different meshes or on none
    tolerance: float = 1e-5  # beside one process
    between: float = 1e-5  # beside torch's


# ------------------------------------------------------------------ groups


def lists(f: Any, model: Any) -> None:
    f.fully_shard([model.blocks[0], model.blocks[1]])
    f.fully_shard([model.embed, model.head], reshard_after_forward=True)
    f.fully_shard(model)


def nested(f: Any, model: Any) -> None:
    for block in model.blocks:
        f.fully_shard(block.up)
        f.fully_shard(block)
    f.fully_shard(model)


def from_meta(f: Any, model: Any) -> None:
    """The model's values wait on rank 0 while a twin of it is sharded without having any."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    by_blocks(f, model)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values if dist.get_rank() == 0 else {}, options=options)


def tied_together(f: Any, model: Any) -> None:
    f.fully_shard([model.inner, model.outer])
    by_blocks(f, model)


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[2].requires_grad_(False)
        for block in self.blocks:
            block.up.weight.requires_grad_(False)


class WithBuffers(Model):
    """One buffer scales, the other counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0]))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x) * self.scale + 0.01 * self.seen


def all_but_some(f: Any, model: Any) -> None:
    by_blocks(f, model, ignored_params=set(model.blocks[0].up.parameters()) | {model.embed.weight})


def average_the_ignored(f: Any, model: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
    loss = one_backward(f, model, x, y, step)
    if f is not None:
        for parameter in (*model.blocks[0].up.parameters(), model.embed.weight):
            assert type(parameter) is nn.Parameter
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return loss


def on_last_dim(f: Any, model: Any) -> None:
    by_blocks(f, model, shard_placement_fn=lambda p: f.Shard(p.ndim - 1))


class Even(nn.Module):
    """Sizes that 4 divides, as torch's wants for other dims and within tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(INPUTS, 16), nn.Linear(16, OUTPUTS)
        self.blocks = nn.ModuleList([Block(16, 32) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks_on_last_dim(f: Any, model: Any) -> None:
    for block in model.blocks:
        f.fully_shard(block, shard_placement_fn=lambda p: f.Shard(p.ndim - 1))
    f.fully_shard(model)


# ------------------------------------------------------------------ meshes


def grid() -> Any:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def hybrid(f: Any, model: Any) -> None:
    by_blocks(f, model, mesh=grid())


def all_shard(f: Any, model: Any) -> None:
    by_blocks(f, model, mesh=init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard")))


def resharding(how: bool | int | None) -> Callable[[Any, Any], None]:
    def shard(f: Any, model: Any) -> None:
        by_blocks(f, model, reshard_after_forward=how)

    return shard


def tensor_parallel(f: Any, model: Any) -> None:
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        f.parallelize_module(block, mesh["tp"], {"up": f.ColwiseParallel(), "down": f.RowwiseParallel()})
    by_blocks(f, model, mesh=mesh["dp"])


def data_part() -> tuple[int, int]:
    return dist.get_rank() // 2, dist.get_world_size() // 2


# ------------------------------------------------------------------ forwards and backwards


def several_forwards(f: Any, model: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
    outs = [model(part) for part in x.chunk(2)]
    loss = sum(((out - part) ** 2).mean() for out, part in zip(outs, y.chunk(2), strict=True)) / 2
    loss.backward()
    return loss.detach()


class Aside(nn.Module):
    """Gives an output without a gradient beside the one that counts, or nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.inner(x)
        return {"out": x, "mean": x.detach().mean(), "index": x.argmax(-1), "name": "aside"}


class WithAsides(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Aside() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            found = block(x)
            x = found["out"].detach() if i == 0 else found["out"]  # the first needs no gradient at all
        return self.head(x)


def prefetching(f: Any, model: Any) -> None:
    by_blocks(f, model, reshard_after_forward=True)
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])


def micro_batches(set_last: Callable[[Any, bool], None]) -> Callable[..., Tensor]:
    def backward(f: Any, model: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
        total = torch.zeros(())
        for i, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            if f is not None:
                set_last(model, i == 1)
            loss = ((model(a) - b) ** 2).mean() / 2
            loss.backward()
            total += loss.detach()
        return total

    return backward


def wait_at_the_end(model: Any, last: bool) -> None:
    model.set_is_last_backward(last)


def sync_at_the_end(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last)


def all_reduce_at_the_end(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(last)


def with_hook(f: Any, model: Any) -> None:
    mesh = grid()

    def over_replicas(reduced: Tensor) -> None:
        dist.all_reduce(reduced, group=mesh["replicate"].get_group())
        reduced /= 2

    by_blocks(f, model, mesh=mesh["shard"])
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(over_replicas)


def divided_by_more(f: Any, model: Any) -> None:
    by_blocks(f, model)
    for module in (*model.blocks, model):
        module.set_reduce_scatter_divide_factor(2.0 * dist.get_world_size())


def half_the_gradient(f: Any, model: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
    loss = ((model(x) - y) ** 2).mean()
    (loss if f is not None else loss / 2).backward()
    return loss.detach()


def with_event(f: Any, model: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
    if f is not None:
        model.set_post_optim_event(None)
    return one_backward(f, model, x, y, step)


class Looked(Model):
    """The embedding is a table, whose backward does not need it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x[:, 0].abs() * 5).long().clamp(0, 10))


def table_stays(f: Any, model: Any) -> None:
    f.fully_shard(model.embed, reshard_after_forward=True)
    by_blocks(f, model)
    model.embed.set_unshard_in_backward(False)


def by_hand(f: Any, model: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
    if f is not None:
        handles = [block.unshard(async_op=True) for block in model.blocks]
        assert all(isinstance(handle, f.UnshardHandle) for handle in handles)
        if step % 2:
            handles[0].wait()
        model.unshard()
    loss = one_backward(f, model, x, y, step)
    if f is not None:
        model.reshard()
    return loss


class Answering(Model):
    def answer(self, x: Tensor, *, scale: float) -> Tensor:
        return super().forward(x) * scale


def methods(f: Any, model: Any) -> None:
    by_blocks(f, model)
    f.register_fsdp_forward_method(model, "answer")


def answering(f: Any, model: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
    loss = ((model.answer(x, scale=2.0) - y) ** 2).mean()
    loss.backward()
    return loss.detach()


def offloaded(f: Any, model: Any) -> None:
    by_blocks(f, model, offload_policy=f.CPUOffloadPolicy(pin_memory=False))


# ------------------------------------------------------------------ precision

HALF = torch.bfloat16


def precision(**policy: Any) -> Callable[[Any, Any], None]:
    def shard(f: Any, model: Any) -> None:
        by_blocks(f, model, mp_policy=f.MixedPrecisionPolicy(**policy))

    return shard


def answering_in_single(f: Any, model: Any) -> None:
    for block in model.blocks:
        f.fully_shard(block, mp_policy=f.MixedPrecisionPolicy(HALF))
    f.fully_shard(model, mp_policy=f.MixedPrecisionPolicy(HALF, output_dtype=torch.float32))


def only_blocks_in_half(f: Any, model: Any) -> None:
    for block in model.blocks:
        f.fully_shard(block, mp_policy=f.MixedPrecisionPolicy(HALF, torch.float32, torch.float32))
    f.fully_shard(model)


class OwnCasts(Model):
    """Converts its inputs itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.embed.weight.dtype))


class Adapted(nn.Module):
    """Frozen weights in half precision beside trainable ones in single, in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(INPUTS, WIDTH).to(HALF).requires_grad_(False)
        self.low, self.high = nn.Linear(INPUTS, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x.to(HALF)).float() + self.high(self.low(x)))


ROUNDED = {"tolerance": 0.05, "between": 0.02}

FEATURES: dict[str, Feature] = {
    "lists of modules": Feature(lists),
    "nested calls": Feature(nested),
    "only the root": Feature(lambda f, model: f.fully_shard(model)),
    "from the meta device": Feature(from_meta),
    "shared parameters, a module run twice, one sometimes unused": Feature(tied_together, Tied),
    "frozen parameters": Feature(model=Frozen),
    "buffers": Feature(model=WithBuffers),
    "ignored_params": Feature(all_but_some, backward=average_the_ignored, clip=False),
    "shard_placement_fn": Feature(blocks_on_last_dim, Even),
    "shard_placement_fn, uneven": Feature(on_last_dim, torch=False),
    "HSDP": Feature(hybrid),
    "HSDP of one replica": Feature(all_shard),
    "reshard_after_forward=True": Feature(resharding(True)),
    "reshard_after_forward=False": Feature(resharding(False)),
    "reshard_after_forward=None": Feature(resharding(None)),
    "reshard_after_forward=2": Feature(resharding(2), worlds=(4,)),  # of 2 ranks it would be all
    "tensor parallelism inside": Feature(tensor_parallel, Even, part=data_part, clip=False),
    "several forwards before a backward": Feature(backward=several_forwards),
    "outputs that need no gradient": Feature(model=WithAsides),
    "explicit prefetch": Feature(prefetching),
    "accumulation with communication": Feature(backward=micro_batches(wait_at_the_end)),
    "accumulation without communication": Feature(backward=micro_batches(sync_at_the_end)),
    "accumulation without all-reduce": Feature(hybrid, backward=micro_batches(all_reduce_at_the_end)),
    "all-reduce hook": Feature(with_hook),
    "divide factor": Feature(divided_by_more, backward=half_the_gradient, torch=False),
    "post-optimizer event": Feature(backward=with_event),
    "no unshard in backward": Feature(table_stays, Looked),
    "unshard and reshard by hand": Feature(backward=by_hand),
    "forward methods": Feature(methods, Answering, answering),
    "offload": Feature(offloaded),
    "param_dtype": Feature(precision(param_dtype=HALF), **ROUNDED),
    "param_dtype, reduce_dtype": Feature(precision(param_dtype=HALF, reduce_dtype=torch.float32), **ROUNDED),
    "reduce_dtype": Feature(precision(reduce_dtype=HALF), **ROUNDED),
    "output_dtype": Feature(answering_in_single, **ROUNDED),
    "cast_forward_inputs=False": Feature(precision(param_dtype=HALF, cast_forward_inputs=False), OwnCasts, **ROUNDED),
    "policies that differ": Feature(only_blocks_in_half, **ROUNDED),
    "frozen half precision beside trainable single": Feature(
        lambda f, model: f.fully_shard(model), Adapted, torch=False
    ),
}


def ten_steps(feature: Feature, f: Any) -> list[Tensor]:
    """Losses, norms of gradients, parameters; `f` None is one process with the whole batch."""
    torch.manual_seed(0)
    model = feature.model()
    if f is not None:
        feature.shard(f, model)
        assert isinstance(model, f.FSDPModule)
    optimizer = adamw(model, eps=1e-3)  # rounding does not become steps
    part, parts = (0, 1) if f is None else feature.part()
    found = []
    for step, (x, y) in enumerate(batches(10)):
        size = PER_RANK * dist.get_world_size() // parts
        mine = slice(part * size, (part + 1) * size)
        loss = feature.backward(f, model, x[mine], y[mine], step)
        if f is not None:
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        found.append(loss)
        if feature.clip:
            found.append(as_plain(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *[as_plain(p) for p in model.parameters()]]


def of_one_process(feature: Feature) -> list[Tensor]:
    """What one rank computes with the whole batch, on all ranks."""
    found: list[Any] = [ten_steps(feature, None) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def as_plain(tensor: Any) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, torch_tensor.DTensor) else whole(tensor)


def check(name: str) -> None:
    feature = FEATURES[name]
    ours = ten_steps(feature, OURS)
    others = [("one process", of_one_process(feature), feature.tolerance)]
    is_nearer = feature.between < feature.tolerance
    if feature.torch and (is_nearer or dist.get_world_size() == max(feature.worlds)):
        others.append(("torch's fully_shard", ten_steps(feature, TORCHS), feature.between))
    for what, theirs, tolerance in others:
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                a.float(), b.float(), rtol=tolerance, atol=tolerance, msg=lambda m, what=what: f"not like {what}: {m}"
            )


def fewest(feature: Feature) -> int:
    """The smallest world of several ranks, if there is one."""
    return min((world for world in feature.worlds if world > 1), default=1)


# What other tests look at, too, or a case that is like another one.
LONG = {
    "only the root",
    "nested calls",
    "reshard_after_forward=False",
    "reshard_after_forward=None",
    "explicit prefetch",
    "accumulation without all-reduce",
    "all-reduce hook",
    "divide factor",
    "post-optimizer event",
    "reduce_dtype",
    "output_dtype",
    "cast_forward_inputs=False",
}


def cases():
    """Each feature on few ranks; and as long tests on the other worlds, and those of `LONG`."""
    for name, feature in FEATURES.items():
        for world in feature.worlds:
            is_short = world == fewest(feature) and name not in LONG
            yield pytest.param(name, world, marks=[] if is_short else pytest.mark.long)


@pytest.mark.parametrize(("name", "world"), list(cases()))
def test_ten_steps(name, world):
    run_ranks(world, check, name)
