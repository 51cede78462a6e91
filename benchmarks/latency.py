"""Response time of interactive commands.

    python benchmarks/latency.py            help, and a report of 1,000 records
    python benchmarks/latency.py --quick    also the full quick preset

With --out, each command becomes a line of that file, which `benchmarks/goals.py` compares with the
goals. This is not a test.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from sample_records import record, run, step_series
from stepscope.records.store import Store

STEPSCOPE = [sys.executable, "-m", "stepscope"]


def seconds(command: list[str], times: int) -> float:
    """Best of several runs: the time when nothing else runs."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        taken.append(time.perf_counter() - start)
    return min(taken)


def filled_store(folder: Path, records: int) -> None:
    with Store(folder / "records.db") as store:
        added = run(cases=records)
        store.add_run(added)
        sizes = ("small", "medium", "large", "xl", "2.7b")
        with store.transaction():
            for number in range(records):
                context = 128 + 8 * (number // len(sizes))
                config = record().config | {
                    "size": sizes[number % len(sizes)],
                    "context": context,
                    "mode": "train-step",
                    "table": "2025",
                    "attention": "sdpa",
                    "compile": "no",
                    "optimizer": "torch",
                }
                key = f"{config['size']}_c{context}"
                series = step_series(50.0 + number / 10, seed=number)
                store.add(
                    record(
                        id=f"{number:012x}", run=added.id, case=key, config=config, series=series
                    )
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="also run the quick preset")
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="a JSON Lines file, one line per command")
    args = parser.parse_args()

    times = {"help": seconds([*STEPSCOPE, "--help"], 7)}
    print(f"stepscope --help: {times['help']:.2f} s")
    with tempfile.TemporaryDirectory() as name:
        filled_store(Path(name), args.records)
        times["report"] = seconds([*STEPSCOPE, "report", "--out", name], 3)
        size = (Path(name) / "report.html").stat().st_size
        print(f"report of {args.records} records: {times['report']:.2f} s, {size / 1e6:.1f} MB")
    if args.quick:
        with tempfile.TemporaryDirectory() as name:
            times["quick"] = seconds([*STEPSCOPE, "run", "--new-ceilings", "--out", name], 1)
            print(f"quick preset with ceilings: {times['quick']:.0f} s")
    if args.out is not None:
        lines = [{"command": command, "seconds": best} for command, best in times.items()]
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
