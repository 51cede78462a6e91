"""Findings of a trace's summary."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from stepscope.analysis.conclusions import conclude
from stepscope.analysis.effects import part
from stepscope.analysis.kernels.matmuls import ON_TENSOR_CORES
from stepscope.analysis.kernels.tensor_cores import is_amd, tensor_core_dtypes
from stepscope.analysis.trace.summary import Gap, KernelRow, Summary
from stepscope.records.stats import summarize
from stepscope.report.blocks import Finding
from stepscope.report.format import counted, duration, percent
from stepscope.views.builders import grouped

HOST_LIMITS_FROM = 0.25
"""Share of idle time without a launch from which the CPU is the first thing to look at."""

TRACED_APART = 0.02
"""Difference above which traced steps are distinguished from the timed ones."""

_WORTH = 0.05


def trace_findings(
    summary: Summary,
    step_ms: float | None = None,
    loading_ms: float | None = None,
    records: tuple[str, ...] = (),
) -> tuple[Finding, ...]:
    """`step_ms` is the step without the profiler, if it was timed, and `loading_ms` its time in a
    DataLoader. `records` are the ids of the records that they come from."""
    findings = (
        *_break(summary),
        _ledger(summary, step_ms),
        *_idle(summary, step_ms),
        *_gaps(summary),
        *_data(summary, step_ms, loading_ms),
        *_top_kernel(summary),
        *_units(summary),
        *_uneven(summary),
    )
    return tuple(msgspec.structs.replace(one, records=records) for one in findings)


def _break(summary: Summary) -> Iterator[Finding]:
    if summary.truncated:
        yield Finding(
            code="trace.truncated",
            timed=False,
            text="The file is truncated: it was read up to its end, and the rest is missing."
            " The profiler writes kernels after operators, so times and shares of the device may be"
            " too low. Export the trace again.",
            tone="warn",
        )


def _ledger(summary: Summary, step_ms: float | None) -> Finding:
    wall = summary.wall_ms
    whose, aside = "A step", ""
    if step_ms and abs(wall / step_ms - 1) > TRACED_APART:
        whose, aside = "A traced step", f" ({duration(step_ms)} without the profiler)"
    what = "the device works" if summary.on_device else "operators run"
    thing = "kernel" if summary.on_device else "operator"
    text = (
        f"{whose} takes {duration(wall)}{aside}: {what} for {percent(summary.busy_ms / wall)} of"
        f" it, in {counted(round(summary.launches), thing)}."
    )
    if summary.cut == "nothing":
        text = (
            "No step is marked in this trace, and it contains fewer than three optimizer steps:"
            f" the full trace is treated as one step. It takes {duration(wall)}: {what}"
            f" for {percent(summary.busy_ms / wall)} of it."
        )
    elif summary.cut == "optimizer":
        text = (
            f"No step is marked in this trace: {len(summary.steps)} steps are cut at optimizer"
            f" steps, and what lies before and after them is left out. {text}"
        )
    unattributed = summary.unattributed_ms / wall
    sums = f"{percent(unattributed)} of the time is unattributed."
    if summary.doubt:
        sums = f"Too much of the time is unattributed: {summary.doubt}."
    return Finding(
        code="trace.unattributed" if summary.doubt else "trace.attributed",
        values={
            "wall_ms": wall,
            "busy": summary.busy_ms / wall,
            "launches": round(summary.launches),
            "unattributed": unattributed,
            "cut": summary.cut,
        },
        text=f"{text} {sums}",
        tone="warn" if summary.doubt else "good",
    )


def host_idle(summary: Summary, step_ms: float | None) -> float:
    """Share of the step in which the device has nothing to run because the CPU is late.

    The profiler slows the CPU down and leaves kernels unchanged, so it is at most what the traced
    kernels do not fill of the step without the profiler.
    """
    traced = summary.idle_of("CPU") / summary.wall_ms
    return traced if not step_ms else min(traced, max(0.0, 1 - summary.busy_ms / step_ms))


def _idle(summary: Summary, step_ms: float | None) -> Iterator[Finding]:
    wall = summary.wall_ms
    host = host_idle(summary, step_ms)
    waits, queue, between = (
        summary.idle_of(cause) / wall for cause in ("synchronization", "queue", "between")
    )
    if host >= HOST_LIMITS_FROM:
        yield Finding(
            code="trace.host-limits",
            values={"idle": host, "in_long_gaps": summary.long_host_ms / wall},
            text=f"For {percent(host)} of the step the device has nothing to run: the next kernel"
            " was not launched before the previous one ended.",
            conclusion=conclude(
                f"The CPU limits this step. {_host_remedy(summary, host)}",
                part(host * wall, summarize(summary.steps)),
            ),
            tone="warn",
        )
    elif host >= _WORTH:
        yield Finding(
            code="trace.waits-for-launches",
            values={"idle": host},
            text=f"The device waits for launches for {percent(host)} of the step.",
        )
    if waits >= 0.01:
        meanwhile = summary.waited_busy_ms / summary.waited_ms if summary.waited_ms else 0.0
        yield Finding(
            code="trace.synchronization",
            values={"idle": waits, "waited_ms": summary.waited_ms, "meanwhile_busy": meanwhile},
            text=f"The device is idle while the CPU waits for it, for {percent(waits)} of the"
            f" step. In total the CPU waits {duration(summary.waited_ms)} per step, and during"
            f" {percent(meanwhile)} of that the device works.",
            tone="warn" if waits >= _WORTH else "info",
        )
    if queue >= _WORTH:
        yield Finding(
            code="trace.between-kernels",
            values={"idle": queue},
            text=f"For {percent(queue)} of the step the device is between two kernels that were"
            " both launched in time: many short kernels, or a stream that waits for another.",
        )
    if between >= _WORTH:
        yield Finding(
            code="trace.no-operator",
            values={"idle": between},
            text=f"No operator runs for {percent(between)} of the step: the program is in"
            " Python or in the dispatcher, or it waits for something other than an operator (a"
            " file, a lock, another process).",
        )


def _host_remedy(summary: Summary, host: float) -> str:
    """Change that would remove the gaps: only short gaps come from the number of launches."""
    in_long = summary.long_host_ms / summary.wall_ms
    if host - in_long < HOST_LIMITS_FROM:
        return (
            f"Of that, {percent(min(1.0, in_long / host))} is in gaps of 1 ms and more, which"
            " neither fewer launches nor faster kernels would remove: look at what the CPU does in"
            " them."
        )
    if summary.replayed >= 0.5:
        return (
            f"CUDA graphs already launch {percent(summary.replayed)} of the kernels, so the time is"
            " lost between graphs: in what the CPU does from one to the next."
        )
    return (
        "A lower precision or faster kernels cannot help with that part; fewer launches can (a"
        " larger batch, torch.compile, a CUDA graph)."
    )


def _gaps(summary: Summary) -> Iterator[Finding]:
    """The longest gaps, if they are a large part of the idle time."""
    idle = summary.idle_ms * len(summary.steps)
    total_ms = summary.wall_ms * len(summary.steps)
    if idle < _WORTH * total_ms or not summary.gaps:
        return
    shown = [gap for gap in summary.gaps if gap.ms >= 0.1 * idle]
    if not shown:
        return
    by_host = grouped(shown, lambda gap: gap.host)
    listed = "; ".join(_same_host(host, gaps) for host, gaps in by_host.items())
    which = "The longest gap" if len(shown) == 1 else f"The {len(shown)} longest gaps"
    share = min(1.0, sum(gap.ms for gap in shown) / idle)
    makes = "makes" if len(shown) == 1 else "make"
    yield Finding(
        code="trace.long-gaps",
        values={"gaps": len(shown), "of_idle": share},
        text=f"{which} {makes} up {percent(share)} of the device's idle time: {listed}.",
        tone="warn",
    )


def _same_host(host: str, gaps: list[Gap]) -> str:
    what = f"the CPU was in {host}" if host else "the trace does not show what the CPU did"
    if len(gaps) == 1:
        return f"{duration(gaps[0].ms)} {_where(gaps[0])} ({what})"
    total = duration(sum(gap.ms for gap in gaps))
    return f"{total} in {len(gaps)} gaps, the longest {_where(gaps[0])} (each time {what})"


def _where(gap: Gap) -> str:
    if gap.first:
        return "before the first kernel"
    return f"before {gap.next}" if gap.next else "after the last kernel"


def _data(summary: Summary, step_ms: float | None, loading_ms: float | None) -> Iterator[Finding]:
    spent, total_ms = summary.data_ms, summary.wall_ms
    if step_ms and loading_ms is not None:
        spent, total_ms = loading_ms, step_ms
    # Medians of two series: a part of every step can be longer than the median step.
    spent = min(spent, total_ms)
    if spent / total_ms >= _WORTH:
        yield Finding(
            code="trace.data-loading",
            values={"loading_ms": spent, "share": spent / total_ms},
            text=f"The loop spends {duration(spent)} of each step, {percent(spent / total_ms)}, in"
            " its DataLoader.",
            conclusion=conclude(
                "Workers can hide it if cores are free to load ahead; if they compete with the step"
                " for cores, it may get slower.",
                part(spent, summarize(summary.steps)),
            ),
            tone="warn",
        )


def top_kernels(summary: Summary, phase: str | None = None) -> list[tuple[str, float, float]]:
    """Name, milliseconds and count per step, of all phases together or of one; longest first."""
    by_name: dict[str, tuple[float, float]] = {}
    for row in summary.kernels:
        if phase in (None, row.phase):
            ms, times = by_name.get(row.kernel, (0.0, 0.0))
            by_name[row.kernel] = (ms + row.ms, times + row.count)
    return sorted(((k, ms, n) for k, (ms, n) in by_name.items()), key=lambda one: -one[1])


def _top_kernel(summary: Summary) -> Iterator[Finding]:
    total = sum(row.ms for row in summary.kernels)
    if total <= 0:
        return
    name, ms, times = top_kernels(summary)[0]
    about = next(row for row in summary.kernels if row.kernel == name)
    unit = f" on {about.unit}" if about.unit else ""
    yield Finding(
        code="trace.top-kernel",
        values={"kernel": name, "class": about.kind, "ms": ms, "calls": times, "share": ms / total},
        text=f"{name} ({about.kind}{unit}) takes the most time: {duration(ms)} in {_calls(times)},"
        f" {percent(ms / total)} of all"
        f" {'kernel' if summary.on_device else 'operator'} time.",
    )


def _calls(times: float) -> str:
    """Calls per step: a mean over steps that differ is not an integer."""
    if abs(times - round(times)) < 1e-3:
        return counted(round(times), "call")
    return f"{times:.1f} calls on average"


def _units(summary: Summary) -> Iterator[Finding]:
    """Use of tensor cores by matmuls, as far as kernel names show it."""
    matmuls: list[KernelRow] = [
        row for row in summary.kernels if row.kind in ("matmul", "attention") and row.unit
    ]
    total = sum(row.ms for row in matmuls)
    if not summary.on_device or total <= 0 or total < _WORTH * summary.busy_ms:
        return
    without = sum(row.ms for row in matmuls if not row.unit.endswith(ON_TENSOR_CORES))
    cores = "matrix cores" if is_amd(summary.device) else "tensor cores"
    if without >= 0.5 * total:
        dtypes = tensor_core_dtypes(summary.device, summary.capability)
        yield Finding(
            code="trace.no-tensor-cores",
            values={
                "share": without / total,
                "device_has": None if dtypes is None else bool(dtypes),
            },
            text=f"{percent(without / total)} of the matmul time is spent on FP32 or FP64"
            f" cores, not on {cores}{_dtype_remedy(dtypes, cores)}.",
            tone="warn" if dtypes != () else "info",
        )
    else:
        yield Finding(
            code="trace.tensor-cores",
            values={"share": 1 - without / total},
            text=f"{percent(1 - without / total)} of the matmul time is spent on {cores}.",
        )


def _dtype_remedy(dtypes: tuple[str, ...] | None, cores: str) -> str:
    if dtypes is None:
        return f": a lower precision would use them, if the device has {cores} for it"
    if not dtypes:
        return ", which this device does not have"
    *others, last = dtypes
    either = f"{', '.join(others)} or {last}" if others else last
    return f": {either} would use them"


def _uneven(summary: Summary) -> Iterator[Finding]:
    steps = sorted(summary.steps)
    median = steps[len(steps) // 2]
    if len(steps) >= 3 and steps[-1] > 1.5 * median:
        yield Finding(
            code="trace.uneven-steps",
            values={"longest_ms": steps[-1], "median_ms": median},
            text=f"The steps are uneven: the longest takes {duration(steps[-1])}, the median"
            f" {duration(median)}.",
            tone="warn",
        )
    if summary.outliers:
        worst = summary.outliers[0]
        what = f"; {worst.different[0]}" if worst.different else ""
        where = f" in {worst.where}" if worst.where else ""
        yield Finding(
            code="trace.outliers",
            values={
                "instances": len(summary.outliers),
                "kernel": worst.kernel,
                "us": worst.us,
                "median_us": worst.median_us,
            },
            text=f"{len(summary.outliers)} instances took far longer than their peers:"
            f" {worst.kernel}{where} took {duration(worst.us / 1e3)} against"
            f" {duration(worst.median_us / 1e3)}{what}.",
            tone="warn",
        )
