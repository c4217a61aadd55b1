"""Distributed tensors: one tensor whose elements are spread over the ranks of a device mesh.

The names and behaviours are those of `torch.distributed.tensor`; `DeviceMesh` is PyTorch's own.
"""

from torch.distributed.device_mesh import DeviceMesh

from terrazzo.comm.alone import init_device_mesh
from terrazzo.layout import Partial, Placement, Replicate, Shard

from terrazzo.tensor.dtensor import DTensor  # isort: skip
from terrazzo.tensor import pickling  # noqa: F401  # isort: skip  (registers what may be unpickled)
from terrazzo.tensor import (
    libraries,  # noqa: F401  (registers itself)
    new_data,  # noqa: F401  (registers itself)
    patching,
)
from terrazzo.tensor.api import distribute_module, distribute_tensor
from terrazzo.tensor.dispatch import calls  # noqa: F401  (registers itself)
from terrazzo.tensor.explanation import Explanation, explain
from terrazzo.tensor.factories import empty, full, linspace, logspace, ones, rand, randn, zeros
from terrazzo.tensor.ops import loaded  # noqa: F401  (loaded: they register what they handle)

patching.install()

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Explanation",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "init_device_mesh",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "zeros",
]
