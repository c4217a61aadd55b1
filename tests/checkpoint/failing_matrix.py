"""Every trial of `test_failing_ranks`: `python -m tests.checkpoint.failing_matrix [--part 1/4] [--s3]`.

`--only "finish raise rank 3 of 4" --times 20` does those of these words, so often.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import s3_server
from tests.checkpoint import test_failing_ranks


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="1/1", help="which part of the trials, of how many")
    parser.add_argument("--s3", action="store_true", help="on an S3 server instead of the disk")
    parser.add_argument("--only", default="", help="what the trials' names contain, as failures show them")
    parser.add_argument("--times", type=int, default=1, help="how often each trial is done")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    trials = test_failing_ranks.matrix()
    random.Random(0).shuffle(trials)
    trials = [trial for trial in trials[part - 1 :: parts] if given.only in test_failing_ranks.name_of(*trial)]
    trials *= given.times
    server = s3_server.S3Server().start() if given.s3 else None
    environment = {} if server is None else server.environment()
    os.environ.update(environment)
    failed = 0
    for number, trial in enumerate(trials, 1):
        with tempfile.TemporaryDirectory() as folder:
            try:
                place = folder if server is None else f"s3://{s3_server.BUCKET}/{Path(folder).name}"
                test_failing_ranks.check_trial(place, *trial, environment)
            except AssertionError as error:
                failed += 1
                print(f"FAILED {trial}: {error}", flush=True)
        if number % 20 == 0 or number == len(trials):
            print(f"{number} of {len(trials)} trials, {failed} failed", flush=True)
    if server is not None:
        server.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
