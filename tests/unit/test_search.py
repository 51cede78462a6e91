"""Search over combinations of changes, and the order of their trials."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from search_facts import llama
from stepscope.advisor.advise.cases import OF_SCRIPTS
from stepscope.analysis.advice.changes import predictions
from stepscope.analysis.advice.plan import Plan, Result
from stepscope.analysis.advice.search import Space
from stepscope.analysis.advice.stopping import is_decided
from stepscope.records.stats import Ratio, sequential_ratio


def test_a_change_that_pays_only_with_others_is_in_the_first_trial() -> None:
    """Alone, TF32 gains more than bfloat16, which launches more kernels; together with what removes
    the launches bfloat16 is much faster."""
    space = Space(llama(), OF_SCRIPTS)
    gains = {one.code: one.gain_ms for one, _ in predictions(llama())}
    assert gains["tf32"] > gains["bfloat16"] > 0
    first = Plan(space, []).next()
    assert first is not None
    assert first.purpose == "best predicted"
    assert first.combination.codes == {"bfloat16", "accelerate", "train-step"}
    assert first.combination.step_ms < 20


def test_every_combination_is_consistent() -> None:
    facts = llama(
        data_ms=3.0, pageable_ms=0.5, cleared_ms=0.4, reads_back=False, waits="copies",
        rates={"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12, "fp8": 1600e12}, lacks=(),
        linear_ms=20.0, linear_matmuls=84.0,
    )  # fmt: skip
    space = Space(facts, OF_SCRIPTS)
    assert len(space.known) >= 12
    combinations = space.combinations()
    assert len(combinations) > 20
    for one in combinations:
        pairs = [(a, b) for a in one.advice for b in one.advice if a is not b]
        assert not any(a.conflicts_with(b) for a, b in pairs)


def test_no_combination_left_out_is_predicted_to_be_faster() -> None:
    """The search leaves out what a change without a rival improves; the best is the same as that of
    all subsets."""
    from itertools import combinations as subsets

    space = Space(llama(), OF_SCRIPTS)
    codes = sorted(entry.code for entry in space.entries())
    wanted = [c for c in codes if space.best({c}, space.known - {c}) is not None or c == "compile"]
    best = min(one.step_ms for one in space.combinations())
    for size in (1, 2, 3):
        for some in subsets(wanted, size):
            for one in space.combinations(some, space.known - {*some}):
                assert one.step_ms >= best - 1e-9


def ratio(value: float, half: float = 0.005) -> Ratio:
    return Ratio(value=value, low=value - half, high=value + half, level=0.99)


def run(space: Space, times: dict[frozenset[str], float], most: int = 20, **how: Any) -> list[str]:
    """Run a plan with planted times, in ms; a combination without one takes what is predicted.
    Negative: it cannot be made."""
    results: list[Result] = []
    codes: list[str] = []
    while (planned := Plan(space, results, **how).next()) is not None and len(results) < most:
        one = planned.combination
        took = times.get(one.codes, one.step_ms)
        works = took > 0
        value = ratio(took / space.facts.step_ms) if works else None
        results.append(Result(one.advice, value, works))
        codes.append("+".join(sorted(one.codes)))
    return codes


def test_members_are_left_out_one_at_a_time_then_others_are_added() -> None:
    codes = run(Space(llama(), OF_SCRIPTS), {})
    assert codes[0] == "accelerate+bfloat16+train-step"
    assert set(codes[1:4]) == {
        "accelerate+bfloat16",
        "accelerate+train-step",
        "bfloat16+train-step",
    }
    assert all("compile" not in one for one in codes[:4])


def test_a_member_that_does_not_pay_is_dropped() -> None:
    space = Space(llama(), OF_SCRIPTS)
    first = Plan(space, []).next()
    assert first is not None
    whole = first.combination
    without = space.without(whole, "accelerate")
    results = [
        Result(whole.advice, ratio(0.15), True),
        Result(without.advice, ratio(0.151), True),
    ]
    plan = Plan(space, results)
    assert plan.best == {"bfloat16", "train-step"}
    slower = [results[0], Result(without.advice, ratio(0.2), True)]
    assert Plan(space, slower).best == whole.codes
    tried = [one.combination.codes for one in plan.trials()]
    assert all("accelerate" not in one for one in tried), "not tried again"


def test_changes_that_there_is_no_time_for_are_left_out() -> None:
    space = Space(llama(), OF_SCRIPTS)
    first = Plan(space, [], without=("train-step",)).next()
    assert first is not None
    assert first.combination.codes
    assert "train-step" not in first.combination.codes
    whole = space.best(("train-step",))
    assert whole is not None
    known = [Result(whole.advice, ratio(0.15), True)]
    planned = [
        one.combination.codes for one in Plan(space, known, without=("train-step",)).trials()
    ]
    assert planned
    assert all("train-step" not in codes for codes in planned)


def test_a_combination_that_fails_is_tried_without_its_members() -> None:
    space = Space(llama(), OF_SCRIPTS)
    everything = frozenset({"bfloat16", "accelerate", "train-step"})
    codes = run(space, {everything: -1.0}, most=3)
    assert codes[0] == "accelerate+bfloat16+train-step"
    assert codes[1] in ("accelerate+bfloat16", "bfloat16+train-step", "accelerate+train-step")
    whole = space.best(everything)
    assert whole is not None
    refuted = Result(whole.advice, None, False, frozenset({"train-step"}))
    after = Plan(space, [refuted]).next()
    assert after is not None
    assert "train-step" not in after.combination.codes


def test_what_a_running_program_can_leave_out_comes_first() -> None:
    space = Space(llama(), OF_SCRIPTS)
    codes = run(space, {}, most=2, switchable=lambda one: one.code == "bfloat16")
    assert codes[1] == "accelerate+train-step"


def test_named_changes_are_tried_whatever_is_predicted() -> None:
    space = Space(llama(), OF_SCRIPTS, only=("tf32", "bfloat16"))
    assert sorted(run(space, {})) == ["bfloat16", "tf32"]
    space = Space(llama(), OF_SCRIPTS, only=("fused-attention",))
    assert run(space, {}) == ["fused-attention"]


def test_a_larger_batch_is_tried_alone_and_last() -> None:
    facts = llama(batch=8, memory_bytes=140 << 30, peak_bytes=10 << 30, saved_bytes=5 << 30)
    codes = run(Space(facts, OF_SCRIPTS), {})
    assert codes[-1] == "larger-batch"
    assert not any("larger-batch" in one for one in codes[:-1])


def test_the_plan_continues_from_its_results() -> None:
    """The next trial depends on the results only: an interrupted search is the same one."""
    space = Space(llama(), OF_SCRIPTS)
    codes = run(space, {}, most=6)
    assert codes == run(space, {}, most=6)
    assert len(codes) == len(set(codes)), "nothing is tried twice"


def test_a_correction_changes_the_prediction() -> None:
    plain = Space(llama(), OF_SCRIPTS).best()
    corrected = Space(llama(), OF_SCRIPTS, {"accelerate": 0.5}).best()
    assert plain is not None
    assert corrected is not None
    assert corrected.step_ms > plain.step_ms


@pytest.mark.parametrize(
    ("low", "high", "best", "decided"),
    [
        (0.49, 0.51, None, True),
        (0.40, 0.60, None, False),
        (0.99, 1.30, None, True),
        (0.90, 1.20, None, False),
        (0.60, 0.62, 0.50, True),
        (0.495, 0.515, 0.50, True),  # They differ by less than a change must gain.
        (0.50, 0.56, 0.50, False),
    ],
)
def test_a_trial_ends_when_its_sign_and_size_are_known(
    low: float, high: float, best: float | None, decided: bool
) -> None:
    one = Ratio(value=(low + high) / 2, low=low, high=high, level=0.99)
    assert is_decided(one, None if best is None else ratio(best)) is decided


def test_an_interval_that_allows_stopping_is_wider_and_narrows() -> None:
    base = [100.0 + n % 3 for n in range(15)]
    new = [50.0 + n % 2 for n in range(15)]
    few, many = (sequential_ratio(base[:n], new[:n]) for n in (3, 15))
    assert few.low < many.low < 0.5 < many.high < few.high
    with pytest.raises(ValueError, match="3 rounds"):
        sequential_ratio(base[:2], new[:2])


def test_facts_without_a_gain_have_no_combination() -> None:
    tuned = replace(
        llama(), dtype="bfloat16", captured=True, compiled=True, fused_optimizer=True,
        attention=(), compiled_by_accelerate=False, reads_back=False, waits="",
    )  # fmt: skip
    space = Space(tuned, OF_SCRIPTS)
    assert space.best() is None
    assert Plan(space, []).next() is None
