"""Peaks of compiled models and models of compiled blocks, against `stepscope.predict(compile=…)`.

The GPU command measures alone; predictions need no GPU and follow with `--measured`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from memory_fit import measured_step
from memory_models import ROWS, on_meta

import stepscope
from stepscope.planning.blocks import repeated_blocks

FORMS: tuple[Literal["blocks", "model"], ...] = ("blocks", "model")
COMPILED = (
    "decoder-0.3b", "decoder-1b", "decoder-8b-blocks", "encoder-0.3b", "encoder-0.1b-no-dropout",
    "convolutions-64", "mixer-2k", "decoder-0.3b-f32", "decoder-1b-f16", "decoder-0.3b-foreach",
)  # fmt: skip


def compiled(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    known = lines_of(options.measured or options.resume)
    end = time.perf_counter() + options.seconds
    for form in FORMS:
        for name in COMPILED:
            line = known.get((name, form))
            if line is None and not options.without_gpu and time.perf_counter() < end:
                line = {"row": name, "form": form, **_measured(name, form)}
            if line is not None and options.measured is not None:
                line |= _predicted(name, form, line)
            if line is not None:
                yield line


def lines_of(record: Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Measured lines of a record, by row and form."""
    if record is None or not record.exists():
        return {}
    lines = map(json.loads, record.read_text().splitlines())
    return {(line["row"], line["form"]): line for line in lines if "peak_bytes" in line}


def _measured(name: str, form: str) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        found = measured_step(ROWS[name], partial(_compile, form))
    except (torch.OutOfMemoryError, RuntimeError) as error:
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    finally:
        torch.compiler.reset()
        gc.collect()
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def _compile(form: str, model: Any, optimizer: Any, batch: Any) -> None:
    del optimizer, batch
    for module in [model] if form == "model" else repeated_blocks(model).values():
        module.compile()


def _predicted(name: str, form: Any, measured: dict[str, Any]) -> dict[str, Any]:
    row = ROWS[name]
    started = time.process_time()
    model, optimizer = on_meta(row)
    batch = row.batch("cpu")
    found = stepscope.predict(model, optimizer, batch, dtype=row.dtype, compile=form)
    return {
        "predicted_bytes": found.peak.allocated,
        "error": found.peak.allocated / measured["peak_bytes"] - 1,
        "cpu_s": round(time.process_time() - started, 1),
    }
