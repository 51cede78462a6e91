"""Finding on a step at the power cap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stepscope.analysis.power import Capped
from stepscope.report.blocks import Finding
from stepscope.report.format import number


def _clock_words(clock_mhz: float | None, highest_mhz: float | None) -> str:
    if clock_mhz is None:
        return ""
    of_highest = f" of {number(highest_mhz / 1e3, 3)}" if highest_mhz else ""
    return f"{number(clock_mhz / 1e3, 3)}{of_highest} GHz"


def capped_finding(
    capped: Mapping[str, Capped], records: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """Meaning of a waterfall's parts at the power cap, where the clock is lower."""
    if not capped:
        return
    listed = "; ".join(
        f"{name}, in {cap.readings} of {cap.of} readings, its clock at"
        f" {_clock_words(cap.clock_mhz, cap.highest_mhz)}"
        for name, cap in capped.items()
    )
    yield Finding(
        code="energy.power-capped",
        values={name: cap.clock_mhz for name, cap in capped.items()},
        records=records,
        text=f"At the power cap: {listed}. At the cap a step takes at least its energy divided by"
        " the power limit: recovering a part shortens the step by its energy, not by its time.",
    )
