"""Predictions learn from verifications, and the page reports their accuracy."""

from __future__ import annotations

import random

import pytest
from test_advice_rules import facts

from stepscope.advisor.advise.history_view import history_blocks
from stepscope.analysis.advice.calibration import Verified, factors, is_right, median_error
from stepscope.analysis.advice.changes import advise
from stepscope.analysis.advice.facts import Facts
from view_blocks import figures_of, findings_of, tables_of

STEP: Facts = facts({"matmul": 80.0}, {}, dtype="float32")
TRULY = {"tf32": 35.0, "bfloat16": 60.0}
"""True gains of these changes on a fictitious device; the rules predict 70 and 74.7 ms."""


def verify(history: list[Verified], noise: float = 0.0) -> None:
    """Advise with the history so far, and append the realized gains."""
    draw = random.Random(len(history))
    for one in advise(STEP, factors(history, "H200")):
        gained = TRULY[one.code] * (1 + noise * draw.uniform(-1, 1))
        history.append(
            Verified(
                device="H200",
                code=one.code,
                predicted_ms=one.gain_ms,
                realized_ms=gained,
                step_ms=STEP.step_ms,
                factor=one.factor,
            )
        )


def test_predictions_converge_to_the_realized_gains() -> None:
    history: list[Verified] = []
    errors = []
    for _ in range(12):
        verify(history)
        errors.append(median_error(history[-2:]) or 0.0)
    assert errors[0] == pytest.approx((0.35 + 0.147) / 2)
    # The fictitious verification that was exactly right counts less and less.
    assert errors[1] < 0.6 * errors[0]
    assert max(errors[2:]) < 0.01
    assert factors(history, "H200")["tf32"] == pytest.approx(0.5)


def test_predictions_stay_stable_under_noise() -> None:
    history: list[Verified] = []
    for _ in range(30):
        verify(history, noise=0.3)
    corrections = factors(history, "H200")
    assert corrections["tf32"] == pytest.approx(0.5, rel=0.3)
    assert corrections["bfloat16"] == pytest.approx(60 / 74.85, rel=0.3)


def test_a_correction_applies_to_one_device() -> None:
    history: list[Verified] = []
    verify(history)
    assert factors(history, "H100") == {}


def test_right_is_a_gain_within_a_third_of_the_predicted() -> None:
    def gained(realized: float) -> bool:
        return is_right(
            Verified(device="", code="", predicted_ms=9.0, realized_ms=realized, step_ms=100.0)
        )

    assert [gained(ms) for ms in (5.9, 6.0, 12.0, 12.1, -1.0)] == [False, True, True, False, False]


def test_the_page_shows_the_history_of_the_error() -> None:
    history: list[Verified] = []
    assert history_blocks(history, "H200") == ()
    for _ in range(4):
        verify(history)
    blocks = history_blocks(history, "H200")
    so_far, trend = findings_of(blocks)
    assert (so_far.code, so_far.values["verified"]) == ("advice.predictions-so-far", 8)
    assert so_far.text.startswith("Verified predictions on this device: 8. For ")
    assert trend.code == "advice.predictions-trend"
    assert trend.values == {
        "first_half_off": pytest.approx(0.146, abs=1e-3),
        "second_half_off": pytest.approx(0.0, abs=1e-3),
    }
    assert trend.text.startswith(
        "The median error was 14.6 % for the first half of them and 0.0 % for"
    )
    (figure,) = figures_of(blocks).values()
    assert sorted(figure.curves[0].y[:2]) == pytest.approx([14.7, 35.0])
    (table,) = tables_of(blocks).values()
    rows = {row[0]: row for row in table.rows}
    assert rows["tf32"][1:4] == (4, pytest.approx(0.7), pytest.approx(0.35))
    assert history_blocks(history, "H100") == ()
