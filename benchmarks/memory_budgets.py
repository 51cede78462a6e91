"""Plans of `stepscope.fit` under budgets, against other ways to save memory.

A decoder with blocks of the shape of an 8B model. Cases, each a line of JSON:

- `plain`: without a plan;
- `fit-1` to `fit-8`: budgets from the smallest plan to that of `plain`, measured twice, the second
  time in the opposite order;
- `checkpoint-k`: each block, or each k-th one, in `torch.utils.checkpoint`; `fit-at-checkpoint-k`
  is the plan for its measured peak;
- `double`: twice the context at the budget of `plain`, and `double-plain` without a budget;
- `compiled-…`: the same with compiled blocks, and `compiled-torch-b` with torch's
  `activation_memory_budget`.

Cases that a record has are not run again (`--resume`).
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from memory_fit import measured_step
from memory_models import Decoder, Row, on_meta
from memory_musts import BUDGETS, fit_for, musts

import stepscope
from stepscope.analysis.predict.fit import MARGIN
from stepscope.planning.fit import plans_of_step

LAYERS, CONTEXT = 8, 16_384
EVERY = (1, 2, 4)
TORCH_BUDGETS = (1.0, 0.5, 0.0)

Prepare = Callable[[Any, torch.optim.Optimizer, Any], dict[str, Any]]


def row_of(context: int = CONTEXT) -> Row:
    return Row(partial(Decoder, LAYERS, 4096, 32, 8, 14336), (1, context))


class Cases:
    """Runs cases that no record has, until the time is over."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._end = time.perf_counter() + options.seconds
        self._without_gpu = options.without_gpu
        self.known = _lines_of(options.resume) if options.resume else {}
        self.is_complete = True

    def run(self, case: str, prepare: Prepare, row: Row | None = None) -> Iterator[dict[str, Any]]:
        if case not in self.known:
            if time.perf_counter() > self._end:
                self.is_complete = False
                return
            self.known[case] = {"case": case, **self._measured(prepare, row or row_of())}
        yield self.known[case]

    def peak(self, case: str) -> int | None:
        """The measured peak of a case; None before it has run."""
        peak: int | None = self.known.get(case, {}).get("peak_bytes")
        return peak

    def _measured(self, prepare: Prepare, row: Row) -> dict[str, Any]:
        started = time.perf_counter()
        told: dict[str, Any] = {}
        try:
            if self._without_gpu:
                model, optimizer = on_meta(row)
                told |= prepare(model, optimizer, row.batch("cpu"))
            else:
                told |= measured_step(row, lambda *step: told.update(prepare(*step)))
        except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
            told["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        finally:
            torch.compiler.reset()
            gc.collect()
        return told | {"seconds": round(time.perf_counter() - started, 1)}


def _lines_of(record: Path) -> dict[str, dict[str, Any]]:
    if not record.exists():
        return {}
    lines = map(json.loads, record.read_text().splitlines())
    return {line["case"]: line for line in lines if "case" in line and "error" not in line}


def budgets(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cases = Cases(options)
    yield from cases.run("plain", _nothing)
    limits = _limits()
    for number, limit in enumerate(limits, 1):
        yield from cases.run(f"fit-{number}", partial(_fit, limit))
    for every in EVERY:
        yield from cases.run(f"checkpoint-{every}", partial(_checkpoint, every))
        yield from _at_peak_of(cases, f"checkpoint-{every}", _fit)
    if (peak := cases.peak("plain")) is not None:
        twice = row_of(2 * CONTEXT)
        yield from cases.run("double-plain", _nothing, twice)
        yield from cases.run("double", partial(_fit, peak), twice)
    for share in TORCH_BUDGETS:
        with torch._functorch.config.patch(activation_memory_budget=share):
            yield from cases.run(f"compiled-torch-{share:g}", _compile)
        yield from _at_peak_of(cases, f"compiled-torch-{share:g}", _compiled_fit)
    for every in EVERY[:2]:
        yield from cases.run(f"compiled-checkpoint-{every}", partial(_compiled_checkpoint, every))
        yield from _at_peak_of(cases, f"compiled-checkpoint-{every}", _compiled_fit)
    for number, limit in reversed([*enumerate(limits, 1)]):
        yield from cases.run(f"fit-{number}-again", partial(_fit, limit))
    yield from musts(cases.known)
    if not cases.is_complete:
        print("not complete: run again with --resume and this record")


def _limits() -> list[int]:
    """Budgets from just above the smallest plan to just above the step as it is."""
    row = row_of()
    model, optimizer = on_meta(row)
    plans = plans_of_step(model, optimizer, row.batch("cpu"), dtype=row.dtype)
    smallest, largest = plans[-1].peak, plans[0].peak
    step = (largest - smallest) / (BUDGETS - 1)
    # A plan is measured to have a little more than the sum that selects it.
    return [int((MARGIN + 0.01) * (smallest + n * step)) for n in range(BUDGETS)]


def _at_peak_of(cases: Cases, case: str, fit: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """A plan whose predicted peak is at most the measured one of another case."""
    peak = cases.peak(case)
    if peak is not None:
        yield from cases.run(fit_for(case), partial(fit, int(MARGIN * peak)))


def _nothing(model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
    del model, optimizer, batch
    return {}


def _fit(budget: int, model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
    started = time.perf_counter()
    fitted = stepscope.fit(model, optimizer, batch, budget=budget, dtype=torch.bfloat16)
    return {
        "budget_bytes": budget,
        "predicted_bytes": fitted.peak,
        "predicted_ms": 1e3 * fitted.seconds,
        "to_host_bytes": fitted.plan.to_host,
        "plan": str(fitted),
        "fit_s": round(time.perf_counter() - started, 1),
    }


def _checkpoint(every: int, model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
    del optimizer, batch
    model.every = every
    return {}


def _compile(model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
    del optimizer, batch
    for block in model.blocks:
        block.compile()
    return {}


def _compiled_checkpoint(every: int, model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
    return _compile(model, optimizer, batch) | _checkpoint(every, model, optimizer, batch)


def _compiled_fit(budget: int, model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
    return _compile(model, optimizer, batch) | _fit(budget, model, optimizer, batch)
