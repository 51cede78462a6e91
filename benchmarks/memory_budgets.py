"""Plans of `stepscope.fit` under budgets, against other ways to save memory.

A decoder with blocks of the shape of an 8B model. One model is built, and follows one plan after
the other. Cases, each a line of JSON:

- `plain`: without a plan;
- `fit-1` to `fit-8`: budgets from the smallest plan to that of `plain`, measured twice, the second
  time in the opposite order;
- `checkpoint-k`: each block, or each k-th one, in `torch.utils.checkpoint`; `fit-at-checkpoint-k`
  is the plan for its measured peak;
- `double`: twice the context at the budget of `plain`, and `double-plain` without a budget;
- `compiled-…`: the same with compiled blocks, and `compiled-torch-b` with torch's
  `activation_memory_budget`.

Cases that a record has are not run again (`--resume`). On a CPU (`--tiny`) bytes are counted.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from memory_fit import known_lines, measured_steps
from memory_models import Decoder, Row, on_meta
from memory_musts import BUDGETS, fit_for, musts
from torch import Tensor

import stepscope
from stepscope.analysis.predict.fit import MARGIN
from stepscope.planning.application import application_of, apply_plan
from stepscope.planning.fit import Fitted, plans_of_step

LAYERS, CONTEXT = 6, 16_384
TINY_CONTEXT, TINY_VOCAB = 1024, 256
EVERY = (1, 2, 4)
COMPILED_EVERY = (1,)
TORCH_BUDGETS = (0.5, 0.0)


class Bench:
    """The model and its batches, and the cases that are known or measured until the time is over.
    A case is measured within a context, which yields what is recorded of it besides."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._end = time.perf_counter() + options.seconds
        self.known = known_lines(options, "case")
        self.is_complete = True
        # As many heads of keys as of queries: kernels of float32 need it.
        shape = (256, 4, 4, 1024) if options.tiny else (4096, 32, 8, 14336)
        self._context = TINY_CONTEXT if options.tiny else CONTEXT
        # Matmuls in bfloat16 are emulated on most CPUs.
        dtype = None if options.tiny else torch.bfloat16
        vocab = {"vocab": TINY_VOCAB} if options.tiny else {}
        self.row = Row(partial(Decoder, LAYERS, *shape, **vocab), (1, self._context), dtype)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._built: Any = None
        self._planned: dict[int, Fitted] = {}

    @property
    def step(self) -> Any:
        """Model and optimizer, which are built where a case needs them."""
        if self._built is None:
            with torch.device(self._device):
                model = self.row.build().train()
            self._built = model, self.row.make_optimizer(model)
        return self._built

    def batch(self, times: int) -> Tensor:
        return torch.zeros(1, times * self._context, dtype=torch.long, device=self._device)

    def limits(self) -> list[int]:
        """Budgets from just above the smallest plan to just above the step as it is."""
        model, optimizer = on_meta(self.row)
        plans = plans_of_step(model, optimizer, self.row.batch("cpu"), dtype=self.row.dtype)
        smallest, largest = plans[-1].peak, plans[0].peak
        step = (largest - smallest) / (BUDGETS - 1)
        # A plan is measured to have a little more than the sum that selects it.
        return [int((MARGIN + 0.01) * (smallest + n * step)) for n in range(BUDGETS)]

    def run(
        self, case: str, prepared: Callable[[Tensor], Any], times: int = 1
    ) -> Iterator[dict[str, Any]]:
        if case in self.known:
            return
        if time.perf_counter() > self._end:
            self.is_complete = False
            return
        started, facts, batch = time.perf_counter(), {}, self.batch(times)
        try:
            with prepared(batch) as more:
                facts |= (more or {}) | measured_steps(*self.step, batch, self.row.dtype)
        except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
            facts["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        model, _ = self.step
        model.zero_grad()
        gc.collect()
        facts["seconds"] = round(time.perf_counter() - started, 1)
        self.known[case] = {"case": case, **facts}
        yield self.known[case]

    def peak(self, case: str) -> int | None:
        """The measured peak of a case; None before it has run."""
        peak: int | None = self.known.get(case, {}).get("peak_bytes")
        return peak

    @contextmanager
    def fitted(self, budget: int, batch: Tensor) -> Iterator[dict[str, Any]]:
        """Follow the fastest plan within a budget."""
        started = time.perf_counter()
        fitted = stepscope.fit(*self.step, batch, budget=budget, dtype=self.row.dtype)
        self._planned[budget] = fitted
        try:
            yield _facts(fitted) | {"fit_s": round(time.perf_counter() - started, 1)}
        finally:
            fitted.undo()

    @contextmanager
    def fitted_again(self, budget: int, batch: Tensor) -> Iterator[dict[str, Any]]:
        """Follow a plan for the second time."""
        if (fitted := self._planned.get(budget)) is None:
            with self.fitted(budget, batch) as facts:
                yield facts
            return
        applied = apply_plan(*self.step, application_of(fitted.plan))
        try:
            yield _facts(fitted)
        finally:
            applied.remove()

    @contextmanager
    def checkpointed(self, every: int, batch: Tensor) -> Iterator[None]:
        del batch
        model, _ = self.step
        model.every = every
        try:
            yield
        finally:
            model.every = 0

    @contextmanager
    def compiled(self, prepared: Callable[[Tensor], Any], batch: Tensor) -> Iterator[Any]:
        """Compile the blocks."""
        blocks = self.step[0].blocks
        for block in blocks:
            block.compile()
        try:
            with prepared(batch) as facts:
                yield facts
        finally:
            for block in blocks:
                block._compiled_call_impl = None
            torch.compiler.reset()


def _facts(fitted: Fitted) -> dict[str, Any]:
    return {
        "budget_bytes": fitted.budget,
        "predicted_bytes": fitted.peak,
        "predicted_ms": 1e3 * fitted.seconds,
        "to_host_bytes": fitted.plan.to_host,
        "plan": str(fitted),
    }


def budgets(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    bench = Bench(options)
    limits = bench.limits()
    if options.without_gpu:
        yield from _predictions(bench, limits)
        return
    yield from bench.run("plain", _nothing)
    for number, limit in enumerate(limits, 1):
        yield from bench.run(f"fit-{number}", partial(bench.fitted, limit))
    for number, limit in reversed([*enumerate(limits, 1)]):
        yield from bench.run(f"fit-{number}-again", partial(bench.fitted_again, limit))
    for every in EVERY:
        yield from bench.run(f"checkpoint-{every}", partial(bench.checkpointed, every))
        yield from _at_peak_of(bench, f"checkpoint-{every}")
    if (peak := bench.peak("plain")) is not None:
        yield from bench.run("double-plain", _nothing, 2)
        yield from bench.run("double", partial(bench.fitted, peak), 2)
    for share in TORCH_BUDGETS:
        with torch._functorch.config.patch(activation_memory_budget=share):
            case = f"compiled-torch-{share:g}"
            yield from bench.run(case, partial(bench.compiled, _nothing))
        yield from _at_peak_of(bench, case)
    for every in COMPILED_EVERY:
        case = f"compiled-checkpoint-{every}"
        checkpointed = partial(bench.checkpointed, every)
        yield from bench.run(case, partial(bench.compiled, checkpointed))
        yield from _at_peak_of(bench, case)
    yield from musts(bench.known)
    if not bench.is_complete:
        print("not complete: run again with --resume and this record")


def _predictions(bench: Bench, limits: list[int]) -> Iterator[dict[str, Any]]:
    for number, limit in enumerate(limits, 1):
        model, optimizer = on_meta(bench.row)
        batch = bench.row.batch("cpu")
        fitted = stepscope.fit(model, optimizer, batch, budget=limit, dtype=bench.row.dtype)
        yield {"case": f"fit-{number}", **_facts(fitted)}


def _at_peak_of(bench: Bench, case: str) -> Iterator[dict[str, Any]]:
    """A plan whose predicted peak is at most the measured one of another case."""
    peak = bench.peak(case)
    if peak is not None:
        prepared: Any = partial(bench.fitted, int(MARGIN * peak))
        if case.startswith("compiled-"):
            prepared = partial(bench.compiled, prepared)
        yield from bench.run(fit_for(case), prepared)


def _nothing(batch: Tensor) -> Any:
    del batch
    return nullcontext({})
