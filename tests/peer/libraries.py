"""Runs other libraries' own tests on torch and under TERRAZZO_INSTALL=1, and says which pass on torch alone.

    python tests/peer/libraries.py SOURCES [LIBRARY ...] [--select EXPRESSION] [--keep torch|all] [--limit 900]

SOURCES has a folder for each library, its repository as it is: `torchtitan`, `OLMo-core`, `accelerate`, and so on
(`LIBRARIES` below says which tests run). The interpreter must have what they import, and an installed terrazzo. A table
is printed, then what fails on terrazzo, passes on torch and is not explained in `docs/compatibility.md`, then what is
explained there and passes. No test is changed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))

from outcomes import Outcomes, counted

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


@dataclass(frozen=True)
class Library:
    """Files, below the folder of the repository, and the folders below it that are put on the path.

    With `ranks` its tests run with the plugin `on_ranks`: for the files in the folders `on_cpu` the CPU stands for
    GPUs, `scripts` are started with that many ranks, and the functions `new_enough` say that a GPU is.
    """

    files: tuple[str, ...]
    path: tuple[str, ...] = (".",)
    ranks: bool = False
    on_cpu: tuple[str, ...] = ()
    scripts: Mapping[str, int] = field(default_factory=dict)
    new_enough: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


LIBRARIES = {
    "torchtitan": Library(("tests/unit_tests",)),
    "OLMo-core": Library(("src/test/distributed",), ("src",), ranks=True),
    "accelerate": Library(("tests/fsdp", "tests/tp", "tests/test_state_checkpointing.py"), ("src",)),
    "lightning": Library(
        (
            "tests/tests_fabric/strategies/test_model_parallel.py",
            "tests/tests_fabric/strategies/test_model_parallel_integration.py",
            "tests/tests_fabric/strategies/test_fsdp.py",
            "tests/tests_fabric/utilities/test_load.py",
        ),
        ("tests", "src"),
    ),
    "ao": Library(
        (
            "test/float8/test_fsdp2",
            "test/test_low_bit_optim.py",
            "test/prototype/test_quantized_training.py",
            "test/quantization/quantize_/workflows/nf4",
            "test/prototype/pat/test_pat_subset_mesh.py",
        ),
        ranks=True,
        on_cpu=("test",),
        scripts={
            "test/float8/test_dtensor.py": 2,
            "test/float8/test_fsdp2_tp.py": 4,
            "test/prototype/mx_formats/test_mx_dtensor.py": 2,
        },
        new_enough=("torchao.utils.is_sm_at_least_89",),
    ),
    "verl": Library(
        (
            "tests/utils/test_fsdp2_peft_wrapping.py",
            "tests/utils/test_fsdp2_model_transfer_on_cpu.py",
            "tests/utils/test_fsdp_wrap_policy_on_cpu.py",
            "tests/utils/test_fsdp_lora_merge.py",
            "tests/utils/test_normalize_peft_param_name.py",
            "tests/utils/test_normalize_peft_param_name_on_cpu.py",
            "tests/utils/test_activation_offload.py",
            "tests/utils/ckpt/test_lora_custom_object_save_on_cpu.py",
            "tests/checkpoint_engine/test_sharded_delta.py",
            "tests/checkpoint_engine/test_block_placement.py",
            "tests/checkpoint_engine/test_fsdp_lora_only_checkpoint_on_cpu.py",
            "tests/workers/test_fsdp_gradient_accumulation_sync_on_cpu.py",
        ),
        ranks=True,
        on_cpu=(
            "tests/special_distributed",
            "tests/utils/test_fsdp_lora_merge.py",
            "tests/utils/test_normalize_peft_param_name.py",
            "tests/utils/test_activation_offload.py",
        ),
        scripts={
            "tests/special_distributed/test_sharded_delta_gather.py": 4,
            "tests/special_distributed/test_fsdp2_cpu_offload_state_dict.py": 2,
        },
        environment={"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu"},
    ),
    "torchtune": Library(("tests/torchtune/training/test_distributed.py", "tests/torchtune/training/checkpointing")),
    "s3-connector-for-pytorch": Library(("s3torchconnector/tst/unit/dcp",), ("s3torchconnector/src",)),
}


def run(folder: Path, library: Library, installed: bool, log: Path, limit: float, select: str) -> None:
    """Run a library's tests; what pytest says of each goes to `log` as soon as it is known."""
    environment = {
        **os.environ,
        **library.environment,
        "PEER_ON_CPU": " ".join(str(folder / each) for each in library.on_cpu),
        "PEER_SCRIPTS": " ".join(f"{path}={ranks}" for path, ranks in library.scripts.items()),
        "PEER_YES": " ".join(library.new_enough),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TERRAZZO_INSTALL": str(int(installed)),
        "PYTHONPATH": os.pathsep.join(
            [
                *(str(folder / each) for each in library.path),
                str(Path(__file__).parent),
                os.environ.get("PYTHONPATH", ""),
            ]
        ),
    }
    files = [each for each in (*library.files, *library.scripts) if (folder / each).exists()]
    command = [sys.executable, "-m", "pytest", "-v", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    with log.open("w") as file:
        done = subprocess.Popen(
            [*command, *(("-p", "on_ranks") if library.ranks else ()), "--timeout=120", "-k", select, *files],
            cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            done.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()


_SAID = {"PASSED": "passed", "XFAIL": "passed", "FAILED": "failed", "XPASS": "failed", "SKIPPED": "skipped"}


def outcomes_of_log(log: Path) -> Outcomes:
    """Outcomes by test, as far as pytest came."""
    lines = re.findall(r"^(\S+::.+?) .*?(PASSED|XFAIL|FAILED|XPASS|SKIPPED)\b", log.read_text(), re.MULTILINE)
    return {test: [_SAID[word], ""] for test, word in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("libraries", nargs="*", default=[*LIBRARIES])
    parser.add_argument("--results", type=Path, default=Path("build/peer"))
    parser.add_argument("--keep", choices=("torch", "all"), help="whose outcomes are not made again")
    parser.add_argument("--select", default="", help="which tests, as pytest's -k")
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds that a library may take; what was not reached is worse"
    )
    options = parser.parse_args()
    explained = set(re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE))
    worse: list[str] = []
    mended: list[str] = []
    print("| library | torch: passed/failed/skipped | terrazzo | worse |\n|---|---|---|---|")
    for name in options.libraries:
        outcomes = []
        for installed, peer in ((False, "torch"), (True, "install")):
            log = options.results.resolve() / peer / f"{name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            if options.keep not in (peer, "all") or not log.exists():
                folder = options.sources.resolve() / name
                run(folder, LIBRARIES[name], installed, log, options.limit, options.select)
            outcomes.append(outcomes_of_log(log))
        torchs, ours = outcomes
        passing = {test for test, outcome in torchs.items() if outcome[0] == "passed"}
        failing = {test for test in passing if ours.get(test, [""])[0] != "passed"}
        print(f"| {name} | {counted(torchs)} | {counted(ours)} | {len(failing)} |", flush=True)
        worse += sorted(test if test in ours else f"{test} (not reached)" for test in failing - explained)
        mended += sorted(test for test in explained & passing if test not in failing)
    print("\nfail on terrazzo alone, and are not explained:", *worse or ["none"], sep="\n    ")
    print("\nare explained, and pass:", *mended or ["none"], sep="\n    ")


if __name__ == "__main__":
    main()
