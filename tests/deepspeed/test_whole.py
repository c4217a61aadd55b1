"""In stages 0 to 2 programs see whole, plain parameters between steps, as under DeepSpeed; what they write counts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import terrazzo.deepspeed as deepspeed
from engine.runs import batches, loss_of, make_model
from ranks import run_ranks


def made(stage: int, **settings: object) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **settings,
    }
    model = make_model()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: deepspeed.DeepSpeedEngine, steps: int = 1) -> None:
    for x, y in batches(steps * 2):
        engine.backward(loss_of(engine, x[:4], y[:4]))
        engine.step()


def check_stages(check: Callable[[int], None]) -> None:
    for stage in (0, 1, 2):
        check(stage)


def check_whole(stage: int) -> None:
    engine = made(stage)
    expected = {name: p.detach().clone() for name, p in make_model().named_parameters()}
    for round_ in range(2):
        model = engine.module
        for name, p in model.named_parameters():
            assert isinstance(p, nn.Parameter) and type(p.data) is torch.Tensor and p.shape == expected[name].shape
            assert round_ or torch.equal(p, expected[name]), name
        # One rank alone may read, compute with and save what it has.
        if dist.get_rank() == 0:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            loaded = torch.load(file)
            plain = make_model()
            plain.load_state_dict(loaded)
            assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
            weight = next(p for p in model.parameters() if p.ndim == 2)
            F.linear(torch.ones(1, weight.shape[1]), weight)
            average = torch.zeros_like(weight)
            average.add_(weight)
            assert torch.equal(average, weight)
        train(engine)


def test_parameters_are_whole_between_steps():
    run_ranks(2, check_stages, check_whole)


def check_writes(stage: int) -> None:
    torch.manual_seed(5)
    other = make_model()
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.randn(p.shape))
    ways = {
        "data": lambda model: [p.data.add_(1.0) for p in model.parameters()],
        "no_grad": lambda model: [p.detach().mul_(0.5) for p in model.parameters()],
        "load": lambda model: model.load_state_dict(other.state_dict()),
        "load_module": None,
    }
    for way, write in ways.items():
        engine, reference = made(stage), copy.deepcopy(make_model())
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        train(engine)
        reference.load_state_dict(engine.module.state_dict())
        for model in (engine.module, reference):
            if write is not None:
                write(model)
            elif model is reference:
                model.load_state_dict(other.state_dict())
            else:
                engine.load_module_state_dict({"module": other.state_dict()})
        train(engine)
        for x, y in batches(2):
            (loss_of(reference, x[:4], y[:4]) / 2).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        for (name, p), q in zip(engine.module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.data, q.data, msg=f"{way}: {name}", rtol=1e-5, atol=1e-6)
            if p.requires_grad:
                torch.testing.assert_close(deepspeed.utils.safe_get_full_fp32_param(p), q.data, rtol=1e-5, atol=1e-6)


def test_what_is_written_to_them_is_trained_and_saved():
    run_ranks(2, check_stages, check_writes)


def check_checkpoint(folder: str) -> None:
    engine = made(1)
    train(engine)
    for p in engine.module.parameters():
        p.data.add_(1.0)
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    given = engine.module_state_dict()
    assert all(type(value) is torch.Tensor and torch.equal(value, expected[name]) for name, value in given.items())
    assert given.keys() == expected.keys()
    engine.module.embed.weight.requires_grad_(False)
    assert "embed.weight" not in engine.module_state_dict(exclude_frozen_parameters=True)
    engine.module.embed.weight.requires_grad_(True)
    for save in (engine.save_checkpoint, engine.save_16bit_model, engine.core.save_checkpoint):
        save(folder)
        assert all(type(p.data) is torch.Tensor for p in engine.module.parameters()), save
    resumed = made(2)
    resumed.load_checkpoint(folder)
    for name, value in resumed.module.state_dict().items():
        assert type(value) is torch.Tensor and torch.equal(value, expected[name]), name


def test_checkpoints_have_what_was_written(tmp_path):
    run_ranks(2, check_checkpoint, str(tmp_path))


def check_norm() -> None:
    engine = made(0, gradient_clipping=0.0)
    before = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
    train(engine)
    after = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
    moved = (before - after).norm() / 0.1  # the rate of SGD
    torch.testing.assert_close(torch.tensor(engine.get_global_grad_norm()), moved, rtol=1e-4, atol=0)


def test_the_norm_of_gradients_is_known_without_clipping():
    run_ranks(2, check_norm)


def check_no_sync(stage: int, **precision: object) -> None:
    engine, reference = made(stage, gradient_accumulation_steps=1, **precision), make_model()
    close = {"rtol": 1e-5, "atol": 1e-6} if not precision else {"rtol": 0.1, "atol": 0.05}
    parameters = list(engine.module.parameters())
    [(x, y)] = batches(1)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    with engine.no_sync():
        for _ in range(2):
            engine.backward(loss_of(engine, x[mine], y[mine]))
            loss_of(reference, x[mine], y[mine]).backward()
            for p, q in zip(parameters, reference.parameters(), strict=True):
                torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(p), q.grad, **close)
    for p in [p for p in parameters if p.requires_grad]:
        deepspeed.utils.safe_set_full_grad(p, torch.ones(p.shape))
        assert deepspeed.utils.safe_get_full_grad(p).eq(1).all()
    engine.zero_grad()
    assert all(deepspeed.utils.safe_get_full_grad(p) is None for p in parameters)


def check_no_sync_in_stages() -> None:
    check_no_sync(0)
    check_no_sync(1)
    check_no_sync(1, bf16={"enabled": True})


def test_what_is_accumulated_without_a_reduction_can_be_read():
    run_ranks(2, check_no_sync_in_stages)


def check_sixteen_bits(stage: int, dtype: torch.dtype) -> None:
    model = nn.Linear(4, 1, bias=False, dtype=dtype)
    nn.init.ones_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 2.0**-14}},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for _ in range(4):  # each of these steps is less than half the distance to the next number of 16 bits
        out = engine(torch.ones(1, 4, dtype=dtype))
        assert out.dtype == dtype
        engine.backward(out.sum())
        engine.step()
    weight = deepspeed.utils.safe_get_full_fp32_param(engine.module.weight)
    assert torch.equal(weight, torch.full((1, 4), 1 - 2.0**-12))


def check_sixteen_bits_in_all() -> None:
    for stage in (1, 2, 3):
        for dtype in (torch.bfloat16, torch.float16):
            check_sixteen_bits(stage, dtype)


def test_a_model_that_comes_in_16_bits_is_trained_in_float32():
    run_ranks(2, check_sixteen_bits_in_all)
