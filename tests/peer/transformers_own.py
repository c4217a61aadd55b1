"""Runs Transformers' own tests of tensor, expert and FSDP parallelism on torch and under `terrazzo.install()`.

    python tests/peer/transformers_own.py SOURCE [FAMILY ...] [--ranks 2] [--results build/peer] [--keep torch|all]

SOURCE is the unpacked source package of Transformers, of the version that is installed: its `tests` has the mixins with
which Transformers tests each of its models. Each FAMILY of `tests/integrations/families.py` is such a model, and its
tests run once on the installed torch, and once on terrazzo. A table is printed, then what fails on terrazzo, passes on
torch and is not explained in `docs/compatibility.md`, then what is explained there and passes.

No test and no assertion is changed. Transformers runs most of these tests for a few families, and here they run for
all. Ranks are forked from the process that runs the tests: `tests/distributed_testing_utils.py`, which would start
them, is not in the source package.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import re
import sys
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path += [str(Path(__file__).parents[1])]

from outcomes import Kept, begin, counted, outcomes_of

from integrations.families import DENSE, EXPERTS, config_of

MIXINS = {
    "tests.test_tensor_parallel_mixin": "TensorParallelTesterMixin",
    "tests.test_expert_parallel_mixin": "ExpertParallelTesterMixin",
    "tests.test_fsdp_mixin": "FSDPTesterMixin",
}
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
SECONDS = 150.0  # that the ranks of a test may take


def started(rank: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Run `rank(number, *args)` in forked processes, which end with the first one that fails."""
    import torch.multiprocessing

    ranks = torch.multiprocessing.start_processes(
        functools.partial(_begin, rank), args, nprocs, join=False, daemon=True, start_method="fork"
    )
    end = time.monotonic() + SECONDS
    try:
        while not ranks.join(timeout=1):
            if time.monotonic() > end:
                raise TimeoutError(f"no rank failed, and some did not end in {SECONDS:.0f} s")
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()


def _begin(rank: Callable[..., None], *args: Any) -> None:
    import torch

    torch.set_num_threads(1)  # makes the pool of threads that a fork lacks, which two threads must not do at once
    rank(*args)


def run_distributed(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: a call runs the function on so many ranks."""

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            import torch.distributed as dist

            store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
            started(functools.partial(_rank, function, world_size, store.port), args, world_size)

        return call

    return decorated


def _rank(function: Callable[..., None], ranks: int, port: int, rank: int, *args: Any) -> None:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    store = dist.TCPStore("localhost", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def helpers() -> ModuleType:
    """`tests.distributed_testing_utils`, for CPUs."""
    import torch

    module = ModuleType("tests.distributed_testing_utils")
    module.__dict__.update(
        run_distributed=run_distributed,
        _start_rank_processes=started,
        _get_distributed_backend=lambda: "gloo",
        _get_distributed_device_type=lambda: "cpu",
        _get_rank_device=lambda rank: torch.device("cpu"),
        _set_rank_device=lambda rank: None,
    )
    return module


class Tester:
    """What the mixins ask about a model."""

    def __init__(self, family: str, ranks: int) -> None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        self._family, self._ranks = family, ranks
        self.causal_lm_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.get_config())]

    def get_config(self) -> Any:
        config = config_of(self._family)
        if config.num_key_value_heads % self._ranks:  # Transformers gives each rank whole heads
            config.num_key_value_heads = self._ranks
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        return self.get_config(), {}


def case_of(family: str, ranks: int) -> type[unittest.TestCase]:
    """Transformers' tests of one model."""
    mixins = []
    for name, mixin in MIXINS.items():
        module = importlib.import_module(name)
        mixins.append(getattr(module, mixin))
        for kind in [kind for kind in vars(module) if kind.endswith("_DISTRIBUTED_TEST_MODEL_TYPES")]:
            setattr(module, kind, None)  # all of them
    tester = Tester(family, ranks)
    about = {
        "model_tester": tester,
        "all_model_classes": (tester.causal_lm_class,),
        "tensor_parallel_size": ranks,
        "fsdp_nproc_per_node": ranks,
    }
    return type(family, (*mixins, unittest.TestCase), about)


def run(source: Path, family: str, peer: str, path: Path, ranks: int) -> None:
    """Run the tests of a family in this process, which it changes, and write their outcomes."""
    begin(path)
    if peer.startswith("install"):
        import terrazzo

        terrazzo.install()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path.insert(0, str(source))
    sys.modules["tests.distributed_testing_utils"] = helpers()
    os.cpu_count = lambda: 64  # fewer than ranks, and a test is skipped
    kept = Kept(path.with_suffix(".part"))
    unittest.defaultTestLoader.loadTestsFromTestCase(case_of(family, ranks)).run(kept)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("families", nargs="*", default=[*DENSE, *EXPERTS])
    parser.add_argument("--ranks", type=int, default=2, help="of a test; some tests have a number of their own")
    parser.add_argument("--results", type=Path, default=Path("build/peer"))
    parser.add_argument("--keep", choices=("torch", "all"), help="whose outcomes are not made again")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that a family may take")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch  # noqa: F401  # before the forks

    explained = set(re.findall(r"^\| `(\w+\.test_\w+)`", PAGE.read_text(), re.MULTILINE))
    worse, mended, totals = [], [], [0, 0]
    print(f"| family, {options.ranks} ranks | torch: passed/failed/skipped | terrazzo | worse |\n|---|---|---|---|")
    for family in options.families:
        torchs, ours = (
            outcomes_of(
                functools.partial(run, ranks=options.ranks),
                options.source.resolve(),
                family,
                f"{peer}-{options.ranks}",
                options.results.resolve(),
                options.limit,
                options.keep in (peer, "all"),
            )
            for peer in ("torch", "install")
        )
        passing = {test for test, outcome in torchs.items() if outcome[0] == "passed"}
        failing = {test for test in passing if ours.get(test, [""])[0] != "passed"}
        totals = [totals[0] + len(passing), totals[1] + len(passing) - len(failing)]
        print(f"| {family} | {counted(torchs)} | {counted(ours)} | {len(failing)} |", flush=True)
        worse += sorted(failing - explained)
        mended += sorted(t for t in explained - failing if t.startswith(f"{family}."))
    print(f"| together | {totals[0]} pass | {totals[1]} of these pass | {totals[0] - totals[1]} |")
    print("\nfail on terrazzo alone, and are not explained:", *worse or ["none"], sep="\n    ")
    print("\nare explained, and pass:", *mended or ["none"], sep="\n    ")


if __name__ == "__main__":
    main()
