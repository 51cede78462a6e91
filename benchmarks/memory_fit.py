"""`stepscope.predict` and `stepscope.fit` against CUDA's allocator and clock.

    python benchmarks/memory_fit.py predictions --out results/memory-predictions.jsonl
    python benchmarks/memory_fit.py budgets --out results/memory-fit_h200.jsonl
    python benchmarks/memory_fit.py compiled --out results/memory-compiled_h200.jsonl
    python benchmarks/memory_fit.py predictions --without-gpu     # only what is predicted
    python benchmarks/memory_fit.py predictions --measured results/memory-predictions.jsonl

`predictions`: 20 models of more than 4 GiB are predicted on the meta device, then built on the GPU
and trained for some steps. `budgets`, `compiled`: see `memory_budgets.py`, `memory_compiled.py`. A
line of JSON for each, written as soon as it is known: an interrupted run continues with the same
`--out`. With `--measured`, the models are predicted (again) and compared with the peaks of that
record.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from memory_models import ROWS, Row, on_meta
from torch import nn

import stepscope
from stepscope.measure.ledger import StorageLedger
from stepscope.planning.simulated_bytes import WORKSPACE

WARM_UP, STEPS = 1, 4
"""Steps before and with a clock, after the first one."""


def predictions(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    known = {} if options.measured is None else measured_before(options.measured)
    done = {} if options.measured is not None else known_lines(options, "row")
    for name, row in ROWS.items():
        if name in done:
            continue
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


def measured_step(row: Row, prepare: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Peak and median time of a step of a new model."""
    gc.collect()
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        torch.cuda.empty_cache()
    with torch.device(device):
        model = row.build().train()
    optimizer, batch = row.make_optimizer(model), row.batch(device)
    if prepare is not None:
        prepare(model, optimizer, batch)
    return measured_steps(model, optimizer, batch, row.dtype)


def measured_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, dtype: torch.dtype | None
) -> dict[str, Any]:
    """The allocator's peak and the median time of steps; on a CPU the counted bytes."""
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    def step() -> None:
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(batch)
        scaler.scale(loss).backward()
        del loss
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step()
    peak = counted_peak(step, model, optimizer) if device.type == "cpu" else 0
    times = []
    for number in range(WARM_UP + STEPS):
        if device.type == "cuda" and number == 0:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {
        "peak_bytes": peak,
        "step_ms": median(times[WARM_UP:]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def counted_peak(
    step: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Bytes of all tensors at the peak of a step, and cuBLAS's workspace, which a GPU adds."""
    ledger = StorageLedger(torch.device("cpu"), None)
    with ledger.watching(model, optimizer):
        ledger.begin("step")
        step()
        ledger.end()
    return ledger.peaks[0].allocated + WORKSPACE


def known_lines(options: argparse.Namespace, *names: str) -> dict[Any, dict[str, Any]]:
    """The lines of earlier runs, by these fields."""
    found = {}
    for record in (options.resume, options.out):
        if record is not None and record.exists():
            for line in map(json.loads, record.read_text().splitlines()):
                if "peak_bytes" in line and set(names) <= line.keys():
                    key = tuple(line[name] for name in names)
                    found[key if len(names) > 1 else key[0]] = line
    return found


def main() -> None:
    from memory_budgets import budgets
    from memory_compiled import compiled

    parts = {"predictions": predictions, "budgets": budgets, "compiled": compiled}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("--without-gpu", action="store_true")
    parser.add_argument("--measured", type=Path, help="record to take measured peaks from")
    parser.add_argument("--tiny", action="store_true", help="small sizes, also for a CPU")
    parser.add_argument("--out", type=Path, help="append a line of JSON for each case")
    parser.add_argument("--resume", type=Path, help="record of the cases that are done")
    parser.add_argument("--seconds", type=float, default=280, help="begin no case after it")
    options = parser.parse_args()
    if options.resume is not None and options.out is not None and not options.out.exists():
        options.out.write_bytes(options.resume.read_bytes() if options.resume.exists() else b"")
    for line in parts[options.part](options):
        print(json.dumps({key: value for key, value in line.items() if key != "plan"}), flush=True)
        if options.out is not None:
            with options.out.open("a") as out:
                out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
