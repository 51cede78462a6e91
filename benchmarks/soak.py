"""Check that records survive kill -9: kills a real run at random moments, many times.

    python benchmarks/soak.py --kills 200

Stops with an error at the first lost or repeated record, the first store that does not open, or the
first worker that survives.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kill_loop import kill_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepscope-soak-") as folder:
        tally = kill_runs(Path(folder), options.kills, options.seed)
    print(f"{tally}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
