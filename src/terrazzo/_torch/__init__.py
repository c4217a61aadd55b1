"""All uses of torch's private names, and everything that terrazzo replaces in torch.

Every such name is declared in one of these modules, with the reason why it is needed and the first version known to
have it; the rest of terrazzo uses it through a plain name. Importing the package looks up all of them. If a torch lacks
some, one `TorchMovedError` lists them all. `python -m terrazzo._torch` prints the table.

    tensors, storages, modules      attributes of tensors, memory and modules
    counting                        a parameter whose `.data` counts writes
    autograd, dispatching           graphs and their engine; operators, dispatch and thread-local state
    groups, saving                  process groups and meshes; what torch.save writes
    devices                         devices that torch does not know by itself
    attention                       fused kernels of attention
    compiling                       marks for Dynamo
    kernels                         element-wise kernels for CUDA and ROCm, from text
    flex                            another function in place of `flex_attention`; imported after that
    graphs                          compilers of whole programs; imported with `terrazzo.graphs`
    launching                       how torchrun starts ranks; imported with `terrazzo.launch`
    function_apply, transforms,
    optimizers, clipping, masked,
    exporting                       functions of torch that are replaced; each first checks cheaply for a tensor of ours
    checkpointing                   recomputation of activations, which keeps the settings of the forward
    replaced                        module names that stand for ours while `terrazzo.install()` is in effect

This is the lowest layer. The layers above pass in what the replaced functions need: the class of our tensors
(`is_ours`), and the function to call for them.
"""

import terrazzo._torch.declared as declared  # first: whether this torch is too old
from terrazzo._torch import (
    attention,
    autograd,
    checkpointing,
    clipping,
    compiling,
    counting,
    devices,
    dispatching,
    exporting,
    function_apply,
    groups,
    kernels,
    masked,
    modules,
    optimizers,
    replicating,
    saving,
    storages,
    symmetric,
    tensors,
    transforms,
    traps,
)

declared.check()

__all__ = [
    "attention",
    "autograd",
    "checkpointing",
    "clipping",
    "compiling",
    "counting",
    "devices",
    "dispatching",
    "exporting",
    "function_apply",
    "groups",
    "kernels",
    "masked",
    "modules",
    "optimizers",
    "replicating",
    "saving",
    "storages",
    "symmetric",
    "tensors",
    "transforms",
    "traps",
]
