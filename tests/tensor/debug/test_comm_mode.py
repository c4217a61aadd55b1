"""What CommDebugMode sees, against counts and bytes worked out by hand."""

import json
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode as TheirMode
from torch.utils.checkpoint import checkpoint

from ranks import run_ranks
from terrazzo.comm import add_observer, remove_observer
from terrazzo.comm.axis import axis_beside, axis_of
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    ones,
)
from terrazzo.tensor.debug import ByCollective, CommDebugMode, Operation


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.recompute = False

    def forward(self, x):
        hidden = checkpoint(self.up, x, use_reentrant=False) if self.recompute else self.up(x)
        return self.down(torch.relu(hidden))


def partition(name, module, mesh):
    placements = {"up": (Shard(0), Shard(0)), "down": (Shard(1), Replicate())}.get(name)
    if placements is not None:
        for (key, p), placement in zip(list(module.named_parameters()), placements, strict=True):
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [placement])))


def tensor_parallel(world):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = distribute_module(MLP(), mesh, partition)
    x = DTensor.from_local(torch.randn(4, 8), mesh, [Replicate()]).requires_grad_()
    return mesh, model, x


def check_tensor_parallel():
    _, model, x = tensor_parallel(4)
    mode = CommDebugMode()
    with mode:
        model(x).redistribute(placements=[Replicate()]).sum().backward()
    activation = 2 * 3 * (4 * 8 * 4) // 4  # an all-reduce of [4, 8] floats over 4 ranks
    forward, backward = mode.get_comm_counts("forward"), mode.get_comm_counts("backward")
    assert forward == {"all_reduce": 1} and backward == {"all_reduce": 1}, (forward, backward)
    assert mode.get_comm_bytes("forward") == {"all_reduce": activation} == mode.get_comm_bytes("backward")
    assert mode.get_total_counts() == 2 and mode.get_total_bytes() == 2 * activation
    counts = mode.get_comm_counts()
    assert counts[torch.ops.c10d_functional.all_reduce] == counts[torch.ops._c10d_functional.all_reduce] == 2
    assert counts[torch.ops.c10d_functional.all_gather_into_tensor] == counts["all_gather"] == 0
    # The backward all-reduce is that of the input of `up`; the forward one was asked for outside of the model.
    assert [(c.phase, c.module, c.axis, c.ranks) for c in mode.collectives] == [
        ("forward", "Global", "tp", 4),
        ("backward", "MLP.up", "tp", 4),
    ]
    return mode


def check_tables(folder):
    mode = check_tensor_parallel()
    info = mode.get_parameter_info()
    assert {name: set(p) for name, p in info.items()} == {
        "MLP.up": {"weight", "bias"},
        "MLP.down": {"weight", "bias"},
    }
    assert mode.get_sharding_info() == {
        "MLP.up.weight": (Shard(0),),
        "MLP.up.bias": (Shard(0),),
        "MLP.down.weight": (Shard(1),),
        "MLP.down.bias": (Replicate(),),
    }
    tables = [mode.generate_comm_debug_tracing_table(level) for level in range(4)]
    assert all("MLP.up" in table and "all_reduce on tp: 1 x, 192 B" in table for table in tables)
    assert "relu" not in tables[0] and "f32[16, 8]" not in tables[0]
    assert "relu(f32[4, 16]S(1))" in tables[1] and "aten." not in tables[1]
    assert "* weight: f32[16, 8] placed ['S(0)'] on mesh (4,)" in tables[1]
    assert "aten.relu(f32[4, 4])" in tables[2] and "aten.t(" not in tables[2]
    assert "aten.t(" in tables[3]
    if dist.get_rank() == 0:
        for level in range(4):
            path = f"{folder}/{level}.json"
            mode.generate_json_dump(path, noise_level=level)
            with open(path) as file:
                tree = json.load(file)
            assert [c["fqn"] for c in tree["children"]] == ["MLP"]
            up = tree["children"][0]["children"][0]
            assert up["fqn"] == "MLP.up" and up["module_type"] == "Linear"
            assert up["collectives_backward"] == [
                {"kind": "all_reduce", "axis": "tp", "ranks": 4, "bytes": 192, "op": "sum"}
            ]
            assert bool(up["operations_forward"]) == bool(up["parameters"]) == (level > 0)
        mode.log_comm_debug_tracing_table_to_file(f"{folder}/log.txt", 2)
        with open(f"{folder}/log.txt") as file:
            assert file.read() == tables[2]
    with pytest.raises(ValueError, match="noise_level"):
        mode.generate_comm_debug_tracing_table(4)
    with pytest.raises(ValueError, match="phase"):
        mode.get_comm_counts("sideways")


def check_keys_and_modules():
    _, model, x = tensor_parallel(4)
    mode = CommDebugMode()
    with mode:
        assert mode.comm_module_counts == {"Global": {"forward": {}, "backward": {}}}
        model(x).redistribute(placements=[Replicate()]).sum().backward()
        assert mode.comm_counts == mode.get_comm_counts()
    functional, native = torch.ops.c10d_functional, torch.ops._c10d_functional
    assert dict(mode.comm_counts) == {functional.all_reduce: 2} and list(mode.comm_counts) == [functional.all_reduce]
    for same in ({"all_reduce": 2}, {functional.all_reduce: 2}, {native.all_reduce: 1, torch.ops.c10d.allreduce_: 1}):
        assert mode.comm_counts == same and same == mode.comm_counts and not mode.comm_counts != same
    assert mode.comm_counts != {functional.all_reduce: 1} and mode.comm_counts != {functional.all_gather_into_tensor: 2}
    both = mode.comm_module_counts
    assert set(both) == {"Global", "MLP", "MLP.up"}
    assert both["Global"] == {"forward": {functional.all_reduce: 1}, "backward": {functional.all_reduce: 1}}
    assert both["MLP"] == both["MLP.up"] == {"forward": {}, "backward": {functional.all_reduce: 1}}


def check_pytorchs_dtensors_too():
    """One mode sees the collectives of both libraries' tensors, and counts PyTorch's as PyTorch's mode does."""
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(32.0).view(8, 4)

    def program():
        x = theirs.distribute_tensor(whole, mesh, [theirs.Shard(0)], src_data_rank=None).requires_grad_()
        (x @ x.t()).sum().redistribute(placements=[theirs.Replicate()]).backward()
        return x.detach().redistribute(placements=[theirs.Replicate()]).to_local().sum()

    mode, reference = CommDebugMode(), TheirMode()
    with reference:
        program()
    with mode:
        program()
    assert reference.get_total_counts() > 1 and mode.get_comm_counts() == reference.get_comm_counts()
    with mode:
        program()
        distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).full_tensor()
    assert mode.get_total_counts() == reference.get_total_counts() + 1


def check_messages_of_fully_shard():
    """Large parts travel as messages between pairs of ranks; they are the collectives that they make up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1200, 1200, bias=False), nn.Linear(1200, 1200, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    mode = CommDebugMode()
    with mode:
        model(torch.ones(1, 1200)).sum().backward()
    assert mode.get_comm_counts() == {"all_gather": 4, "reduce_scatter": 2}, mode.get_comm_counts()
    # Messages of the user's own are counted.
    peer = 1 - dist.get_rank()
    with mode:
        works = [dist.isend(torch.ones(2), peer), dist.irecv(torch.empty(2), peer)]
        for work in works:
            work.wait()
    assert mode.get_comm_counts() == {"send": 1}
    # Those by which ranks meet before a group of theirs is made are not.
    axis = axis_of(DeviceMesh.from_group(dist.new_group(), "cpu"), (0,))
    with mode:
        axis_beside(axis)
    assert mode.get_total_counts() == 0


def check_recomputation_belongs_to_its_module():
    _, model, x = tensor_parallel(2)
    model.recompute = True
    mode = CommDebugMode()
    with mode:
        model(x).sum().backward()
    by_module = [
        (entry.name, record.fqn)
        for _, record in mode._tree.root.walk()
        for entry in record.entries["backward"]
        if isinstance(entry, Operation) and entry.name == "linear"
    ]
    assert by_module == [("linear", "MLP.up")], by_module


def check_every_kind_and_torchs_own():
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0)])
    mode = CommDebugMode()
    with mode:
        x.full_tensor()
        x.redistribute(placements=[Shard(1)])
        x.sum().full_tensor()
        plain = torch.ones(4)
        dist.all_reduce(plain)
        funcol.all_gather_tensor(plain, 0, dist.group.WORLD).sum()
        funcol.reduce_scatter_tensor(plain, "sum", 0, dist.group.WORLD).sum()
    assert mode.get_comm_counts() == {"all_gather": 2, "all_to_all": 1, "all_reduce": 2, "reduce_scatter": 1}
    moved = mode.get_comm_bytes()
    assert moved["all_gather"] == 96 + 48 and moved["all_to_all"] == 24
    assert moved["all_reduce"] == 6 + 24 and moved["reduce_scatter"] == 12
    with mode:
        ones(3, device_mesh=mesh, placements=[Replicate()]) + 1
    assert mode.get_total_counts() == 0 and mode.collectives == ()


def check_composites_and_nesting():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
    y = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    similarity = torch.nn.functional.cosine_similarity  # which C++ takes apart
    seen = []
    add_observer(seen.append)
    similarity(x, y).sum().full_tensor()
    remove_observer(seen.append)
    outer, inner = CommDebugMode(), CommDebugMode()
    with outer:
        with inner:
            value = similarity(x, y).sum().full_tensor()
        value.backward()
        with pytest.raises(RuntimeError, match="entered already"), outer:
            pass
    plain = similarity(x.full_tensor(), y.full_tensor()).sum()
    torch.testing.assert_close(value, plain)
    assert x.grad is not None
    assert [(c.kind, c.bytes) for c in inner.collectives] == [(e.kind, e.bytes) for e in seen]
    assert outer.collectives[: len(seen)] == inner.collectives
    text = inner.generate_comm_debug_tracing_table(2)
    assert "cosine_similarity(" in text and "aten." in text


def check_callbacks_of_backward():
    """What runs at the end of backward, without a node of its own, is backward too."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]).requires_grad_()
    engine = torch.autograd.Variable._execution_engine
    mode = CommDebugMode()
    with mode:
        for loss in (x.sum(), x.sum().to_local()):
            loss.register_hook(lambda grad: engine.queue_callback(lambda: x.detach().full_tensor()))
            loss.backward()
    assert mode.get_comm_counts("forward") == {} and mode.get_comm_counts("backward") == {"all_gather": 2}


def test_callbacks_of_backward():
    run_ranks(2, check_callbacks_of_backward)


def test_counts_bytes_and_modules():
    run_ranks(4, check_tensor_parallel_only)


def check_tensor_parallel_only():
    check_tensor_parallel()


def test_tables_and_json(tmp_path):
    run_ranks(4, check_tables, str(tmp_path))


def test_keys_and_modules():
    run_ranks(4, check_keys_and_modules)


def test_pytorchs_dtensors_too():
    run_ranks(4, check_pytorchs_dtensors_too)


def test_messages_of_fully_shard():
    run_ranks(2, check_messages_of_fully_shard)


def test_recomputation():
    run_ranks(2, check_recomputation_belongs_to_its_module)


def test_every_kind():
    run_ranks(4, check_every_kind_and_torchs_own)


def test_composites():
    run_ranks(2, check_composites_and_nesting)


def test_lookup():
    counts = ByCollective(all_gather=3)
    assert counts.get("all_reduce", 7) == 7 and counts.get(torch.ops.c10d_functional.all_gather_into_tensor) == 3
    assert torch.ops._c10d_functional.all_gather_into_tensor.default in counts
    assert torch.ops.aten.add not in counts and counts[torch.ops.aten.add] == 0
    assert counts.by_kind() == {"all_gather": 3}
    counts.add("exchange", 2)
    counts[torch.ops.c10d.broadcast_] = 1
    assert counts.by_kind() == {"all_gather": 3, "exchange": 2, "broadcast": 1} == pickle.loads(pickle.dumps(counts))
    assert repr(counts) == repr(counts.by_kind()) and counts["exchange"] == counts.get("exchange") == 2
    assert counts[torch.ops._dtensor.shard_dim_alltoall] == 0
