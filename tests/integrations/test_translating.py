"""Under `terrazzo.install()` PyTorch's private helpers answer for terrazzo's objects as for PyTorch's, or raise.

`HELPERS` says of each private name that a library imports which of these it does; the census below finds the names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch import nn
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_dtensor
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

import terrazzo
import terrazzo.checkpoint
import terrazzo.tensor
from ranks import run_ranks
from terrazzo.errors import PlacementsError, PrivateHelperError
from terrazzo.fsdp import FSDPModule, fully_shard
from terrazzo.integrations.installing import InstallWarning
from terrazzo.tensor.placement_types import _StridedShard
from test_imports import names_used, nodes_of

ROOT = Path(__file__).parents[2]

UTILS = "torch.distributed.tensor._utils"
STATE = "torch.distributed._state_dict_utils"
NESTED = "torch.distributed.checkpoint._nested_dict"
TRAVERSE = "torch.distributed.checkpoint._traverse"

LIBRARIES = {
    "torch": SimpleNamespace(**{**vars(torch_tensor), "_StridedShard": TorchStridedShard}),
    "terrazzo": SimpleNamespace(**vars(terrazzo.tensor), _StridedShard=_StridedShard),
}


@contextmanager
def installed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstallWarning)  # of other tests' modules
        terrazzo.install()
    try:
        yield
    finally:
        terrazzo.uninstall()


def helper(name: str) -> Any:
    """As a library gets it."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def comparable(value: Any) -> Any:
    """A value without the classes that the two libraries have for it."""
    if hasattr(value, "full_tensor"):
        placements = [str(p) for p in value.placements]
        return "DTensor", placements, tuple(value.shape), value.dtype, value.to_local().tolist()
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.dtype, value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, [(key, comparable(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [comparable(item) for item in value]
    return str(value)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return comparable(call())
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)


def in_both(calls: dict[str, Callable[[Any], Any]], *, may_raise: bool = False) -> None:
    """Check that each call gives with terrazzo's objects, under `install`, what it gives with PyTorch's."""
    expected = {name: outcome(lambda: call(LIBRARIES["torch"])) for name, call in calls.items()}  # noqa: B023
    assert may_raise or not [name for name, value in expected.items() if "Error" in str(value)]
    with installed():
        found = {name: outcome(lambda: call(LIBRARIES["terrazzo"])) for name, call in calls.items()}  # noqa: B023
    for name in calls:
        assert found[name] == expected[name], name


# ------------------------------------------------------------------ shapes and offsets


def layouts(lib: Any, ndim: int) -> list[list[Any]]:
    one = [lib.Shard(0), lib.Shard(1), lib.Replicate(), lib.Partial(), lib.Partial("max")]
    return [[p] for p in one] if ndim == 1 else [[p, q] for p in one for q in one]


def check_shapes() -> None:
    calls: dict[str, Callable[[Any], Any]] = {}

    def add(name: str, number: int, mesh: Any, *args: Any) -> None:
        calls[f"{name}{args} {mesh} {layouts(LIBRARIES['torch'], mesh.ndim)[number]}"] = lambda lib: helper(
            f"{UTILS}.{name}"
        )(*args, layouts(lib, mesh.ndim)[number])

    for mesh in (dist.init_device_mesh("cpu", (4,)), dist.init_device_mesh("cpu", (2, 2))):
        for number in range(len(layouts(LIBRARIES["torch"], mesh.ndim))):
            for shape in ((8, 4), (5, 3), (1, 2), (0, 4)):
                add("compute_local_shape_and_global_offset", number, mesh, shape, mesh)
                add("_compute_local_shape_and_global_offset", number, mesh, shape, mesh.shape, mesh.get_coordinate())
                add("compute_local_tensor_info", number, mesh, torch.empty(shape, device="meta"), mesh)
                add("compute_global_tensor_info", number, mesh, torch.empty(shape, device="meta"), mesh)
            add("assert_no_mixed_partial_types", number, mesh)
            add("compute_global_tensor_shape", number, mesh, torch.Size([dist.get_rank() + 1, 3]), mesh)
    assert len(calls) == 30 * 18
    in_both(calls, may_raise=True)
    # Every rank holds a part of its own.
    with installed():
        parts: list[Any] = [None] * 4
        mesh = dist.init_device_mesh("cpu", (4,))
        compute = helper("torch.distributed._tensor._utils.compute_local_shape_and_global_offset")  # an older name
        dist.all_gather_object(parts, compute((7, 2), mesh, [terrazzo.tensor.Shard(0)]))
        assert parts == [((2, 2), (0, 0)), ((2, 2), (2, 0)), ((2, 2), (4, 0)), ((1, 2), (6, 0))]
        assert compute((7, 2), mesh, [terrazzo.tensor.Shard(0)], skip_offset=True)[1] == ()


def strided(lib: Any) -> list[Any]:
    return [lib._StridedShard(0, split_factor=2), lib.Shard(0)]


def check_placements() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    compute = f"{UTILS}.compute_local_shape_and_global_offset"
    is_shard_like = "torch.distributed.tensor.placement_types._is_shard_like"
    in_both(
        {
            "order": lambda lib: helper(compute)((8, 4), mesh, strided(lib)),
            "order by coordinate": lambda lib: helper(f"{UTILS}._compute_local_shape_and_global_offset")(
                (8, 4), (2, 2), (1, 0), strided(lib)
            ),
            "all by name": lambda lib: helper(f"{UTILS}._compute_local_shape_and_global_offset")(
                placements=strided(lib), my_coordinate=(1, 0), mesh_shape=(2, 2), global_shape=(8, 4)
            ),
            "some by name": lambda lib: helper(f"{UTILS}._compute_local_shape_and_global_offset")(
                (8, 4), mesh_shape=(2, 2), my_coordinate=(1, 0), placements=strided(lib), skip_offset=True
            ),
            "like a shard": lambda lib: [
                helper(is_shard_like)(p) for p in (*strided(lib), lib.Replicate(), lib.Partial())
            ],
            "no like": lambda lib: helper("torch.distributed.tensor._api._normalize_placements_for_grad")(
                (lib.Partial(), lib.Shard(0))
            ),
            "size": lambda lib: helper(f"{UTILS}.normalize_to_torch_size")(3),
            "mesh": lambda lib: helper(f"{UTILS}.try_find_mesh_from_args")(
                torch.ops.aten.mm.default, (lib.distribute_tensor(torch.ones(4), mesh, strided(lib)),)
            ),
        }
    )
    with installed():
        from torch.distributed.tensor.placement_types import _StridedShard as Installed

        assert Installed is _StridedShard
        from torch.distributed.tensor.placement_types import Partial, _MaskPartial

        assert Partial is terrazzo.tensor.Partial and not isinstance(Partial(), _MaskPartial)
        with pytest.raises(PlacementsError, match=r"_MaskPartial is a placement of PyTorch's embeddings.*Partial\(\)"):
            _MaskPartial("sum", offset_shape=torch.Size([4, 2]))
        # Of uneven parts PyTorch means others by it, so this says what terrazzo's DTensor has.
        placements = strided(LIBRARIES["terrazzo"])
        rows = terrazzo.tensor.distribute_tensor(torch.arange(6.0), mesh, placements).to_local()
        shape, offset = helper(compute)((6, 4), mesh, placements)
        assert shape == (len(rows), 4) and (not len(rows) or offset == (int(rows[0]), 0))
        with pytest.raises(PrivateHelperError, match=r"length 6, a rank of \(2, 2\) holds under \[_StridedShard"):
            helper(f"{UTILS}._compute_local_shape_and_global_offset")((6, 4), (2, 2), (1, 0), placements)
        with pytest.raises(PrivateHelperError, match=r"length 6, a rank of \(2, 2\) holds under \[_StridedShard"):
            helper(f"{UTILS}._compute_local_shape_and_global_offset")(
                (6, 4), mesh_shape=(2, 2), my_coordinate=(1, 0), placements=placements
            )
        spec = helper("torch.distributed.tensor._dtensor_spec.DTensorSpec")
        assert spec is terrazzo.tensor.libraries.DTensorSpec
        with pytest.raises(PrivateHelperError, match="DTensorSpec, which is terrazzo's"):
            helper("torch.distributed.tensor._collective_utils.redistribute_cost")(*[spec(mesh, placements)] * 2)


def test_placements_mean_what_they_mean_for_pytorch():
    run_ranks(4, check_shapes)
    run_ranks(4, check_placements)


# ------------------------------------------------------------------ state dicts


def whole(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def state_of(lib: Any, mesh: Any) -> dict[str, Any]:
    """Uneven and empty shards, an order of shards, nested."""
    return {
        "uneven": lib.distribute_tensor(whole(5, 3), mesh, [lib.Shard(0), lib.Replicate()]),
        "both": lib.distribute_tensor(whole(3, 4), mesh, [lib.Shard(1), lib.Shard(0)]),
        "order": lib.DTensor.from_local(whole(2, 3) + mesh.get_rank(), mesh, strided(lib)),
        "nested": {"empty": lib.distribute_tensor(whole(1, 2), mesh, [lib.Shard(0), lib.Shard(0)]), "step": 3},
        "list": [lib.distribute_tensor(whole(4), mesh, [lib.Shard(0), lib.Shard(0)]), torch.ones(2), "text"],
    }


def target_of(lib: Any, mesh: Any, device: str) -> dict[str, Any]:
    made = {
        "uneven": [lib.Shard(0), lib.Replicate()],
        "both": [lib.Shard(1), lib.Shard(0)],
        "plain": None,
        "untouched": [lib.Shard(0), lib.Shard(0)],
    }
    zeros = {name: torch.zeros(5, 4, device=device) for name in made}
    return {
        name: zeros[name] if placed is None else lib.distribute_tensor(zeros[name], mesh, placed)
        for name, placed in made.items()
    }


def check_state_dicts() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    rank = dist.get_rank()

    def use(name: str, *args: Any, **kwargs: Any) -> Any:
        return helper(f"{STATE}.{name}")(*args, **kwargs)

    def copied(lib: Any) -> Any:
        state = state_of(lib, mesh)
        on_cpu = use("_create_cpu_state_dict", state)
        assert type(on_cpu["uneven"]) is type(state["uneven"]) and on_cpu["uneven"] is not state["uneven"]
        result = use("_copy_state_dict", state, on_cpu)
        assert result["uneven"] is on_cpu["uneven"], "the values are the targets"
        return result, on_cpu

    def iterated(lib: Any) -> Any:
        seen = []

        def distributed(value: Any, *_: Any) -> Any:
            assert isinstance(value, lib.DTensor)
            seen.append(value.placements)
            return value * 2

        result = use("_iterate_state_dict", state_of(lib, mesh), None, distributed, lambda value, *_: value + 1)
        return result, seen

    def filled(name: str, device: str, **kwargs: Any) -> Callable[[Any], Any]:
        def call(lib: Any) -> Any:
            full = {key: whole(5, 4) for key in ("uneven", "both", "plain")} if rank == 0 or "dist" in name else {}
            local = target_of(lib, mesh, device)
            before = dict(local)
            use(name, {**full, "step": 3} if full else full, local, torch.device("cpu"), **kwargs)
            assert isinstance(local["both"], lib.DTensor)
            same = {key: local.get(key) is value for key, value in before.items()}
            return {key: value for key, value in local.items() if not getattr(value, "is_meta", False)}, same

        return call

    def tensors(lib: Any) -> Any:
        full = whole(5, 4) if rank == 0 else helper(f"{STATE}._TensorInfo")(torch.Size((5, 4)), torch.float32)
        local = target_of(lib, mesh, "cpu")
        use("_broadcast_tensors", {"both": full}, local, ["both"], torch.device("cpu"))
        use("_distribute_tensors", local | {"both": (local["both"], whole(5, 4) * 2)}, ["both"], torch.device("cpu"))
        return local

    def flattened(lib: Any) -> Any:
        state = state_of(lib, mesh)
        flat, mapping = use("_flatten_state_dict", state)
        assert flat["nested.empty"] is state["nested"]["empty"]
        back = use("_unflatten_state_dict", flat, mapping)
        assert back["list"][0] is state["list"][0]
        return flat, mapping, back

    def traversed(lib: Any) -> Any:
        state, seen = state_of(lib, mesh), []
        flat, mapping = helper(f"{NESTED}.flatten_state_dict")(state)
        assert flat["uneven"] is state["uneven"]
        helper(f"{TRAVERSE}.traverse_state_dict")(state, lambda path, value: seen.append((path, value)))
        assert seen[0][1] is state["uneven"]
        helper(f"{TRAVERSE}.set_element")(state, ("nested", "new", 1), state["both"])
        assert state["nested"]["new"][1] is state["both"]
        assert helper(f"{TRAVERSE}.get_element")(state, ("list", 0)) is state["list"][0]
        helper(f"{TRAVERSE}.print_tensor")(("list", 0), state["list"][0], print_fun=seen.append)
        return flat, mapping, [path for path, _ in seen[:5]], helper(f"{NESTED}.unflatten_state_dict")(flat, mapping)

    def similar(lib: Any) -> Any:
        one, other = {"a": torch.ones(2)}, {"a": torch.ones(3)}
        same = use("_check_state_dict_similarity", state_of(lib, mesh), state_of(lib, mesh))
        return same, use("_check_state_dict_similarity", one, other)

    def materialised(lib: Any) -> Any:
        state = {"w": lib.distribute_tensor(torch.zeros(5, 3, device="meta"), mesh, [lib.Shard(0), lib.Shard(0)])}
        helper("torch.distributed.checkpoint.planner_helpers._init_state_dict")(state)
        return isinstance(state["w"], lib.DTensor), state["w"].device.type, tuple(state["w"].to_local().shape)

    in_both(
        {
            "gather": lambda lib: use("_gather_state_dict", state_of(lib, mesh)),
            "gather on two": lambda lib: use("_gather_state_dict", state_of(lib, mesh), ranks_only=(0, 1)),
            "offload": lambda lib: use("_offload_state_dict_to_cpu", state_of(lib, mesh)),
            "copy": copied,
            "iterate": iterated,
            "broadcast": filled("_broadcast_state_dict", "cpu"),
            "broadcast strictly": filled("_broadcast_state_dict", "cpu", strict=True),
            "broadcast to meta": filled("_broadcast_state_dict", "meta"),
            "distribute": filled("_distribute_state_dict", "cpu"),
            "tensors": tensors,
            "flatten": flattened,
            "traverse": traversed,
            "similar": similar,
            "materialise": materialised,
        }
    )


def check_parts_of_flat_memory() -> None:
    """The local tensors of fully_shard's parameters lie in larger ones."""
    torch.manual_seed(0)
    with installed():
        model = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), mesh=dist.init_device_mesh("cpu", (2,)))
        state = model.state_dict()
        assert any(value.to_local().storage_offset() for value in state.values())
        on_cpu = helper(f"{STATE}._create_cpu_state_dict")(state)
        copied = helper(f"{STATE}._copy_state_dict")(state, on_cpu)
        offloaded = helper(f"{STATE}._offload_state_dict_to_cpu")(state)
        for name, value in state.items():
            for other in (on_cpu[name], copied[name], offloaded[name]):
                assert isinstance(other, terrazzo.tensor.DTensor) and other.placements == value.placements
                assert torch.equal(other.to_local(), value.to_local())
            assert on_cpu[name].to_local().data_ptr() != value.to_local().data_ptr() or not value.to_local().numel()


def test_state_dicts_are_treated_as_by_pytorch():
    run_ranks(2, check_parts_of_flat_memory)
    run_ranks(4, check_state_dicts)


# ------------------------------------------------------------------ modules, and what is for checkpoints


def check_refusals() -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    planner_helpers = "torch.distributed.checkpoint.planner_helpers"
    states = (
        "torch.distributed._composable_state._get_module_state",
        "torch.distributed.fsdp._fully_shard._fsdp_state._get_module_fsdp_state",
    )
    plain, sharded, parallel = nn.Linear(2, 2), fully_shard(nn.Linear(2, 2), mesh=mesh), nn.Linear(2, 2)
    x = terrazzo.tensor.distribute_tensor(torch.ones(4, 2), mesh, [terrazzo.tensor.Shard(0)])
    parallel.weight = nn.Parameter(x)
    reader = terrazzo.checkpoint.FileSystemReader("somewhere")
    with installed():
        from torch.distributed.fsdp._fully_shard._fully_shard import FSDPModule as Private
        from torch.distributed.tensor._api import DTensor as PrivateDTensor

        assert Private is FSDPModule and PrivateDTensor is terrazzo.tensor.DTensor
        assert helper("torch.distributed.fsdp._common_utils._get_module_fsdp_state")(sharded) is None  # it is FSDP1's
        for name in states:
            assert helper(name)(plain) is None and helper(name)(parallel) is None
            with pytest.raises(PrivateHelperError, match=r"FSDPLinear, which .* isinstance\(module, terrazzo.fsdp"):
                helper(name)(sharded)
        with pytest.raises(AttributeError, match="_get_fsdp_state"):  # by which libraries change PyTorch's state
            _ = sharded._get_fsdp_state
        assert helper("torch.distributed.checkpoint.state_dict._get_fqns")(sharded, "weight") == {"weight"}
        refused = {
            f"{planner_helpers}._create_read_items": ("w", reader, None),
            "torch.distributed.checkpoint.state_dict._patch_model_state_dict": (parallel,),
            f"{UTILS}.ExplicitRedistributionContext": (),
            "torch.distributed.utils._sync_module_states": (parallel, dist.group.WORLD, 1, 0, set()),
            "torch.distributed.tensor.experimental._attention._enable_context_parallel_dispatcher": (),
        }
        # Items, plans and metadata of checkpoints are translated both ways.
        (item,) = helper(f"{planner_helpers}._create_write_items")("w", x)
        (chunk,) = helper(f"{planner_helpers}._create_chunk_list")(x)
        plan = helper(f"{planner_helpers}._create_default_metadata_only_plan")({"w": x})
        (read,) = helper(f"{planner_helpers}._create_read_items")("b", terrazzo.checkpoint.BytesStorageMetadata(), None)
        kinds = terrazzo.checkpoint
        assert (type(item), type(plan), type(read)) == (kinds.WriteItem, kinds.SavePlan, kinds.ReadItem)
        assert type(chunk) is kinds.ChunkStorageMetadata is type(item.tensor_data.chunk)
        for each in (chunk, item.tensor_data.chunk, plan.items[0].tensor_data.chunk):
            assert (tuple(each.offsets), tuple(each.sizes)) == ((2 * dist.get_rank(), 0), (2, 2))
        for name, args in refused.items():
            with pytest.raises(TypeError, match=rf"{name}, a private function of PyTorch, .* Use .*terrazzo"):
                helper(name)(*args)
        assert x.data_ptr() == 0, "as libraries that compare the addresses of parameters find PyTorch's DTensors"
        stager = helper("torch.distributed.checkpoint._state_dict_stager.StateDictStager")(pin_memory=False)
        staged = stager.stage({"w": x})["w"]
        assert torch.equal(staged.full_tensor(), x.full_tensor())
        assert staged.to_local().data_ptr() != x.to_local().data_ptr()
        # PyTorch's own code has PyTorch's own objects meanwhile, also those that it looks up when it runs.
        theirs = torch_dtensor(torch.ones(4, 2), mesh, [TorchShard(0)])
        assert type(theirs.redistribute(placements=[TorchShard(1)]).full_tensor()) is torch.Tensor
        # Whoever sets a name wants it used; to set what it was undoes that.
        module = importlib.import_module(STATE)
        before, mine = module._gather_state_dict, object()
        module._gather_state_dict = mine
        assert module._gather_state_dict is mine is vars(module)["_gather_state_dict"]
        module._gather_state_dict = before
        assert module._gather_state_dict is before is not vars(module)["_gather_state_dict"]
    assert module._gather_state_dict is before.__wrapped__
    assert type(module) is ModuleType


def test_what_cannot_be_translated_is_refused():
    run_ranks(2, check_refusals)


# ------------------------------------------------------------------ the census


LIBRARY_MODULES = {  # the distributions whose private imports are looked at, and their packages
    "accelerate": ["accelerate"],
    "deepspeed": ["deepspeed"],
    "peft": ["peft"],
    "pytorch-lightning": ["pytorch_lightning", "lightning_fabric"],
    "ray": ["ray/train"],
    "spmd_types": ["spmd_types"],
    "torchao": ["torchao"],
    "torchdata": ["torchdata"],
    "torchmetrics": ["torchmetrics"],
    "torchtitan": ["torchtitan"],
    "transformers": ["transformers"],
}

# What libraries use that are not installed: torchft, torchsnapshot, torchstore, verl, Megatron-LM, OLMo-core,
# s3torchconnector, nvidia-resiliency-ext, composer, Model Optimizer, torchtune.
ELSEWHERE = """
_composable_state._get_module_state _state_dict_utils._broadcast_state_dict _state_dict_utils._copy_state_dict
_state_dict_utils._create_cpu_state_dict _state_dict_utils._distribute_tensors _state_dict_utils._gather_state_dict
_state_dict_utils._iterate_state_dict _state_dict_utils._offload_state_dict_to_cpu _state_dict_utils._TensorInfo
checkpoint._extension.ZStandard checkpoint._nested_dict.flatten_state_dict checkpoint._nested_dict.unflatten_state_dict
checkpoint._nested_dict.FLATTEN_MAPPING checkpoint._sharded_tensor_utils._flatten_sharded_tensors
checkpoint._storage_utils._storage_setup checkpoint._traverse.OBJ_PATH checkpoint._traverse.set_element
checkpoint._traverse.traverse_state_dict checkpoint.api._wrap_exception checkpoint.filesystem._item_size
checkpoint.filesystem._StorageInfo checkpoint.filesystem._StoragePrefix checkpoint.filesystem._StorageWriterTransforms
checkpoint.filesystem._write_item checkpoint.planner_helpers._create_default_metadata_only_plan
checkpoint.planner_helpers._create_read_items checkpoint.planner_helpers._create_write_items
checkpoint.planner_helpers._init_state_dict checkpoint.state_dict._get_fqns checkpoint.state_dict._init_optim_state
checkpoint.state_dict._patch_model_state_dict checkpoint.state_dict._patch_optimizer_state_dict
checkpoint.state_dict._verify_options checkpoint.state_dict_loader._load_state_dict
checkpoint.state_dict_saver._save_state_dict checkpoint.utils._DistWrapper checkpoint.utils._get_failure_dict
fsdp._common_utils._get_module_fsdp_state_if_fully_sharded_module fsdp._common_utils.FSDP_WRAPPED_MODULE
fsdp._fully_shard._fsdp_common.TrainingState fsdp._fully_shard._fsdp_state._get_module_fsdp_state
fsdp._fully_shard._fsdp_param_group.FSDPParamGroup fsdp._fully_shard._fsdp_param.FSDPParam
fsdp._fully_shard._fully_shard.FSDPModule fsdp._runtime_utils._lazy_init
fsdp._unshard_param_utils._get_module_fsdp_state fsdp._unshard_param_utils._unshard_params_for_summon
tensor._api.DTensor tensor._api.distribute_tensor tensor._collective_utils.redistribute_cost
tensor._collective_utils.shard_dim_alltoall tensor._collective_utils.unpad_tensor tensor._dtensor_spec.DTensorSpec
tensor._dtensor_spec.TensorMeta tensor._redistribute.redistribute_local_tensor
tensor._utils._compute_local_shape_and_global_offset tensor._utils.compute_global_tensor_info
tensor._utils.compute_local_shape_and_global_offset tensor.placement_types._MaskPartial
tensor.placement_types._StridedShard utils._sync_module_states utils._free_storage
""".split()

# Names, or beginnings of names below torch.distributed, that no object of terrazzo's reaches, or only loudly, and why.
GROUPS = "process groups, stores, collectives and meshes, which are PyTorch's own"
PIPELINES = "pipelines' schedules, which are PyTorch's own"
FSDP1 = "FSDP1's state: none for a module of fully_shard, as in PyTorch"
OTHERS = {
    "_composable.": "only names that are terrazzo's, or know no tensors",
    "_functional_collectives.": GROUPS,
    "_get_process_group_name": GROUPS,
    "_local_tensor": "a simulation of ranks with PyTorch's own tensors",
    "_mesh_layout.": GROUPS,
    "_ops.": GROUPS,
    "_symmetric_memory.": GROUPS,
    "_tensor.DeviceMesh": GROUPS,
    "algorithms._checkpoint.": "wraps modules for activation checkpointing, whatever their parameters",
    "checkpoint._consolidate_hf_safetensors.": "reads files",
    "checkpoint._extension.": "compresses bytes",
    "checkpoint._nested_dict.FLATTEN_MAPPING": "a type alias",
    "checkpoint._traverse.OBJ_PATH": "a type alias",
    "checkpoint.filesystem._Storage": "records of PyTorch's writers, which know no tensors",
    "checkpoint.format_utils._EmptyStateDictLoadPlanner": "a planner of PyTorch's, which load() refuses",
    "checkpoint.utils._DistWrapper": "sends objects",
    "device_mesh.": GROUPS,
    "distributed_c10d.": GROUPS,
    "fsdp._common_utils.": FSDP1,
    "fsdp._runtime_utils.": FSDP1,
    "fsdp._unshard_param_utils.": FSDP1,
    "fsdp.wrap.": "policies, which see classes of modules",
    "fsdp._fully_shard._fsdp_common.": "meshes for ShardPlacementResult, which terrazzo's fully_shard takes, and enums",
    "fsdp._fully_shard._fsdp_init.": "meshes for ShardPlacementResult, which terrazzo's fully_shard takes",
    "fsdp._fully_shard._fsdp_param": "classes of PyTorch's fully_shard, which libraries change; terrazzo's has none",
    "pipelining.": PIPELINES,
    "tensor._api._": "autograd functions for PyTorch's DTensor; terrazzo's has no _spec, an AttributeError",
    "tensor._dispatch": "registers operations for PyTorch's DTensor",
    "tensor._dtensor_spec.": "PyTorch's specification: DTensorSpec refuses terrazzo's placements",
    "tensor._ops": "registers operations for PyTorch's DTensor",
    "tensor._random.": "seeds PyTorch's generators, which terrazzo's random tensors follow",
    "tensor.experimental._attention._": "load balancers of PyTorch's context_parallel, which sees plain tensors",
    "tensor.experimental._context_parallel._attention.flex_cp_allgather": "gathers plain tensors",
    "tensor.placement_types.Shard._local_shard_size_on_dim": "a name of older versions of PyTorch",
    "_state_dict_utils._TensorInfo": "a shape and a dtype",
}


BELOW = "torch.distributed."


def private_names(package: Path) -> set[str]:
    """The names below torch.distributed that modules use, if they or their modules are private."""
    found = set()
    for path in package.rglob("*.py"):
        source = path.read_text(errors="replace")
        if "torch.distributed" not in source:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other people's code
            names = [name.removeprefix(BELOW) for _, name in names_used(source) if name.startswith(BELOW)]
        found |= {name for name in names if is_private(name)}
        nodes_of.cache_clear()  # or the trees of all libraries would be kept
    return found


def place_of(name: str) -> tuple[Any, str] | None:
    """The module, or public class, that has the private part of a name; None if the name is a module's, or unknown."""
    home: Any = dist
    for i, part in enumerate(name.split(".")):
        try:
            value = getattr(home, part)
        except AttributeError:
            try:
                value = importlib.import_module(".".join(["torch.distributed", *name.split(".")[: i + 1]]))
            except ImportError:
                return (home, part) if isinstance(home, type) else None
        if not isinstance(value, ModuleType) and (part.startswith("_") or not isinstance(value, type)):
            return home, part
        if isinstance(home, ModuleType) and is_private(home.__name__.removeprefix("torch.distributed")):
            if not isinstance(value, ModuleType):
                return home, part
        home = value
    return None


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def verdict(name: str, translated: Mapping[str, tuple[str, ...]]) -> str:
    """What a private name is under `install`."""
    place = place_of(name)
    if place is None:
        return "a module, or not in this torch"
    home, attribute = place
    value = getattr(home, attribute, None)
    if (getattr(value, "__module__", None) or "").startswith("terrazzo."):
        return "terrazzo's"
    if attribute in translated.get(getattr(home, "__name__", ""), ()):
        return "works or raises"
    return next((reason for start, reason in OTHERS.items() if name.startswith(start)), "")


def installed_libraries() -> dict[str, list[Path]]:
    """The libraries of this environment in the versions that are tested with."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    found = {}
    for name, packages in LIBRARY_MODULES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if pinned.get(name) == version:
            site = Path(importlib.metadata.distribution(name).locate_file(""))
            found[name] = [site / package for package in packages if (site / package).exists()]
    return found


def test_each_private_name_that_libraries_import_has_been_looked_at():
    used = {name: {"ELSEWHERE"} for name in ELSEWHERE}
    for library, packages in installed_libraries().items():
        for package in packages:
            for name in private_names(package):
                used.setdefault(name, set()).add(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstallWarning)
        translated = terrazzo.install().translated
    try:
        unknown = sorted(f"{name} ({', '.join(used[name])})" for name in used if not verdict(name, translated))
    finally:
        terrazzo.uninstall()
    assert not unknown, (
        "these private names of torch.distributed are used by libraries, and nobody has said what they do with "
        f"terrazzo's objects: {unknown}. If a name is a function of tensors, placements, modules or state dicts, "
        "add its module to HELPERS in terrazzo.integrations.installing, and a comparison with PyTorch above; if it "
        "cannot get any, or fails loudly, add it to OTHERS with the reason"
    )
