"""`deepspeed.moe`: what the layer returns, by its definition, on one device and on several ranks.

`scripts.py` compares whole runs with the real DeepSpeed's, random draws among them.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo.deepspeed as deepspeed
from engine.deepspeed_cases import deepspeed_is_installed
from ranks import device_type, run_ranks
from terrazzo.deepspeed.moe.layer import MoE
from terrazzo.deepspeed.moe.utils import configure_moe_param_groups, has_moe_layers, is_moe_param
from terrazzo.deepspeed.utils import groups
from terrazzo.errors import EngineConfigError, EngineError, StateNameError

pytestmark = pytest.mark.on_late

DIM, EXPERTS = 6, 4


class Expert(nn.Module):
    """Returns a bias, too, as Megatron's layers do; two of its layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down(torch.relu(self.up(x))), None


def layer(**options: object) -> MoE:
    torch.manual_seed(3)
    options = {"min_capacity": 1, "use_rts": False, "top2_2nd_expert_sampling": False, **options}
    moe = MoE(DIM, Expert(), EXPERTS, **options)
    stacked = moe.deepspeed_moe.experts.deepspeed_experts
    assert stacked.up.weight is stacked.down.weight and stacked.up.weight.shape == (EXPERTS, DIM, DIM)
    with torch.no_grad():
        for p in stacked.parameters():
            torch.testing.assert_close(p[0], p[3])  # copies, as DeepSpeed's
            p.normal_()
    return moe


def expert(moe: MoE, e: int, x: Tensor) -> Tensor:
    inner = moe.deepspeed_moe.experts.deepspeed_experts
    return torch.relu(x @ inner.up.weight[e].T + inner.up.bias[e]) @ inner.down.weight[e].T


def by_definition(moe: MoE, x: Tensor, k: int, factor: float, drop: bool) -> tuple[Tensor, Tensor, list[int]]:
    """The first tokens of an expert are kept with k 2, first choices before second ones; those of the highest gates
    with k 3."""
    gates = (x @ moe.deepspeed_moe.gate.wg.weight.T).softmax(-1)
    chosen = gates.topk(k, dim=1)[1].tolist()
    capacity = max(math.ceil(len(x) / EXPERTS * factor * k), 1) if drop else len(x)
    counts = [sum(e in c for c in chosen) for e in range(EXPERTS)]
    kept: set[tuple[int, int]] = set()
    for e in range(EXPERTS):
        order = [(t, c.index(e)) for t, c in enumerate(chosen) if e in c]
        order.sort(key=lambda found: (found[1], found[0]) if k == 2 else -float(gates.detach()[found[0], e]))
        kept |= {(t, e) for t, _ in order[:capacity]}
    rows = []
    for t, row in enumerate(x):
        mine = [e for e in chosen[t] if (t, e) in kept]
        total = sum((gates[t, e] for e in mine), torch.zeros(())) if k > 1 else 1.0
        rows.append(sum((gates[t, e] / total * expert(moe, e, row) for e in mine), torch.zeros(DIM)))
    share = torch.tensor([sum(e in (c[:1] if k == 2 else c) for c in chosen) / len(x) for e in range(EXPERTS)])
    return torch.stack(rows), (gates.mean(0) * share).sum() * EXPERTS / (k if k > 2 else 1), counts


@pytest.mark.cpu_only("the layer's own arithmetic")
@pytest.mark.parametrize(("k", "factor", "drop"), [(1, 1.0, False), (2, 0.5, True), (2, 1.0, False), (3, 0.6, True)])
def test_a_layer_returns_what_its_definition_says(k, factor, drop):
    moe = layer(k=k, capacity_factor=factor, drop_tokens=drop)
    x = torch.randn(11, DIM, requires_grad=True)
    found = []
    for y, l_aux, counts in (moe(x), by_definition(moe, x, k, factor, drop)):
        grads = torch.autograd.grad((y * y).sum() + l_aux, [x, *moe.parameters()])
        found.append([y, l_aux, torch.as_tensor(counts).float(), *grads])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    everything = by_definition(moe, x, k, factor, False)[0]
    assert torch.allclose(found[0][0], everything, atol=1e-4) is not drop


@pytest.mark.cpu_only("the layer's own arithmetic")
def test_with_one_expert_per_token_capacity_unused_tokens_and_the_residual():
    moe = layer(capacity_factor=0.5, eval_capacity_factor=8.0, use_residual=True)
    x = torch.randn(2, 6, DIM)
    used = torch.tensor([1.0] * 10 + [0.0] * 2)
    share = moe.coefficient(x).softmax(-1)
    dense = moe.mlp(x)[0]
    for training, most in ((True, 2), (False, 12)):  # ceil(12 / 4 * 0.5)
        y, _, counts = moe.train(training)(x, used)
        assert counts.sum() == 10
        tokens = ((y - dense * share[..., 1:]) / share[..., :1]).reshape(-1, DIM)
        computed = (tokens.abs().amax(1) > 1e-5).sum()
        assert computed == sum(min(int(c), most) for c in counts)
        assert tokens[10:].abs().max() < 1e-5


def check_divided() -> None:
    """Experts on two of four ranks each, or on all: each rank's results are those of all experts on one device."""
    for ep_size in (2, 4):
        for options in (
            {"k": 1},
            {"k": 2, "capacity_factor": 0.4, "use_residual": True},
            {"k": 3, "drop_tokens": False},
        ):
            whole = layer(**options)
            moe = layer(ep_size=ep_size, **options)
            with pytest.raises(EngineError, match=f"divided among {ep_size} ranks, but are not: pass the model to"):
                moe(torch.ones(4, DIM))
            moe.load_state_dict(whole.state_dict())
            moe.set_deepspeed_parallelism()
            x = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
            for mine, expected in zip(moe(x), whole(x), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
            assert all(is_moe_param(p) for p in moe.deepspeed_moe.experts.parameters())
    name, rank = "ep_size_2", dist.get_rank()
    for k in (1, 2, 3):  # ranks with fewer tokens than min_capacity, and one with none
        options = {"k": k, "min_capacity": 4}
        moe, whole = layer(ep_size=4, **options), layer(**options)
        moe.set_deepspeed_parallelism()
        x = torch.randn(rank, DIM)
        y, l_aux, counts = moe(x)
        assert y.shape == x.shape and counts.sum() == (rank * k)
        if rank:
            expected = by_definition(whole, x, k, 1.0, drop=False)
            torch.testing.assert_close((y, l_aux), expected[:2], rtol=1e-4, atol=1e-4)
        else:
            assert l_aux == 0
    assert groups._get_max_expert_size_name() == "ep_size_4"
    assert groups._get_expert_parallel_rank(name) == rank % 2
    assert groups._get_expert_data_parallel_rank(name) == rank // 2
    assert groups._get_expert_parallel_world_size("ep_size_4") == 4
    assert groups._get_expert_data_parallel_world_size("ep_size_4") == 1
    together = groups._get_expert_parallel_group_dict()[name], groups._get_expert_data_parallel_group_dict()[name]
    assert [dist.get_process_group_ranks(g) for g in together] == [
        [rank // 2 * 2, rank // 2 * 2 + 1],
        [rank % 2, rank % 2 + 2],
    ]
    with pytest.raises(EngineConfigError, match="no group 'ep_size_3' of experts"):
        groups._get_expert_parallel_group("ep_size_3")
    # An engine whose data-parallel ranks are others: its groups take the place of the first ones.
    groups._create_expert_and_data_parallel(
        2, data=init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    )
    assert dist.get_process_group_ranks(groups._get_expert_parallel_group(name)) == [rank % 2, rank % 2 + 2]


PREFIX = "1.deepspeed_moe.experts.deepspeed_experts."
SHAPES = {"up.weight": (DIM, DIM), "up.bias": (DIM,)}


def engine_with(stage: int, seed: int, ep_size: int = 2, **options: object) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(seed)
    first, moe = nn.Linear(DIM, DIM), layer(ep_size=ep_size, k=2, drop_tokens=False)
    with torch.no_grad():
        for p in moe.deepspeed_moe.experts.parameters():
            p.mul_(1 + seed)
    first.requires_grad_(False)
    zero = {"stage": stage, "round_robin_gradients": bool(options.pop("robin", False))}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": zero,
        **options,
    }
    return deepspeed.initialize(model=nn.Sequential(first, moe), config=settings)[0]


def check_layout(folder: str) -> None:
    rank = dist.get_rank()
    for data_first in (False, True):
        engine = engine_with(2, 0, use_data_before_expert_parallelism=data_first, bf16={"enabled": True})
        x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(rank))
        engine.backward(engine(x.to(device_type()))[0].square().mean())
        engine.step()
        tag = f"first-{data_first}"
        engine.core.save_checkpoint(folder, tag, {"mine": 3}, layout="deepspeed").result()
        weights = {n: v.full_tensor().cpu() for n, v in engine.core.module_state_dict().items()}
        moments = {
            n: deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg").cpu()
            for n, p in engine.module.named_parameters()
            if p.requires_grad
        }
        # Of two parts of the experts this rank has one, and of the ranks with the same ones it is one.
        part, place = (rank // 2, rank % 2) if data_first else (rank % 2, rank // 2)
        path = Path(folder) / tag
        stored = torch.load(path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", weights_only=False)
        state = stored["optimizer_state_dict"]
        assert state["partition_count"] == [4, 2]
        [_, group] = state["base_optimizer_state"]["param_groups"]
        assert group["moe"] is True and group["name"] == "ep_size_2" and group["params"] == [1]
        kept = state["base_optimizer_state"]["state"][1]["exp_avg"]
        for found, values in ((state["single_partition_of_fp32_groups"][1], weights), (kept, moments)):
            own = [values[PREFIX + name][2 * part + e].flatten() for e in range(2) for name in SHAPES]
            line = torch.cat(own)
            torch.testing.assert_close(found, line.chunk(2)[place], rtol=0, atol=0)
        for e in range(EXPERTS):
            stored = torch.load(path / f"layer_0_expert_{e}_mp_rank_00_model_states.pt")
            assert stored.keys() == {f"{PREFIX}{e}.{name}" for name in (*SHAPES, "down.weight")}
            for name in SHAPES:
                assert torch.equal(stored[f"{PREFIX}{e}.{name}"], weights[PREFIX + name][e].bfloat16())
        model = torch.load(path / "mp_rank_00_model_states.pt", weights_only=False)
        assert model["num_experts"] == [EXPERTS] and not any("deepspeed_experts" in name for name in model["module"])
        assert list(model["param_shapes"][1]) == [f"{PREFIX}{e}.{name}" for e in range(2) for name in SHAPES]
        assert model["shared_params"] == {f"{PREFIX}{e}.down.weight": f"{PREFIX}{e}.up.weight" for e in range(2)}
        # Any other stage and degree goes on from it.
        other = engine_with(3 if data_first else 1, 5, ep_size=1 if data_first else 4)
        assert other.load_checkpoint(folder, tag)[1]["mine"] == 3
        for name, value in other.core.module_state_dict().items():
            frozen = name.startswith("0.")  # in the precision of forward
            expected = weights[name].bfloat16().float() if frozen else weights[name]
            assert torch.equal(value.full_tensor().cpu(), expected), name
    with pytest.raises(EngineError, match="only in stages 1 and 2 without round_robin"):
        engine_with(3, 0).core.save_checkpoint(folder, layout="deepspeed")
    with pytest.raises(EngineError, match="only in stages 1 and 2 without round_robin"):
        engine_with(2, 0, robin=True).core.save_checkpoint(folder, layout="deepspeed")
    with pytest.raises(StateNameError, match="num_experts"):
        engine.core.save_checkpoint(folder, "named", {"num_experts": 1}, layout="deepspeed")


@pytest.mark.skipif(not deepspeed_is_installed(), reason="DeepSpeed, whose classes its files name, is not installed")
def test_experts_in_deepspeeds_layout(tmp_path):
    run_ranks(4, check_layout, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first-False", "first-True", "latest"]


def test_divided_experts_are_those_of_one_device():
    run_ranks(4, check_divided)


@pytest.mark.cpu_only("no tensors")
def test_groups_of_parameters_and_wrong_arguments():
    model = nn.Sequential(nn.Linear(2, DIM), layer())
    found = configure_moe_param_groups(list(model.parameters()))
    assert [len(group["params"]) for group in found] == [3, 2] and found[1]["name"] == "ep_size_1"
    assert configure_moe_param_groups(found) is found
    assert has_moe_layers(model) == (True, EXPERTS) and has_moe_layers(model[0]) == (False, 0)
    assert deepspeed.moe.layer.MoE is MoE
    with pytest.raises(EngineConfigError, match="ep_size 3 does not divide the number of experts, 4"):
        MoE(DIM, Expert(), 4, ep_size=3)
    with pytest.raises(EngineConfigError, match="must be None, 'Jitter' or 'RSample', not 'Noise'"):
        MoE(DIM, Expert(), 4, noisy_gate_policy="Noise")
    with pytest.raises(EngineConfigError, match="no groups of experts: deepspeed.initialize makes"):
        groups._get_max_expert_size_name()
    with pytest.raises(EngineConfigError, match="from another range than one expert's. Initialise the expert before"):
        layer().deepspeed_moe.experts.deepspeed_experts.up.reset_parameters()
    with pytest.warns(UserWarning, match="no Tutel"):
        copy.deepcopy(MoE(DIM, Expert(), 4, use_tutel=True))
