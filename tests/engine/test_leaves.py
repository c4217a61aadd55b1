"""A leaf is gathered and reduced as one: ranks may use different parts of it."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo.deepspeed as deepspeed
from ranks import fresh_values, run_ranks
from terrazzo.engine import initialize
from terrazzo.engine.placing import gathered_together
from terrazzo.errors import DivergedRanksError, EngineConfigError
from terrazzo.fsdp import FSDPModule

pytestmark = pytest.mark.on_late

WIDTH, EXPERTS, STEPS, MICROS = 6, 4, 5, 2
ADAM = {"lr": 0.01, "weight_decay": 0.1}


class Expert(nn.Module):
    def __init__(self, inner: int = 9) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    def __init__(self, inner: int = 9) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(inner) for _ in range(EXPERTS)])
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for number in chosen:
            x = x + self.experts[number](x)
        return x + self.shift


class Model(nn.Module):
    def __init__(self, inner: int = 9) -> None:
        super().__init__()
        self.into, self.mixture, self.out = nn.Linear(3, WIDTH), Mixture(inner), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return self.out(self.mixture(self.into(x), chosen))


def chosen_by(step: int, micro: int, rank: int) -> list[int]:
    """One, none or several, in any order; the last expert is used in one step only, and by one rank."""
    if (step, micro, rank) == (2, 0, 1):
        return [3, 0]
    return [[0], [2, 1], [], [1, 0]][(step + micro + 3 * rank) % 4]


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    x, y = batch(step, micro, rank)
    return (model(x, chosen_by(step, micro, rank)) - y).square().mean()


def make_model(inner: int = 9) -> Model:
    torch.manual_seed(0)
    return Model(inner)


def train_alone(world: int) -> list[dict[str, dict[str, Tensor | None]]]:
    """By step, the gradients and the values of one process that has the data of all ranks."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICROS):
            for rank in range(world):
                (loss_of(model, step, micro, rank) / (world * MICROS)).backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        seen.append({"gradients": gradients, "values": copy.deepcopy(model.state_dict())})
    return seen


def config(stage: int, **zero: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": ADAM},
    }


def check_training() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = train_alone(world)
    marked = make_model()
    deepspeed.utils.set_z3_leaf_modules(marked, [Mixture])
    runs = [(stage, copy.deepcopy(marked), {}) for stage in (0, 1, 2, 3)]
    runs.append((3, make_model(), {"leaf_module": {"classes": [f"{__name__}.Mixture"]}}))
    runs.append((3, make_model(), {"leaf_module": {"name_suffixes": "mixture"}, "offload_param": {"device": "cpu"}}))
    for stage, model, zero in runs:
        engine = initialize(model, config=config(stage, **zero))
        leaf = engine.module.mixture
        assert isinstance(leaf, FSDPModule)
        assert not any(isinstance(inner, FSDPModule) for inner in list(leaf.modules())[1:])
        for step in range(STEPS):
            for micro in range(MICROS):
                engine.backward(loss_of(engine, step, micro, rank))
                if micro == MICROS - 1:
                    engine.reshard()
                    for name, p in engine.module.named_parameters():
                        grad, alone = p.grad, expected[step]["gradients"][name]
                        assert (grad is None) == (alone is None), (stage, step, name)
                        if grad is not None:
                            torch.testing.assert_close(grad.full_tensor().to(alone.device), alone, rtol=1e-5, atol=1e-6)
                engine.step()
            for name, p in engine.module.named_parameters():
                alone = expected[step]["values"][name]
                torch.testing.assert_close(p.detach().full_tensor().to(alone.device), alone, rtol=1e-5, atol=1e-6)


def test_ranks_that_use_different_experts_train_as_one_process():
    run_ranks(2, check_training)


def check_compiled() -> None:
    """A leaf in a layer, compiled: the layer around it is not, because it gathers inside."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.ModuleList([nn.Sequential(Expert(), nn.Tanh())])[0])
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(copy.deepcopy(plain[0][0]), nn.Tanh())])
    model.forward = lambda x: model.layers[0](x)
    deepspeed.utils.set_z3_leaf_modules(model, ["Expert"])
    engine = initialize(model, config=config(3), compile="aot_eager")
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(engine(x), plain(x))


def test_a_leaf_in_a_compiled_layer():
    run_ranks(2, check_compiled)


def test_which_modules_are_gathered_together():
    model = nn.Sequential(Mixture(), nn.ModuleList([nn.Sequential(nn.Linear(2, 2), Mixture()), Mixture()]))
    layers = model[1]
    assert gathered_together(model, ()) == [*model[0].experts, *layers]
    model[0]._z3_leaf = layers[0][1]._z3_leaf = layers[1]._z3_leaf = True
    assert gathered_together(model, ()) == [model[0], layers[0][1], layers[0], layers[1]]
    assert gathered_together(model, ("Expert",)) == [model[0], layers[0][1], layers[1]]
    layers[0][1]._z3_leaf = False
    assert gathered_together(model, ("Expert",)) == [model[0], *layers[0][1].experts, layers[1]]
    layers[0]._z3_leaf = layers[0][1]._z3_leaf = True  # the outer one is the unit
    assert gathered_together(model, ()) == [model[0], layers[0], layers[1]]
    model._z3_leaf = True
    assert gathered_together(model, ()) == []


def test_how_leaves_are_marked():
    utils = deepspeed.utils
    model = make_model()
    mixture, experts = model.mixture, list(model.mixture.experts)
    assert utils.set_z3_leaf_modules(model, ["Mixture"]) == [mixture] == utils.get_z3_leaf_modules(model)
    assert utils.z3_leaf_module(mixture) and not utils.z3_leaf_module(experts[0])
    assert utils.unset_z3_leaf_modules(model, [Mixture]) == [mixture] and utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules(model, [f"{__name__}.Expert"]) == experts
    assert utils.unset_z3_leaf_modules(model, [nn.Module]) == in_order_of_apply(model)
    assert utils.set_z3_leaf_modules_by_name(model, ["mixture", "no"], raise_if_not_found=False) == ([mixture], ["no"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["s.0", ".1", "x"], True, False) == (experts[:2], ["x"])
    assert utils.set_z3_leaf_modules_by_name(model, ["mixture"], flag=False) == ([mixture], [])
    utils.set_z3_leaf_module(model.out, True)
    assert utils.get_z3_leaf_modules(model) == [*experts[:2], model.out]
    for function, names in (
        (utils.set_z3_leaf_modules, ["NoSuch"]),
        (utils.unset_z3_leaf_modules, [nn.Conv1d]),
        (utils.set_z3_leaf_modules_by_name, ["mixtures"]),
        (utils.set_z3_leaf_modules_by_suffix, ["mixtures"]),
    ):
        with pytest.raises(ValueError, match="the model has no module"):
            function(model, names)
    assert utils.set_z3_leaf_modules(model, ["NoSuch"], raise_if_not_found=False) == []
    for wrong in ("Mixture", [mixture]):
        with pytest.raises(EngineConfigError, match="must be a list of classes"):
            utils.set_z3_leaf_modules(model, wrong)


def in_order_of_apply(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    model.apply(found.append)
    return found


def test_leaves_that_cannot_be(caplog):
    model = make_model()
    deepspeed.utils.set_z3_leaf_modules(model, [nn.ModuleList])
    with pytest.raises(EngineConfigError, match=r"the leaf module 'mixture.experts' \(ModuleList\) has no forward"):
        initialize(model, config=config(3))
    initialize(make_model(), config=config(3, leaf_module={"classes": ["NoSuch"], "names": ["mixture", "none"]}))
    assert "leaf_module names none, NoSuch, but" in caplog.text
    sharded = initialize(make_model(), config=config(3)).module
    with pytest.warns(UserWarning, match="sharded already"):
        deepspeed.utils.set_z3_leaf_modules(sharded, [Mixture])


def check_without() -> str:
    # Of the former group's store PyTorch 2.14 would read the former addresses.
    rank, store = dist.get_rank(), dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=2))
    engine = initialize(make_model(inner=33), config=config(3))
    x, y = batch(0, 0, dist.get_rank())

    def train(steps: int, *experts: int) -> None:
        for _ in range(steps):
            engine.backward((engine(x, [*experts]) - y).square().mean())
            engine.step()

    train(STEPS, rank)  # small experts are gathered and reduced together, whichever runs
    engine.module.set_coalesce_bytes(0)  # with messages of their own they wait for each other, until the time limit
    train(MICROS, 0, 1)  # first messages keep the limit that their group was made with
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), None)
    with pytest.raises(DivergedRanksError) as caught:
        train(STEPS, rank)
    return str(caught.value)


@pytest.mark.cpu_only("makes a group of gloo")
def test_without_a_leaf_an_error_says_what_to_do():
    for value in fresh_values(2, check_without, timeout=60):
        message = value
        assert "mixture.experts.0" in message and "mixture.experts.1" in message
        assert "set_z3_leaf_modules" in message and "zero_optimization.leaf_module" in message
