"""benchmarks/step_loss: the training text, and loss curves of the rungs."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from step_loss import STUDY
from step_loss.cases import LossFlags
from step_loss.measure import FOLLOWERS, begin_again, entropy, sequences
from step_loss.rows import loss_curves

from step_records import loss_record
from stepscope.errors import UsageError
from stepscope.measure.device import CpuDevice
from stepscope.records.schema import Record
from stepscope.studies.step.ladder import start
from stepscope.training.transformer import TransformerStep


def test_begin_again_resets_master_weights() -> None:
    work = msgspec.structs.replace(
        start("tiny", "tiny", 8, 1, {"vocab": 32, "n_layers": 1}),
        dtype="bfloat16-master",
        optimizer="stepscope-fused",
    )
    step = TransformerStep(work, CpuDevice())
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step.run_phases()
    begin_again(step, before)
    for parameter, initial in zip(step.model.parameters(), before, strict=True):
        assert parameter.equal(initial)
        state = step.optimizer.state[parameter]
        assert state["master"].equal(initial.float())
        assert not any(state[name].any() for name in ("step", "exp_avg", "exp_avg_sq"))


class TestText:
    def test_the_seed_selects_rows_of_one_markov_chain(self) -> None:
        first, again = (sequences(50, 40, 1000, seed=3) for _ in "ab")
        other = sequences(50, 40, 1000, seed=4)
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)
        followers: dict[int, set[int]] = {}
        for row in (*first, *other):
            for word, after in itertools.pairwise(row):
                followers.setdefault(int(word), set()).add(int(after))
        assert max(map(len, followers.values())) <= FOLLOWERS

    def test_words_are_within_a_small_vocabulary(self) -> None:
        rows = sequences(10, 30, 7, seed=0)
        assert rows.min() >= 0
        assert rows.max() < 7

    def test_entropy_is_that_of_the_next_word(self) -> None:
        shares = 1 / np.arange(1, 9) / (1 / np.arange(1, 9)).sum()
        assert entropy() == pytest.approx(-(shares * np.log(shares)).sum())


class TestView:
    def blocks(self, *records: Record) -> dict[str, Any]:
        """Tables and figures by name, findings by code."""
        return {getattr(b, "name", None) or b.code: b for b in STUDY.view(records)}

    def test_curves_are_compared_with_the_same_seed(self) -> None:
        falling = [9.0 - step * 0.1 for step in range(50)]
        records = [
            *(loss_record("start", seed, [value + seed for value in falling]) for seed in (0, 1)),
            loss_record("bf16", 0, [value * 1.001 for value in falling]),
            loss_record("bf16", 1, [(value + 1) * 0.998 for value in falling]),
            loss_record("flash", 0, [value * 1.02 for value in falling]),
        ]
        curves = loss_curves(STUDY.results(records))
        assert curves["bf16"].apart(curves["start"]) == pytest.approx(-0.002)
        assert curves["start"].fell_by() == pytest.approx(1 - 5.3 / 10.0)
        blocks = self.blocks(*records)
        table = blocks["step-loss"]
        assert [row[-1] for row in table.rows] == [None, "same", "deviates"]
        figure = blocks["step-loss-apart"]
        # In percent, each seed against the baseline with the same seed.
        means = {curve.label: sum(curve.y) / len(curve.y) for curve in figure.curves}
        assert means == pytest.approx({"bf16": -0.05, "flash": 2.0})
        apart = blocks["step.loss-apart"]
        assert (apart.values["flash"], apart.tone) == (pytest.approx(0.02), "warn")
        assert "bf16" not in apart.values
        assert apart.text.endswith(
            " The final loss deviates by more than 0.5 %: flash attention (2.0 %)."
        )
        same = self.blocks(*records[:-1])["step.loss-same"]
        assert (same.values["farthest"], same.tone) == ("bf16", "good")
        assert same.values["apart"] == pytest.approx(0.002)
        assert same.text == (
            "In 50 steps the loss of the float32 step falls by 47.0 %. The other rungs (1) end"
            " within 0.5 % of it; the largest deviation is 0.2 % (bfloat16 autocast)."
        )

    def test_without_learning_curves_are_not_compared(self) -> None:
        flat = [9.0] * 20
        blocks = self.blocks(loss_record("start", 0, flat), loss_record("bf16", 0, flat))
        short = blocks["step.not-learnt"]
        assert (short.values, short.tone) == ({"steps": 20, "fell_by": 0.0}, "warn")
        assert short.conclusion == (
            "That is too little to compare the other rungs: train for more steps."
        )
        table = blocks["step-loss"]
        assert [row[-1] for row in table.rows] == [None, "too few steps"]


def test_one_rung_can_be_trained_again() -> None:
    all_cases = STUDY.cases(LossFlags(seeds=(0,)))
    again = STUDY.cases(LossFlags(seeds=(0,), only=("low-precision-grads",)))
    assert [case.rung for case in again] == ["low-precision-grads"]
    assert again[0] in all_cases
    with pytest.raises(UsageError, match="rung"):
        STUDY.cases(LossFlags(rungs=("flash",), only=("low-precision-grads",)))


@pytest.mark.parametrize(
    ("flags", "rungs"),
    [
        ({"only": ("fused-projections",)}, {"fused-projections"}),
        ({"only": ("flash",)}, {"flash"}),
        ({"only": ("flash", "fused-projections")}, {"flash", "fused-projections"}),
        ({"rungs": ("tf32", "flash")}, {"start", "tf32", "flash"}),
    ],
)
def test_requested_rungs_are_cases_even_if_a_change_does_not_apply(
    flags: dict[str, tuple[str, ...]], rungs: set[str]
) -> None:
    lacks = CpuDevice().lacks()
    cases = STUDY.cases_here(LossFlags(**flags), lacks)  # type: ignore[arg-type]
    assert {case.rung for case in cases} == rungs
    for case in cases:
        absent = case.rung in ("fused-projections", "tf32")
        assert bool(set(case.needs) & set(lacks)) is absent
        assert not absent or case.seed == 0
    here = LossFlags()
    assert STUDY.cases_here(here, ()) == STUDY.cases(here)
