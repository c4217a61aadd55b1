"""Scripts by the real DeepSpeed and by `terrazzo.deepspeed`: `python tests/deepspeed/same.py` proves all equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"

# In 16 bits the two round at other places; a curve of losses stays the same curve.
TOLERANCE = {"half": 2e-3, "own_optimizer": 3e-2, "smallest_half": 2e-3}


def run(which: str, names: list[str], folder: Path, ranks: int = 2) -> dict[str, list[float]]:
    """What `real` or `ours` sees, each in ranks of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCES)}
    out = folder / f"{which}.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, str(HERE / "scripts.py"), str(out), which, *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(out.read_text())


def differences(theirs: dict[str, list[float]], ours: dict[str, list[float]]) -> dict[str, float]:
    """By script, the largest difference; what is more than rounding is an error."""
    found = {}
    for name, expected in theirs.items():
        assert len(expected) == len(ours[name]), f"{name}: {len(expected)} and {len(ours[name])} values"
        found[name] = max(abs(a - b) for a, b in zip(expected, ours[name], strict=True))
        limit = TOLERANCE.get(name, 1e-5)
        assert found[name] <= limit, f"{name}: {expected} by DeepSpeed, {ours[name]} by terrazzo"
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        results = [run(which, sys.argv[1:], Path(scratch)) for which in ("real", "ours")]
        for script, difference in differences(*results).items():
            print(f"{script:<16} largest difference {difference:.1e}")
