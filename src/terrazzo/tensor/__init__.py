"""Distributed tensors: one tensor whose elements live on the ranks of a device mesh.

The names and behaviours are those of `torch.distributed.tensor`; `DeviceMesh` and `init_device_mesh` are PyTorch's own.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terrazzo.layout import Partial, Placement, Replicate, Shard

from terrazzo.tensor.dtensor import DTensor  # isort: skip
from terrazzo.tensor import pickling  # noqa: F401  # isort: skip  (registers what may be unpickled)
from terrazzo.tensor.api import distribute_module, distribute_tensor
from terrazzo.tensor.factories import empty, full, ones, rand, randn, zeros
from terrazzo.tensor.handlers import clip, compiling, masked, optimizers, transforms
from terrazzo.tensor.ops import autograd, foreach, loaded, recurrent  # noqa: F401  (loaded: they register what they handle)

foreach.install()
clip.install()
masked.install()
optimizers.install()
compiling.install()
autograd.install_function_bridge()
transforms.install()
recurrent.install()

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "init_device_mesh",
    "ones",
    "rand",
    "randn",
    "zeros",
]
