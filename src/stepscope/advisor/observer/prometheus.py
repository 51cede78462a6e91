"""A line of an observer in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from stepscope.analysis.observed.lines import PARTS, Steps


def prometheus_text(rank: int, line: Steps, alarms: Sequence[str]) -> str:
    """Return the metrics of a rank; `alarms` are the codes of its alarms so far."""
    return "\n".join(_lines(rank, line, alarms)) + "\n"


def _lines(rank: int, line: Steps, alarms: Sequence[str]) -> Iterator[str]:
    def metric(name: str, kind: str, about: str, values: dict[str, float]) -> Iterator[str]:
        yield f"# HELP stepscope_{name} {about}"
        yield f"# TYPE stepscope_{name} {kind}"
        for labels, value in values.items():
            yield f'stepscope_{name}{{rank="{rank}"{labels}}} {value:.9g}'

    parts = {f',part="{part}"': line.part_ms(part) / 1e3 for part in PARTS}
    sizes = {
        "allocated": line.allocated_bytes,
        "reserved": line.reserved_bytes,
        "resident": line.resident_bytes,
    }
    memory = {f',kind="{name}"': float(n) for name, n in sizes.items() if n is not None}
    counts = {f',code="{code}"': float(n) for code, n in Counter(alarms).items()}
    yield from metric("steps_total", "counter", "Training steps so far.", {"": line.step})
    yield from metric(
        "step_seconds", "gauge", "Mean time of the latest steps.", {"": line.step_ms / 1e3}
    )
    yield from metric("step_part_seconds", "gauge", "Mean time of a step in each part.", parts)
    yield from metric("memory_bytes", "gauge", "Memory at the end of a step.", memory)
    yield from metric("alarms_total", "counter", "Deviations so far.", counts)
