"""What the checkpoints in tests/golden hold.  Run as a program, it writes the one of the present version.

python tests/checkpoint/golden_state.py FOLDER
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import torch


def golden_state() -> dict[str, Any]:
    """One value of every kind that version 1 knows."""
    count = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)
    dtypes = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.complex128,
    ]  # fmt: skip
    tensors = {str(dtype).removeprefix("torch."): count.to(dtype) for dtype in dtypes}
    return {
        "tensors": tensors,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "page": torch.arange(1024, dtype=torch.float32),
        "objects": {
            "none": None, "bool": True, "int": -5, "big": 2**90, "float": 0.1, "text": "käse", "bytes": b"\x00\xff",
            "list": [1, [2]], "tuple": (1, ("a",)), "set": {1, 2}, "frozenset": frozenset({"x"}),
            "by_number": [(1, {2: "two"})], "ordered": [OrderedDict(b=1, a=2)], "complex": 1 + 2j,
            "bytearray": bytearray(b"ab"), "range": range(1, 9, 2), "slice": slice(1, None, 2), "dtype": torch.bfloat16,
            "device": torch.device("cpu"), "size": torch.Size([2, 3]), "scalar": np.float32(1.5), "long": "z" * 5000,
        },
    }  # fmt: skip


if __name__ == "__main__":
    from terrazzo.checkpoint import FileSystemWriter, save

    save(golden_state(), storage_writer=FileSystemWriter(sys.argv[1]))
