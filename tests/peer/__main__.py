"""Runs PyTorch's own tests of tensors and checkpoints on terrazzo, and says which of those that pass on torch fail.

    python tests/peer SOURCE [FILE ...] [--install] [--results build/peer] [--keep torch|all] [--limit 900]

SOURCE is an unpacked source tree of PyTorch (2.6 is what `docs/compatibility.md` speaks of); of it `test/distributed`
and `torch/testing/_internal` are needed. Each FILE, a path below `test/distributed`, runs once on the installed torch
and once on terrazzo, in a process of its own. The table of `docs/compatibility.md` is printed, then what fails on
terrazzo and passes on torch and is not explained there, then what is explained there and passes. With `--install` the
files import PyTorch's names, which `terrazzo.install()` has replaced; without, terrazzo's.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))

import on_peer
from outcomes import counted, outcomes_of

FILES = [
    *("_tensor/debug/test_comm_mode.py", "_tensor/debug/test_comm_mode_features.py"),
    *("_tensor/experimental/test_local_map.py", "_tensor/experimental/test_register_sharding.py"),
    *(
        f"_tensor/test_{name}.py"
        for name in (
            *("api", "attention", "convolution_ops", "dtensor", "embedding_ops", "experimental_ops", "init"),
            *("math_ops", "matrix_ops", "optimizers", "pointwise_ops", "random_ops", "redistribute", "tensor_ops"),
            *("utils", "view_ops"),
        )
    ),
    *(
        f"checkpoint/test_{name}.py"
        for name in (
            *("checkpoint", "compatibility", "dedup_tensors", "dtensor_checkpoint", "dtensor_resharding"),
            *("file_system_checkpoint", "file_system_checkpoint_cpu", "format_utils", "fsdp_model_state"),
            *(
                "fsdp_optim_state",
                "fsdp_tp_checkpoint_conversion",
                "fsspec",
                "hsdp_checkpoint",
                "nested_dict",
                "planner",
            ),
            *("save_load_api", "state_dict", "state_dict_utils", "tp_checkpoint", "traverse", "utils"),
        )
    ),
    *(f"checkpoint/e2e/test_{name}.py" for name in ("e2e_save_and_load", "fine_tuning", "fsdp_ep", "pipeline")),
    *(
        f"_composable/fsdp/test_fully_shard_{name}.py"
        for name in (
            *("autograd", "clip_grad_norm_", "comm", "extensions", "frozen", "grad_scaler", "init", "mixed_precision"),
            *("overlap", "state", "state_dict", "training"),
        )
    ),
    *(f"_composable/test_{name}.py" for name in ("checkpoint", "contract", "replicate")),
    *(f"_composable/test_composability/test_{name}.py" for name in ("2d_composability", "pp_composability")),
    *(f"tensor/parallel/test_{name}.py" for name in ("parallelize_api", "tp_examples", "tp_random_state", "tp_style")),
]
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--install", action="store_true", help="run under terrazzo.install(), with imports as they are")
    parser.add_argument("--results", type=Path, default=Path("build/peer"))
    parser.add_argument(
        "--keep", choices=("torch", "all"), help="whose outcomes are taken from --results if they are there"
    )
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that a file may take")
    options = parser.parse_args()
    explained = set(re.findall(r"^\| `([\w./]+::[\w.]+)`", PAGE.read_text(), re.MULTILINE))
    source, results = options.source.resolve(), options.results.resolve()
    worse, mended = [], []
    tried = "install" if options.install else "terrazzo"
    print(f"| file | torch: passed/failed/skipped | {tried} | worse |\n|---|---|---|---|")
    for file in options.files:
        torchs, ours = (
            outcomes_of(on_peer.run, source, file, peer, results, options.limit, options.keep in (peer, "all"))
            for peer in ("torch", tried)
        )
        name = file.removesuffix(".py")
        failing = {f"{name}::{t}" for t, o in ours.items() if o[0] == "failed" and torchs.get(t, [""])[0] == "passed"}
        print(f"| {name} | {counted(torchs)} | {counted(ours)} | {len(failing)} |", flush=True)
        worse += sorted(failing - explained)
        mended += sorted(t for t in explained - failing if t.startswith(f"{name}::"))
    print("\nfail on terrazzo alone, and are not explained:", *worse or ["none"], sep="\n    ")
    print("\nare explained, and pass:", *mended or ["none"], sep="\n    ")


if __name__ == "__main__":
    main()
