"""Write the usual ceilings of GPUs, from the records in results/.

    python scripts/make_usual_ceilings.py            write the file
    python scripts/make_usual_ceilings.py --check    exit with 1 if it is out of date

The usual value is the median over measurements of the same device at the same power limit. The
launch rate depends on the CPU and is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import msgspec

from stepscope.errors import StepscopeError
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.records.usual_ceilings import FILE, power_key

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "src" / "stepscope" / "records" / FILE
LEFT_OUT = "launch.rate"
LEAST = 3
"""Measurements from which on a value counts as usual."""


def table(results: Path) -> bytes:
    measured: defaultdict[tuple[str, str, str], set[float]] = defaultdict(set)
    for record in _records(results):
        here = record.environment
        for one in record.ceilings if here.device_kind == "cuda" else ():
            if one.source == "measured" and not one.doubt and one.name != LEFT_OUT:
                # All records of a run have the ceilings of one measurement.
                key = here.device_name, power_key(here.power_limit_w), one.name
                measured[key].add(one.value)
    usual: defaultdict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for (device, power, name), values in sorted(measured.items()):
        if len(values) >= LEAST:
            usual[device].setdefault(power, {})[name] = float(f"{median(values):.4g}")
    return msgspec.json.format(msgspec.json.encode(usual, order="sorted"), indent=1) + b"\n"


def _records(results: Path) -> list[Record]:
    records = []
    for path in sorted(results.glob("*.jsonl")):
        try:
            records += read_records(path)
        except StepscopeError:
            # Results of benchmarks are in files of their own form.
            continue
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    made = table(ROOT / "results")
    if options.check:
        return int(not OUT.exists() or OUT.read_bytes() != made)
    OUT.write_bytes(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
