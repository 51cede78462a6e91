"""The verdict: its parts add up, its limit is the hardware's, and it fits a terminal."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from own_records import advice, attached, inspected_record, tried
from sample_records import environment
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.given import with_advice
from stepscope.advisor.verdict import breakdown, matmul_kinds, program_verdict
from stepscope.analysis import parts
from stepscope.analysis.advice.changes import advise
from stepscope.analysis.limits import fastest_dtype, hardware_limit, mfu
from stepscope.analysis.trace.summary import LedgerLine, Summary
from stepscope.analysis.verdict import (
    IDEAL,
    MAX_PARTS,
    BreakdownPart,
    Estimate,
    Gain,
    Limit,
    MemoryChange,
    RankedChange,
    Verdict,
    parts_of,
    plain,
    ranked,
)
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Ceiling, FailedCheck, Record
from stepscope.report.answer import gain_text, sentences
from stepscope.report.blocks import Page, Table
from stepscope.report.html import html_page
from stepscope.report.text import markdown_page
from stepscope.report.verdict import MAX_LINES, WIDTH, segments, share_text, verdict_lines
from stepscope.report.wrapping import wrapped, wrapped_code
from stepscope.studies.page import answers, make_page, study_sections, verdict_of
from stepscope.studies.registry import find_study
from stepscope.views.verdict import step_limit
from study_records import benchmark_record, matrix_ceiling, profile_record

RESULTS = Path(__file__).parents[2] / "results"
ADVISED = [*sorted(RESULTS.glob("advise-*_h200.jsonl")), RESULTS / "advise-slow_cpu.jsonl"]
RATES = {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12}


def change(code: str, low: float, *, setting: str = "") -> RankedChange:
    return RankedChange(
        code=code,
        title=code,
        gain=Gain(value=low + 1, low=low, high=low + 2, measured=True),
        risk="",
        lines=("x = 1",),
        setting=setting,
    )


@given(
    st.dictionaries(
        st.sampled_from([IDEAL, *"abcdefghij"]),
        st.floats(min_value=0, max_value=1e6),
        max_size=11,
    )
)
def test_parts_keep_the_total_and_are_at_most_seven(spent: dict[str, float]) -> None:
    parts = parts_of(spent)
    assert len(parts) <= MAX_PARTS
    assert sum(part.ms for part in parts) == pytest.approx(sum(spent.values()), abs=1e-6)
    assert all(part.ms > 0 for part in parts)
    assert IDEAL not in [part.label for part in parts[1:]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["forward", "optimizer", "idle", "outside", ""]),
            st.sampled_from(["matmul", "softmax", "copy/cast", "communication", "unattributed"]),
            st.floats(min_value=-1, max_value=1e4),
        ),
        max_size=12,
    ),
    st.floats(min_value=0.1, max_value=1e4),
)
def test_the_breakdown_of_a_traced_step_is_the_timed_step(
    lines: list[tuple[str, str, float]], step_ms: float
) -> None:
    summary = inspected_record().required("profile", Summary)
    traced = tuple(LedgerLine(phase=phase, kind=kind, ms=ms) for phase, kind, ms in lines)
    summary = msgspec.structs.replace(summary, lines=traced)
    limit = Limit(matmul_ms=3.0, update_ms=1.0, dtype="bfloat16")
    capped, parts = breakdown(summary, step_ms, limit)
    assert sum(part.ms for part in parts) == pytest.approx(step_ms)
    assert capped is not None
    assert capped.ms <= limit.ms
    # One number: the limit, and the part of that name.
    assert sum(p.ms for p in parts if p.label == IDEAL) == pytest.approx(
        capped.ms, abs=step_ms / 1e3
    )
    assert bool(capped.doubt) == (limit.matmul_ms - capped.matmul_ms >= 0.01 * step_ms) or (
        limit.update_ms - capped.update_ms >= 0.01 * step_ms
    )


def test_the_limit_is_that_of_the_fastest_dtype_a_change_could_apply() -> None:
    assert fastest_dtype("float32", RATES) == "bfloat16"
    assert fastest_dtype("float32", RATES, lacks=("bfloat16",)) == "tf32"
    assert fastest_dtype("bfloat16", RATES) == "bfloat16"
    assert fastest_dtype("float32", RATES | {"bfloat16": 1e12, "tf32": 0.0}) == "float32"
    limit = hardware_limit(8e12, 10**9, "float32", RATES, 4e12)
    assert limit is not None
    assert (limit.dtype, limit.matmul_ms, limit.update_ms) == ("bfloat16", 10.0, 7.0)
    assert hardware_limit(0.0, 10, "float32", RATES, 4e12) is None
    assert hardware_limit(8e12, 10, "float32", {}, 4e12) is None


def test_a_step_below_its_limit_says_that_the_ceilings_are_wrong() -> None:
    verdict = Verdict(
        subject="step",
        device="CPU",
        step=Estimate(value=10.0, low=9.0, high=11.0),
        limit=Limit(matmul_ms=11.0, update_ms=1.0, dtype="float32"),
    )
    assert next(sentences(verdict)) == (
        "A step takes 10.0 ms, less than the hardware limit of 12.0 ms: the ceilings were measured"
        " too low, or the FLOPs are overestimated; measure the ceilings again with"
        " `stepscope run --new-ceilings`."
    )


def test_the_next_command_is_complete_in_lines_that_a_shell_joins() -> None:
    words = [
        "stepscope",
        "inspect",
        "train.py",
        "--note",
        "two words " * 3,
        "it's",
        *map(str, range(99)),
    ]
    verdict = Verdict(subject="s", device="d", next_command=shlex.join(words))
    lines = verdict_lines(verdict)
    assert len(lines) > 4
    assert max(map(len, lines)) <= WIDTH
    _, _, command = "\n".join(lines).partition("Next: ")
    assert shlex.split(command.replace("\\\n", "")) == words


def test_the_answer_does_not_contradict_the_parts_below_it() -> None:
    parts = (
        BreakdownPart(label="not attributed", ms=6.0, meaning="unattributed"),
        BreakdownPart(label="slow matmuls", ms=3.0, meaning="lost"),
    )
    verdict = Verdict(
        subject="step",
        device="CPU",
        step=Estimate(value=10.0, low=9.0, high=11.0),
        parts=parts,
        trust="noisy",
        trust_reason="the machine was busy",
        memory_change=MemoryChange(code="c", title="fused loss", gain_bytes=1024, gain_ms=0.0),
        peak_bytes=4096,
    )
    text = " ".join(sentences(verdict))
    assert "The largest attributed part: slow matmuls, 3.00 ms" in text
    assert "so changes are not ranked" in text
    # Where nothing is ranked, nothing is predicted either.
    assert "fused loss" not in text
    good = msgspec.structs.replace(verdict, trust="good", trust_reason="")
    text = " ".join(sentences(good))
    assert "fused loss would lower it by 1.00 KiB at no cost in time (predicted)." in text
    attributed = msgspec.structs.replace(verdict, parts=parts[1:], changes=(change("x", 1.0),))
    text = " ".join(sentences(attributed))
    assert "The largest part: slow matmuls" in text
    assert "so predicted changes are not ranked" in text


def test_a_prediction_that_may_gain_nothing_is_named_and_not_denied() -> None:
    """The advice lists torch.compile with 30 % of the step; its range includes zero."""
    doubtful = msgspec.structs.replace(
        advice("compile", gain=0.3), low_ms=-0.1, high_ms=0.5, ranked=False
    )
    record = inspected_record(step=1.0, environment=environment(device_kind="cpu"))
    verdict = program_verdict([with_advice(record, [doubtful])])
    assert verdict is not None
    text = " ".join(sentences(msgspec.structs.replace(verdict, trust="good", trust_reason="")))
    assert "No known change is predicted" not in text
    assert "largest predicted gain is that of the change compile, 300 µs (−100 to 500 µs)" in text
    trial = tried(51.0, doubtful)
    after = program_verdict([with_advice(record, [doubtful]), trial])
    assert after is not None
    text = " ".join(sentences(msgspec.structs.replace(after, trust="good", trust_reason="")))
    assert "None of the tried changes gains time." in text
    vague = program_verdict([with_advice(record, [doubtful]), tried(49.9, doubtful, noise=5.0)])
    assert vague is not None
    text = " ".join(sentences(msgspec.structs.replace(vague, trust="good", trust_reason="")))
    assert "None of the tried changes" not in text
    assert "No tried change is shown to gain time" in text
    assert "it may be none" in text


def test_of_changes_that_exclude_each_other_the_best_is_ranked() -> None:
    order = ranked(
        [
            change("tf32", 5, setting="dtype"),
            change("bfloat16", 9, setting="dtype"),
            change("compile", 3),
            change("graph", 2),
            change("small", 1),
        ]
    )
    assert [one.code for one in order] == ["bfloat16", "compile", "graph"]


BF16, FUSED = advice("bfloat16", 0.4), advice("fused-optimizer", 0.3, optimizer="adamw-fused")
COMPILE, BLOCK = (advice(f"compile-{one}", 0.2, compile=one) for one in ("model", "block"))
ATTENTION = advice("fused-attention", -0.1, attention="fused")


def verified(*trials: Record) -> Verdict:
    """The verdict on a step of 1 ms; trials are of the same step when it takes 50 ms."""
    advised = [BF16, FUSED, COMPILE, BLOCK, ATTENTION]
    verdict = program_verdict([with_advice(inspected_record(), advised), *trials])
    assert verdict is not None
    return verdict


def test_a_verified_combination_is_the_advice_and_what_it_leaves_out_is_not() -> None:
    verdict = verified(
        tried(20.0, BF16),
        tried(40.0, COMPILE),
        tried(35.0, BLOCK),
        tried(45.0, FUSED),
        tried(12.0, BF16, COMPILE),
        tried(12.1, BF16, COMPILE, FUSED),
        tried(13.0, BF16, COMPILE, ATTENTION),
    )
    assert verdict.reachable_with == (BF16.title, COMPILE.title)
    assert [one.code for one in verdict.changes if one.gain.measured] == [
        "bfloat16",
        "compile-model",
    ]
    # Compiled blocks gain more alone, and are another value of the same setting.
    left_out = {BLOCK.code, FUSED.code, ATTENTION.code}
    assert not left_out & {one.code for one in verdict.changes}


def test_a_change_that_gains_only_on_top_of_others_has_that_gain() -> None:
    verdict = verified(tried(20.0, BF16), tried(14.0, BF16, ATTENTION))
    first, second, *_ = verdict.changes
    assert (first.code, second.code) == ("bfloat16", "fused-attention")
    assert second.gain.measured
    assert second.gain.on_top_of == (BF16.title,)
    assert second.gain.value == pytest.approx(20 - 14, rel=0.01)
    assert 0 < second.gain.low < second.gain.value < second.gain.high


def test_changes_that_trials_refute_are_not_predicted_any_more() -> None:
    before = verified()
    assert {"bfloat16", "cuda-graph"} <= {one.code for one in before.changes}
    lost = verified(
        tried(20.0, BF16, losses=(2.0, 1.5, 1.8, 2.0)), tried(60.0, BLOCK), tried(51.0, COMPILE)
    )
    assert lost.reachable_with
    titles = {BF16.title, BLOCK.title, COMPILE.title}
    assert not titles & {*lost.reachable_with, *(one.title for one in lost.changes)}
    crashed = verified(tried(status="error", reason="it crashed"))
    assert BF16.title not in crashed.reachable_with
    out_of_time = verified(tried(status="timeout", reason="ended by --total-timeout 5 s"))
    assert BF16.title in out_of_time.reachable_with


def test_changes_that_exclude_each_other_are_not_advised_together() -> None:
    verdict = program_verdict([inspected_record()])
    assert verdict is not None
    codes = [one.code for one in verdict.changes]
    assert "cuda-graph" in codes
    # Both capture CUDA graphs; as settings they differ.
    assert "train-step" in [one.code for one in advise(facts_of(inspected_record()))]
    assert "train-step" not in codes


def test_the_memory_sentence_names_no_change_that_excludes_a_kept_one() -> None:
    saving = msgspec.structs.replace(BLOCK, gain_bytes=30 << 30)
    other = msgspec.structs.replace(FUSED, gain_bytes=20 << 30)
    record = with_advice(inspected_record(), [BF16, COMPILE, saving, other])
    before = program_verdict([record])
    assert before is not None
    trials = [tried(20.0, BF16), tried(12.0, BF16, COMPILE)]
    after = program_verdict([record, *trials])
    assert after is not None
    assert after.memory_change is not None
    assert after.memory_change.code == other.code
    wrong = tried(30.0, other, losses=(2.0, 1.5, 1.8, 2.0))
    refuted = program_verdict([record, *trials, wrong])
    assert refuted is not None
    assert refuted.memory_change is None


SAVING = msgspec.structs.replace(
    FUSED, gain_bytes=30 << 30, best_after="the change bfloat16", gain_after_ms=0.7
)


@pytest.mark.parametrize(
    ("trials", "time"),
    [
        ([tried(45.0, SAVING)], " (predicted) and gain 5.00 ms (4.55 to 5.45 ms), measured."),
        ([tried(60.0, SAVING)], " (predicted) and cost 10.0 ms (9.40 to 10.6 ms), measured."),
        ([tried(50.0, SAVING)], " (predicted); no gain in time was measured."),
        (
            [tried(60.0, SAVING), tried(20.0, BF16), tried(15.0, BF16, SAVING)],
            " (predicted) and gain 5.00 ms (4.75 to 5.25 ms), measured.",
        ),
        # No trial isolates its gain.
        ([tried(30.0, BF16, SAVING)], " (predicted)."),
        ([tried(30.0, BF16, SAVING, COMPILE), tried(20.0, BF16)], " (predicted)."),
    ],
)
def test_the_memory_sentence_predicts_no_time_for_a_change_that_was_tried(
    trials: list[Record], time: str
) -> None:
    records = [with_advice(inspected_record(), [BF16, COMPILE, SAVING]), *trials]
    page = make_page(records)
    untried = make_page(records[:1])
    for shown in (html_page, markdown_page, _terminal):
        text = " ".join(shown(page).split())
        assert f"{SAVING.title} would lower it by 30.0 GiB{time}" in text
        before = " ".join(shown(untried).split())
        assert "lower it by 30.0 GiB and with the change bfloat16 gain 700 µs (predicted)" in before


def _terminal(page: Page) -> str:
    assert page.verdict is not None
    return "\n".join(verdict_lines(page.verdict))


@pytest.mark.parametrize("width", [40, 60, 80, 100])
@pytest.mark.parametrize("path", ADVISED, ids=lambda path: path.stem)
def test_nothing_but_code_is_left_out_of_a_narrow_verdict(path: Path, width: int) -> None:
    verdict = program_verdict(read_records(path))
    assert verdict is not None
    lines = verdict_lines(verdict, width)
    assert max(map(len, lines)) <= width
    shown = " ".join(" ".join(lines).split())
    assert " ".join(sentences(verdict)) in shown
    for change in verdict.changes:
        assert f"{change.title}: {gain_text(change)}" in shown
        assert change.warning in shown
    for part in verdict.parts:
        assert f"{part.label} {share_text(part, verdict)}" in shown
    assert verdict.subject in shown
    assert verdict.device in shown


def test_numbers_stay_with_their_units() -> None:
    text = "A step takes 34.2 ms, 5.1 % of 4.50 GiB in 7 steps (12 %) and 3 sizes."
    for width in range(9, 60):
        lines = wrapped(text, width)
        assert " ".join(lines) == text
        assert not any(re.match(r"(ms|%|GiB)", line) for line in lines)
        assert max(map(len, lines)) <= width


def test_code_is_wrapped_and_stays_code() -> None:
    line = "    optimizer = AdamW(model.parameters(), lr=1, fused=True)  # the same rule as before"
    lines = wrapped_code(line, 40)
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("    optimizer")
    assert ast.dump(ast.parse("if 1:\n" + "\n".join(lines))) == ast.dump(
        ast.parse(f"if 1:\n{line}")
    )
    short = change("x", 1.0)
    verdict = Verdict(
        subject="s",
        device="d",
        step=Estimate(value=9, low=9, high=9),
        changes=(msgspec.structs.replace(short, lines=(line,)),),
    )
    assert "# the same rule as before" in "".join(verdict_lines(verdict, 40))


def test_code_that_does_not_fit_is_left_out_from_the_last_change_on() -> None:
    changes = tuple(
        msgspec.structs.replace(change(name, 1.0), lines=tuple(f"{name} = {n}" for n in range(7)))
        for name in ("first", "second", "third")
    )
    step = Estimate(value=9, low=9, high=9)
    verdict = Verdict(subject="s", device="d", step=step, changes=changes, next_command="go")
    lines = verdict_lines(verdict)
    assert len(lines) <= MAX_LINES
    assert "   first = 6" in lines
    assert "   second = 6" in lines
    assert "   third = 0" not in lines
    assert any(line.startswith("3. third: ") for line in lines)


@pytest.mark.parametrize("path", ADVISED, ids=lambda path: path.stem)
def test_the_verdict_of_a_program_fits_a_terminal(path: Path) -> None:
    records = read_records(path)
    verdict = program_verdict(records)
    assert verdict is not None
    assert verdict.step is not None
    lines = verdict_lines(verdict)
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= WIDTH
    assert sum(part.ms for part in verdict.parts) == pytest.approx(verdict.step.value, rel=1e-6)
    assert sum(one.columns for one in segments(verdict.parts)) == WIDTH
    if verdict.limit is not None:
        assert verdict.parts[0].label == IDEAL
        assert verdict.parts[0].ms == pytest.approx(verdict.limit.ms)


def test_a_slow_float32_step_is_far_from_its_limit() -> None:
    """By its own dtype it would be at up to 84 % of the limit."""
    verdict = program_verdict(read_records(RESULTS / "advise-slow_h200.jsonl"))
    assert verdict is not None
    assert verdict.mfu is not None
    assert plain(verdict.mfu) > 0.8
    assert verdict.limit_share is not None
    assert plain(verdict.limit_share) < 0.1
    assert verdict.reachable_verified
    assert verdict.changes[0].code == "bfloat16"
    assert all(one.gain.measured for one in verdict.changes)
    assert verdict.next_command.startswith("stepscope advise --apply slow.py")
    text = " ".join(sentences(verdict))
    assert "as fast (measured)" in text
    assert verdict.largest_loss is not None
    assert verdict.largest_loss.label.removesuffix(" beyond the limit") in text


def test_a_loss_that_drifts_is_a_warning() -> None:
    verdict = program_verdict(read_records(RESULTS / "advise-vit_h200.jsonl"))
    assert verdict is not None
    assert verdict.changes[0].code == "bfloat16"
    assert "3.7 %" in verdict.changes[0].warning


def test_untrusted_times_rank_nothing() -> None:
    (record, *_) = read_records(RESULTS / "advise-slow_h200.jsonl")
    busy = FailedCheck(code="busy-machine", message="busy")
    given = {name: one for name, one in record.attachments.items() if name != "advice"}
    noisy = msgspec.structs.replace(record, failed_checks=(busy,), attachments=given)
    verdict = program_verdict([noisy])
    assert verdict is not None
    assert (verdict.trust, verdict.changes, verdict.reachable_ms) == ("noisy", (), None)
    assert "changes are not ranked" in " ".join(sentences(verdict))
    good = program_verdict([msgspec.structs.replace(record, attachments=given)])
    assert good is not None
    assert good.changes
    assert not good.changes[0].gain.measured
    assert good.next_command.startswith("stepscope advise --verify slow.py")
    assert good.next_on_recording == ""


def test_without_ceilings_and_advice_the_next_command_measures_them() -> None:
    record = inspected_record(step=1.0, environment=environment(device_kind="cpu"), ceilings=())
    summary = msgspec.structs.replace(record.required("profile", Summary), kernels=(), uses=())
    record = attached(record, profile=summary)
    verdict = program_verdict([record])
    assert verdict is not None
    assert verdict.next_command == "stepscope advise train.py"
    rate = Ceiling(name="matmul.float32", value=1e12, unit="FLOP/s", source="measured")
    measured = program_verdict([msgspec.structs.replace(record, ceilings=(rate,))])
    assert measured is not None
    assert measured.next_command == ""


def test_a_program_without_a_trace_still_has_a_step() -> None:
    record = msgspec.structs.replace(inspected_record(), attachments={})
    verdict = program_verdict([record])
    assert verdict is not None
    assert verdict.step is not None
    assert verdict.parts == ()
    assert verdict_lines(verdict)[-1].startswith("Next: stepscope inspect")
    # No rule was applied.
    assert "change" not in " ".join(sentences(verdict))


def test_records_without_a_program_have_the_verdict_of_their_longest_step() -> None:
    verdict = verdict_of(read_records(RESULTS / "profile_h200.jsonl"))
    assert verdict is not None
    assert not verdict.judged
    assert verdict.mfu is not None
    assert plain(verdict.mfu) > 0.7
    assert verdict.limit_share is not None
    assert plain(verdict.limit_share) < 0.1
    timed = verdict_of(read_records(RESULTS / "h200.jsonl"))
    assert timed is not None
    assert timed.parts == ()
    assert timed.limit is not None
    assert verdict_of(read_records(RESULTS / "memory_h200.jsonl")) is None


def test_two_times_of_one_step_have_the_reason() -> None:
    """The verdict is on the traced step, the table below it has the benchmark's."""
    traced = profile_record(step=50.0)
    timed = msgspec.structs.replace(benchmark_record(step=51.0), case=traced.case)
    page = make_page([timed, traced])
    verdict = page.verdict
    assert verdict is not None
    assert verdict.step is not None
    assert (verdict.step.value, verdict.listed_ms) == (50.0, 51.0)
    assert verdict_of([traced]).listed_ms is None  # type: ignore[union-attr]
    far = msgspec.structs.replace(verdict, listed_ms=70.0)
    assert "benchmark" not in " ".join(sentences(verdict))
    for with_stats in (False, True):
        assert "benchmark measured 70" in " ".join(sentences(far, with_stats=with_stats))


def test_every_study_answers_in_a_line() -> None:
    found = list(answers(list(study_sections(read_records(RESULTS / "h200.jsonl")))))
    assert [title for title, _ in found] == ["Benchmark", "Warm-up"]
    assert all(answer for _, answer in found)


def test_the_page_and_its_markdown_open_with_the_verdict() -> None:
    records = read_records(RESULTS / "advise-slow_h200.jsonl")
    page = make_page(records)
    assert page.verdict is not None
    html = html_page(page)
    assert html.index('class="verdict"') < html.index('class="headline"')
    assert 'class="part ideal n0"' in html
    assert html.count('class="copy"') == len(page.verdict.changes) + 1
    text = markdown_page(page)
    assert text.index("Next: stepscope") < text.index(page.headline.title)


def test_a_hostile_subject_is_escaped() -> None:
    subject = "<script>alert(1)</script>\x1b[31m"
    verdict = Verdict(subject=subject, device="d", step=Estimate(value=1, low=1, high=1))
    table = Table(name="t", title="t", columns=(), rows=())
    html = html_page(Page(title="x", subtitle="", headline=table, sections=(), verdict=verdict))
    assert "<script>alert" not in html
    assert "\x1b" not in "".join(verdict_lines(verdict))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_limit_has_fp8_matmuls_where_a_change_could_apply_them(dtype: str) -> None:
    """float16 does not become FP8: that would be two changes of the training."""
    bandwidth = Ceiling(name="memory.copy", value=1e15, unit="B/s", source="measured")
    rates = {"float32": 5e13, "bfloat16": 1e14, "float16": 1e14}
    known = [matrix_ceiling(name, rate) for name, rate in rates.items()]
    usual, with_fp8 = (
        benchmark_record(dtype=dtype, ceilings=(*known, bandwidth, *more))
        for more in ((), (matrix_ceiling("fp8", 2e14),))
    )
    ((_, workload),) = find_study("benchmark").results([usual])
    before, after = step_limit(usual, workload), step_limit(with_fp8, workload)
    assert before is not None
    assert after is not None
    if dtype == "float16":
        assert after == before
    else:
        assert after.dtype == "FP8 and bfloat16"
        assert 0.5 * before.matmul_ms < after.matmul_ms < before.matmul_ms
    assert after.update_ms == before.update_ms


def test_a_step_in_fp8_is_compared_with_the_fp8_rate() -> None:
    record = benchmark_record(dtype="bfloat16", ceilings=(matrix_ceiling("fp8", 2e14),))
    assert mfu(record) is None
    in_fp8 = msgspec.structs.replace(record, config=record.config | {"dtype": "fp8"})
    assert mfu(in_fp8) == pytest.approx(1e12 / 0.1 / 2e14)


def test_parts_have_names_that_are_true_for_the_step() -> None:
    spent = {parts.IDEAL: 10.0, parts.SLOW_MATMULS: 5.0, parts.IDLE: 3.0}
    on_cpu = parts_of(spent, parts.part_names(["convolutions", "matmuls"], on_gpu=False))
    assert [(one.code, one.label) for one in on_cpu] == [
        ("limit", "hardware limit"),
        ("matmuls-beyond-limit", "convolutions and matmuls beyond the limit"),
        ("idle", "between operators"),
    ]
    assert all(one.definition for one in on_cpu)
    on_gpu = parts_of(spent, parts.part_names(["matmuls", "attention"]))
    names = ["hardware limit", "matmuls and attention beyond the limit", "device idle"]
    assert [one.label for one in on_gpu] == names
    vit, naive = (
        program_verdict(read_records(RESULTS / f"advise-{name}.jsonl"))
        for name in ("vit_h200", "slow_h200")
    )
    assert vit is not None
    assert naive is not None
    assert "attention" in " ".join(one.label for one in vit.parts)
    assert "attention" not in " ".join(one.label for one in naive.parts)


def test_every_part_is_defined_in_the_glossary_the_page_and_by_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepscope.cli import main

    glossary = (RESULTS.parent / "docs" / "glossary.md").read_text()
    for label, kind in parts.KINDS.items():
        assert f"| **{label}** | `{kind.code}` | {kind.definition} |" in glossary
    record = str(RESULTS / "advise-slow_h200.jsonl")
    assert main(["advise", record, "--out", str(tmp_path), "--explain"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    slow = parts.KINDS[parts.SLOW_MATMULS].definition
    assert slow in printed
    assert slow in (tmp_path / "advise-slow_h200-advice.html").read_text().replace("&#39;", "'")
    assert main(["advise", record, "--out", str(tmp_path)]) == 0
    assert slow not in " ".join(capsys.readouterr().out.split())


def test_a_combination_is_one_entry_unless_the_gain_of_each_change_is_known() -> None:
    """Two of three shares are not known: a trial without the change is as noisy as its gain."""
    verdict = verified(
        tried(30.0, BF16, FUSED, COMPILE),
        tried(33.0, BF16, COMPILE, noise=30.0),
        tried(32.0, BF16, FUSED, noise=30.0),
        tried(45.0, FUSED, COMPILE),
    )
    whole, share, *more = verdict.changes
    assert whole.code == "bfloat16+fused-optimizer+compile-model"
    assert whole.gain.value == pytest.approx(20.0, rel=0.01)
    assert whole.gain.measured
    assert not whole.gain.on_top_of
    assert whole.lines == tuple(dict.fromkeys((*BF16.lines, *FUSED.lines, *COMPILE.lines)))
    assert (share.code, share.lines) == ("bfloat16", ())
    assert share.gain.value == pytest.approx(15.0, rel=0.01)
    assert share.gain.on_top_of == (FUSED.title, COMPILE.title)
    assert not any(one.gain.measured for one in more)


def test_no_measured_change_of_a_verdict_may_gain_nothing() -> None:
    """Whatever is known of what torch.compile adds to bfloat16."""
    parts, whole = ["bfloat16", "compile-model"], ["bfloat16+compile-model", "bfloat16"]
    for noise, expected in ((0.1, parts), (1.0, parts), (30.0, whole)):
        verdict = verified(tried(30.0, BF16, COMPILE), tried(33.0, BF16, noise=noise))
        measured = [one for one in verdict.changes if one.gain.measured]
        assert all(one.gain.low > 0 for one in measured)
        assert [one.code for one in measured] == expected


@pytest.mark.parametrize(
    ("kernel", "library", "kind"),
    [
        ("aten::mkldnn_rnn_layer", "", "recurrent layers"),
        ("RNN_blockPersist_fp_LSTM", "cuDNN", "recurrent layers"),
        ("aten::convolution_backward", "", "convolutions"),
        ("sm90_xmma_fprop_implicit_gemm", "cuDNN", "convolutions"),
        ("aten::addmm", "", "matmuls"),
    ],
)
def test_matmuls_are_named_by_what_they_belong_to(kernel: str, library: str, kind: str) -> None:
    record = inspected_record()
    summary = record.required("profile", Summary)
    row = msgspec.structs.replace(
        next(one for one in summary.kernels if one.kind == "matmul"), kernel=kernel, library=library
    )
    assert matmul_kinds(msgspec.structs.replace(summary, kernels=(row,))) == [kind]
