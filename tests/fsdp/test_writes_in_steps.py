"""Writes to parameters while their module runs, and until its backward ends: the shards get them."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.compare import Model, assert_same_parameters, batches, loss_of, mine, shard_blocks
from ranks import device_type, run_ranks
from terrazzo.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, report
from terrazzo.tensor import DTensor, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, parallelize_module

pytestmark = pytest.mark.on_late

WORDS = "were written to while their module ran"


def in_place(parameter: Any) -> None:
    with torch.no_grad():
        parameter.clamp_(-0.2, 0.2)


def through_data(parameter: Any) -> None:
    parameter.data.clamp_(-0.2, 0.2)


def through_data_taken_before(parameter: Any) -> None:
    data = parameter.data
    assert parameter.data is not data
    data[:1] = 0.1
    data.clamp_(-0.2, 0.2)


def other_data(parameter: Any) -> None:
    parameter.data = parameter.data.clamp(-0.2, 0.2)


def through_data_of_the_first_call(parameter: Any) -> None:
    if not hasattr(parameter, "taken"):
        parameter.taken = parameter.data
    parameter.taken.clamp_(-0.2, 0.2)


def other_memory(parameter: Any) -> None:
    with torch.no_grad():
        parameter.set_(parameter.detach().clamp(-0.2, 0.2))


WRITERS = (in_place, through_data, through_data_taken_before, other_data)


def other_memory_unbound(parameter: Any) -> None:
    with torch.no_grad():
        torch.Tensor.set_(parameter, parameter.detach().clamp(-0.2, 0.2))


def exchanged(parameter: Any) -> None:
    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clamp(-0.2, 0.2)))


IN_FORWARD = (*WRITERS, through_data_of_the_first_call, other_memory, other_memory_unbound, exchanged)


class Writing(nn.Module):
    """Writes to the parameters of some modules in it, first of all."""

    def __init__(self, module: nn.Module, writer: Any) -> None:
        super().__init__()
        self.module, self.writer = module, writer

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.module.parameters():
            self.writer(parameter)
        return self.module(x)  # type: ignore[no-any-return]


def ways() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}]
    if torch.distributed.get_world_size() == 4:
        found = [{"reshard_after_forward": 2}, {"mesh": init_device_mesh(device_type(), (2, 2))}]
    return found


def writing_model(writer: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Model()
    for i, block in enumerate(model.blocks):
        block.down = Writing(block.down, writer)
        if i == 1:
            model.blocks[i] = Writing(block, writer)
    model.head = Writing(model.head, writer)
    return model


def train(model: Any, reference: Any, steps: int = 3, between: Any = None) -> None:
    """Both on the same batches; afterwards and in each step they are alike."""
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (model, reference))
    for x, y in batches(steps):
        losses = (loss_of(model, mine(x), mine(y)), loss_of(reference, x, y))
        for module in (model, reference) if between is not None else ():
            for parameter in module.parameters():
                between(parameter)
        for loss in losses:
            loss.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)


def check_in_forward() -> None:
    for options in ways():
        for writer in IN_FORWARD:
            model = writing_model(writer)
            reference = copy.deepcopy(model)
            shard_blocks(model, **options)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                train(model, reference)
            said = [str(each.message) for each in seen if WORDS in str(each.message)]
            if torch.distributed.get_world_size() == 1:
                assert not said
                continue
            assert len(said) == len(report(model).groups), "once for each unit"
            with torch.no_grad(), pytest.raises(AssertionError):  # they were written: without, it is another model
                torch.testing.assert_close(model.head.module.weight.full_tensor(), Model().head.weight)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_writes_in_forward(world):
    run_ranks(world, check_in_forward)


def check_before_backward() -> None:
    """`model.parameters()` are the sharded ones, the kept parts of them, or the unsharded ones."""
    for options in ways():
        for writer in (through_data, other_data):
            if writer is other_data and options.get("reshard_after_forward") is not False:
                continue  # the backward of one device would use the old ones, which are not there any more
            torch.manual_seed(0)
            model: Any = Model()
            reference = copy.deepcopy(model)
            shard_blocks(model, **options)
            train(model, reference, between=writer)


@pytest.mark.filterwarnings(f"ignore:.*{WORDS}")
@pytest.mark.parametrize("world", [2, 4])
def test_writes_between_forward_and_backward(world):
    run_ranks(world, check_before_backward)


def check_kept_parts() -> None:
    """The `.data` of parts that are kept between forward and backward, on whichever rank it is set."""
    for bound in (0, 4 << 20):
        torch.manual_seed(0)
        model: Any = Model()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        shard_blocks(model, reshard_after_forward=2)
        model.set_coalesce_bytes(bound)
        (x, y), *_ = batches(1)
        for times in (2, 4):
            loss = loss_of(model, mine(x), mine(y))
            for parameter in model.parameters():
                parameter.data = parameter.data * 2
            with pytest.warns(UserWarning, match=WORDS) if times == 2 else warnings.catch_warnings():
                loss.backward()
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.full_tensor(), before[name] * times), name


def test_data_of_kept_parts():
    run_ranks(4, check_kept_parts)


def check_idle() -> None:
    """`.data` of what an evaluation has left unsharded; with tensor parallelism, too."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    for parallel in (False, True):
        for writer in WRITERS[1:]:
            torch.manual_seed(0)
            model: Any = nn.Linear(5, 6)
            reference = copy.deepcopy(model)
            if parallel:
                parallelize_module(model, mesh["tp"], ColwiseParallel())
                fully_shard(model, mesh=mesh["dp"])
            else:
                fully_shard(model)
            x = torch.ones(2, 5)
            with torch.no_grad():
                model(x)
            assert isinstance(model.weight, DTensor) == parallel
            for module in (model, reference):
                for parameter in module.parameters():
                    if parallel and writer is not through_data:
                        parameter.data.mul_(0.5)
                    else:
                        writer(parameter)
            assert_same_parameters(model, reference)
            model.reshard()
            assert_same_parameters(model, reference)


def test_data_of_what_is_unsharded_between_steps():
    run_ranks(4, check_idle)


def check_rounded() -> None:
    """Of what is computed in bfloat16, the float32 shards get what was written, and keep the rest as it was."""
    for offload in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Linear(16, 33)
        before = [p.detach().clone() for p in model.parameters()]
        policies: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), **policies)
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(2, 16))
                assert model.weight.dtype is torch.bfloat16
                model.weight[20:22] = 3.0
                model.bias.data[0] = float("nan")
            model.reshard()
        before[0][20:22] = 3.0
        before[1][0] = float("nan")
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert parameter.dtype is torch.float32
            torch.testing.assert_close(parameter.full_tensor().cpu(), value.cpu(), rtol=0, atol=0, equal_nan=True)


def test_what_is_not_written_keeps_its_precision():
    run_ranks(2, check_rounded)


def check_max_norm() -> None:
    """What differs between ranks is said to, and each rank's own rows are kept."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5))
    fully_shard(model[0])
    fully_shard(model)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(torch.arange(8)).sum().backward()
        if _ == 0:
            assert any(f"('0.weight') {WORDS}" in str(each.message) for each in seen)
        else:
            assert not any(WORDS in str(each.message) for each in seen)
    assert torch.all(model[0].weight.full_tensor().norm(dim=1) < 0.501)


def test_an_embedding_that_writes_to_itself():
    run_ranks(2, check_max_norm)


def check_faces() -> None:
    """The unsharded parameter is an `nn.Parameter` for everybody, which copies as one."""
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 2)
    model.weight.note = "of the user"
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(1, 3))
    parameter = model.weight
    parameter.data.add_(1)
    assert isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor)
    plain = nn.Parameter(parameter.detach())
    assert repr(parameter) == repr(plain)
    for other in (pickle.loads(pickle.dumps(parameter)), copy.copy(parameter), copy.deepcopy(parameter)):
        assert isinstance(other, nn.Parameter) and torch.equal(other, parameter) and other.requires_grad
        assert other.__dict__ in ({"note": "of the user"}, {})
    assert type(pickle.loads(pickle.dumps(parameter))) is nn.Parameter
    assert type(parameter + 1) is Tensor and type(parameter.data) is Tensor and not parameter.data.requires_grad
    before = parameter.detach().clone()
    with torch.inference_mode():
        parameter.data = parameter.data * 2
        parameter.data.mul_(2)
        model(torch.ones(1, 3))
    model.reshard()
    torch.testing.assert_close(model.weight.full_tensor(), before * 4)


@pytest.mark.cpu_only("PyTorch takes no inference tensor as data on devices that it does not know")
def test_what_an_unsharded_parameter_is():
    run_ranks(2, check_faces)
