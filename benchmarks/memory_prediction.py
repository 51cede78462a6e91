"""Predicted and measured peak memory of every eager step in a file of records.

    python benchmarks/memory_prediction.py [results/h200.jsonl]

Cases of one run share a process, so the cuBLAS workspace of the backward's thread already exists
for all but the first. The remaining error is the placement of blocks in the allocator's cache.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import predict
from stepscope.model.sizes import find_size, with_overrides
from stepscope.records.jsonl import read_records

RESULTS = Path(__file__).resolve().parents[1] / "results" / "h200.jsonl"


def main(path: Path) -> None:
    errors: list[float] = []
    for record in read_records(path):
        work, peak = record.config, record.quantity("peak_bytes")
        if record.study != "benchmark" or peak is None or work["compile"] != "no":
            continue
        model = with_overrides(
            find_size(work["size"], work["table"]), context=work["context"], **work["overrides"]
        )
        predicted = predict(
            StepPlan(
                model=model,
                batch=work["batch"],
                context=work["context"],
                dtype=work["dtype"],
                attention=work["attention"],
                mode=work["mode"],
                optimizer=work["optimizer"],
                used_before=bool(errors),
            )
        ).peak
        errors.append(predicted.allocated / peak - 1)
        print(
            f"{record.case:<58} {peak / 2**30:8.3f} GiB measured,"
            f" {predicted.allocated / 2**30:8.3f} predicted, {errors[-1]:+.2%} ({predicted.phase})"
        )
    sizes = sorted(map(abs, errors))
    print(
        f"{len(errors)} peaks: median error {statistics.median(sizes):.3%},"
        f" {sizes[int(0.9 * len(sizes))]:.3%} in nine of ten, {sizes[-1]:.3%} at most"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
