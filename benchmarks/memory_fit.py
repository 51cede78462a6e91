"""`stepscope.predict` and `stepscope.fit` against CUDA's allocator and clock.

    python benchmarks/memory_fit.py predictions --out results/memory-predictions.jsonl
    python benchmarks/memory_fit.py budgets --out results/memory-fit_h200.jsonl
    python benchmarks/memory_fit.py compiled --out results/memory-compiled_h200.jsonl
    python benchmarks/memory_fit.py predictions --without-gpu     # only what is predicted
    python benchmarks/memory_fit.py predictions --measured results/memory-predictions.jsonl

`predictions`: 20 models of more than 4 GiB are predicted on the meta device, then built on the GPU
and trained for two steps. `budgets`, `compiled`: see `memory_budgets.py`, `memory_compiled.py`. A
line of JSON for each. With `--measured`, the models are predicted (again) and compared with the
peaks of that record.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from memory_models import ROWS, Row, on_meta
from torch import nn

import stepscope

STEPS = 6
"""Timed steps, after two others."""


def predictions(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    known = {} if options.measured is None else measured_before(options.measured)
    for name, row in ROWS.items():
        started = time.perf_counter()
        model, optimizer = on_meta(row)
        found = stepscope.predict(model, optimizer, row.batch("cpu"), dtype=row.dtype)
        line = {
            "row": name,
            "predicted_bytes": found.peak.allocated,
            "predicted_reserved_bytes": found.reserved,
            "seconds": time.perf_counter() - started,
        }
        if options.measured is not None or not options.without_gpu:
            measured = known[name] if options.measured is not None else measured_step(row)
            line |= measured | {"error": found.peak.allocated / measured["peak_bytes"] - 1}
        yield line


def measured_before(record: Path) -> dict[str, dict[str, Any]]:
    """What an earlier run measured, by row."""
    lines = map(json.loads, record.read_text().splitlines())
    kept = ("peak_bytes", "step_ms", "device", "torch")
    return {line["row"]: {name: line[name] for name in kept} for line in lines}


def measured_step(
    row: Row, prepare: Callable[[nn.Module, torch.optim.Optimizer, Any], Any] | None = None
) -> dict[str, Any]:
    """The allocator's peak and the median time of a step on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = row.build().train()
    optimizer, batch = row.make_optimizer(model), row.batch("cuda")
    if prepare is not None:
        prepare(model, optimizer, batch)
    scaler = torch.amp.GradScaler(enabled=row.dtype is torch.float16)
    times = []
    for number in range(STEPS + 2):
        if number == 1:
            torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.autocast("cuda", row.dtype or torch.bfloat16, enabled=row.dtype is not None):
            loss = model(batch)
        scaler.scale(loss).backward()
        del loss
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "step_ms": sorted(times[2:])[STEPS // 2],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main() -> None:
    from memory_budgets import budgets
    from memory_compiled import compiled

    parts = {"predictions": predictions, "budgets": budgets, "compiled": compiled}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("--without-gpu", action="store_true")
    parser.add_argument("--measured", type=Path, help="record to take measured peaks from")
    parser.add_argument("--out", type=Path, help="write a line of JSON for each row")
    parser.add_argument("--resume", type=Path, help="record of the cases that are done")
    parser.add_argument("--seconds", type=float, default=420, help="begin no case after it")
    options = parser.parse_args()
    lines = []
    for line in parts[options.part](options):
        lines.append(line)
        print(json.dumps({key: value for key, value in line.items() if key != "plan"}), flush=True)
        if options.out is not None:
            options.out.write_text("".join(json.dumps(one) + "\n" for one in lines))


if __name__ == "__main__":
    main()
