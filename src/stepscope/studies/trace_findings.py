"""What the summary of a trace says, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.analysis.trace.summary import KernelRow, Summary
from stepscope.report.blocks import Finding
from stepscope.report.format import count, duration, percent

HOST_LIMITS_FROM = 0.25
"""From this share of idle time without a launch on, the host is what to look at first."""

TRACED_APART = 0.02
"""Traced steps that differ by more than this from the timed ones are told apart from them."""

_WORTH = 0.05
_TENSOR = "tensor cores"


def trace_findings(
    summary: Summary, step_ms: float | None = None, loading_ms: float | None = None
) -> tuple[Finding, ...]:
    """`step_ms` is the step without the profiler, where it was timed, and `loading_ms` what of it
    is spent in a DataLoader."""
    return (
        _account(summary, step_ms),
        *_idle(summary, step_ms),
        *_data(summary, step_ms, loading_ms),
        *_matmul(summary),
        *_top_kernel(summary),
        *_units(summary),
        _attribution(summary),
        *_uneven(summary),
    )


def _account(summary: Summary, step_ms: float | None) -> Finding:
    wall = summary.wall_ms
    whose, aside = "A step", ""
    if step_ms and abs(wall / step_ms - 1) > TRACED_APART:
        whose, aside = "A traced step", f" ({duration(step_ms)} without the profiler)"
    what = "the device works" if summary.on_device else "operators run"
    things = "kernels" if summary.on_device else "operators"
    text = (
        f"{whose} takes {duration(wall)}{aside}: {what} for {percent(summary.busy_ms / wall)} of"
        f" it, in {count(round(summary.launches))} {things}."
    )
    if summary.cut == "nothing":
        text = (
            "No step is marked in this trace, and fewer than three steps of an optimizer are in it:"
            f" the whole of it is taken, as if it were one step. It takes {duration(wall)}: {what}"
            f" for {percent(summary.busy_ms / wall)} of it."
        )
    elif summary.cut == "optimizer":
        text = (
            f"No step is marked in this trace: {len(summary.steps)} steps are cut where the"
            f" optimizer has stepped, and what lies before and after them is left out. {text}"
        )
    if summary.doubt:
        return Finding(text=f"{text} The ledger does not close: {summary.doubt}.", tone="warn")
    share = percent(summary.residual_ms / wall)
    return Finding(text=f"{text} The ledger closes with a residual of {share}.", tone="good")


def host_idle(summary: Summary, step_ms: float | None) -> float:
    """Share of the step in which the device has nothing to run because the host is late.

    The profiler makes the host slower and leaves kernels as they are, so it is at most what the
    traced kernels do not fill of the step as it is without it.
    """
    traced = summary.idle_of("host") / summary.wall_ms
    return traced if not step_ms else min(traced, max(0.0, 1 - summary.busy_ms / step_ms))


def _idle(summary: Summary, step_ms: float | None) -> Iterator[Finding]:
    wall = summary.wall_ms
    host = host_idle(summary, step_ms)
    waits, queue, between = (
        summary.idle_of(cause) / wall for cause in ("synchronisation", "queue", "between")
    )
    if host >= HOST_LIMITS_FROM:
        yield Finding(
            text=f"The host limits this step: for {percent(host)} of it the device has nothing to"
            " run, because the next kernel was not launched before the one before it had ended. A"
            " lower precision or faster kernels cannot help with that part; fewer launches can"
            " (a larger batch, torch.compile, a CUDA graph).",
            tone="warn",
        )
    elif host >= _WORTH:
        yield Finding(text=f"The device waits for launches for {percent(host)} of the step.")
    if waits >= 0.01:
        meanwhile = summary.waited_busy_ms / summary.waited_ms if summary.waited_ms else 0.0
        yield Finding(
            text=f"The device is idle while the host waits for it, for {percent(waits)} of the"
            f" step. In all the host waits {duration(summary.waited_ms)} in a step, and during"
            f" {percent(meanwhile)} of that the device works.",
            tone="warn" if waits >= _WORTH else "info",
        )
    if queue >= _WORTH:
        yield Finding(
            text=f"For {percent(queue)} of the step the device is between two kernels that were"
            " both launched in time: many short kernels, or a stream that waits for another."
        )
    if between >= _WORTH:
        yield Finding(
            text=f"No operator runs for {percent(between)} of the step: there the program is in"
            " Python or in the dispatcher, or it waits for something that is no operator (a file, a"
            " lock, another process)."
        )


def _data(summary: Summary, step_ms: float | None, loading_ms: float | None) -> Iterator[Finding]:
    spent, whole = summary.data_ms, summary.wall_ms
    if step_ms and loading_ms is not None:
        spent, whole = loading_ms, step_ms
    # Medians of two series: what is a part of every step can be longer than the median step.
    spent = min(spent, whole)
    if spent / whole >= _WORTH:
        yield Finding(
            text=f"The loop spends {duration(spent)} of each step, {percent(spent / whole)}, in its"
            " DataLoader. Workers can hide that where cores are free to load ahead; where they"
            " compete with the step for cores, it may get slower.",
            tone="warn",
        )


def _matmul(summary: Summary) -> Iterator[Finding]:
    # Not the busy time: where the ledger does not close, its classes come to more than that.
    kinds = {line.kind for line in summary.lines if line.phase != "idle"}
    shares = sorted(((max(0.0, summary.class_ms(kind)), kind) for kind in kinds), reverse=True)
    busy = sum(ms for ms, _ in shares)
    if busy <= 0:
        return
    largest = ", ".join(f"{kind} {percent(ms / busy)}" for ms, kind in shares[:4] if ms > 0)
    yield Finding(text=f"Of the time in which something runs: {largest}.")


def top_kernels(summary: Summary, phase: str | None = None) -> list[tuple[str, float, float]]:
    """Name, milliseconds and count in a step, of all phases together or of one; longest first."""
    found: dict[str, tuple[float, float]] = {}
    for row in summary.kernels:
        if phase in (None, row.phase):
            ms, times = found.get(row.kernel, (0.0, 0.0))
            found[row.kernel] = (ms + row.ms, times + row.count)
    return sorted(((k, ms, n) for k, (ms, n) in found.items()), key=lambda one: -one[1])


def _top_kernel(summary: Summary) -> Iterator[Finding]:
    total = sum(row.ms for row in summary.kernels)
    if total <= 0:
        return
    name, ms, times = top_kernels(summary)[0]
    about = next(row for row in summary.kernels if row.kernel == name)
    unit = f" on {about.unit}" if about.unit else ""
    yield Finding(
        text=f"{name} ({about.kind}{unit}) takes the most time: {duration(ms)} in"
        f" {_calls(times, len(summary.steps))}, {percent(ms / total)} of all"
        f" {'kernel' if summary.on_device else 'operator'} time."
    )


def _calls(in_a_step: float, steps: int) -> str:
    """In whole numbers: steps that are not alike have a fraction of a call in the mean."""
    if abs(in_a_step - round(in_a_step)) < 1e-6:
        return f"{count(round(in_a_step))} {'call' if round(in_a_step) == 1 else 'calls'}"
    return f"a step, {count(round(in_a_step * steps))} calls in {steps} steps"


def _units(summary: Summary) -> Iterator[Finding]:
    """Whether the matrix products use tensor cores, as far as their names tell."""
    products: list[KernelRow] = [
        row for row in summary.kernels if row.kind in ("matmul", "attention") and row.unit
    ]
    total = sum(row.ms for row in products)
    if not summary.on_device or total <= 0 or total < _WORTH * summary.busy_ms:
        return
    without = sum(row.ms for row in products if _TENSOR not in row.unit)
    if without >= 0.5 * total:
        yield Finding(
            text=f"{percent(without / total)} of the time of matrix products is spent on FP32 or"
            " FP64 cores, not on tensor cores: TF32, bfloat16 or float16 would use those.",
            tone="warn",
        )
    else:
        yield Finding(
            text=f"{percent(1 - without / total)} of the time of matrix products is spent on"
            " tensor cores."
        )


def _attribution(summary: Summary) -> Finding:
    shares = summary.shares
    text = (
        f"Known of the time of all {'kernels' if summary.on_device else 'operators'}: the class"
        f" for {percent(shares.kind)}, the phase for {percent(shares.phase)}"
    )
    if shares.module > 0:
        text += f", the part of the model for {percent(shares.module)}"
    if shares.backward_module > 0:
        text += f" (of the backward {percent(shares.backward_module)})"
    return Finding(text=f"{text}.")


def _uneven(summary: Summary) -> Iterator[Finding]:
    steps = sorted(summary.steps)
    median = steps[len(steps) // 2]
    if len(steps) >= 3 and steps[-1] > 1.5 * median:
        yield Finding(
            text=f"The steps are uneven: the longest takes {duration(steps[-1])}, the median"
            f" {duration(median)}.",
            tone="warn",
        )
    if summary.outliers:
        worst = summary.outliers[0]
        what = f"; {worst.different[0]}" if worst.different else ""
        where = f" in {worst.where}" if worst.where else ""
        yield Finding(
            text=f"{len(summary.outliers)} instances took far longer than their peers:"
            f" {worst.kernel}{where} took {duration(worst.us / 1e3)} against"
            f" {duration(worst.median_us / 1e3)}{what}.",
            tone="warn",
        )
