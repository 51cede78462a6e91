"""Peaks of compiled and accelerated steps, against `stepscope.predict(compile=…)`.

The GPU command measures alone; predictions need no GPU and follow with `--measured`. An accelerated
step is measured where it is captured as a CUDA graph, after the first steps, in which `accelerate`
compares it with the original.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from memory_fit import WORKSPACE, known_lines, measured_step
from memory_models import ROWS, Decoder, Row, on_meta

import stepscope
from stepscope.planning.blocks import repeated_blocks

FORMS: tuple[Literal["accelerate", "blocks", "model"], ...] = ("accelerate", "blocks", "model")
ROWS_OF_FORM = {
    "accelerate": ("decoder-1b", "decoder-8b-blocks", "encoder-0.3b", "decoder-0.3b-sgd"),
    "blocks": ("decoder-0.3b", "decoder-1b", "decoder-8b-blocks", "encoder-0.3b", "mixer-2k"),
    "model": ("decoder-0.3b", "decoder-8b-blocks", "encoder-0.1b-no-dropout", "mixer-2k"),
}
TINY = {"tiny": Row(partial(Decoder, 3, 128, 4, 4, 256), (2, 128), None)}
CAPTURED = 6
"""Steps after which an accelerated step is a CUDA graph."""


def compiled(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    end = time.perf_counter() + options.seconds
    if options.measured is not None:
        options.resume, options.out = options.measured, None
    known = known_lines(options, "row", "form")
    rows = TINY if options.tiny else ROWS
    for form in FORMS:
        for name in TINY if options.tiny else ROWS_OF_FORM[form]:
            if options.measured is not None:
                if (name, form) in known:
                    yield known[name, form] | _predicted(rows[name], form, known[name, form])
            elif (name, form) not in known and time.perf_counter() < end:
                yield {"row": name, "form": form, **_measured(rows[name], form)}


def _measured(row: Row, form: str) -> dict[str, Any]:
    started = time.perf_counter()
    measure = _accelerated if form == "accelerate" else partial(_compiled, form)
    try:
        found = measure(row)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    finally:
        torch.compiler.reset()
        gc.collect()
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def _compiled(form: str, row: Row) -> dict[str, Any]:
    def prepare(model: Any, *_: Any) -> None:
        for module in [model] if form == "model" else repeated_blocks(model).values():
            module.compile()

    return measured_step(row, prepare)


def _accelerated(row: Row) -> dict[str, Any]:
    """Peak of the steps in which the graph is captured."""
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        model = row.build().train()
    optimizer, batch = row.make_optimizer(model), row.batch("cuda" if on_gpu else "cpu")
    options = {"form": "compiled with passes"} | ({} if on_gpu else {"compiler": "aot_eager"})
    stepscope.accelerate(model, optimizer, compile=options, dtype=row.dtype)
    step = stepscope.TrainStep(model, optimizer, dtype=row.dtype)
    before, times = 0, []
    for number in range(CAPTURED):
        if on_gpu and number == 1:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_reserved()
        started = time.perf_counter()
        step(batch).item()
        times.append(1e3 * (time.perf_counter() - started))
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else WORKSPACE,
        "reserved_before_bytes": before,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else WORKSPACE,
        "step_ms": times[-1],
        "explain": step.explain(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }


def _predicted(row: Row, form: Any, measured: dict[str, Any]) -> dict[str, Any]:
    started = time.process_time()
    model, optimizer = on_meta(row)
    batch = row.batch("cpu")
    found = stepscope.predict(model, optimizer, batch, dtype=row.dtype, compile=form)
    return {
        "predicted_bytes": found.peak.allocated,
        "error": found.peak.allocated / measured["peak_bytes"] - 1,
        "cpu_s": round(time.process_time() - started, 1),
    }
