"""`terrazzo.fsdp` and the engine on the device: no races, and the same bits in every schedule."""

from __future__ import annotations

import copy
import shutil
import tempfile
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
import torch.nn.functional as F
from torch import nn

from device_ranks import run_on_devices
from late_ranks import run_late
from terrazzo.fsdp import CPUOffloadPolicy, Int8Blocks, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from terrazzo.fsdp.plan.operations import Stream
from terrazzo.tensor import init_device_mesh
from terrazzo.testing import late

WIDTH, WORDS = 16, 20
REPLICAS = "replicas"  # two of all shards, on an even number of ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    uses_all = False  # also the weight of `unused`

    def __init__(self, unused=False):
        super().__init__()
        self.unused = nn.Linear(3, 5) if unused else None
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.uses_all:
            x = x + 0 * self.unused.weight.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(device, sizes=None, coalesce=False, unused=False, prefetch=False, function=fully_shard, **options):
    torch.manual_seed(0)
    model = Model(unused)
    if "offload_policy" not in options or function is torchs.fully_shard:
        model.to(device)
    if sizes is REPLICAS:
        world = dist.get_world_size()
        sizes = (2, world // 2) if world % 2 == 0 else (1, world)
    names = {"mesh_dim_names": ("replicas", "shards")} if sizes else {}
    mesh = init_device_mesh(device.type, sizes or (dist.get_world_size(),), **names)
    for block in model.blocks:
        function(block, mesh=mesh, **options)
    function(model, mesh=mesh, **options)
    if not coalesce and function is fully_shard:
        model.set_coalesce_bytes(0)
    if prefetch:
        for one, next_ in zip(model.blocks, model.blocks[1:], strict=False):
            one.set_modules_to_forward_prefetch([next_])
            next_.set_modules_to_backward_prefetch([one])
    return model


def batch(device, step, micro, rank=None):
    seed = 100 * step + 10 * micro + (dist.get_rank() if rank is None else rank)
    tokens = torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(seed))
    return tokens.pin_memory().to(device, non_blocking=True)


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def train(model, device, steps=2, micros=1, before=lambda model, last: None, between=lambda model: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        for micro in range(micros):
            before(model, micro == micros - 1)
            tokens = batch(device, step, micro)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            between(model)
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    parts = [whole(p.detach().to(device)).flatten() for p in model.parameters()]
    return {"parameters": torch.cat(parts).cpu(), "losses": torch.stack(losses).cpu()}


# ------------------------------------------------------------------ ways to train


def check_plain(device):
    return train(sharded(device), device)


def check_coalesced(device):
    return train(sharded(device, coalesce=True), device)


def check_mixed_precision(device):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(sharded(device, mp_policy=policy), device)


def check_bfloat16_reductions(device):
    return train(sharded(device, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), device)


def check_accumulation(device):
    return train(sharded(device), device, micros=2, before=lambda m, last: m.set_requires_gradient_sync(last))


def check_accumulation_in_shards(device):
    return train(sharded(device), device, micros=3)


def check_offload(device):
    return train(sharded(device, offload_policy=CPUOffloadPolicy()), device)


def check_offload_to_pageable_memory(device):
    return train(sharded(device, offload_policy=CPUOffloadPolicy(pin_memory=False)), device)


def check_offload_of_the_optimizer(device):
    return train(sharded(device, offload_policy=CPUOffloadPolicy(parameters=False)), device)


def check_offload_of_gradients(device):
    policy = CPUOffloadPolicy(parameters=False, gradients=True)
    return train(sharded(device, offload_policy=policy), device, micros=2)


def check_offload_and_accumulation(device):
    return train(sharded(device, offload_policy=CPUOffloadPolicy()), device, micros=2)


def check_whole_after_forward(device):
    return train(sharded(device, reshard_after_forward=False), device)


def check_unused_parameters(device):
    return train(sharded(device, unused=True), device)


def check_prefetching(device):
    return train(sharded(device, prefetch=True), device)


def check_double_buffers(device):
    """With one that is needed in addition, as more are gathered ahead."""
    model = sharded(device, prefetch=True)
    model.blocks[0].set_modules_to_forward_prefetch(list(model.blocks)[1:])
    model.set_double_buffers()
    return train(model, device, micros=2, steps=3)


def check_double_buffers_of_coalesced_units(device):
    model = sharded(device, coalesce=True, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.set_double_buffers()
    return train(model, device, steps=3)


def check_stream_of_its_own(device):
    stream = torch.Stream(device=device)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        return train(sharded(device), device)


def check_unsharded_ahead(device):
    def unshard(model, last):
        for block in model.blocks:
            handle = block.unshard(async_op=True)
        if handle is not None:
            handle.wait()

    return train(sharded(device), device, before=unshard)


def check_gathers_that_are_given_up(device):
    def give_up(model, last):
        for block in model.blocks:
            block.unshard(async_op=True)
        for block in model.blocks:
            block.reshard()
        torch.ones(1000, device=device)

    return train(sharded(device), device, before=give_up)


def check_blocks_unsharded_before(device):
    """Each is a root of its own, with streams of its own, until the model runs."""
    model = sharded(device, coalesce=True)
    for block in model.blocks:
        block.unshard(async_op=True)
    return train(model, device)


def check_failing_backwards(device):
    """On all ranks, when some of the reductions are under way; then the step is taken again."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("on purpose")

    def fail(model, last):
        handle = model.blocks[0].register_forward_hook(lambda block, args, out: Failing.apply(out))
        with pytest.raises(KeyError, match="on purpose"):
            model(batch(device, 7, 0)).sum().backward()
        handle.remove()
        model.zero_grad()

    return train(sharded(device), device, before=fail)


def check_state_dicts_between(device):
    """Ranks are compared before a state dict is made, and the host waits for that."""
    return train(sharded(device), device, before=lambda model, last: model.state_dict())


def check_evaluation_between(device):
    def evaluate(model, last):
        with torch.no_grad():
            model(batch(device, 7, 0))

    return train(sharded(device), device, before=evaluate)


def check_hooks_on_gradients(device):
    model = sharded(device)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 1)
    return train(model, device)


def check_models_with_the_same_streams(device):
    """A device has 32 streams, which are given out again: with the memory that an earlier model may still use."""
    models, losses = [sharded(device) for _ in range(3)], []
    while models:
        model = models.pop()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            tokens = batch(device, step, 0)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        for _ in range(32 - (len(Stream) - 1)):
            torch.get_device_module(device.type).Stream(device, priority=-1)
    losses = torch.stack(losses).cpu()
    assert torch.equal(losses, losses[:2].repeat(3))
    return {"losses": losses, "parameters": torch.zeros(1)}


def check_host_writes_after_forward(device):
    """What the host writes at once to offloaded parameters does not get into that forward, nor into a backward that
    does not reduce."""
    tokens, found = batch(device, 0, 0), []
    for backward, grad, write in ((False, False, True), (False, True, True), (True, True, True), (False, False, False)):
        model = sharded(device, offload_policy=CPUOffloadPolicy())
        model.set_requires_gradient_sync(False)
        with torch.set_grad_enabled(grad):
            output = model(tokens)
        if backward:
            output.sum().backward()
        with torch.no_grad():
            for p in model.parameters() if write else ():
                p.mul_(2)
        found.append(output.detach().sum())
    losses = torch.stack(found).cpu()
    assert (losses == losses[-1]).all(), losses
    return {"losses": losses, "parameters": torch.zeros(1)}


def check_shared_streams_beside_two(device):
    """Two models compute on streams of the user's, which do not wait for each other, and communicate on the same ones:
    by turns, and with the second one's forward before the first one's backward."""
    streams = [torch.get_device_module(device.type).Stream(device) for _ in range(2)]
    now, losses = torch.accelerator.current_stream(), []
    for between in (False, True):
        models = [sharded(device) for _ in streams]
        share_comm_ctx(models)
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        turns = [[0, 1]] if between else [[0], [1]]
        for stream in streams:
            stream.wait_stream(now)
        for step in range(3):
            for turn in turns:
                open_losses = {}
                for k in turn:
                    with torch.get_device_module(device.type).stream(streams[k]):
                        tokens = batch(device, step, 0)
                        open_losses[k] = F.cross_entropy(models[k](tokens).flatten(0, 1), tokens.flatten())
                for k in turn:
                    with torch.get_device_module(device.type).stream(streams[k]):
                        open_losses[k].backward()
                for k in turn:
                    with torch.get_device_module(device.type).stream(streams[k]):
                        optimizers[k].step()
                        optimizers[k].zero_grad()
                losses.extend(loss.detach() for loss in open_losses.values())
        for stream in streams:
            now.wait_stream(stream)
    losses = torch.stack(losses).cpu()
    assert torch.equal(losses, losses[::2].repeat_interleave(2)), losses
    return {"losses": losses, "parameters": torch.zeros(1)}


def check_worker_thread(device):
    values = []

    def work():
        torch.accelerator.set_device_index(device.index)
        values.append(train(sharded(device), device))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return values[0]


def check_replicas(device):
    return train(sharded(device, sizes=REPLICAS), device)


def check_coalesced_replicas(device):
    return train(sharded(device, sizes=REPLICAS, coalesce=True), device)


def check_replicas_in_bfloat16(device):
    return train(sharded(device, sizes=REPLICAS, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), device)


def check_encoded_replicas(device):
    """What is sent is decoded and added by the stream that reduces over the shards, before that over the replicas."""
    return train(sharded(device, sizes=REPLICAS, mp_policy=MixedPrecisionPolicy(reduce_codec=Int8Blocks())), device)


def check_replicas_and_accumulation(device):
    model = sharded(device, sizes=REPLICAS)
    return train(model, device, micros=2, before=lambda m, last: m.set_requires_all_reduce(last))


def check_double_buffers_on_replicas(device):
    model = sharded(device, sizes=REPLICAS, reshard_after_forward=2 if dist.get_world_size() == 4 else True)
    model.set_double_buffers()
    return train(model, device, micros=2, steps=3, before=lambda m, last: m.set_requires_all_reduce(last))


def neighbours():
    """How many ranks keep a block gathered between them."""
    return min(2, dist.get_world_size())


def check_some_blocks_stay_gathered(device):
    return train(sharded(device, reshard_after_forward=neighbours()), device)


def check_writes_to_kept_parts(device):
    """Between forward and backward, whose gathers have to wait for them."""

    def write(model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.01

    return train(sharded(device, reshard_after_forward=neighbours()), device, between=write)


def check_offloaded_state_that_the_host_reads(device):
    """After a step the optimizer's state is in host memory, and may be read at once."""
    model, sums = sharded(device, offload_policy=CPUOffloadPolicy(parameters=False)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        tokens = batch(device, step, 0)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        for state in optimizer.state.values():
            local = state["exp_avg"].to_local()
            assert local.device.type == "cpu"
            sums.append(local.abs().sum())
        optimizer.zero_grad()
    return {"losses": torch.stack(sums), "parameters": torch.zeros(1)}


def check_writes_to_unsharded_parameters(device):
    """In forward, so that the gather in backward has to wait until the shards have what was written."""
    return train(write_in_forward(sharded(device)), device)


def check_writes_between_two_runs(device):
    """The gather for the second run in one forward has to wait until the shards have what the first one wrote."""
    model = sharded(device)
    model.blocks.insert(1, model.blocks[0])
    return train(write_in_forward(model), device)


def write_in_forward(model):
    def write(block, args):
        with torch.no_grad():
            block.up.bias.add_(0.01)  # which backward does not need

    for block in set(model.blocks):
        block.register_forward_pre_hook(write)
    return model


def check_hooks_on_reductions(device):
    model, stream = sharded(device), torch.get_device_module(device.type).Stream(device)
    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(lambda gradients: gradients.mul_(1.0), stream=stream)
    return train(model, device)


def check_another_current_device(device):
    """A model is on the device that was current when it was made. Later another one may be."""
    model = sharded(device)
    torch.accelerator.set_device_index((device.index + 1) % torch.accelerator.device_count())
    try:
        return train(model, device)
    finally:
        torch.accelerator.set_device_index(device.index)


SAMPLE = (check_plain, check_mixed_precision, check_accumulation_in_shards, check_offload, check_unused_parameters)
OTHERS = (
    check_coalesced,
    check_bfloat16_reductions,
    check_accumulation,
    check_offload_to_pageable_memory,
    check_offload_of_the_optimizer,
    check_offload_of_gradients,
    check_offload_and_accumulation,
    check_offloaded_state_that_the_host_reads,
    check_whole_after_forward,
    check_prefetching,
    check_double_buffers,
    check_double_buffers_of_coalesced_units,
    check_stream_of_its_own,
    check_unsharded_ahead,
    check_gathers_that_are_given_up,
    check_blocks_unsharded_before,
    check_failing_backwards,
    check_state_dicts_between,
    check_evaluation_between,
    check_hooks_on_gradients,
    check_hooks_on_reductions,
    check_writes_to_unsharded_parameters,
    check_writes_between_two_runs,
    check_worker_thread,
    check_models_with_the_same_streams,
    check_shared_streams_beside_two,
    check_host_writes_after_forward,
    check_another_current_device,
)
ON_REPLICAS = (
    check_replicas,
    check_replicas_in_bfloat16,
    check_coalesced_replicas,
    check_encoded_replicas,
    check_replicas_and_accumulation,
    check_double_buffers_on_replicas,
    check_some_blocks_stay_gathered,
    check_writes_to_kept_parts,
)


def all_same(world, *checks, modes, **options):
    """A check gives each rank the same in all modes, and all ranks the same parameters; nothing is from new memory."""
    results = run_late(world, *checks, modes=modes, timeout=400, **options)
    for k, check in enumerate(checks):
        runs = results[k * len(modes) : (k + 1) * len(modes)]
        for ranks in runs:
            for rank, found in enumerate(ranks):
                assert not found["losses"].isnan().any() and not found["parameters"].isnan().any(), check.__name__
                assert torch.equal(found["losses"], runs[0][rank]["losses"]), check.__name__
                assert torch.equal(found["parameters"], runs[0][0]["parameters"]), check.__name__


@pytest.mark.long
@pytest.mark.parametrize("check", (*SAMPLE, *OTHERS))
def test_fully_shard_has_no_races_in_any_mode(check):
    all_same(2, check, modes=late.MODES)


@pytest.mark.long
@pytest.mark.parametrize("check", SAMPLE)
def test_fully_shard_has_no_races_where_nccl_averages(check):
    all_same(2, check, modes=("needed", "random"), backend_name="nccl")


@pytest.mark.long
@pytest.mark.parametrize("check", ON_REPLICAS)
def test_replicas_have_no_races(check):
    all_same(4, check, modes=("eager", "needed", "default_first"))


def check_a_step_without_waits(device, **options):
    """The host runs ahead of the device: it launches a whole step, and waits for nothing."""
    model, counts = sharded(device, **options), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        tokens, waits = batch(device, step, 0), late.host_waits()
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        counts.append(late.host_waits() - waits)
    assert counts[1:] == [0, 0], counts


def check_a_step_with_unused_parameters(device, **options):
    """Backwards do not wait to know whether other ranks have a gradient that this one has not, also if micro-batches
    are added up. Only asking for this gradient does, once."""
    model, counts = sharded(device, unused=True, **options), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    used = [p for name, p in model.named_parameters() if "unused" not in name]
    for step in range(3):
        waits = late.host_waits()
        for micro in range(2):
            tokens = batch(device, step, micro)
            model.uses_all = dist.get_rank() == step == 1 and micro == 0  # this alone has a gradient
            F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(used, 1.0)
        assert late.host_waits() == waits
        optimizer.step()
        counts.append(late.host_waits() - waits)
        assert (model.unused.weight.grad is not None) == (step == 1) and model.unused.bias.grad is None
        optimizer.zero_grad()
        assert late.host_waits() - waits == counts[-1]
    assert counts == [1, 1, 1], counts


def check_steps_without_waits(device):
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_a_step_without_waits(device)
    check_a_step_without_waits(device, coalesce=True, mp_policy=half)
    check_a_step_without_waits(device, sizes=REPLICAS, mp_policy=half)
    check_a_step_without_waits(device, sizes=REPLICAS, reshard_after_forward=False)
    if dist.get_world_size() == 4:
        check_a_step_without_waits(device, reshard_after_forward=2)
    check_a_step_with_unused_parameters(device)
    check_a_step_with_unused_parameters(device, sizes=REPLICAS, mp_policy=half, coalesce=True)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_a_step_of_fully_shard_does_not_wait_for_the_device(world):
    run_late(world, check_steps_without_waits)


# ------------------------------------------------------------------ on accelerators

MICROS = {
    check_accumulation: 2,
    check_accumulation_in_shards: 3,
    check_offload_and_accumulation: 2,
    check_offload_of_gradients: 2,
    check_replicas_and_accumulation: 2,
    check_double_buffers: 2,
    check_double_buffers_on_replicas: 2,
}
DOUBLE_BUFFERS = (check_double_buffers, check_double_buffers_of_coalesced_units, check_double_buffers_on_replicas)
STEPS = dict.fromkeys(DOUBLE_BUFFERS, 3)
IN_BFLOAT16 = (
    check_mixed_precision,
    check_bfloat16_reductions,
    check_replicas_in_bfloat16,
    check_double_buffers_of_coalesced_units,
)
TRAIN_OTHERWISE = (
    check_encoded_replicas,
    check_models_with_the_same_streams,
    check_shared_streams_beside_two,
    check_host_writes_after_forward,
    check_offloaded_state_that_the_host_reads,
    check_writes_to_unsharded_parameters,
    check_writes_to_kept_parts,
    check_writes_between_two_runs,
)


def on_one_device(device, unused=False, steps=2, micros=1):
    """What PyTorch computes with the whole model on one device from all ranks' batches, and the losses of this rank."""
    torch.manual_seed(0)
    model, losses = Model(unused).to(device), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for micro in range(micros):
            parts = []
            for rank in range(dist.get_world_size()):
                tokens = batch(device, step, micro, rank)
                parts.append(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
            torch.stack(parts).mean().backward()
            losses.append(parts[dist.get_rank()].detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).cpu(),
        "losses": torch.stack(losses).cpu(),
    }


def check_as_on_one_device(device, check):
    found = check(device)
    if check in TRAIN_OTHERWISE:
        assert not found["losses"].isnan().any() and not found["parameters"].isnan().any()
        return
    expected = on_one_device(device, check is check_unused_parameters, STEPS.get(check, 2), MICROS.get(check, 1))
    tolerance = 5e-2 if check in IN_BFLOAT16 else 1e-4
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("check", (*SAMPLE, *OTHERS, *ON_REPLICAS))
def test_fully_shard_trains_on_accelerators_as_one_device(check):
    run_on_devices(check_as_on_one_device, check)


def check_as_pytorchs(device):
    """With the same reductions in bfloat16, too."""
    for ours, theirs in (
        ({}, {}),
        ({"sizes": REPLICAS}, {"sizes": REPLICAS}),
        (
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
            {"mp_policy": torchs.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        ),
        ({"offload_policy": CPUOffloadPolicy()}, {"offload_policy": torchs.CPUOffloadPolicy()}),
    ):
        found = train(sharded(device, **ours), device)
        expected = train(sharded(device, function=torchs.fully_shard, **theirs), device)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_fully_shard_trains_on_accelerators_as_pytorchs():
    run_on_devices(check_as_pytorchs)


# ------------------------------------------------------------------ the engine


def check_engine(device):
    from terrazzo.engine import initialize

    found, folder = [], tempfile.mkdtemp()
    on_files = {"device": "nvme", "nvme_path": folder, "buffer_size": 700, "buffer_count": 2}
    for stage, dtype, more in (
        (3, torch.float32, {}),
        (3, torch.bfloat16, {"bf16": {"enabled": True}}),
        (2, torch.float16, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
        (
            3,
            torch.float32,
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
        ),
        (2, torch.float32, {"zero_optimization": {"stage": 2, "offload_optimizer": on_files}}),
        (
            3,
            torch.bfloat16,
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_optimizer": on_files}},
        ),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
        config = {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            **more,
        }
        engine = initialize(model, config=config)
        for step in range(4):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step)).to(device, dtype)
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.detach().cpu())
    shutil.rmtree(folder)
    # The state on files and in memory are the same numbers: stage 3 and 2 in float32, and stage 3 in bfloat16.
    memory, half, _, _, files, half_on_files = torch.stack(found).split(4)
    torch.testing.assert_close(files, memory, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(half_on_files, half)
    return {"losses": torch.stack(found), "parameters": torch.zeros(1)}


@pytest.mark.long
def test_the_engine_has_no_races():
    all_same(2, check_engine, modes=("eager", "needed", "default_first"))


def check_deepspeed(device):
    """As one device trains, also after a checkpoint was loaded."""
    from terrazzo import deepspeed

    losses, parts, rank, world = [], [], dist.get_rank(), dist.get_world_size()
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        reference = copy.deepcopy(model).to(device)
        numbers = {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01}
        engine, *_ = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": numbers},
                "gradient_clipping": 1.0,
            },
        )
        optimizer = torch.optim.AdamW(reference.parameters(), **numbers)
        box = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        for step in range(3):
            if step == 1:  # a step that is undone
                engine.save_checkpoint(box[0], tag="here")
                for _ in range(2):
                    engine.backward(engine(torch.ones(2, 8, device=device)).square().mean())
                    engine.step()
                engine.load_checkpoint(box[0], tag="here")
            for micro in range(2):
                x = torch.randn(2 * world, 8, generator=torch.Generator().manual_seed(10 * step + micro)).to(device)
                (reference(x).square().mean() / 2).backward()
                parts.append(reference(x[2 * rank :][:2]).square().mean().detach())
                loss = engine(x[2 * rank :][:2]).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(box[0])
    losses = torch.stack(losses).cpu()
    torch.testing.assert_close(losses, torch.stack(parts).cpu(), rtol=1e-4, atol=1e-5)
    return {"losses": losses, "parameters": torch.zeros(1)}


@pytest.mark.long
def test_deepspeeds_face_has_no_races():
    all_same(2, check_deepspeed, modes=("needed", "default_first"))


@pytest.mark.gpu
def test_deepspeeds_face_trains_on_accelerators():
    run_on_devices(check_deepspeed)


@pytest.mark.gpu
def test_the_engine_trains_on_accelerators():
    for found in run_on_devices(check_engine):
        assert not found["losses"].isnan().any()
