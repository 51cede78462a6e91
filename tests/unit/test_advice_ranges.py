"""Ranges of predicted gains, and scaling of a trace to the timed step."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_advice_rules import facts

from command_line import python
from own_records import advice, attached, tried
from stepscope.advisor.advise.facts import block_list, facts_of
from stepscope.advisor.advise.outcome import Tried
from stepscope.advisor.advise.view import advice_table, trial_blocks
from stepscope.analysis.advice import ranges
from stepscope.analysis.advice.changes import advise, predictions
from stepscope.analysis.advice.facts import Facts, PhaseWork
from stepscope.analysis.advice.ranges import gain_range, observed, ratio_range
from stepscope.analysis.advice.rule import Advice
from stepscope.analysis.advice.timeline import wall_ms
from stepscope.analysis.trace.summary import Summary
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.report.blocks import Interval
from view_blocks import coded, table_of

ROOT = Path(__file__).parents[2]
ON_CPU, ON_GPU = (ROOT / "results" / f"advise-slow_{name}.jsonl" for name in ("cpu", "h200"))


def slower(summary: Summary, times: float) -> Summary:
    """Return the trace of a machine that was slower by this factor while it was traced."""

    def longer(parts: tuple, *names: str) -> tuple:  # type: ignore[type-arg]
        return tuple(
            msgspec.structs.replace(part, **{name: times * getattr(part, name) for name in names})
            for part in parts
        )

    return msgspec.structs.replace(
        summary,
        steps=tuple(times * ms for ms in summary.steps),
        phases={name: times * ms for name, ms in summary.phases.items()},
        lines=longer(summary.lines, "ms"),
        uses=longer(summary.uses, "ms"),
        kernels=longer(summary.kernels, "ms"),
        runs=longer(summary.runs, "ms", "longest_ms"),
        data_ms=times * summary.data_ms,
    )


def with_trace(record: Record, times: float) -> Record:
    return attached(record, profile=slower(record.required("profile", Summary), times))


def predicted_gains(record: Record) -> dict[str, float]:
    return {one.advice.code: one.advice.gain_ms for one in predictions(facts_of(record))}


def test_a_noisy_trace_of_a_cpu_predicts_what_a_clean_one_does() -> None:
    (record, *_) = read_records(ON_CPU)
    clean = predicted_gains(record)
    assert {"fused-optimizer", "compile", "fused-attention"} <= set(clean)
    for times in (0.7, 1.9):
        assert predicted_gains(with_trace(record, times)) == pytest.approx(clean)
    step = facts_of(record)
    assert wall_ms(step) == pytest.approx(step.step_ms)


def test_gpu_kernels_take_no_longer_than_the_step() -> None:
    (record, *_) = read_records(ON_GPU)
    step = facts_of(with_trace(record, 2.0))
    assert step.device_ms <= step.step_ms * (1 + 1e-9)
    # A trace shorter than the step is unchanged: the rest is the host's.
    assert facts_of(record).device_ms < facts_of(record).step_ms


def test_the_backtest_file_matches_the_records() -> None:
    done = python("scripts/make_advice_ranges.py", "--check", cwd=ROOT)
    assert done.returncode == 0, f"run scripts/make_advice_ranges.py {done.stderr}"


ratios = st.lists(st.floats(-1, 3), max_size=30)


@given(own=ratios, others=ratios)
def test_a_range_contains_most_observations(own: list[float], others: list[float]) -> None:
    low, high = ratio_range("rule", {"rule": own, "other": others})
    assert low <= 1.0 <= high, "the prediction itself"
    inside = sum(low <= one <= high for one in own)
    assert inside >= 0.75 * len(own)
    if len(own) < 9:
        assert inside == len(own)


def test_a_rule_without_observations_has_a_wide_range() -> None:
    known = {"other": [0.9, 1.0, 1.1] * 5, "wrong": [0.1, 1.8]}
    assert ratio_range("rule", known) == (0.1, 1.8)
    assert ratio_range("rule", {}) == (0.0, 2.0)
    low, high = ratio_range("other", known)
    assert 0.8 < low < high < 1.2


def test_on_a_cpu_four_of_five_gains_lie_in_ranges_from_the_other_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each trial is compared with the range that the other trials give."""
    inside = []
    for path in sorted((ROOT / "results").glob("advise-*_cpu.jsonl")):
        records = read_records(path)
        step = facts_of(records[0])
        predicted = {one.advice.code: one.advice.gain_ms for one in predictions(step)}
        for one in (Tried(record) for record in records if record.study == "advise"):
            code, realized = one.trial.code, one.realized_ms
            if code not in predicted or realized is None or one.base_ms is None:
                continue
            realized *= step.step_ms / one.base_ms
            others = {rule: list(several) for rule, several in observed()["cpu"].items()}
            others[code].remove(round(realized / predicted[code], 3))
            with monkeypatch.context() as patched:
                patched.setattr(ranges, "observed", lambda others=others: {"cpu": others})
                low, high = gain_range(code, predicted[code], step)
            inside.append(low <= realized <= high)
    assert len(inside) >= 15
    assert sum(inside) >= 0.8 * len(inside)


def test_a_gain_within_the_noise_has_no_rank_and_comes_last() -> None:
    step = facts(
        {"matmul": 30.0, "elementwise": 10.0},
        {"matmul": 50.0},
        dtype="float32",
        cleared_ms=6.0,
        optimizer_ms=10.0,
    )
    quiet, noisy = advise(step), advise(msgspec.structs.replace(step, noise_ms=5.0))
    assert [one.ranked for one in noisy] == [True, True, False]
    assert noisy[-1].code == "set-to-none"
    assert noisy[-1].low_ms is not None
    assert noisy[-1].low_ms < 0 < noisy[-1].gain_ms
    assert {one.code for one in quiet} == {one.code for one in noisy}
    table = advice_table(noisy, 100.0)
    assert [row[0] for row in table.rows] == ["1", "2", None]
    assert all(isinstance(row[2], Interval) for row in table.rows)


@given(gain=st.floats(-50, 100), noise=st.floats(0, 20), on_gpu=st.booleans())
def test_a_range_contains_its_prediction_and_does_not_exceed_the_step(
    gain: float, noise: float, on_gpu: bool
) -> None:
    step = facts(on_gpu=on_gpu, noise_ms=noise)
    low, high = gain_range("compile", gain, step)
    assert low <= gain <= high <= step.step_ms


def test_advice_of_older_records_has_no_range() -> None:
    text = b'{"code":"tf32","title":"t","gain_ms":4.0,"why":"","risk":"","lines":[]}'
    old = msgspec.json.decode(text, type=Advice)
    assert (old.low_ms, old.high_ms, old.ranked) == (None, None, True)
    table = advice_table((old,), 10.0)
    assert [column.title for column in table.columns][:2] == ["change", "gain"]
    assert table.rows[0][1] == 4.0


def test_the_page_counts_the_gains_that_lie_in_their_ranges() -> None:
    def trial(low: float, high: float) -> Record:
        return tried(30.0, msgspec.structs.replace(advice(), low_ms=low, high_ms=high))

    # The step took 50 ms instead of 100 in the trials, and 30 with the change.
    records = [trial(30.0, 50.0), trial(45.0, 60.0)]
    blocks = trial_blocks(records)
    finding = coded(blocks, "advise.in-range")
    assert finding.values == {"gains": 2, "in_range": 1}
    assert finding.records == tuple(one.id for one in records)
    assert finding.text == "1 of 2 measured gains are in the predicted range."
    table = table_of(blocks, "advise-trials")
    assert isinstance(table.rows[0][2], Interval)


def test_a_fused_update_on_a_cpu_is_compute_bound() -> None:
    step = facts(
        on_gpu=False,
        optimizer_ms=50.0,
        fused_optimizer=False,
        bandwidth=16e9,
        parameters=2_500_000,
        dtype="float32",
        rates={},
    )
    assert wall_ms(step) == 150.0
    moved = 2_500_000 * 28 / 16e9 * 1e3
    (adam,) = advise(step)
    assert adam.gain_ms == pytest.approx(50.0 - 3.2 * moved)
    (sgd,) = advise(msgspec.structs.replace(step, optimizer="sgd"))
    assert sgd.gain_ms == pytest.approx(50.0 - 0.08 * 50.0)


def emulated(**changes: object) -> Facts:
    given_facts = {
        "on_gpu": False,
        "dtype": "bfloat16",
        "autocast": True,
        "flops": 1e9,
        "parameters": 0,
    }
    return facts(**given_facts | changes)  # type: ignore[arg-type]


def test_convolutions_of_an_emulated_dtype_call_for_float32() -> None:
    """Even if its matmuls are fast: 100 ms for 1 GFLOP is a hundredth of 1 TFLOP/s."""
    fast = emulated(rates={"float32": 5e11, "bfloat16": 1e12})
    (change,) = advise(fast)
    assert (change.code, change.gain_ms) == ("float32", pytest.approx(100.0 - 2 * 1e9 / 5e11 * 1e3))
    assert "matmuls and convolutions take 100 ms in bfloat16" in change.why
    # By the rates alone it would take 0.5 ms; small steps stay below the rate.
    slow = emulated(rates={"float32": 1e11, "bfloat16": 5e8})
    (change,) = advise(slow)
    assert change.gain_ms == pytest.approx(100.0 - 2 * 1e9 / 1e11 * 1e3)
    near = emulated(rates={"float32": 5e9, "bfloat16": 2e10})
    assert "float32" not in {one.code for one in advise(near)}


def test_the_lines_name_the_modules_of_the_program() -> None:
    (record, *_) = read_records(ON_CPU)
    assert facts_of(record).block_list == "blocks"
    summary = record.required("profile", Summary)
    (first, *_) = summary.uses
    uses = tuple(
        msgspec.structs.replace(first, module=module, ms=ms)
        for module, ms in (
            ("base/transformer.h.*/attn", 5.0),
            ("base/transformer.h.*/mlp/* Linear", 5.0),
            ("base/heads.*", 6.0),
            ("body/* Conv2d", 50.0),
            ("", 90.0),
        )
    )
    assert block_list(msgspec.structs.replace(summary, uses=uses)) == "base.transformer.h"
    assert block_list(msgspec.structs.replace(summary, uses=())) == ""
    # Below an entry of an nn.Sequential, and in one of several models: not attributes.
    for module in ("* TransformerEncoder/layers.*/linear1", "Network first/layers.*"):
        (named,) = (msgspec.structs.replace(first, module=module, ms=99.0),)
        assert block_list(msgspec.structs.replace(summary, uses=(*uses, named))) == ""
    step = facts({"elementwise": 30.0}, {"elementwise": 70.0}, compiled=False, blocks=4)
    for path, line in (
        ("transformer.h", "for block in model.transformer.h:"),
        ("", "for block in …:  # the nn.ModuleList of the repeated blocks"),
    ):
        changes = advise(msgspec.structs.replace(step, block_list=path))
        (lines,) = (one.lines for one in changes if one.code == "compile-blocks")
        assert lines[0] == line


def loading(cores: int, threads: int, data_ms: float = 40.0) -> list[Advice]:
    outside = PhaseWork(name="outside", classes={"between": data_ms})
    step = facts(
        {"matmul": 25.0},
        {"matmul": 35.0},
        on_gpu=False,
        outside=outside,
        cores=cores,
        threads=threads,
        data_ms=data_ms,
        step_ms=60.0 + data_ms,
    )
    return [one for one in advise(step) if one.code == "data-ahead"]


def test_workers_for_a_cpu_step_gain_what_the_cores_allow() -> None:
    (shared,) = loading(cores=2, threads=2)
    assert shared.gain_ms == pytest.approx(40.0 / 2)
    (free,) = loading(cores=8, threads=4)
    assert free.gain_ms == pytest.approx(40.0)
    # Four workers load 400 ms in 100, and the step alone takes 60.
    (busy,) = loading(cores=8, threads=4, data_ms=400.0)
    assert busy.gain_ms == pytest.approx(400.0 - 40.0)
    assert loading(cores=1, threads=1) == []
    for one in (shared, free):
        assert "the step may get slower" in one.risk
        assert not one.ranked, "workers for a CPU step were never back-tested"
    assert "workers take theirs from the step" in shared.why
    assert "num_workers=1" in shared.lines[0]
