"""Waterfall from the ideal time of an observed step to the measured time, by cause.

The parts add up exactly. The FLOPs of a user's operations are counted, but their bytes are unknown:
the ideal time is that of the matmuls plus moving the optimizer's bytes once.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.analysis.limits import hardware_limit, matrix_ceiling, measured_ceilings
from stepscope.analysis.parts import OPTIMIZER, SLOW_MATMULS
from stepscope.analysis.power import power_capped
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.verdict import Limit
from stepscope.analysis.waterfall import Ideal, Waterfall, spent_in, waterfall
from stepscope.report.blocks import Block, Finding
from stepscope.report.format import duration
from stepscope.views.builders import capitalized
from stepscope.views.energy import capped_finding
from stepscope.views.program.rows import ProgramRecord, resting_on
from stepscope.views.waterfall import figure

_MATMUL = "matmul."


def step_limit(lead: ProgramRecord) -> Limit | None:
    """The hardware limit of a step, the same as in the verdict: that of the fastest dtype."""
    record = lead.record
    ceilings = measured_ceilings(record)
    rates = {
        name.removeprefix(_MATMUL): ceiling.value
        for name, ceiling in ceilings.items()
        if name.startswith(_MATMUL)
    }
    own = matrix_ceiling(record)
    if own is not None and not rates:
        rates = {lead.case.dtype: own.value}
    bandwidth = record.ceiling("memory.copy")
    return hardware_limit(
        record.quantity("flops") or 0.0,
        int(record.quantity("parameters") or 0),
        lead.case.dtype,
        rates,
        bandwidth.value if bandwidth is not None and bandwidth.value > 0 else None,
        doubts={name: ceiling.doubt for name, ceiling in ceilings.items()},
    )


def program_waterfall(
    summary: Summary, limit: Limit | None, step_ms: float, waited_less_ms: float = 0.0
) -> Waterfall:
    """The waterfall of a step, whose ideal time is its hardware limit."""
    ideal = []
    if limit is not None:
        ideal = [
            Ideal("matmuls", SLOW_MATMULS, limit.matmul_ms),
            Ideal("bytes of the optimizer", OPTIMIZER, limit.update_ms),
        ]
    return waterfall(summary, spent_in(summary), ideal, step_ms, waited_less_ms)


def waterfall_blocks(lead: ProgramRecord, name: str) -> tuple[Block, ...]:
    limit, summary, step_ms = step_limit(lead), lead.summary, lead.step_ms
    if limit is None or summary is None or not step_ms:
        return ()
    water = program_waterfall(summary, limit, step_ms, lead.waited_less_ms)
    capped = power_capped(lead.record)
    return (
        *resting_on(
            lead,
            (
                *_too_low(water),
                *capped_finding({"this step": capped} if capped else {}),
            ),
        ),
        figure(
            water,
            f"{name}-waterfall",
            "From the ideal time to the measured step",
            "A waterfall: time of the step beyond its ideal time (matmuls at the measured rate, the"
            " optimizer's bytes at the measured bandwidth), by part. Each bar starts where the"
            " previous one ends; the parts add up to the measured time. The slowdown of traced"
            " steps is subtracted from their idle time.",
        ),
    )


def _too_low(water: Waterfall) -> Iterator[Finding]:
    for label, ms in water.faster.items():
        yield Finding(
            code="inspect.rate-too-low",
            values={"part": label, "least_ms": ms, "took_ms": water.ideal[label]},
            text=f"{capitalized(label)} would take {duration(ms)} at the rates measured"
            f" here, but took {duration(water.ideal[label])}: these rates were measured too low,"
            " perhaps on a busy machine (`stepscope run` with --new-ceilings measures them again),"
            " or the FLOPs are overestimated. The measured time is used as the ideal.",
            tone="warn",
        )
