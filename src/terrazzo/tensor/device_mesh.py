"""PyTorch's meshes, in the module where `torch.distributed.tensor` has them."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
