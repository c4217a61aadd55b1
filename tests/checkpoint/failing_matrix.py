"""Every trial of `test_failing_ranks`: `python -m tests.checkpoint.failing_matrix [--part 1/4]`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.checkpoint import test_failing_ranks


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="1/1", help="which part of the trials, of how many")
    part, parts = map(int, parser.parse_args().part.split("/"))
    trials = test_failing_ranks.matrix()
    random.Random(0).shuffle(trials)
    trials = trials[part - 1 :: parts]
    failed = 0
    for number, trial in enumerate(trials, 1):
        with tempfile.TemporaryDirectory() as folder:
            try:
                test_failing_ranks.check_trial(Path(folder), *trial)
            except AssertionError as error:
                failed += 1
                print(f"FAILED {trial}: {error}", flush=True)
        if number % 20 == 0 or number == len(trials):
            print(f"{number} of {len(trials)} trials, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
