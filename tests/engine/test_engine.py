"""Every stage, precision and number of ranks trains as one process with PyTorch alone does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo
from engine.runs import Model, averaged, batches, config, engine_of, loss_of, make_model, train, train_plainly, weights
from ranks import device_type, run_ranks
from terrazzo.comm.alone import backends
from terrazzo.engine import initialize
from terrazzo.errors import EngineConfigError, EngineError
from terrazzo.fsdp import offload

pytestmark = pytest.mark.on_late(both=True)

STEPS = 8


def check_stages() -> list[list[float]]:
    runs = []
    expected, reference = train_plainly(STEPS)
    theirs = dict(reference.named_parameters())
    for stage in (0, 1, 2, 3):
        for accumulation in (1, 2):
            engine = engine_of(stage, gradient_accumulation_steps=accumulation)
            runs.append(train(engine, STEPS))
            assert engine.global_steps == STEPS and engine.micro_steps == STEPS * accumulation
            assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (8, accumulation)
            assert engine.train_micro_batch_size_per_gpu() == 8 // accumulation // engine.world_size
            assert engine.device.type == device_type() and engine.global_rank == engine.local_rank
            assert engine.get_lr() == [0.02] and 0 < engine.get_global_grad_norm() < 10
            assert engine.zero_optimization() is (stage > 0) and not engine.bfloat16_enabled()
            assert engine.global_samples == STEPS * 8 and engine.skipped_steps == 0
            torch.testing.assert_close(torch.tensor(runs[-1]), torch.tensor(expected), rtol=1e-5, atol=1e-5)
            for name, ours in weights(engine).items():
                torch.testing.assert_close(ours, theirs[name].detach(), rtol=1e-4, atol=1e-5)
    return runs


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_every_stage_trains_like_one_process(world):
    for runs in run_ranks(world, check_stages):
        assert len(runs) == 8


def check_defaults() -> None:
    """A config that says nothing of clipping has DeepSpeed's: a norm of at most 1."""
    for limit, options in ((1.0, {}), (0.0, {"gradient_clipping": 0}), (0.0, {"gradient_clipping": 0.0})):
        model = make_model()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        settings = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **options}
        engine = initialize(make_model(), config=settings)
        norms = []
        for x, y in batches(3):
            loss_of(model, x, 5 * y).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf")).item())
            optimizer.step()
            optimizer.zero_grad()
            part = slice(engine.global_rank * 4, engine.global_rank * 4 + 4)
            engine.backward(loss_of(engine, x[part], 5 * y[part]))
            engine.step()
        assert max(norms) > 3
        for name, ours in weights(engine).items():
            torch.testing.assert_close(ours, model.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


def test_gradients_are_clipped_unless_the_config_says_not_to():
    run_ranks(2, check_defaults)


def check_offload() -> None:
    expected = train_plainly(STEPS)[0]
    cpu = {"device": "cpu", "pin_memory": False}
    for zero in ({"stage": 1, "offload_optimizer": cpu}, {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}):
        engine = engine_of(zero["stage"], zero_optimization=zero)
        torch.testing.assert_close(torch.tensor(train(engine, STEPS)), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert all(p.device.type == "cpu" for p in engine.module.parameters())
    parked, to_host = [], offload.to_host
    offload.to_host = lambda local, settings: parked.append(local) or to_host(local, settings)  # type: ignore[assignment]
    try:
        engine = engine_of(2, zero_optimization={"stage": 2, "offload_optimizer": {**cpu, "step_on": "device"}})
        torch.testing.assert_close(torch.tensor(train(engine, STEPS)), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    finally:
        offload.to_host = to_host
    assert len(parked) == 2 * STEPS * len(engine.optimizer.state) > 0  # two tensors of AdamW's for each


def test_offload_to_the_cpu():
    run_ranks(2, check_offload)


def check_sixteen_bits() -> None:
    expected, _ = train_plainly(STEPS, torch.bfloat16)
    first = None
    for stage in (0, 1, 2, 3):
        engine = engine_of(stage, bf16={"enabled": True})
        assert engine.bfloat16_enabled()
        losses = torch.tensor(train(engine, STEPS))
        torch.testing.assert_close(losses, torch.tensor(expected), rtol=2e-2, atol=2e-2)
        first = losses if first is None else first
        torch.testing.assert_close(losses, first, rtol=1e-3, atol=1e-3)
        assert all(p.dtype is torch.float32 for p in engine.module.parameters())
        assert engine.module.shift.dtype is torch.float32


def test_bfloat16():
    run_ranks(2, check_sixteen_bits)


def check_all_sixteen_bits(folder: str) -> None:
    """The same as a model that is bfloat16 itself, with PyTorch's optimizer; a checkpoint continues it."""
    model = make_model().bfloat16()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.5)
    expected = []
    for x, y in batches(STEPS):
        loss = loss_of(lambda x: model(x.bfloat16()), x, y)
        loss.backward()
        expected.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    options = {"bf16": bf16, "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.5}}}
    for stage in (0, 1, 2, 3):
        engine = initialize(make_model(), config={**config(stage, **options), "scheduler": None})
        losses = torch.tensor(train(engine, STEPS))
        torch.testing.assert_close(losses, torch.tensor(expected), rtol=3e-2, atol=3e-2)
        assert losses[-1] < losses[0]
        assert all(p.dtype is torch.bfloat16 for p in engine.module.parameters())
        states = [t for state in engine.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        assert states and all(t.dtype is torch.bfloat16 for t in states)
        if stage != 2:
            continue
        engine.save_checkpoint(folder)
        again = initialize(make_model(seed=1), config={**config(3, **options), "scheduler": None})
        again.load_checkpoint(folder)
        saved, loaded = (weights(e) for e in (engine, again))
        assert all(torch.equal(loaded[name], value) for name, value in saved.items()) and len(saved) > 5
    with pytest.raises(EngineConfigError, match="bf16_optimizer_states are not both true"):
        initialize(make_model(), config=config(1, bf16={"enabled": True, "bf16_optimizer_states": True}))


def test_parameters_and_optimizer_in_bfloat16(tmp_path):
    run_ranks(2, check_all_sixteen_bits, str(tmp_path))


def check_float16() -> None:
    first = None
    for stage in (0, 2, 3):
        engine = engine_of(stage, fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})
        losses = train(engine, 40)
        assert engine.skipped_steps > 0 and engine.loss_scale.value < 2.0**40
        assert engine.global_steps == 40
        taken = 40 - engine.skipped_steps
        assert engine.lr_scheduler.last_batch_iteration == taken - 1
        if first is None:
            first = (losses, engine.skipped_steps)
        assert engine.skipped_steps == first[1]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(first[0]), rtol=1e-2, atol=1e-2)
        assert losses[-1] < losses[0]
        static = engine_of(stage, fp16={"enabled": True, "loss_scale": 128})
        plain = train_plainly(STEPS, torch.float16)[0]
        torch.testing.assert_close(torch.tensor(train(static, STEPS)), torch.tensor(plain), rtol=2e-3, atol=2e-3)
        assert static.loss_scale.value == 128


def test_float16_skips_and_counts_steps_that_overflow():
    run_ranks(2, check_float16)


def check_scale_exhausted() -> None:
    engine = engine_of(1, fp16={"enabled": True, "initial_scale_power": 0, "hysteresis": 1})
    loss = loss_of(engine, torch.full((4, 6), 1e4), torch.zeros(4, 3)) * float("inf")
    engine.backward(loss)
    with pytest.raises(FloatingPointError, match="smallest loss scale"):
        engine.step()


def test_gradients_that_always_overflow():
    run_ranks(2, check_scale_exhausted)


def check_optimizers() -> None:
    expected = train_plainly(STEPS)[0]
    described = {key: value for key, value in config(2).items() if key not in ("optimizer", "scheduler")}

    def scheduler(optimizer):
        from terrazzo.engine import WarmupLR

        return WarmupLR(optimizer, warmup_max_lr=0.02, warmup_num_steps=5)

    model = make_model()
    decayed = [p for p in model.parameters() if p.requires_grad]
    built = torch.optim.AdamW(
        [{"params": decayed[:3]}, {"params": decayed[3:]}], lr=0.01, weight_decay=0.1
    )  # before sharding
    engine = initialize(model, built, scheduler, config=described)
    assert engine.optimizer is built and len(built.param_groups) == 2
    torch.testing.assert_close(torch.tensor(train(engine, STEPS)), torch.tensor(expected), rtol=1e-5, atol=1e-5)

    made = initialize(
        make_model(), lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1), scheduler, config=described
    )
    torch.testing.assert_close(torch.tensor(train(made, STEPS)), torch.tensor(expected), rtol=1e-5, atol=1e-5)

    with pytest.raises(EngineConfigError, match="one of them"):
        initialize(make_model(), built, config=config(0))
    with pytest.raises(EngineConfigError, match="no optimizer"):
        initialize(make_model(), config=described)
    with pytest.raises(EngineError, match="not in the model"):
        initialize(make_model(), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), config=described)


def test_optimizers_of_all_kinds():
    run_ranks(2, check_optimizers)


def check_same_start() -> None:
    engine = engine_of(1, make_model(seed=torch.distributed.get_rank()))
    expected = dict(make_model(seed=0).named_parameters())
    for name, ours in weights(engine).items():
        assert torch.equal(ours, expected[name])


def test_all_ranks_begin_with_the_first_ones_values():
    run_ranks(2, check_same_start)


class Result:
    """What some model returns; PyTorch does not know that there is a tensor in it."""

    def __init__(self, x):
        self.x = x


class Returning(Model):
    def forward(self, x):
        return Result(super().forward(x))


def check_backward_that_nobody_sees() -> None:
    model, expected = Returning(), train_plainly(STEPS)[0]
    model.load_state_dict(make_model().state_dict())
    engine = initialize(model, config=config(0, gradient_accumulation_steps=2))
    losses = []
    for x, y in batches(STEPS):
        loss = torch.zeros(())
        for micro in (0, 1):
            part = ((engine(x[micro * 4 : micro * 4 + 4]).x - y[micro * 4 : micro * 4 + 4]) ** 2).mean()
            part.backward()
            engine.step()
            loss += part.detach() / 2
        losses.append(loss.item())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    half = initialize(Returning(), config=config(1, fp16={"enabled": True, "loss_scale": 8}))
    half(torch.ones(8, 6)).x.float().sum().backward()
    with pytest.raises(EngineError, match="without the loss scale"):
        half.step()


def test_backward_that_nobody_sees():
    run_ranks(1, check_backward_that_nobody_sees)


def check_gradients_aside() -> None:
    """Gradients that the program takes through the model, also inside another backward, are no part of a step."""
    expected = train_plainly(STEPS)[0]

    def slope(engine, x, y):
        with torch.enable_grad():  # which is off in hooks
            x = x.clone().requires_grad_()
            return torch.autograd.grad(loss_of(engine, x, y), x)[0]

    def same(engine, x, y):
        return torch.func.grad(lambda x: loss_of(engine, x, y))(x)

    def slope_in_a_hook(engine, part):
        other, found = torch.ones((), requires_grad=True), []
        other.register_hook(lambda _: found.append(slope(engine, *part)))
        (other * 2).backward()
        return found[0]

    for stage in (0, 1, 2, 3):
        engine = engine_of(stage, gradient_accumulation_steps=2)
        losses = []
        for x, y in batches(STEPS):
            total = torch.zeros(())
            for micro in (0, 1):
                first = (micro * dist.get_world_size() + dist.get_rank()) * engine.train_micro_batch_size_per_gpu()
                part = [each[first : first + engine.train_micro_batch_size_per_gpu()] for each in (x, y)]
                expected_slope = slope(engine, *part)
                torch.testing.assert_close(same(engine, *part), expected_slope)
                loss = loss_of(engine, *part)
                torch.testing.assert_close(slope_in_a_hook(engine, part), expected_slope)
                assert engine.between_steps is (micro == 0)
                total += engine.backward(loss)
                engine.step()
            losses.append(averaged(total))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    half = engine_of(1, fp16={"enabled": True, "loss_scale": 8})
    x = torch.ones(4, 6)
    assert slope(half, x, torch.zeros(4, 3)).any()
    with pytest.raises(EngineError, match="without the loss scale"):
        loss_of(half, x, torch.zeros(4, 3)).backward()


def test_gradients_aside_are_no_part_of_a_step():
    run_ranks(2, check_gradients_aside)


def check_compiled() -> None:
    expected, names = train_plainly(STEPS)[0], list(make_model().state_dict())
    for stage in (1, 3):
        engine = initialize(make_model(), config=config(stage), compile="aot_eager")
        losses = train(engine, STEPS)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert list(engine.module.state_dict()) == names and type(engine.module.blocks[0]).__name__.endswith("Block")
        report = str(terrazzo.compile_report(engine.module.blocks[0]))
        assert "1 graphs" in report and f"{STEPS} calls, compiled" in report
    alone = initialize(nn.Linear(6, 3), config=config(2), compile="aot_eager")
    assert "Linear" in str(terrazzo.compile_report(alone.module))


def test_compiled_blocks():
    run_ranks(2, check_compiled)


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 5, sparse=sparse)
        self.out = nn.Linear(5, 2)

    def forward(self, tokens):
        return self.out(self.words(tokens).mean(1))


def check_sparse() -> None:
    """Embeddings whose gradients are sparse are trained as others are."""
    rank = torch.distributed.get_rank()
    tokens = torch.randint(0, 11, (8, 4), generator=torch.Generator().manual_seed(3))
    losses = {}
    for sparse in (False, True):
        torch.manual_seed(0)
        engine = initialize(Words(sparse), config=config(0))
        losses[sparse] = []
        for _ in range(5):
            loss = (engine(tokens[rank * 4 : rank * 4 + 4]) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            losses[sparse].append(averaged(loss))
    torch.testing.assert_close(torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=1e-5, atol=1e-6)


@pytest.mark.cpu_only("sparse tensors")
def test_sparse_embedding_gradients():
    run_ranks(2, check_sparse)


def test_the_model_has_what_the_tests_need():
    model = Model()
    assert model.mix.weight is model.again.weight and not model.blocks[1].up.weight.requires_grad


# ------------------------------------------------------------------ devices


def check_devices() -> None:
    """An accelerator without streams, on which fully_shard does not run, is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
        engine = engine_of(3)
        assert backends() == "gloo" and engine.ranks.mesh.device_type == "cpu"


def test_without_streams_the_engine_trains_on_the_cpu():
    run_ranks(1, check_devices)
