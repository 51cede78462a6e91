"""Findings of the benchmark study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stepscope.analysis.checks import PHASES_OFF
from stepscope.analysis.conclusions import NOTHING, Conclusion, conclude, joined
from stepscope.analysis.effects import Effect, ratio
from stepscope.analysis.group_checks import check_group
from stepscope.analysis.limits import (
    host_bound,
    median_ms,
    phase_sums,
)
from stepscope.errors import some
from stepscope.records.schema import Record
from stepscope.records.stats import Summary, summarize
from stepscope.report.blocks import Finding, Value
from stepscope.report.format import duration, number, percent, rate
from stepscope.studies.benchmark.rows import (
    BenchmarkRow,
    DtypePair,
    common_context,
    is_steady,
    pairs_of,
)
from stepscope.views.builders import failure_findings, finding, grouped

_PASSES = ("forward", "backward", "optimizer")
_AS_EXPECTED = 0.3
"""Largest distance from 2 at which a ratio needs no explanation."""
_GAIN = 1.1
"""Smallest gain that counts: two runs differ by less."""


def benchmark_findings(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    yield from _phase_times(rows)
    yield from _backward_over_forward(rows)
    yield from _cpu_bound(rows)
    yield from dtype_findings(rows)
    yield from _phases_against_step(rows)
    yield from _failures(rows)
    yield from _checks(rows)


def _backward_over_forward(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """The ratio by size against the 2:1 of the FLOPs, at the longest context that was measured."""
    by_size: dict[tuple[str, str], BenchmarkRow] = {}
    for row in _of_one_variant(rows):
        work = row.workload
        key = (f"{work.table} {work.size}" if work.table != "2025" else work.size, work.dtype)
        if row.ratio is not None and (
            key not in by_size or work.context > by_size[key].workload.context
        ):
            by_size[key] = row
    if not by_size:
        return
    several = len({dtype for _, dtype in by_size}) > 1
    ratios = {f"{size}{f' {dtype}' * several}": row for (size, dtype), row in by_size.items()}

    listed = ", ".join(f"{name} {number(row.ratio or 0, 3)}" for name, row in ratios.items())
    yield finding(
        "benchmark.backward-over-forward",
        f"Backward pass over forward pass (2 by FLOPs): {listed}.",
        [
            source[0]
            for row in ratios.values()
            for part in ("forward", "backward")
            if (source := row.source(part)) is not None
        ],
        {name: row.ratio for name, row in ratios.items()},
        conclusion=_why_the_ratio_departs(list(ratios.values())),
    )


def _phase_times(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """Mean and standard deviation of the passes of each size at the most frequent context, and the
    least steady of them."""
    timed = [row for row in _of_one_variant(rows) if row.forward and row.backward]
    timed = [row for row in timed if row.workload.context == common_context(timed)]
    values: dict[str, Value] = {}
    listed, spreads = [], []
    for row in timed:
        parts = []
        for part in _PASSES:
            summary: Summary | None = getattr(row, part)
            if summary is None:
                continue
            values |= {f"{row.name} {part}": summary.mean, f"{row.name} {part} std": summary.std}
            parts.append(f"{part} {duration(summary.mean)} ± {duration(summary.std)}")
            spreads.append((summary.std / summary.mean, f"{part} of {row.name}"))
        listed.append(f"{row.name}: {', '.join(parts)}")
    if not listed:
        return
    most, where = max(spreads)
    yield finding(
        "benchmark.phase-times",
        f"{'; '.join(listed)}. The standard deviation is at most {percent(most)} of the mean"
        f" ({where}).",
        [record for row in timed for record in row.done],
        values | {"spread": most, "spread_of": where},
    )


def _of_one_variant(rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    """The rows that differ from the first one in size, context and dtype alone."""

    def variant(row: BenchmarkRow) -> tuple[object, ...]:
        work = row.workload
        return (work.attention, work.compile, work.batch, tuple(work.overrides.items()))

    return [row for row in rows if variant(row) == variant(rows[0])]


def _why_the_ratio_departs(rows: Sequence[BenchmarkRow]) -> Conclusion:
    """Explain the ratio of times: the ratio of FLOPs times that of the two rates."""
    known = [(row, effect) for row in rows if (effect := row.ratio_effect) is not None]
    least, most = 2.0 - _AS_EXPECTED, 2.0 + _AS_EXPECTED
    apart = [
        (row, effect)
        for row, effect in known
        if effect.against(most).above or effect.against(least).below
    ]
    if not apart:
        bounds = [effect.against(end) for _, effect in known for end in (least, most)]
        return conclude("The FLOPs explain it.", *bounds)
    row, effect = max(apart, key=lambda pair: abs(pair[1].value - 2.0))
    departs = effect.against(most if effect.value > most else least)
    backward = row.source("backward")
    assert row.forward is not None
    assert row.backward is not None
    assert backward is not None
    share = host_bound(backward[0])
    if share is not None and share.bound:
        return conclude(
            f"{row.name} is CPU-bound ({percent(share.fraction)} of the step ends with an empty"
            " launch queue), so time follows the number of launches, not the FLOPs.",
            departs,
            share.effect,
        )
    if row.flops is None:
        return NOTHING
    forward_rate = row.flops.forward / row.forward.median * 1e3
    backward_rate = row.flops.backward / row.backward.median * 1e3
    faster = backward_rate > forward_rate
    better, worse = ("backward", "forward") if faster else ("forward", "backward")
    return conclude(
        f"For {row.name} the forward pass runs at {rate(forward_rate, 'FLOP/s')} and the backward"
        f" pass at {rate(backward_rate, 'FLOP/s')}: the {worse} pass spends a larger share of its"
        " time outside matmuls (copies, elementwise work, memory that is touched for the first"
        f" time), the {better} pass a smaller one.",
        departs,
    )


def _cpu_bound(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """Steps in which the GPU is idle while the CPU launches."""
    shares = [
        (share, row, record)
        for row in rows
        for record in row.done
        if (share := host_bound(record)) is not None
    ]
    if not shares:
        return
    records = [record for _, _, record in shares]
    bound = [row.name for share, row, _ in shares if share.bound]
    if not bound:
        return
    names = some(list(dict.fromkeys(bound)))
    shown = [share.effect for share, _, _ in shares if share.effect.above]
    yield finding(
        "benchmark.host-limits",
        f"{len(bound)} of {len(shares)} steps are CPU-bound: their launch queue runs empty"
        f" ({names}).",
        records,
        {"steps": len(bound), "of": len(shares), "names": names},
        conclusion=conclude(
            f"In {len(shown)} of them the GPU is shown to wait for the CPU: a faster dtype cannot"
            " help; more work per launch can (a larger batch or context, torch.compile, CUDA"
            " graphs).",
            *shown,
        )
        if shown
        else NOTHING,
        tone="warn",
    )


def dtype_findings(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """Speedup of each dtype over float32.

    A CPU-bound step takes as long in any dtype: the GPU waits for launches, and autocast adds some.
    """
    for dtype, pairs in grouped(pairs_of(rows), lambda pair: pair.workload.dtype).items():
        low = min(pairs, key=lambda pair: pair.speedup or 0.0)
        high = max(pairs, key=lambda pair: pair.speedup or 0.0)
        least = ""
        if low is not high:
            least = f" and {number(low.speedup or 0.0, 3)}× on {low.name}{_by_phase(low)}"
        useless = [pair for pair in pairs if _gain(pair).below]
        yield from _gain_by_size(dtype, pairs)
        yield finding(
            "benchmark.dtype-gain",
            f"{dtype} instead of float32 makes the step {number(high.speedup or 0.0, 3)}× as fast"
            f" on {high.name}{_by_phase(high)}{least}.",
            [record for pair in pairs for row in pair for record in row.done],
            {
                "dtype": dtype,
                "most": high.speedup,
                "most_on": high.name,
                "least": low.speedup,
                "least_on": low.name,
                "without_gain": len(useless),
            },
            conclusion=joined(*_why_no_gain(useless)),
            tone="warn" if useless else "info",
        )


def _gain_by_size(dtype: str, pairs: Sequence[DtypePair]) -> Iterator[Finding]:
    """The speedup of each pass by size, at the most frequent context."""
    context = common_context([pair.row for pair in pairs])
    sized = {
        pair.workload.size: pair
        for pair in pairs
        if pair.workload.context == context
        and pair.workload.attention == pairs[0].workload.attention
        and pair.workload.compile == pairs[0].workload.compile
    }
    if len(sized) < 2:
        return
    listed = [f"{size} {number(p.speedup or 0.0, 3)}×{_by_phase(p)}" for size, p in sized.items()]
    first, *_, last = sized.values()
    grows = None
    if (small := first.effect) is not None and (large := last.effect) is not None:
        grows = Effect(large.value / small.value, large.low / small.high, large.high / small.low)
    yield finding(
        "benchmark.dtype-by-size",
        f"Speedup of a step in {dtype} over float32 at context {context}: {', '.join(listed)}.",
        [record for pair in sized.values() for row in pair for record in row.done],
        {size: pair.speedup for size, pair in sized.items()} | {"dtype": dtype},
        conclusion=NOTHING
        if grows is None
        else conclude(
            f"It {'grows' if grows.above else 'falls'} with the size:"
            f" {number(grows.value, 3)} times as much on {last.workload.size} as on"
            f" {first.workload.size}.",
            grows,
        ),
    )


def _by_phase(pair: DtypePair) -> str:
    gains = [
        f"{phase} {number(gain, 3)}×"
        for phase in ("forward", "backward", "optimizer")
        if (gain := pair.gain(phase)) is not None
    ]
    return f" ({', '.join(gains)})" if len(gains) > 1 else ""


def _gain(pair: DtypePair) -> Effect:
    """The speedup against the smallest that counts."""
    assert pair.effect is not None
    return pair.effect.against(_GAIN)


def _why_no_gain(useless: Sequence[DtypePair]) -> Iterator[Conclusion]:
    """The steps that a dtype does not speed up, by what limits them."""
    waiting = {pair: pair.host for pair in useless if pair.host is not None and pair.host.bound}
    others = [pair for pair in useless if pair not in waiting]
    if waiting:
        least = min(host.fraction for host in waiting.values())
        yield conclude(
            f"It does not help {_names(waiting)}: these steps are CPU-bound (at least"
            f" {percent(least)} of each ends with an empty launch queue), so faster"
            " kernels only make the GPU wait longer, and autocast's casts are additional launches.",
            *map(_gain, waiting),
            *(host.effect for host in waiting.values()),
        )
    if others:
        on_cpu = any(pair.row.records[0].environment.device_kind == "cpu" for pair in others)
        why = (
            ": this CPU has no faster unit for the dtype, or none at all."
            if on_cpu
            else ", not CPU-bound: what the matmuls gain is lost in casts and in operators that"
            " move as many bytes as before."
        )
        yield conclude(f"It does not help {_names(others)}{why}", *map(_gain, others))


def _names(pairs: Iterable[DtypePair]) -> str:
    return some(list(dict.fromkeys(pair.name for pair in pairs)), 8)


def _phases_against_step(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """Compare the sum of the phases with steps that have no marks between them."""
    off = [
        (abs(summarize(sums).median / step - 1.0), f"{row.name}, {mode}", record)
        for row in rows
        for mode, record in row.by_mode.items()
        if (step := median_ms(record, "step")) and (sums := phase_sums(record))
    ]
    if not off:
        return
    worst, name, record = max(off, key=lambda entry: entry[0])
    middle = sorted(value for value, _, _ in off)[len(off) // 2]
    close = sum(value <= PHASES_OFF for value, _, _ in off)
    records = [entry[2] for entry in off]
    agreement = "add up to the step that was timed as one"
    if not close:
        agreement = "do not add up to the step that was timed as one"
    elif close < len(off):
        agreement += f" within {percent(PHASES_OFF)} in {close} of {len(off)} cases"
    doubt = "" if is_steady(record) else ", whose samples are not steady"
    yield finding(
        "benchmark.phases-sum",
        f"The phases {agreement}: {percent(middle)} apart in the median of {len(off)},"
        f" {percent(worst)} at most ({name}{doubt}).",
        records,
        {"close": close, "of": len(off), "middle": middle, "worst": worst, "case": name},
        tone="good" if all(map(_add_up, records)) else "info",
    )


def _add_up(record: Record) -> bool:
    """True if the phases add up to the step within the tolerance, whatever the noise."""
    step, sums = record.find("step"), phase_sums(record)
    if step is None or not sums or not is_steady(record):
        return False
    effect = ratio(step.values, sums)
    return effect.against(1 - PHASES_OFF).above and effect.against(1 + PHASES_OFF).below


def _failures(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    named = [(f"{row.name} {mode}", record) for row in rows for mode, record in row.by_mode.items()]
    yield from failure_findings("benchmark.failed", named)


def _checks(rows: Sequence[BenchmarkRow]) -> Iterator[Finding]:
    """Failed checks of records against each other, by code; those of single records are in the list
    of all records."""
    records = [record for row in rows for record in row.records]
    of_groups = check_group(records)
    failed = [(check, record) for record in records for check in of_groups.get(record.id, ())]
    for code, members in grouped(failed, lambda pair: pair[0].code).items():
        yield finding(
            "benchmark.failed-check",
            f"Check {code} failed {len(members)}×, first: {members[0][0].message}",
            [record for _, record in members],
            {"check": code, "times": len(members)},
            tone="warn",
            timed=False,
        )
