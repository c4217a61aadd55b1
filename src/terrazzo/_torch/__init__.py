"""The only place that knows torch's inside: private names, and what of torch is replaced.

Every such name is declared in one of these modules with what it is for and since which version it is known, and is
used from elsewhere through a plain name. Importing the package looks all of them up, and a torch that lacks some raises
one `TorchMovedError` that names them all. `python -m terrazzo._torch` prints the table.

    tensors, storages, modules      attributes of tensors, memory and modules
    autograd, dispatching           graphs and their engine; operators, dispatch and thread-local state
    groups, saving                  process groups and meshes; what torch.save writes
    compiling                       marks for Dynamo
    graphs                          compilers of whole programs; imported with `terrazzo.graphs`
    function_apply, transforms,
    optimizers, clipping, masked,
    exporting                       what is replaced: each asks first, cheaply, whether a tensor is one of ours
    replaced                        names of modules that stand for ours while `terrazzo.install()` says so

It is the lowest layer. What is replaced is given functions by the layers above: `is_ours`, and what to run then.
"""

from terrazzo._torch import (
    autograd,
    clipping,
    compiling,
    dispatching,
    exporting,
    function_apply,
    groups,
    masked,
    modules,
    optimizers,
    replicating,
    saving,
    storages,
    symmetric,
    tensors,
    transforms,
)
from terrazzo._torch.declared import check

check()

__all__ = [
    "autograd",
    "clipping",
    "compiling",
    "dispatching",
    "exporting",
    "function_apply",
    "groups",
    "masked",
    "modules",
    "optimizers",
    "replicating",
    "saving",
    "storages",
    "symmetric",
    "tensors",
    "transforms",
]
