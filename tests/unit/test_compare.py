from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sample_records import ceilings, environment, record, samples, times
from stepscope.analysis.compare import (
    compare_records,
    compare_runs,
    differences,
    exceeds,
    inconclusive,
)
from stepscope.errors import StepscopeError
from stepscope.records.schema import FailedCheck, Reading, Record, Series


def step(median: float, **changes: Any) -> Record:
    how = {"seed": changes.pop("seed", 0), "count": changes.pop("count", 20)}
    return record(series=(times("step", median, **how),), **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_name": "H100"}, "device_name NVIDIA H200 / H100"),
        ({"device_kind": "rocm"}, "device_kind cuda / rocm"),
        ({"device_count": 8}, "device_count 1 / 8"),
        ({"threads": 2}, "threads 16 / 2"),
        ({"torch": "2.13.0"}, "torch 2.11.0 / 2.13.0"),
        ({"cuda": "13.0"}, "cuda 12.8 / 13.0"),
        ({"power_limit_w": 500.0}, "power_limit_w 690.0 / 500.0"),
    ],
)
def test_settings_that_change_times_are_differences(change: dict[str, Any], message: str) -> None:
    assert differences(environment(), environment(**change)) == (message,)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"commit": "other", "dirty": True},
        {"driver": "999"},
        {"load_average": 4.0},
        {"power_limit_w": None},
        {"cpu": "EPYC"},
    ],
)
def test_the_subject_of_a_comparison_is_not_a_difference(change: dict[str, Any]) -> None:
    assert differences(environment(), environment(**change)) == ()


def test_on_a_cpu_the_cpu_decides() -> None:
    here = environment(device_kind="cpu")
    assert differences(here, environment(device_kind="cpu", cpu="EPYC")) == (
        "cpu Xeon 8480 / EPYC",
    )


@pytest.mark.parametrize(
    ("name", "variants", "names"),
    [
        ("step", ("eager", "compiled"), ("eager", "compiled")),
        ("step", ("slow", "fast"), ("slow", "fast")),
        ("step", ("baseline: block", "stepscope: graph"), ("baseline", "stepscope")),
        ("consecutive", ("baseline: block", "stepscope: graph"), ("baseline", "stepscope")),
    ],
)
def test_all_interleaved_variants_are_compared(
    name: str, variants: tuple[str, str], names: tuple[str, str]
) -> None:
    def interleaved(second: float, seed: int) -> Record:
        series = [
            times(name, ms, variant=variant, seed=seed)
            for variant, ms in zip(variants, (100.0, second), strict=True)
        ]
        others = times("forward", 9.0, variant="eager"), times("wall", 9.0, variant="fast")
        return record(series=(*series, *others))

    comparisons = compare_records(interleaved(50.0, 0), interleaved(150.0, 1))
    assert [one.of for one in comparisons] == [*names]
    assert [one.verdict for one in comparisons] == ["no difference shown", "slower"]
    (beyond,) = exceeds(comparisons, 0.03)
    assert beyond.name.endswith(f": {names[1]}")


def test_consecutive_steps_decide_over_single_samples() -> None:
    def race(single: float, block: float, seed: int) -> Record:
        took = {"baseline: block": (100.0, 100.0), "stepscope: graph": (single, block)}
        return record(
            series=tuple(
                times(name, ms[index], variant=variant, seed=seed)
                for index, name in enumerate(("step", "consecutive"))
                for variant, ms in took.items()
            )
        )

    comparisons = compare_records(race(100.0, 100.0, 0), race(100.0, 150.0, 1))
    assert [(one.of, one.verdict) for one in comparisons] == [
        ("baseline", "no difference shown"),
        ("stepscope", "slower"),
    ]


def test_every_size_of_a_message_is_compared() -> None:
    def sweep(second: float, seed: int) -> Record:
        sizes = {1024: 1.0, 4096: second}
        return record(
            series=tuple(
                times("collective", ms, "host", size=size, seed=seed) for size, ms in sizes.items()
            )
        )

    comparisons = compare_records(sweep(2.0, 0), sweep(3.0, 1))
    assert [(one.of, one.verdict) for one in comparisons] == [
        ("1024", "no difference shown"),
        ("4096", "slower"),
    ]


def test_a_missing_variant_is_lost_but_another_winner_of_a_side_is_not() -> None:
    three = [times("step", 10.0, variant=variant) for variant in "abc"]
    comparisons = compare_records(record(series=tuple(three)), record(series=tuple(three[:2])))
    assert [(one.of, one.lost) for one in comparisons] == [("a", False), ("b", False), ("c", True)]
    races = [
        record(
            series=(
                times("step", 10.0, variant="baseline: x"),
                times("step", 5.0, variant=f"stepscope: {variant}"),
            )
        )
        for variant in ("eager", "graph")
    ]
    assert not any(one.lost for one in compare_records(*races))


@pytest.mark.parametrize(
    ("median", "verdict"), [(110.0, "slower"), (90.0, "faster"), (100.0, "no difference shown")]
)
def test_a_comparison_has_medians_ratio_and_verdict(median: float, verdict: str) -> None:
    (comparison,) = compare_records(step(100.0), step(median, seed=1))
    assert comparison.verdict == verdict
    assert (comparison.base, comparison.new) == pytest.approx((100.0, median))
    assert comparison.unit == "ms"
    assert comparison.ratio is not None
    assert comparison.ratio.value == pytest.approx(median / 100.0)
    assert comparison.ratio.low <= comparison.ratio.value <= comparison.ratio.high
    assert comparison.p is not None
    assert (comparison.p < 0.002) == (verdict != "no difference shown")
    assert comparison.note == ""


def test_too_few_samples_are_reported() -> None:
    (comparison,) = compare_records(step(100.0, count=3), step(200.0, count=3))
    assert comparison.verdict == "too few samples"
    assert "base: only 3 samples" in comparison.note
    assert "new: only 3 samples" in comparison.note


def test_different_machines_are_refused_with_the_differences() -> None:
    other = environment(device_name="H100", torch="2.13.0")
    with pytest.raises(
        StepscopeError, match=r"device_name NVIDIA H200 / H100; torch 2\.11\.0 / 2\.13\.0"
    ):
        compare_records(step(100.0), step(100.0, environment=other))


def test_across_machines_times_are_relative_to_the_ceilings() -> None:
    fast = step(100.0, ceilings=ceilings(bfloat16=700e12))
    slow = step(
        150.0, ceilings=ceilings(bfloat16=350e12), environment=environment(device_name="A100")
    )
    (comparison,) = compare_records(fast, slow, across=True)
    assert comparison.ratio is not None
    assert comparison.ratio.value == pytest.approx(0.75)
    assert comparison.verdict == "faster"
    assert (comparison.base, comparison.new) == pytest.approx((100.0, 150.0))
    assert "own ceiling: matmul.bfloat16 700 and 350 TFLOP/s" in comparison.note
    with pytest.raises(StepscopeError, match=r"no measured matrix ceiling .*bfloat16"):
        compare_records(fast, step(1.0, ceilings=(), environment=slow.environment), across=True)


def test_across_on_one_machine_compares_times() -> None:
    (comparison,) = compare_records(step(100.0), step(120.0, ceilings=()), across=True)
    assert comparison.ratio is not None
    assert comparison.ratio.value == pytest.approx(1.2)
    assert comparison.note == ""


def test_runs_are_matched_by_study_and_case() -> None:
    base = [step(100.0, case="a"), step(100.0, case="gone"), step(100.0, case="a", study="other")]
    new = [
        step(100.0, case="fresh"),
        step(999.0, case="a"),
        step(110.0, case="a", attempt=2),
        step(100.0, case="a", study="other"),
    ]
    comparisons = compare_runs(base, new)
    assert [(c.study, c.case, c.verdict) for c in comparisons] == [
        ("benchmark", "fresh", "not compared"),
        ("benchmark", "a", "slower"),
        ("other", "a", "no difference shown"),
        ("benchmark", "gone", "not compared"),
    ]
    assert comparisons[1].new == pytest.approx(110.0)
    assert (comparisons[0].note, comparisons[3].note) == (
        "only in the new run",
        "only in the base run",
    )


@pytest.mark.parametrize(
    ("base", "new", "note"),
    [
        ({}, {"status": "oom", "reason": "out of memory"}, r"new: oom \(out of memory\)"),
        ({"status": "timeout"}, {"series": ()}, "base: timeout; new: no samples"),
        ({}, {"series": (times("forward", 1.0),)}, "step in ms .* in the base, forward in ms"),
        ({}, {"series": (times("step", 1.0, "host"),)}, "by the device's clock .* the host's"),
        (
            {},
            {"series": (Series(name="step", unit="ms", values=(0.0,) * 9, clock="device"),)},
            "not above zero",
        ),
    ],
)
def test_cases_that_cannot_be_compared_say_why(
    base: dict[str, Any], new: dict[str, Any], note: str
) -> None:
    (comparison,) = compare_records(record(**base), record(**new))
    assert comparison.verdict == "not compared"
    assert re.search(note, comparison.note)


def test_a_series_that_is_not_a_time_is_not_compared() -> None:
    rates = [
        record(series=(Series(name="bandwidth", unit="GB/s", values=samples(median)),))
        for median in (100.0, 200.0)
    ]
    (comparison,) = compare_records(*rates)
    assert comparison.verdict == "not compared"
    assert "is not a time" in comparison.note


def test_a_changed_configuration_is_noted() -> None:
    (comparison,) = compare_records(step(90.0, case="a"), step(90.0, case="a", config={"batch": 8}))
    assert comparison.note == "batch was 4 and is 8"
    trials = [step(90.0, case="a", config={"advice": [{"gain": n}]}) for n in (1, 2)]
    (comparison,) = compare_records(*trials)
    assert comparison.note == "advice differs"


def test_the_gate_needs_a_significant_slowdown_beyond_the_limit() -> None:
    base = [step(100.0, case=c) for c in "abcd"] + [step(100.0, case="e", count=3)]
    new = [
        step(108.0, case="a", seed=1),
        step(103.0, case="b", seed=1),
        step(80.0, case="c", seed=1),
        record(case="d", status="oom", series=()),
        step(200.0, case="e", count=3),
    ]
    comparisons = compare_runs(base, new)
    assert [c.case for c in exceeds(comparisons, 0.05)] == ["a", "d"]
    assert [c.case for c in exceeds(comparisons, 0.0)] == ["a", "b", "d"]
    assert [c.case for c in exceeds(comparisons, 0.10)] == ["d"]


def test_a_missing_case_does_not_pass_the_gate() -> None:
    base = [step(100.0, case="a"), step(100.0, case="b"), record(case="c", status="oom", series=())]
    comparisons = compare_runs(base, [step(100.0, case="a", seed=1)])
    assert [(c.case, c.lost) for c in comparisons] == [("a", False), ("b", True), ("c", False)]
    assert [c.case for c in exceeds(comparisons, 0.05)] == ["b"]


def busy(median: float, **changes: Any) -> Record:
    """A record whose process waited for a core for half of the time."""
    readings = (Reading(at_s=0.0, waited_s=0.0), Reading(at_s=20.0, waited_s=10.0))
    return step(median, readings=readings, **changes)


@pytest.mark.parametrize(("base", "new"), [(busy, busy), (busy, step), (step, busy)])
def test_a_busy_machine_gives_no_verdict(
    base: Callable[..., Record], new: Callable[..., Record]
) -> None:
    (comparison,) = compare_records(base(100.0), new(150.0, seed=1))
    assert comparison.verdict == "cannot tell"
    assert comparison.ratio is not None
    assert comparison.ratio.low > 1.0
    assert "the machine was busy" in comparison.note
    assert exceeds([comparison], 0.03) == ()
    assert inconclusive([comparison]) == (comparison,)


def test_a_stored_lint_or_noisy_samples_give_no_verdict() -> None:
    flagged = step(150.0, failed_checks=(FailedCheck(code="busy-machine", message="planted"),))
    values = (206.0, 812.0, 999.0, 230.0) * 2
    noisy = record(series=(Series(name="step", unit="ms", values=values, clock="device"),))
    for new in (flagged, noisy):
        (comparison,) = compare_records(step(100.0), new)
        assert comparison.verdict == "cannot tell"


def test_a_missing_case_is_lost_on_a_busy_machine_too() -> None:
    gone = busy(100.0, status="error", reason="crashed")
    comparisons = compare_records(busy(100.0), msgspec.structs.replace(gone, series=()))
    assert exceeds(comparisons, 0.03) == comparisons
    assert inconclusive(comparisons) == ()


def repeated(median: float, *, runs: int = 8, first: str = "1", **changes: Any) -> list[Record]:
    """Runs of one case whose medians differ by 0.1 % from run to run."""
    return [
        step(median * (1 + index / 1000), run=f"{first}{index}", seed=index, **changes)
        for index in range(runs)
    ]


def test_repeated_runs_are_one_sample_each() -> None:
    (comparison,) = compare_runs(repeated(100.0), repeated(110.0, first="2"))
    assert comparison.verdict == "slower"
    assert comparison.base == pytest.approx(100.35, rel=2e-3)
    assert comparison.ratio is not None
    assert comparison.ratio.value == pytest.approx(1.1, rel=5e-3)
    assert comparison.note.startswith("base: 8 runs; new: 8 runs")
    (few,) = compare_runs(repeated(100.0, runs=3), repeated(110.0, runs=3, first="2"))
    assert few.verdict == "too few samples"


def test_steps_of_few_runs_do_not_hide_how_runs_differ() -> None:
    """Both sides vary by 20 % from run to run: 160 samples of each would show a difference."""
    wide = [step(100.0 + 20 * (index % 2), run=f"1{index}", seed=index) for index in range(8)]
    other = [step(102.0 + 20 * (index % 2), run=f"2{index}", seed=index) for index in range(8)]
    (comparison,) = compare_runs(wide, other)
    assert comparison.verdict == "no difference shown"


def test_repeated_runs_on_a_busy_machine_are_left_out() -> None:
    busy = {"failed_checks": (FailedCheck(code="busy-machine", message="busy"),)}
    noisy = [step(300.0, run=f"3{index}", **busy) for index in range(2)]
    (comparison,) = compare_runs([*repeated(100.0), *noisy], repeated(100.0, first="2"))
    assert comparison.verdict == "no difference shown"
    assert comparison.note.startswith("base: 8 runs of 10; new: 8 runs")
    (doubted,) = compare_runs(repeated(100.0, **busy), repeated(150.0, first="2"))
    assert doubted.verdict == "cannot tell"


def started(runs: list[Record], *, first: int, every: int) -> list[Record]:
    """The runs with times of their start, in minutes."""
    return [
        msgspec.structs.replace(run, started=f"2026-01-02T03:{first + every * index:02}:00+00:00")
        for index, run in enumerate(runs)
    ]


def test_runs_that_did_not_alternate_may_share_a_drift() -> None:
    """A difference of 2 % between runs that differ by 0.1 % among themselves."""
    base, new = repeated(100.0), repeated(102.0, first="2")
    (alternating,) = compare_runs(started(base, first=0, every=2), started(new, first=1, every=2))
    assert alternating.verdict == "slower"
    (one_after_the_other,) = compare_runs(
        started(base, first=0, every=1), started(new, first=8, every=1)
    )
    assert one_after_the_other.verdict == "cannot tell"
    assert "samples depend on each other" in one_after_the_other.note
    # The order of the runs is that of their starts, not that of the file.
    (shuffled,) = compare_runs(
        started(base, first=0, every=2)[::-1], started(new, first=1, every=2)
    )
    assert shuffled == alternating


def drifting(median: float, **changes: Any) -> Record:
    values = tuple(median * (1 + 0.15 * index / 29) for index in range(30))
    series = Series(name="step", unit="ms", values=values, clock="device")
    return record(series=(series,), **changes)


@pytest.mark.parametrize("across", [False, True])
def test_samples_that_drift_do_not_fail_the_gate(across: bool) -> None:
    other = {"environment": environment(device_name="A100")} if across else {}
    (comparison,) = compare_records(step(100.0, count=30), drifting(100.0, **other), across=across)
    assert comparison.verdict == "cannot tell"
    assert "new: the level drifts by +15" in comparison.note
    assert exceeds([comparison], 0.03) == ()
    assert inconclusive([comparison]) == (comparison,)
    (clear,) = compare_records(step(100.0, count=30), drifting(200.0, **other), across=across)
    assert clear.verdict == "slower"
    assert exceeds([clear], 0.03) == (clear,)
