"""Predicted against measured peak memory of every eager step in a file of records.

    python benchmarks/memory_prediction.py [results/h200.jsonl]

Cases of one run share a process, so all but the first find the work space that cuBLAS took for the
backward's thread already there. What is left is where blocks lie in the allocator's cache.
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
    off: list[float] = []
    for record in read_records(path):
        work, peak = record.config, record.quantity("peak_bytes")
        if record.study != "benchmark" or peak is None or work["compile"] != "no":
            continue
        model = with_overrides(
            find_size(work["size"], work["table"]), context=work["context"], **work["overrides"]
        )
        told = predict(
            StepPlan(
                model=model,
                batch=work["batch"],
                context=work["context"],
                dtype=work["dtype"],
                attention=work["attention"],
                mode=work["mode"],
                optimizer=work["optimizer"],
                used_before=bool(off),
            )
        ).peak
        off.append(told.allocated / peak - 1)
        print(
            f"{record.case:<58} {peak / 2**30:8.3f} GiB measured, {told.allocated / 2**30:8.3f}"
            f" predicted, {off[-1]:+.2%} ({told.phase})"
        )
    sizes = sorted(map(abs, off))
    print(
        f"{len(off)} peaks: off by {statistics.median(sizes):.3%} in the median,"
        f" {sizes[int(0.9 * len(sizes))]:.3%} in nine of ten, {sizes[-1]:.3%} at most"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
