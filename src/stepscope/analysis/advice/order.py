"""Order of changes where times are not reliable: by what other work on the machine changes less.

It is an order only. No gain, no limit and no rank follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stepscope.analysis.advice.changes import predictions
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.rule import WORTH
from stepscope.records.stats import Ratio

DEVICE_TIME, OPERATOR_TIME = "device time", "traced operator time"
CPU_TIME, INSTRUCTIONS = "CPU time", "instructions"


class Order(NamedTuple):
    codes: tuple[str, ...]
    """Best first."""
    titles: tuple[str, ...]
    by: str


def predicted_order(facts: Facts) -> Order | None:
    """Return the changes by the predicted reduction of the work in the traced kernels of a GPU, or
    the operators of a CPU; None if not even an order is known. The time to launch kernels is left
    out: on a busy machine it is that of other processes, too."""
    if not facts.ordered or not facts.device_ms:
        return None
    saved = {
        (one.code, one.title): facts.device_ms - after.device_ms / after.samples
        for one, after in predictions(facts)
    }
    worth = {one: ms for one, ms in saved.items() if ms >= WORTH * facts.device_ms}
    ordered = sorted(worth, key=lambda one: -worth[one])
    by = DEVICE_TIME if facts.on_gpu else OPERATOR_TIME
    return _order(ordered, by)


def _order(ordered: list[tuple[str, str]], by: str) -> Order | None:
    if not ordered:
        return None
    return Order(tuple(code for code, _ in ordered), tuple(title for _, title in ordered), by)


def measured_order(ratios: Mapping[tuple[str, str], Ratio], by: str) -> Order | None:
    """Return the combinations, by code and title, that reduce the work, from the ratio of it to the
    unchanged step's; None if none is shown to."""
    shown = {one: ratio for one, ratio in ratios.items() if ratio.high < 1}
    return _order(sorted(shown, key=lambda one: shown[one].value), by)
