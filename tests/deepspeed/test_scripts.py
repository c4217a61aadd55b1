"""A script for DeepSpeed runs with another import, and trains as one process with PyTorch alone does."""

from __future__ import annotations

import argparse
import copy
import json
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.stage
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import terrazzo.deepspeed as deepspeed
from engine.deepspeed_cases import deepspeed_is_installed
from engine.runs import averaged, batches, config, loss_of, make_model, train_plainly
from fsdp.compare import Counted
from ranks import device_type, run_ranks
from terrazzo.comm import alone
from terrazzo.errors import EngineConfigError, EngineError, EngineValueError
from terrazzo.tensor import DTensor

pytestmark = pytest.mark.on_late(both=True)

STEPS = 5


def mine(x, y, micro=0, of=1):
    """This rank's part of a whole batch."""
    size = len(x) // dist.get_world_size() // of
    first = (micro * dist.get_world_size() + dist.get_rank()) * size
    return x[first : first + size], y[first : first + size]


def check_script(folder: str) -> None:
    expected = torch.tensor(train_plainly(STEPS)[0])
    path = f"{folder}/ds.json"
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(config(2), file)
    dist.barrier()
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed_config", path])
    deepspeed.init_distributed()
    model = make_model()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=[p for p in model.parameters() if p.requires_grad]
    )
    assert loader is None and isinstance(engine, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    losses = []
    for x, y in batches(STEPS):
        loss = loss_of(engine, *mine(x, y))
        engine.backward(loss)
        engine.step()
        assert engine.was_step_applied()
        losses.append(averaged(loss))
    torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-5, atol=1e-5)
    assert scheduler.get_last_lr() == engine.get_lr() == [optimizer.param_groups[0]["lr"]]
    assert engine.global_steps == STEPS and engine.zero_optimization_stage() == 2
    assert engine.shift.shape == (7,) and "module.head.weight" in dict(engine.named_parameters())
    assert engine.get_global_grad_norm() > 0 and not optimizer.overflow and engine.loss_scale() == 1
    assert engine.zero_reduce_bucket_size() == 500_000_000 and engine.get_batch_info() == (8, 4, 1)
    with pytest.raises(AttributeError, match="nor the model"):
        engine.nothing_of_that_name  # noqa: B018
    assert engine.save_checkpoint(folder, client_state={"mine": 3}) is True
    assert engine.load_checkpoint(folder)[1] == {"mine": 3}
    assert engine.load_checkpoint(f"{folder}/none") == (None, None)
    assert engine.save_16bit_model(folder, "whole.bin") is True
    stored = torch.load(f"{folder}/whole.bin", weights_only=True)
    fresh = make_model(3)
    fresh.load_state_dict(stored)
    torch.testing.assert_close(loss_of(fresh, *mine(x, y)), loss_of(engine, *mine(x, y)))
    assert stored["mix.weight"].data_ptr() == stored["again.weight"].data_ptr()
    engine.destroy()


def test_a_usual_script(tmp_path):
    run_ranks(2, check_script, str(tmp_path))


def check_direct_backward() -> None:
    """`loss.backward()`, in every stage and with accumulation, also where the loss has terms beside the model's."""
    expected = None
    for stage in (0, 1, 2, 3):
        for way in ("engine", "direct", "by hand", "no_sync", "coalesced"):
            if way == "no_sync" and stage > 1:
                continue
            engine, *_ = deepspeed.initialize(model=make_model(), config=config(stage, gradient_accumulation_steps=2))
            losses = []
            for x, y in batches(STEPS):
                total = torch.zeros(())
                for micro in (0, 1):
                    if way == "by hand":
                        engine.set_gradient_accumulation_boundary(micro == 1)
                    part = mine(x, y, micro, 2)
                    if way == "coalesced" or (way == "no_sync" and micro == 0):
                        with engine.no_sync() if way == "no_sync" else engine.coalesce_grad_reduction():
                            engine.backward(loss := loss_of(engine, *part))
                    else:
                        loss = loss_of(engine, *part)
                        _ = loss.backward() if way == "direct" else engine.backward(loss)
                    total += loss.detach() / 2
                    if way in ("engine", "direct"):
                        engine.step()
                        assert engine.was_step_applied() is (micro == 1)
                if way in ("by hand", "no_sync", "coalesced"):
                    engine.set_gradient_accumulation_boundary(True)
                    engine.step()
                    engine.set_gradient_accumulation_boundary(None)
                losses.append(averaged(total))
            assert engine.global_steps == STEPS
            expected = losses if expected is None else expected
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(expected), torch.tensor(train_plainly(STEPS)[0]), rtol=1e-5, atol=1e-5)


def check_coalesced() -> None:
    x, y = mine(*next(batches(1)))
    for stage in (1, 2, 3):
        engine, *_ = deepspeed.initialize(model=make_model(), config=config(stage, gradient_accumulation_steps=2))
        engine.set_gradient_accumulation_boundary(True)
        with Counted() as kinds, engine.coalesce_grad_reduction():
            for _ in range(2):
                engine.backward(loss_of(engine, x, y))
            for block in (engine.no_sync, engine.coalesce_grad_reduction):
                with pytest.raises(EngineError, match="nested" if stage < 2 else "nested|incompatible"), block():
                    pass
            with pytest.raises(EngineError, match="It is illegal to call"):
                engine.step()
        assert not any("reduce" in kind for kind in kinds), (stage, kinds)
        assert engine.is_gradient_accumulation_boundary()
        with Counted() as kinds:
            engine.step()
        assert any("reduce" in kind for kind in kinds) and engine.was_step_applied(), (stage, kinds)


def test_backwards_in_a_block_are_reduced_once():
    run_ranks(2, check_coalesced)


def check_wrong_backward() -> None:
    x, y = mine(*next(batches(1)))
    engine, *_ = deepspeed.initialize(model=make_model(), config=config(2, gradient_accumulation_steps=2))
    engine.backward(loss_of(engine, x[:2], y[:2]))
    engine.step()
    loss_of(engine, x[2:], y[2:]).backward()
    with pytest.raises(EngineError, match="use one of them"):
        engine.step()
    half, *_ = deepspeed.initialize(model=make_model(), config=config(1, fp16={"enabled": True, "loss_scale": 64}))
    assert half.optimizer.needs_scaler() and not engine.optimizer.needs_scaler()
    with pytest.raises(EngineError, match=r"engine.scale\(loss\).backward"):
        loss_of(half, x, y).backward()
    direct = [p.grad for p in half.module.parameters()]
    assert all(grad is None for grad in direct)
    for way in ("scale", "backward"):
        half, *_ = deepspeed.initialize(model=make_model(), config=config(1, fp16={"enabled": True, "loss_scale": 64}))
        loss = loss_of(half, x, y)
        _ = half.scale(loss).backward() if way == "scale" else half.backward(loss)
        grad = deepspeed.utils.safe_get_full_grad(half.module.head.weight)
        first = grad if way == "scale" else first  # noqa: F821
        torch.testing.assert_close(grad, first)
    sharded, *_ = deepspeed.initialize(model=make_model(), config=config(3))
    with pytest.raises(EngineError, match="stage 3 shards"), sharded.no_sync():
        pass
    whole, *_ = deepspeed.initialize(model=make_model(), config=config(0))
    with whole.no_sync():
        whole.backward(loss_of(whole, x, y))
        with pytest.raises(EngineError, match="inside no_sync"):
            whole.step()


def test_loss_backward_gives_the_right_gradients_or_an_error():
    run_ranks(2, check_direct_backward)
    run_ranks(2, check_wrong_backward)


def whole(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p.detach()


def check_whole_tensors() -> None:
    rank = dist.get_rank()
    x, y = next(batches(1))
    for stage in (0, 3):
        plain = make_model()
        loss_of(plain, x, y).backward()
        theirs = dict(plain.named_parameters())
        options = {**config(stage), "gradient_clipping": 0.0, "scheduler": {"type": "WarmupLR", "params": {}}}
        engine, *_ = deepspeed.initialize(model=make_model(), config=options)
        utils, named = deepspeed.utils, dict(engine.module.named_parameters())
        assert utils.safe_get_full_optimizer_state(named["head.weight"], "exp_avg") is None
        engine.backward(loss_of(engine, *mine(x, y)))
        for name, p in named.items():
            if p.requires_grad:
                assert torch.equal(utils.safe_get_full_fp32_param(p), theirs[name])
                torch.testing.assert_close(utils.safe_get_full_grad(p), theirs[name].grad)
            else:  # as in DeepSpeed
                assert utils.safe_get_full_fp32_param(p) is None and utils.safe_get_full_grad(p) is None
                assert utils.safe_get_local_fp32_param(p) is None and utils.safe_get_local_grad(p) is None
        weight = named["head.weight"]
        utils.safe_set_full_grad(weight, torch.ones(3, 7))
        assert utils.safe_get_local_grad(weight).eq(1).all()
        engine.step()
        torch.testing.assert_close(utils.safe_get_full_optimizer_state(weight, "exp_avg"), torch.full((3, 7), 0.1))
        utils.safe_set_full_optimizer_state(weight, torch.zeros(3, 7), "exp_avg")
        assert utils.safe_get_local_optimizer_state(weight, "exp_avg").eq(0).all()
        utils.safe_set_full_fp32_param(weight, torch.arange(21.0).reshape(3, 7))
        assert torch.equal(whole(weight), torch.arange(21.0).reshape(3, 7))
        with pytest.raises(EngineValueError, match="of shape"):
            utils.safe_set_full_fp32_param(weight, torch.zeros(2))
        with pytest.raises(EngineValueError, match="no gradient"):
            utils.safe_set_full_grad(weight, torch.ones(3, 7))

        with deepspeed.zero.GatheredParameters([weight, named["head.bias"]], modifier_rank=1):
            assert weight.data.cpu().numpy().shape == (3, 7) and engine.module.head.weight is weight
            if rank == 1:
                nn.init.constant_(weight, 2.0)
                engine.module.head.bias.data[1:] = 5.0
        assert (type(weight).__name__ == "DTensor") is (stage == 3) and whole(weight).eq(2).all()
        assert whole(named["head.bias"])[1:].eq(5).all()
        with patch.object(engine.module, "parameters", wraps=engine.module.parameters) as walks:
            with deepspeed.zero.GatheredParameters(list(named.values()), modifier_rank=0):
                assert walks.call_count <= 1  # not for each of them
        with deepspeed.zero.unwrap_model_for_generation(engine) as model:
            assert model is engine.module
            model(torch.ones(1, 6))
        with deepspeed.zero.GatheredParameters(weight):
            assert (weight + 1).sum().item() == 63 and len(weight) == 3 and weight.tolist()[0][0] == 2
        x1, y1 = mine(x, y)
        plain.load_state_dict({name: whole(p) for name, p in named.items()}, strict=False)
        torch.testing.assert_close(loss_of(engine, x1, y1), loss_of(plain, x1, y1))  # forward has seen it all


def test_whole_parameters_gradients_and_states():
    run_ranks(2, check_whole_tensors)


def check_around() -> None:
    with pytest.raises(AttributeError, match="use peft"):
        deepspeed.linear  # noqa: B018

    x, y = mine(*next(batches(1)))
    no_optimizer = {key: value for key, value in config(3).items() if key not in ("optimizer", "scheduler")}
    engine, optimizer, _, scheduler = deepspeed.initialize(model=make_model(), config=no_optimizer)
    assert optimizer is None and scheduler is None
    with torch.no_grad():
        torch.testing.assert_close(engine(x), make_model()(x))
    engine.backward(loss_of(engine, x, y))
    with pytest.raises(EngineError, match="needs an optimizer"):
        engine.step()
    with pytest.raises(EngineConfigError, match="there is no config"):
        deepspeed.initialize(model=make_model())
    with pytest.raises(EngineConfigError, match="and as config_params"):
        deepspeed.initialize(model=make_model(), config=config(0), config_params=config(0))
    with pytest.raises(EngineError, match="not in the model"):
        deepspeed.initialize(model=make_model(), model_parameters=nn.Linear(2, 2).parameters(), config=config(0))

    # What is passed comes before what the config describes; a scheduler may be PyTorch's.
    model = make_model()
    passed = deepspeed.ops.adam.FusedAdam(model.parameters(), lr=0.5)
    rates = torch.optim.lr_scheduler.LambdaLR(passed, lambda step: 1 / (step + 1))
    data = TensorDataset(torch.randn(11, 6, device="cpu"), torch.randn(11, 3, device="cpu"))
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, optimizer=passed, lr_scheduler=rates, training_data=data, config=config(1)
    )
    assert optimizer.optimizer is passed and scheduler is rates
    seen = 0
    for a, b in loader:
        engine.backward(loss_of(engine, a.to(engine.device), b.to(engine.device)))
        engine.step()
        seen += len(a)
    assert seen == 6 and len(loader) == 2 and engine.get_lr() == [0.5 / 3]
    repeating = deepspeed.utils.RepeatingLoader(loader)
    assert len([next(repeating) for _ in range(5)]) == 5
    with pytest.raises(EngineError, match="call engine.step"):
        optimizer.step()
    groups = [{"params": [model.head.weight], "lr": 0.25}, {"params": [model.embed.weight]}]
    model = make_model()
    groups = [{"params": [model.head.weight], "lr": 0.25}, {"params": model.embed.parameters()}]
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups,
        config={**no_optimizer, "optimizer": {"type": "Lion", "params": {"lr": 1}}},
    )
    assert [(len(g["params"]), g["lr"]) for g in optimizer.param_groups] == [(1, 0.25), (2, 1)]
    later = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = engine.module.blocks[0].up.weight.full_tensor()
    engine.backward(loss_of(engine, x, y))
    engine.step()
    later.step()
    assert torch.equal(engine.module.blocks[0].up.weight.full_tensor(), before)  # trained only what it was told
    assert engine.get_lr() == [0.025, 0.1]
    engine.set_train_batch_size(16)
    assert engine.gradient_accumulation_steps() == 2 and engine.get_mom() == [(0.9, 0.999)] * 2
    assert deepspeed.get_accelerator().device_name() == device_type() and deepspeed.comm.get_rank() == dist.get_rank()
    assert deepspeed.comm.get_all_ranks_from_group() == [0, 1]


def test_what_scripts_use_besides():
    run_ranks(2, check_around)


class Part(nn.Module):
    def __init__(self, seed: int, inputs: int, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(inputs, outputs)

    @property
    def tied_weight(self):
        return self.linear.weight

    @property
    def turned(self):
        return self.linear.weight.t()

    def forward(self, x):
        return torch.tanh(self.linear(x))


def pipeline_layers(weight="tied_weight"):  # a property, as in GPT-NeoX and Megatron
    tied = [deepspeed.pipe.TiedLayerSpec("t", Part, 3, 6, 6, tied_weight_attr=[weight, "linear.bias"])] * 2
    layers = [deepspeed.pipe.LayerSpec(Part, seed, 6, 6) for seed in (0, 1)]
    return [tied[0], *layers, lambda x: x * 2, tied[1], nn.Linear(6, 3)]


def check_pipeline(folder: str) -> list[float]:
    runs = []
    x, y = next(batches(1))
    for name, what in (("turned", "it is no parameter there"), ("typo", "has no such attribute")):
        with pytest.raises(EngineConfigError, match=f"'{name}' of layer 0, Part: {what}; .* of layer 4, Part: {what}"):
            deepspeed.PipelineModule(pipeline_layers(name), num_stages=2)
    for stages in (1, 2):
        torch.manual_seed(9)
        model = deepspeed.PipelineModule(
            pipeline_layers(), num_stages=stages, loss_fn=nn.functional.mse_loss, activation_checkpoint_interval=2
        )
        options = {**config(1), "gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
        options["pipeline"] = {"activation_checkpoint_interval": stages, "seed_layers": False}
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=options
        )

        def micro_batches(x, y, stages=stages):
            pairs = zip(x.chunk(2), y.chunk(2), strict=True)
            return (mine(a, b) if stages == 1 else (a, b) for a, b in pairs)  # alone, a stage's ranks differ in data

        assert model.activation_checkpoint_interval == stages  # the config's
        losses = [float(engine.train_batch(micro_batches(x, y))) for x, y in batches(STEPS)]
        losses.append(float(engine.eval_batch(micro_batches(x, y))))
        runs.append(losses)
    torch.testing.assert_close(torch.tensor(runs[0]), torch.tensor(runs[1]), rtol=1e-5, atol=1e-6)
    engine.save_checkpoint(folder, "t")
    with pytest.raises(EngineError, match="call train_batch"):
        engine(x)
    return runs[0]


def check_ragged() -> None:
    """Batches of other shapes than the first one's, which a dataset has in this order."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")  # as datasets are
    data = [(draw(n, 3), draw(n, 3)) for n in (2, 5, 3, 5) for _ in range(2)]
    torch.manual_seed(9)
    layers = [nn.Linear(3, 3) for _ in range(2)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    model = deepspeed.PipelineModule(
        layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform", dynamic_shape=True
    )
    rate = {"type": "SGD", "params": {"lr": 0.1}}
    options = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "optimizer": rate}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), training_data=data, config=options
    )
    optimizer, device = torch.optim.SGD(plain.parameters(), lr=0.1), plain[0].weight.device
    for start in (0, 2, 4, 6, 0):
        loss = sum(nn.functional.mse_loss(plain(x.to(device)), y.to(device)) for x, y in data[start : start + 2]) / 2
        other = iter([(x[None], y[None]) for x, y in data[2:4]])
        with torch.no_grad():
            expected = sum(nn.functional.mse_loss(plain(x.to(device)), y.to(device)) for x, y in data[2:4]) / 2
        torch.testing.assert_close(engine.eval_batch(other), expected)
        torch.testing.assert_close(engine.train_batch(), loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def check_gathered_in_a_pipeline() -> None:
    """Two stages of two ranks: each keeps its own values, and writers are found in the stage."""
    rank, stage = dist.get_rank(), dist.get_rank() // 2
    torch.manual_seed(3)
    layers = [nn.Linear(3, 3) for _ in range(2)]
    model = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    gathered = deepspeed.zero.GatheredParameters

    def value() -> float:
        [weight] = [p for p in model.parameters() if p.ndim == 2]
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        assert whole.eq(whole[0, 0]).all()
        return whole[0, 0].item()

    def write(writer: int | None, number: float) -> None:
        [weight] = [p for p in model.parameters() if p.ndim == 2]
        with gathered(list(model.parameters()), modifier_rank=writer):
            nn.init.constant_(weight, number)

    write(1, 10.0 * rank)  # not sharded yet: the second rank of each stage
    assert value() == [10, 30][stage]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config(1))
    assert value() == [10, 30][stage]
    write(0, 10.0 * rank + 1)
    assert value() == [1, 21][stage]
    write(1, 10.0 * rank + 2)
    assert value() == [12, 32][stage]
    if stage == 1:  # alone: the other stage has no part in it
        write(3, 10.0 * rank + 3)
        assert value() == 33
        with pytest.raises(EngineValueError, match=r"modifier_rank is 4, but the parameter is on the ranks \[2, 3\]"):
            write(4, 0.0)
        with pytest.raises(EngineValueError, match="from 0 to 1"):
            write(-1, 0.0)
    write(None, 7.0)
    assert value() == [12, 33][stage]


def check_modules_while_gathered() -> None:
    """Scripts evaluate and generate in such blocks, and compute losses."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    model = copy.deepcopy(plain)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config(3))
    gathered, parameters = deepspeed.zero.GatheredParameters, list(engine.module.parameters())
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(plain[0].weight.device)
    expected = plain(x)
    for params in (parameters, parameters[:1]):
        with gathered(params, modifier_rank=None if params is parameters else 0):
            assert parameters[0].shape == (5, 3) and not isinstance(parameters[0].data, DTensor)
            with torch.no_grad():
                torch.testing.assert_close(engine(x), expected)
            loss = engine(x).square().mean()
            torch.testing.assert_close(parameters[0].data, plain[0].weight.data, rtol=0, atol=0)
        engine.backward(loss)
        for mine, p in zip(parameters, plain.parameters(), strict=True):
            grad = torch.autograd.grad(plain(x).square().mean(), p)[0]
            torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(mine), grad)
        engine.zero_grad()
    with pytest.raises(EngineError, match="after its parameters were written there"), gathered(parameters):
        parameters[2].data.add_(1)  # which no version counter shows
        engine(x)
    torch.testing.assert_close(engine(x), expected)


def test_modules_run_while_their_parameters_are_gathered():
    run_ranks(2, check_modules_while_gathered)


def test_gathered_parameters_in_a_pipeline():
    run_ranks(4, check_gathered_in_a_pipeline)


def test_process_groups_have_a_backend_for_the_cpu_too(monkeypatch):
    """Norms and whole parameters of what is offloaded are on the CPU, where nccl cannot reduce them."""
    started = []
    deepspeed.get_accelerator()  # is kept, as it was found
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend=None, **options: started.append(backend))
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for wanted in (None, "nccl", "gloo", "cpu:gloo,cuda:nccl"):
        deepspeed.init_distributed(wanted)
    assert started == ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "gloo", "cpu:gloo,cuda:nccl"]
    alone.initialise()  # by the engine
    assert started[-1] == "cpu:gloo,cuda:nccl"


def test_pipelines(tmp_path):
    run_ranks(2, check_pipeline, str(tmp_path))
    if hasattr(torch.distributed.pipelining.stage, "InferenceMode"):  # stages infer shapes more than once
        run_ranks(2, check_ragged)


def test_layers_are_cut_as_deepspeed_cuts_them():
    from terrazzo.deepspeed.pipe.partition import balanced, uniform

    if not deepspeed_is_installed():
        pytest.skip("DeepSpeed is not installed")
    import deepspeed.runtime.utils as theirs

    generator = torch.Generator().manual_seed(0)
    for items in range(1, 9):
        for parts in range(1, 5):
            assert uniform(items, parts) == list(theirs.partition_uniform(items, parts)) or items < parts
            for _ in range(4):
                weights = torch.randint(0, 5, (items,), generator=generator).tolist()
                if items >= parts:
                    assert balanced(weights, parts) == list(theirs.partition_balanced(weights, parts)), weights
