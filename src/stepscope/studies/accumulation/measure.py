"""Measure the sums, dot products and squares."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stepscope.records.schema import Quantity, Series
from stepscope.studies.accumulation.cases import (
    OVERFLOWED,
    AccumulationCase,
    DotCase,
    HalvesCase,
    SquareCase,
    SumCase,
)
from stepscope.studies.base import Bench, Measurement

if TYPE_CHECKING:
    import torch

_MARKS_PER_DECADE = (1, 2, 5)
_ROWS = 64
_EDGES = (1e-24, 1e-12, 1e-5, 1e-4, 1e-3, 200.0, 300.0, 1e5, 1e19, 2e19)


def measure(case: AccumulationCase, bench: Bench) -> Measurement:
    match case:
        case SumCase():
            return _sum(case, bench)
        case DotCase():
            return _dot(case, bench)
        case SquareCase():
            return _square(case, bench)
        case HalvesCase():
            return _halves(case, bench)


def _sum(case: SumCase, bench: Bench) -> Measurement:
    """Add one term after the other, on the CPU: the arithmetic is the same everywhere."""
    import torch

    accumulator = getattr(torch, case.accumulator)
    term = torch.tensor(case.term, dtype=getattr(torch, case.terms.removesuffix("-converted")))
    if case.terms.endswith("-converted"):
        term = term.to(torch.float32)
    marks = _marks(case.count)
    total, sums, last_moved = torch.zeros((), dtype=accumulator), [], 0
    start = time.perf_counter()
    before = 0.0
    for index in range(1, case.count + 1):
        total += term
        now = total.item()
        if now != before:
            before, last_moved = now, index
        if index in marks:
            sums.append(now)
    took = (time.perf_counter() - start) * 1e3
    bench.progress(1, 1, "sum")
    values = {
        "sum": before,
        "sum_1000": sums[sorted(marks).index(1000)],
        "last_moved": last_moved,
        "term_held": term.item(),
    }
    return Measurement(
        series=(
            Series(name="partial", unit="1", values=tuple(sums)),
            Series(name="at", unit="terms", values=tuple(map(float, sorted(marks)))),
            Series(name="step", unit="ms", values=(took,)),
        ),
        quantities=_quantities(values),
    )


def _marks(count: int) -> set[int]:
    marks, decade = {1000, count}, 1
    while decade <= count:
        marks |= {decade * digit for digit in _MARKS_PER_DECADE if decade * digit <= count}
        decade *= 10
    return marks


def _dot(case: DotCase, bench: Bench) -> Measurement:
    """Multiply rows of positive numbers on the device, and accumulate them in the dtype itself."""
    import torch

    device, dtype = bench.device, case.format
    storage = torch.float32 if dtype in ("float32", "tf32") else getattr(torch, dtype)
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    generator = torch.Generator().manual_seed(0)
    on_device, by_hand = [], []
    for length in case.length:
        a, b = (
            (0.5 + torch.rand(_ROWS, length, generator=generator)).to(storage) for _ in range(2)
        )
        exact = (a.double() * b.double()).sum(dim=1)
        product = a.to(device.torch_device) @ b.to(device.torch_device).T
        on_device.append(_worst(product.diagonal().cpu().double(), exact))
        total = torch.zeros(_ROWS, dtype=storage)
        for column in (a * b).unbind(dim=1):
            total += column
        by_hand.append(_worst(total.double(), exact))
    torch.set_float32_matmul_precision("highest")
    return Measurement(
        series=(
            Series(name="device", unit="1", values=tuple(on_device)),
            Series(name="in_format", unit="1", values=tuple(by_hand)),
        )
    )


def _worst(computed: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((computed - exact) / exact).abs().max())


def _square(case: SquareCase, bench: Bench) -> Measurement:
    """Squares near the ends of the range, and the variance of numbers that are close together."""
    import torch

    dtype = getattr(torch, case.format)
    edges = torch.tensor(_EDGES, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    # Far from zero and narrow: mean(x²) - mean(x)² cancels.
    narrow = (100.0 + torch.randn(4096, generator=generator)).to(dtype)
    naive = (narrow * narrow).mean() - narrow.mean() ** 2
    exact = narrow.double().var(correction=0)
    bench.progress(1, 1, "squares")
    return Measurement(
        series=(
            Series(name="value", unit="1", values=_EDGES),
            Series(name="square", unit="1", values=tuple(_finite(edges * edges))),
        ),
        quantities=_quantities(
            {
                name: float(value)
                for name, value in (("variance", naive), ("variance_exact", exact))
                if torch.isfinite(value)
            }
        ),
    )


def _halves(case: HalvesCase, bench: Bench) -> Measurement:
    """The weight's gradient of a linear layer under a mean over the batch: as one matmul, and as
    the mean of two half batches, as two ranks compute it."""
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (torch.randn(case.rows, case.width, generator=generator) for _ in range(2))

    def gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        x, dy = (each.to(bench.device.torch_device) for each in (x, dy))
        return dy.T @ x / len(x)

    whole = gradient(inputs, outputs)
    halves = zip(inputs.chunk(2), outputs.chunk(2), strict=True)
    averaged = sum((gradient(x, dy) for x, dy in halves), torch.zeros_like(whole)) / 2
    exact = outputs.double().T @ inputs.double() / case.rows
    apart = (whole - averaged).abs().cpu()
    return Measurement(
        quantities=_quantities(
            {
                "apart": float(apart.max()),
                "differing": float((apart > 0).double().mean()),
                "largest": float(whole.abs().max()),
                "error_whole": float((whole.cpu().double() - exact).abs().max()),
                "error_averaged": float((averaged.cpu().double() - exact).abs().max()),
            }
        )
    )


def _finite(values: torch.Tensor) -> list[float]:
    """The values with OVERFLOWED for infinity, which JSON cannot represent."""
    import torch

    return [OVERFLOWED if not torch.isfinite(value) else float(value) for value in values]


def _quantities(values: dict[str, float]) -> tuple[Quantity, ...]:
    return tuple(Quantity(name=name, value=value, unit="1") for name, value in values.items())
