"""The ZeRO stages, as settings of `fully_shard`.

    stage   on ranks that       parameters between steps      gradients while they accumulate
    0       replicate           whole                         whole, reduced at the last micro-batch
    1       shard               gathered after each step      whole, reduced at the last micro-batch
    2       shard               gathered after each step      sharded, reduced at each micro-batch
    3       shard               sharded, gathered when used   sharded, reduced at each micro-batch

So all stages run the same code and have the same kinds of tensors, and a checkpoint of one stage loads in any other.
The optimizer always works on the parameters' shards, in float32 even if the model computes in 16 bits, unless
`bf16_master_weights_and_grads` says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terrazzo._meant import meant
from terrazzo._torch.groups import split
from terrazzo.comm import Axis, axis_of, collectives
from terrazzo.comm.alone import accelerator, initialise
from terrazzo.engine.config import EngineConfig
from terrazzo.engine.experts import divide_experts, experts_of
from terrazzo.engine.leaves import is_leaf, leaves_in
from terrazzo.errors import EngineConfigError
from terrazzo.fsdp import CPUOffloadPolicy, FSDPModule, Int8Blocks, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from terrazzo.tensor import DTensor
from terrazzo.tensor.foreign import is_torch_dtensor
from terrazzo.tensor.parallel.experts import expert_mesh

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class RankRoles:
    """Which ranks hold shards or replicas, which of these see different data, which share its sequences, which hold the
    other stages of a pipeline, and how many hold parts of a model."""

    mesh: DeviceMesh  # for `fully_shard`
    data: Axis  # `samples` times `sequence`
    samples: Axis
    sequence: Axis | None
    pipeline: Axis | None
    model_parallel: int  # ranks that hold parts of one model, over all stages
    data_mesh: DeviceMesh  # the ranks of `data`, in one dim

    @staticmethod
    def of(mesh: DeviceMesh | None, data_dim: str, pipeline_dim: str | None, config: EngineConfig) -> RankRoles:
        """From the user's mesh, whose dims have these names; None: all ranks, as one data-parallel dim."""
        zero = config.zero_optimization
        initialise()
        if mesh is None:
            dims = (data_dim,) if pipeline_dim is None else (pipeline_dim, data_dim)
            shape = (dist.get_world_size(), 1)[: len(dims)]
            mesh = init_device_mesh(device_type(), shape, mesh_dim_names=dims)
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1 and data_dim not in names:
            raise EngineConfigError(f"the mesh {mesh} has no dim named {data_dim!r}: pass the name of one as data_dim=")
        if pipeline_dim is not None and (mesh.ndim == 1 or pipeline_dim not in names):
            raise EngineConfigError(
                f"the mesh {mesh} needs a dim named {pipeline_dim!r}, for the stages of the pipeline, and one named "
                f"{data_dim!r}: init_device_mesh('cpu', (2, 2), mesh_dim_names=({pipeline_dim!r}, {data_dim!r}))"
            )
        data_mesh = mesh if mesh.ndim == 1 else mesh[data_dim]
        data = axis_of(data_mesh, 0)
        pipeline = None if pipeline_dim is None else axis_of(mesh[pipeline_dim], 0)
        sharding = 1 if zero.stage == 0 else zero.mics_shard_size or data.size
        if data.size % sharding:
            raise EngineConfigError(
                f"config: zero_optimization.mics_shard_size {sharding} does not divide the {data.size} data-parallel "
                "ranks"
            )
        within = zero.zero_hpz_partition_size
        if 1 < within < sharding and sharding % within:
            raise EngineConfigError(
                f"config: zero_optimization.zero_hpz_partition_size {within} does not divide the {sharding} ranks that "
                "a parameter is sharded over"
            )
        hybrid = zero.stage == 0 or sharding < data.size
        shard_mesh = _replicas(data_mesh, sharding) if hybrid else data_mesh
        samples, sequence = data, None
        if config.sequence_parallel_size > 1:
            samples, sequence = _sharing(data_mesh, config.sequence_parallel_size, pipeline is not None)
        return RankRoles(shard_mesh, data, samples, sequence, pipeline, mesh.size() // data.size, data_mesh)


def _sharing(mesh: DeviceMesh, size: int, pipelined: bool) -> tuple[Axis, Axis]:
    """The ranks that see different samples, and those that share the sequences of one, `size` neighbours."""
    if pipelined:
        raise EngineConfigError("config: sequence_parallel_size does not support pipelines: leave it out")
    if mesh.size() % size:
        raise EngineConfigError(
            f"config: sequence_parallel_size {size} does not divide the {mesh.size()} data-parallel ranks"
        )
    cut = _in_two(mesh, size, ("samples", "sequence"))
    return axis_of(cut, 0), axis_of(cut, 1)


def _replicas(mesh: DeviceMesh, sharding: int) -> DeviceMesh:
    """The mesh's ranks in two dims: the first replicates, the second, of size `sharding`, shards."""
    return _in_two(mesh, sharding, ("replicate", "shard"))


def _in_two(mesh: DeviceMesh, size: int, names: tuple[str, str]) -> DeviceMesh:
    """A 1-D mesh in two dims, of which the second has `size` ranks, neighbours."""
    if mesh.mesh_dim_names is None:
        return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, size), mesh_dim_names=names)
    name = mesh.mesh_dim_names[0]
    # Split instead of created: it stays part of the mesh on which parameters may be tensor-parallel, and the ranks of
    # other parts of that mesh create groups of theirs at the same time.
    return split(mesh, 0, (mesh.size() // size, size), (f"{name}_{names[0]}", f"{name}_{names[1]}"))


def device_type() -> str:
    """The type of device that the ranks train on."""
    found = accelerator()
    backend = dist.get_backend_config() if hasattr(dist, "get_backend_config") else str(dist.get_backend())
    return found.type if found is not None and f"{found.type}:" in str(backend) else "cpu"


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype in which the model computes."""
    return torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else torch.float32


def shard_model(
    model: nn.Module,
    config: EngineConfig,
    ranks: RankRoles,
    init_weights: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Give every rank the first one's values, and apply `fully_shard` as the ZeRO stage requires.

    A model on the meta device is initialised after it is sharded, so no rank ever holds all of it.
    """
    _refuse_strangers(model)
    if compute_dtype(config) is not torch.float32:
        _prepare_precision(model, torch.bfloat16 if config.bf16.bf16_master_weights_and_grads else torch.float32)
        keep_in_fp32(model.modules(), config.data_types.keep_in_fp32_modules)
    unmade = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if unmade and any(not p.is_meta for p in model.parameters()):
        raise EngineConfigError(
            f"some of the model's tensors are on the meta device and others are not: {', '.join(unmade[:4])} are"
        )
    spread = experts_of(model)
    apart = {p for module in spread if expert_mesh(module) is not None for p in module.parameters()}
    if not unmade:
        same_everywhere((*(p for p in model.parameters() if p not in apart), *model.buffers()), ranks.data)
    divisor = 1.0 if config.gradient_allreduce_op == "sum" else float(ranks.data.size)
    zero = config.zero_optimization
    for module in spread:
        mesh = divide_experts(module, ranks.data_mesh)
        if not unmade:
            same_everywhere(module.parameters(), axis_of(mesh, 0))
        fully_shard(
            module,
            mesh=_replicas(mesh, 1) if zero.stage == 0 else mesh,
            mp_policy=_precision(config),
            offload_policy=_offload(config),
            reshard_after_forward=None if zero.stage == 3 else False,
        ).set_gradient_divide_factor(divisor)
    reshard: bool | int | None = None if zero.stage == 3 else False
    if 1 < zero.zero_hpz_partition_size < ranks.mesh.size(ranks.mesh.ndim - 1):
        reshard = zero.zero_hpz_partition_size
    chosen = gathered_together(model, config.zero_optimization.wrap, all_classes=ranks.pipeline is None)
    inside = {inner for module in spread for inner in module.modules()}
    for module in (*(each for each in chosen if each not in inside), model):
        fully_shard(
            module,
            mesh=ranks.mesh,
            mp_policy=_precision(config),
            offload_policy=_offload(config),
            reshard_after_forward=reshard,
        )
        if config.gradient_allreduce_op == "sum":
            module.set_reduce_scatter_divide_factor(1.0)  # type: ignore[operator]

    if unmade:
        policy = _offload(config)
        away = isinstance(policy, CPUOffloadPolicy) and policy.parameters
        resting = "cpu" if away else ranks.mesh.device_type
        _make_values(model, set(unmade), torch.device(resting), init_weights)


def _refuse_strangers(model: nn.Module) -> None:
    """Raise for PyTorch's own DTensors and for modules that are sharded by its own `fully_shard`."""
    for name, module in model.named_modules():
        kinds = [f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__]
        if any(kind.startswith("torch.distributed.fsdp") and kind.endswith(".FSDPModule") for kind in kinds):
            raise EngineConfigError(
                f"{name or 'the model'} is sharded by torch.distributed.fsdp: import fully_shard from terrazzo.fsdp, "
                "or call terrazzo.install() before the code that imports it; modules that are not sharded the engine "
                "shards"
            )
    for name, parameter in model.named_parameters():
        if is_torch_dtensor(type(parameter)):
            raise EngineConfigError(
                f"{name} is a DTensor of torch.distributed.tensor: import distribute_tensor, parallelize_module and "
                "the like from terrazzo.tensor, or call terrazzo.install() before the code that imports them"
            )


def _make_values(
    model: nn.Module, names: set[str], device: torch.device, init_weights: Callable[[nn.Module], Any] | None
) -> None:
    """Allocate and initialise a sharded model: each rank draws its part of what one device would draw."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    speechless = [name for name, module in owners.items() if not hasattr(module, "reset_parameters")]
    if init_weights is None and speechless:
        raise EngineConfigError(
            "the model is on the meta device, and there is no reset_parameters() to initialise "
            f"{', '.join(sorted(speechless)[:4])}: pass initialize(init_weights=...), a function of the model"
        )
    model.to_empty(device=device)
    with torch.no_grad():
        if init_weights is not None:
            init_weights(model)
            return
        for module in dict.fromkeys(owners[name] for name in sorted(names)):
            module.reset_parameters()  # type: ignore[operator]


def _precision(config: EngineConfig) -> MixedPrecisionPolicy:
    dtype, zero = compute_dtype(config), config.zero_optimization
    reduce_dtype = None if config.communication_data_type is None else _DTYPES[config.communication_data_type]
    half = dtype is not torch.float32
    return MixedPrecisionPolicy(
        param_dtype=dtype if half else None,
        reduce_dtype=reduce_dtype or (torch.float32 if half else None),
        gather_codec=Int8Blocks() if zero.zero_quantized_weights else None,
        reduce_codec=Int8Blocks() if zero.zero_quantized_gradients else None,
    )


def _offload(config: EngineConfig) -> OffloadPolicy:
    sections = (config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param)
    chosen = [section for section in sections if section.device in ("cpu", "nvme")]
    if not chosen:
        return OffloadPolicy()
    on_device = config.zero_optimization.offload_optimizer.step_on == "device"
    return CPUOffloadPolicy(any(section.pin_memory for section in chosen), parameters=not on_device)


def reshard(model: nn.Module) -> None:
    """Reshard all parameters, so that each is registered as its shard."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered_together(model: nn.Module, class_names: tuple[str, ...], *, all_classes: bool = True) -> list[nn.Module]:
    """The modules to gather and reduce as one, inner ones first: leaves, and those of the given classes outside of
    leaves, or the items of module lists.

    A module that shares a parameter with the rest of the model is left out, because that parameter must stay in the
    outermost group. With `all_classes`, a class that the model does not have is an error; a pipeline stage need not
    have all classes.

    >>> blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> len(gathered_together(nn.Sequential(nn.Linear(2, 2), blocks), ()))
    2
    """
    if is_leaf(model):
        return []
    chosen = list(_by_class(model, class_names) if class_names else _items_of_lists(model))
    found = {type(module).__name__ for module in model.modules() if module is not model}
    absent = [name for name in class_names if name not in found]
    if absent and all_classes:
        raise EngineConfigError(
            f"config: zero_optimization.wrap names {', '.join(absent)}, but the model has no module of that class"
            + meant(absent[0], found, f"; it has {', '.join(sorted(found))}")
        )
    uses: dict[nn.Parameter, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[parameter] = uses.get(parameter, 0) + 1
    return [module for module in chosen if _keeps_to_itself(module, uses)]


def compile_together(model: nn.Module, class_names: tuple[str, ...], backend: str) -> nn.Module:
    """Compile the modules that are gathered together, each as its own graphs; a model without any is compiled whole.

    Of one that contains another only the inner one is compiled, because a graph cannot gather in between. They keep
    their class, their parameters and their names in the state dict.
    """
    from terrazzo.graphs import compile as compile_module  # imported only if needed, because it imports Dynamo

    chosen = dict.fromkeys(gathered_together(model, class_names))
    if not chosen:
        return compile_module(model, backend=backend)
    around = {id(module) for module in chosen if any(inner in chosen for inner in list(module.modules())[1:])}
    compiled = {id(module): compile_module(module, backend=backend) for module in chosen if id(module) not in around}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in compiled:
                setattr(parent, name, compiled[id(child)])
    return model


def _by_class(model: nn.Module, names: tuple[str, ...]) -> Iterator[nn.Module]:
    """The modules of these classes, inner ones first, as fully_shard needs them."""
    for child in model.children():
        if is_leaf(child):
            yield child
            continue
        yield from _by_class(child, names)
        if type(child).__name__ in names:
            yield child


def _items_of_lists(model: nn.Module) -> Iterator[nn.Module]:
    """The items of the outermost module lists, and of module dicts with numbers as keys (as in pipeline stages)."""
    for child in model.children():
        if is_leaf(child):
            yield child
        elif isinstance(child, nn.ModuleList) or (isinstance(child, nn.ModuleDict) and all(map(str.isdigit, child))):
            for item in child.children():
                if not is_leaf(item):
                    yield from leaves_in(item)
                if type(item).forward is not nn.Module.forward:
                    yield item
        else:
            yield from _items_of_lists(child)


def _keeps_to_itself(module: nn.Module, uses: dict[nn.Parameter, int]) -> bool:
    inside: dict[nn.Parameter, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        inside[parameter] = inside.get(parameter, 0) + 1
    return bool(inside) and all(uses[parameter] == count for parameter, count in inside.items())


def _prepare_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters to `dtype`; copies in the compute dtype are made from them. Buffers are not converted."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def keep_in_fp32(modules: Iterable[nn.Module], names: Sequence[str] | None) -> None:
    """Convert buffers of 16 bits to float32 if their names match, with `*` for any characters; None: those that models
    of Transformers name themselves, such as the biases of a router, which 16 bits are too coarse for."""
    for module in modules:
        strict, half = (
            getattr(module, f"_keep_in_fp32_modules{kind}", None) or () if names is None else names
            for kind in ("_strict", "")
        )
        if not strict and not half:
            continue
        for name, buffer in module.named_buffers():
            wanted = {torch.bfloat16: strict, torch.float16: (*strict, *half)}.get(buffer.dtype, ())
            if any(re.search(each.replace("*", ".*"), name) for each in wanted):
                buffer.data = buffer.data.float()


@torch.no_grad()
def same_everywhere(tensors: Iterable[Tensor], axis: Axis) -> None:
    """Give every rank of an axis the tensors, or local tensors, of the first one."""
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.copy_(collectives.broadcast(on_device(local, axis), axis, 0))


def on_device(tensor: Tensor, axis: Axis) -> Tensor:
    """The tensor on the device on which the axis communicates; a model may be on the CPU, or offloaded to it."""
    return tensor.to(axis.device_type)
