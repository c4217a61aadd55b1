"""State dicts of models and optimizers in one process: names, lazy state, groups, options, errors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as torch_sd

from terrazzo.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from terrazzo.errors import CheckpointError, CheckpointMismatchError


class Net(nn.Module):
    """Nested, with a buffer, a frozen parameter and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.head = nn.Linear(4, 3, bias=False)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.norm(self.body(x)))
        return self.head(x) + self.tied(x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def two_groups(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.03}], **options)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2, seed: int = 5) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(actual: Any, expected: Any) -> None:
    assert_same_structure = type(actual) is type(expected) or (isinstance(actual, dict) and isinstance(expected, dict))
    assert assert_same_structure, (type(actual), type(expected))
    if isinstance(expected, dict):
        assert set(actual) == set(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    else:
        assert actual == expected


# ------------------------------------------------------------------ names


WRAPPINGS = {
    "plain": lambda m: m,
    "compiled": torch.compile,
    "data parallel": nn.DataParallel,
    "checkpointed": checkpoint_wrapper,
    "compiled inside checkpointed": lambda m: checkpoint_wrapper(torch.compile(m)),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_wrappers_do_not_show_in_names(wrap: Any) -> None:
    model = net()
    expected = model.state_dict()
    inner = copy.deepcopy(model)
    inner.body[0] = wrap(inner.body[0])
    wrapped = wrap(inner)
    assert_same(get_model_state_dict(wrapped), dict(expected))

    zeroed = {name: torch.zeros_like(value) for name, value in expected.items()}
    report = set_model_state_dict(wrapped, zeroed)
    assert report.missing_keys == report.unexpected_keys == []
    assert all(not value.any() for value in wrapped.state_dict().values())
    assert set(zeroed) == set(expected), "the caller's dict is left alone"


def test_a_child_called_like_a_wrappers_attribute_keeps_its_name() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self._orig_mod = nn.Linear(2, 2)

    odd = Odd()
    for wrapped in (odd, nn.DataParallel(odd), torch.compile(odd)):
        assert set(get_model_state_dict(wrapped)) == {
            "module.weight",
            "module.bias",
            "_orig_mod.weight",
            "_orig_mod.bias",
        }


def test_modifiers_name_a_child_that_the_keys_hide() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self._register_state_dict_hook(self._hide)
            self.register_load_state_dict_pre_hook(self._show)

        @staticmethod
        def _hide(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for key in [k for k in state if k.startswith(f"{prefix}inner.")]:
                state[prefix + key[len(prefix) + 6 :]] = state.pop(key)

        @staticmethod
        def _show(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for name in ("weight", "bias"):
                if prefix + name in state:
                    state[f"{prefix}inner.{name}"] = state.pop(prefix + name)

        def _modifiers(self) -> dict[str, str]:
            return {"weight": "inner", "bias": "inner"}

    model = nn.Sequential(Hidden(), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    options = StateDictOptions(dsd_fqn_modifiers="_modifiers")
    weights, state = get_state_dict(model, optimizer, options=options)
    assert set(weights) == {"0.weight", "0.bias", "1.weight", "1.bias"} == set(state["state"])
    zeroed = {name: torch.zeros_like(value) for name, value in weights.items()}
    set_state_dict(model, optimizer, model_state_dict=zeroed, optim_state_dict=state, options=options)
    assert not model[0].inner.weight.any()


def test_extra_state_goes_through() -> None:
    class Extra(nn.Linear):
        seen: Any = None

        def get_extra_state(self) -> Any:
            return {"kind": {1, 2}}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    model = torch.compile(nn.Sequential(Extra(2, 2)))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert state["0._extra_state"] == {"kind": {1, 2}}
    set_model_state_dict(model, state)
    assert model._orig_mod[0].seen == {"kind": {1, 2}}


# ------------------------------------------------------------------ against torch


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_equal_to_torchs_own(flat: bool, full: bool) -> None:
    model = net()
    optimizer = two_groups(model)
    train(model, optimizer)
    ours = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flat)
    )
    theirs = torch_sd.get_state_dict(
        model,
        optimizer,
        options=torch_sd.StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flat),
    )
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])


def test_what_torch_made_can_be_set() -> None:
    model, other = net(0), net(1)
    optimizer, fresh = two_groups(model), two_groups(other)
    train(model, optimizer)
    for flat in (False, True):
        weights, state = torch_sd.get_state_dict(
            model, optimizer, options=torch_sd.StateDictOptions(flatten_optimizer_state_dict=flat)
        )
        set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
        assert_same(get_state_dict(other, fresh), get_state_dict(model, optimizer))


# ------------------------------------------------------------------ state of optimizers that have not stepped

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_saving_before_the_first_step_changes_nothing_and_restores_the_beginning(make: Any) -> None:
    reference = net()
    expected = train(reference, make(reference.parameters()), steps=3)

    model = net()
    optimizer = make(model.parameters())
    hyperparameters = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    kept = {p: dict(s) for p, s in optimizer.state.items()}
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    assert {p: dict(s) for p, s in optimizer.state.items()} == kept
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == hyperparameters
    assert all(p.grad is None for p in model.parameters())
    assert train(model, optimizer, steps=3) == expected

    resumed = net(seed=7)
    other = make(resumed.parameters())
    set_state_dict(resumed, other, model_state_dict=weights, optim_state_dict=state)
    assert train(resumed, other, steps=3) == expected


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training_continues_after_a_round_trip(make: Any) -> None:
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer)
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        resumed = net(seed=7)
        other = make(resumed.parameters())
        set_state_dict(resumed, other, model_state_dict=weights, optim_state_dict=state, options=options)
        reference = copy.deepcopy((model, optimizer))
        assert train(resumed, other, seed=9) == train(*reference, seed=9)


def test_a_schedulers_count_is_not_disturbed() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    stepped: list[int] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    state = get_optimizer_state_dict(model, optimizer)
    assert stepped == []
    assert state["param_groups"][0]["initial_lr"] == 0.1
    train(model, optimizer, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_parameters_that_were_never_stepped_have_an_entry() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert state["used.weight"]["step"] == 2 and state["idle.weight"]["step"] == 0
    assert model.idle.weight not in optimizer.state


class PassesOn(torch.optim.Optimizer):
    """As wrappers of Accelerate and Lightning are: everything is the inner optimizer's."""

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def test_an_optimizer_behind_another_before_its_first_step() -> None:
    net, other = Net(), Net()
    inner, fresh = (torch.optim.AdamW(model.parameters(), lr=lr) for model, lr in ((net, 0.1), (other, 0.2)))
    expected = get_optimizer_state_dict(net, inner)
    found = get_optimizer_state_dict(net, PassesOn(PassesOn(inner)))
    torch.testing.assert_close(found["state"], expected["state"])
    assert found["param_groups"] == expected["param_groups"]
    set_optimizer_state_dict(other, PassesOn(fresh), found)
    assert fresh.param_groups[0]["lr"] == 0.1 and len(fresh.state) == len(expected["state"])


def test_lbfgs_has_no_state_before_its_first_step() -> None:
    model = nn.Linear(2, 1)
    assert get_optimizer_state_dict(model, torch.optim.LBFGS(model.parameters()))["state"] == {}


def test_an_optimizer_that_cannot_take_zero_gradients_is_reported() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match="SparseAdam could not make its state"):
        get_optimizer_state_dict(model, torch.optim.SparseAdam(model.parameters()))


def test_state_whose_first_value_is_the_parameters() -> None:
    class Averaging(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.5})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state.setdefault("average", p.detach().clone())
                        state["step"] = state.get("step", 0) + 1
                        p.data.add_(p.grad, alpha=-group["lr"])
                        state["average"].lerp_(p.detach(), 0.5)

    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    entry = get_optimizer_state_dict(model, Averaging(model.parameters()))["state"]["weight"]
    assert entry["step"] == 0
    assert torch.equal(entry["average"], before) and torch.equal(model.weight, before)


# ------------------------------------------------------------------ groups


def test_groups_follow_names_not_order() -> None:
    model = net()
    optimizer = two_groups(model)
    train(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    other = copy.deepcopy(model)
    params = list(other.parameters())[::-1]
    regrouped = torch.optim.AdamW(
        [{"params": [p], "lr": 9.0} for p in params if p.dim() > 1] + [{"params": [p for p in params if p.dim() <= 1]}]
    )
    set_optimizer_state_dict(other, regrouped, state)
    assert [g["lr"] for g in regrouped.param_groups] == [0.001] * (len(regrouped.param_groups) - 1) + [0.03]
    assert {g["weight_decay"] for g in regrouped.param_groups[:-1]} == {0.1}
    assert_same(get_optimizer_state_dict(other, regrouped)["state"], state["state"])


def test_a_group_cannot_take_two_values() -> None:
    model = net()
    state = get_optimizer_state_dict(model, two_groups(model))
    merged = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointMismatchError, match=r"weight_decay 0\.1 and 0\.01"):
        set_optimizer_state_dict(model, merged, state)
    flat = get_optimizer_state_dict(
        model, two_groups(model), options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    with pytest.raises(CheckpointMismatchError, match="lr 0.001 and 0.03"):
        set_optimizer_state_dict(model, merged, flat)


def test_several_optimizers_share_one_dict() -> None:
    def make(model: Net) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        ends = [model.head.weight]
        rest = [p for p in model.parameters() if p is not model.head.weight]
        return torch.optim.AdamW(rest), torch.optim.SGD(ends, lr=0.1, momentum=0.9)

    model, other = net(0), net(1)
    optimizers, others = make(model), make(other)
    train(model, *optimizers)
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state = get_optimizer_state_dict(model, optimizers, options=options)
        set_optimizer_state_dict(other, others, state, options=options)
        assert_same(get_optimizer_state_dict(other, others), get_optimizer_state_dict(model, optimizers))
        # one of them alone takes its part
        set_optimizer_state_dict(other, others[1], state, options=options)


def test_a_group_without_parameters_keeps_its_values() -> None:
    model = net()
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": [], "lr": 0.7}])
    state = get_optimizer_state_dict(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.1
    set_optimizer_state_dict(model, optimizer, state)
    assert optimizer.param_groups[1]["lr"] == 0.7


def test_values_that_only_one_side_has() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = get_optimizer_state_dict(model, optimizer)
    state["param_groups"][0]["initial_lr"] = 0.5
    del state["param_groups"][0]["eps"]
    set_optimizer_state_dict(model, optimizer, state)
    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    assert optimizer.param_groups[0]["eps"] == 1e-8


def test_betas_that_came_back_as_a_list() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = get_optimizer_state_dict(model, optimizer)
    state["param_groups"][0]["betas"] = [0.8, 0.9]
    set_optimizer_state_dict(model, optimizer, state)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_shared_parameters_are_found_under_any_name() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    assert "head.weight" in state["state"] and "tied.weight" not in state["state"]
    renamed = copy.deepcopy(state)
    renamed["state"]["tied.weight"] = renamed["state"].pop("head.weight")
    group = renamed["param_groups"][0]
    group["params"] = ["tied.weight" if name == "head.weight" else name for name in group["params"]]
    other = net(1)
    fresh = torch.optim.AdamW(other.parameters())
    set_optimizer_state_dict(other, fresh, renamed)
    assert_same(get_optimizer_state_dict(other, fresh), state)


def test_float32_moments_of_bfloat16_parameters_survive() -> None:
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn_like(p, dtype=torch.float32),
            "exp_avg_sq": torch.rand_like(p, dtype=torch.float32),
        }
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    fresh = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, fresh, state)
    assert fresh.state[model.weight]["exp_avg"].dtype == torch.float32
    assert_same(get_optimizer_state_dict(model, fresh), state)


def test_nested_state_with_integer_keys_survives_flattening() -> None:
    class Blocks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p].setdefault("blocks", {0: {"l.r": p.detach() * 2}, 1: {"rank": 1}})

    model = nn.Linear(2, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer = Blocks(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    assert "state.weight.blocks.0.l.r" in flat
    expected = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    for p in model.parameters():
        optimizer.state[p]["blocks"][1]["rank"] = 5
    set_optimizer_state_dict(model, optimizer, flat, options=options)
    assert_same(get_optimizer_state_dict(model, optimizer), expected)


# ------------------------------------------------------------------ options


def test_frozen_parameters_can_be_left_out_under_all_their_names() -> None:
    model = net()
    model.head.weight.requires_grad_(False)
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert not {"frozen.weight", "head.weight", "tied.weight"} & set(state)
    assert {"body.0.weight", "norm.running_mean"} <= set(state)


@pytest.mark.parametrize("keep", [False, True])
def test_submodules(keep: bool) -> None:
    model = torch.compile(net())
    optimizer = torch.optim.AdamW(model.parameters())
    options = StateDictOptions(keep_submodule_prefixes=keep)
    with pytest.warns(FutureWarning, match="submodules"):
        weights, state = get_state_dict(model, optimizer, submodules={model.body}, options=options)
    prefix = "body." if keep else ""
    names = {f"{prefix}{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    assert set(weights) == names == set(state["state"]) == set(state["param_groups"][0]["params"])


def test_a_dict_keyed_by_modules() -> None:
    model = torch.compile(net())
    with pytest.warns(FutureWarning, match="keyed by modules"):
        report = set_model_state_dict(
            model,
            {model.body: {"0.weight": torch.zeros(6, 4)}},
            options=StateDictOptions(strict=False),
        )
    assert not model.body[0].weight.any()
    assert "head.weight" in report.missing_keys


def test_broadcasting_needs_full_state() -> None:
    with pytest.raises(ValueError, match="full_state_dict"):
        get_model_state_dict(net(), options=StateDictOptions(broadcast_from_rank0=True))


def test_broadcasting_without_ranks_just_loads() -> None:
    model, other = net(0), net(1)
    optimizer, fresh = two_groups(model), two_groups(other)
    train(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state, options=options)
    assert_same(get_state_dict(other, fresh), (weights, state))


def test_meta_parameters_are_replaced_and_stay_tied() -> None:
    state = get_model_state_dict(net())
    with torch.device("meta"):
        model = Net()
    model.body = copy.deepcopy(net(3).body)
    kept = model.body[0].weight
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    assert model.body[0].weight is kept
    assert model.head.weight is model.tied.weight
    assert not model.frozen.weight.requires_grad
    assert_same(get_model_state_dict(model), dict(state))
    state["frozen.weight"].zero_()
    assert model.frozen.weight.any(), "nothing is shared with the dict"


# ------------------------------------------------------------------ errors


def test_all_that_does_not_fit_the_model_is_listed_at_once() -> None:
    model = torch.compile(net())
    state = get_model_state_dict(model)
    for name in ("head.weight", "norm.bias"):
        del state[name]
    state["stranger"] = torch.zeros(1)
    with pytest.raises(
        CheckpointMismatchError, match=r"missing.*norm.bias.*head.weight.*unexpected.*stranger"
    ) as caught:
        set_model_state_dict(model, state)
    assert set(caught.value.missing) == {"head.weight", "norm.bias"}
    report = set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    assert report.unexpected_keys == ["stranger"]


def test_shapes_are_checked_before_anything_is_written() -> None:
    model = net()
    state = {name: torch.zeros_like(value) for name, value in get_model_state_dict(model).items()}
    state["body.0.weight"], state["head.weight"] = torch.zeros(4, 6), torch.zeros(1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointMismatchError, match=r"body\.0\.weight.*\n.*head\.weight"):
        set_model_state_dict(model, state)
    assert_same(dict(model.state_dict()), dict(before))


def test_an_empty_dict_is_not_a_successful_load() -> None:
    model = net()
    with pytest.raises(CheckpointMismatchError, match="missing"):
        set_model_state_dict(model, {})
    with pytest.raises(CheckpointMismatchError, match="empty"):
        set_state_dict(model, two_groups(model), model_state_dict={}, optim_state_dict={})


def test_all_that_does_not_fit_the_optimizer_is_listed_at_once() -> None:
    model = net()
    optimizer = two_groups(model)
    train(model, optimizer)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    del state["state"]["body.0.weight"]
    del state["state"]["body.2.weight"]["exp_avg"]
    state["state"]["body.2.bias"]["exp_avg"] = torch.zeros(5)
    state["param_groups"][1]["params"].remove("norm.bias")
    state["state"]["stranger"] = {}
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointMismatchError) as caught:
        set_optimizer_state_dict(model, optimizer, state)
    message = str(caught.value)
    for part in (
        "body.0.weight: all of its state is missing",
        "body.2.weight: exp_avg is missing",
        "state.body.2.bias.exp_avg: shape (5,) in the state dict, (4,) in the optimizer",
        "norm.bias: missing from param_groups",
        "stranger: unexpected",
    ):
        assert part in message
    assert_same(optimizer.state_dict(), before)

    state["state"]["body.2.bias"]["exp_avg"] = torch.ones(4)
    kept = optimizer.state[model.body[0].weight]["exp_avg"].clone()
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    assert torch.equal(optimizer.state[model.body[0].weight]["exp_avg"], kept)
    assert torch.equal(optimizer.state[model.body[2].bias]["exp_avg"], torch.ones(4))


@pytest.mark.parametrize("library", [set_optimizer_state_dict, torch_sd.set_optimizer_state_dict])
def test_numbered_state_goes_by_place(library: Any) -> None:
    """What an optimizer's own `state_dict` gives: PyTorch's function takes it, too."""
    model, other = net(), net(1)
    optimizer, target = two_groups(model), two_groups(other)
    train(model, optimizer)
    library(other, target, copy.deepcopy(optimizer.state_dict()))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[one].keys() == target.state[two].keys()
        assert all(torch.equal(value, target.state[two][key]) for key, value in optimizer.state[one].items())
    assert [group["lr"] for group in target.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_numbers_that_mean_nothing_are_refused() -> None:
    model = net()
    optimizer = two_groups(model)
    train(model, optimizer)
    numbered, named = optimizer.state_dict(), get_optimizer_state_dict(model, optimizer)
    with pytest.raises(CheckpointMismatchError, match="groups"):
        set_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), numbered)
    with pytest.raises(CheckpointError, match="must name"):
        set_optimizer_state_dict(model, optimizer, named | {"state": {0: {}, **named["state"]}})
    half = len(list(model.parameters())) // 2
    several = [torch.optim.SGD(part) for part in (list(model.parameters())[:half], list(model.parameters())[half:])]
    with pytest.raises(CheckpointError, match="several optimizers"):
        set_optimizer_state_dict(model, several, numbered)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = net()
    with pytest.raises(CheckpointError, match="not in the model"):
        get_optimizer_state_dict(model, torch.optim.AdamW(net().parameters()))
