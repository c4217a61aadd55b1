"""Every operation of PyTorch's own database gives on the device what it gives on the CPU."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from late_ranks import run_late

SAMPLES = 3  # of each operation
OTHERS = {
    "sparse.sampled_addmm": "sparse tensors are not supported",
    "sparse.mm.reduce": "sparse tensors are not supported",
    "to_sparse": "sparse tensors are not supported",
    "tensor_split": "takes indices of the CPU only, as on CUDA",
    "as_strided.partial_views": "the sample views other memory than its tensor has",
    "native_batch_norm": "the CPU leaves out statistics that the device has",
    "_native_batch_norm_legit": "the CPU leaves out statistics that the device has",
    "nn.functional.fractional_max_pool3d": "random",
    "nn.functional.scaled_dot_product_attention": "random: some samples drop out",
    "nn.functional.multi_head_attention_forward": "random: some samples drop out",
}
VALUES_DIFFER = (
    "rand", "dropout", "bernoulli", "normal", "multinomial", "empty", "uniform", "cauchy", "exponential", "geometric",
    "rrelu", "lowrank",
)  # fmt: skip


def on(device):
    def move(x):
        if isinstance(x, torch.Tensor):
            return x.detach().to(device)
        return device if isinstance(x, torch.device) else x

    return move


def check_database(device):
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    wrong, count = [], 0
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}".removesuffix(".")
        if torch.float32 not in op.supported_dtypes("cpu") or name in OTHERS:
            continue
        samples = op.sample_inputs("cpu", torch.float32, requires_grad=False)
        for sample in itertools.islice(samples, SAMPLES):
            try:
                expected = op(sample.input, *sample.args, **sample.kwargs)
            except (RuntimeError, AssertionError):
                continue  # not for the CPU
            kwargs = {key: device if key == "device" else value for key, value in sample.kwargs.items()}
            try:
                found = op(*tree_map(on(device), (sample.input, *sample.args)), **tree_map(on(device), kwargs))
                torch.accelerator.synchronize()
                for want, got in zip(tree_leaves(expected), tree_leaves(found), strict=True):
                    if isinstance(want, torch.Tensor) and not any(part in name for part in VALUES_DIFFER):
                        torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=1e-4, equal_nan=True)
                count += 1
            except (RuntimeError, AssertionError) as error:
                wrong.append(f"{name}: {str(error).partition(chr(10))[0]}")
    assert not wrong, "\n".join(wrong)
    return count


@pytest.mark.long
def test_operations_are_those_of_the_cpu():
    ((count,),) = run_late(1, check_database)
    assert count > 1500
