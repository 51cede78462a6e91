"""Write the seconds of every case of a run to `runner/case_costs.json`, for the estimate at
the start of `stepscope run`.

    stepscope run --out /tmp/quick            # on an otherwise idle machine
    python scripts/make_case_costs.py /tmp/quick/RUN.jsonl --total 118
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import msgspec

from stepscope.records.jsonl import read_records
from stepscope.runner.estimate import COSTS, Costs

FILE = Path(__file__).parents[1] / "src/stepscope/runner" / COSTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, help="records of a run of preset quick")
    parser.add_argument("--total", type=float, required=True, help="seconds of the entire run")
    options = parser.parse_args()
    records = read_records(options.records)
    cases: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for record in records:
        if record.status != "skipped":
            cases[record.study][record.case] = round(record.elapsed_s, 2)
    spent = sum(seconds for study in cases.values() for seconds in study.values())
    environment = records[0].environment
    costs = msgspec.json.decode(FILE.read_bytes(), type=dict[str, Costs]) if FILE.exists() else {}
    costs[environment.device_kind] = Costs(
        device=f"{environment.device_name}, {environment.threads} threads",
        start_s=round(max(0.0, options.total - spent), 1),
        per_case_s=round(spent / sum(map(len, cases.values())), 2),
        cases=dict(cases),
    )
    text = msgspec.json.format(msgspec.json.encode(costs, order="sorted"), indent=1)
    FILE.write_bytes(text + b"\n")


if __name__ == "__main__":
    main()
