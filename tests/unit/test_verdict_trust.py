"""The verdict says what it rests on: ceilings, complete recordings, checked machines, trials."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_line import python
from own_records import advice, attached, inspected_record, tried
from sample_records import environment
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.given import with_advice
from stepscope.advisor.advise.outcome import Tried, best_of
from stepscope.advisor.advise.step import RecordedStep
from stepscope.advisor.advise.view import doubtful_ceilings, trial_blocks
from stepscope.advisor.scope.recorder import Recorder
from stepscope.advisor.scope.stages import Effort
from stepscope.advisor.verdict import program_verdict
from stepscope.analysis.advice.changes import advise
from stepscope.analysis.limits import mfu
from stepscope.analysis.verdict import AtMost, Verdict
from stepscope.cli.advice_page import conclude
from stepscope.cli.answer import AnswerOptions
from stepscope.cli.commands.trace import main as trace
from stepscope.cli.common import json_line
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Ceiling, FailedCheck, Record
from stepscope.report.answer import sentences
from stepscope.report.blocks import Finding, Page, Table
from stepscope.report.html import html_page
from stepscope.report.tables import col, table
from stepscope.report.text import csv_text, latex, markdown, markdown_page
from stepscope.report.verdict import verdict_facts, verdict_lines
from stepscope.studies.page import make_page
from stepscope.views.program.setting import Setting
from trace_files import training_step

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
SLOW = RESULTS / "advise-slow_h200.jsonl"
BF16, FUSED = advice("bfloat16", 0.4), advice("fused-optimizer", 0.3, optimizer="adamw-fused")


def on_page(page: Page) -> str:
    return html_page(page)


def in_markdown(page: Page) -> str:
    return markdown_page(page)


def on_terminal(page: Page) -> str:
    assert page.verdict is not None
    return "\n".join(verdict_lines(page.verdict))


SURFACES = (on_page, in_markdown, on_terminal)
Surface = Callable[[Page], str]


def shown(surface: Surface, records: list[Record]) -> str:
    return " ".join(surface(make_page(records)).split())


def verdict_on(*records: Record) -> Verdict:
    verdict = program_verdict(records)
    assert verdict is not None
    return verdict


def with_doubt(record: Record, doubt: str = "the machine was busy") -> Record:
    ceilings = tuple(msgspec.structs.replace(one, doubt=doubt) for one in record.ceilings)
    return msgspec.structs.replace(record, ceilings=ceilings)


def with_rates(**changes: Any) -> Record:
    rates = {"matmul.float32": 5e16, "matmul.bfloat16": 8e17, "memory.copy": 4e15}
    units = {"memory.copy": "B/s"}
    ceilings = tuple(
        Ceiling(name=name, value=rate, unit=units.get(name, "FLOP/s"), source="measured")
        for name, rate in rates.items()
    )
    return inspected_record(ceilings=ceilings, **changes)


@pytest.mark.parametrize("surface", SURFACES)
def test_a_ceiling_below_its_usual_value_marks_the_mfu(surface: Surface) -> None:
    """The float32 ceiling of this record is 45 TFLOP/s, all others of an H200 are 53."""
    text = shown(surface, read_records(SLOW))
    assert "matmul.float32 16 % below usual" in text
    # A page has the number above the sentence.
    bound = "≤ 83.5 %" if surface is on_page else "MFU in float32: at most 83.5 %"
    assert bound in text
    assert "MFU in float32: 83.5 %" not in text


def test_a_ceiling_below_its_usual_value_is_marked_wherever_it_is_used() -> None:
    records = read_records(SLOW)
    share = mfu(records[0])
    assert isinstance(share, AtMost)
    facts = verdict_facts(verdict_on(*records))
    assert facts is not None
    assert "below usual" in facts["mfu_doubt"]
    # The limit rests on bfloat16, which is as usual.
    assert facts["limit"]["doubt"] == ""
    page = make_page(records)
    (ceilings,) = (
        block
        for section in page.sections
        for block in section.blocks
        if isinstance(block, Table) and block.name == "ceilings"
    )
    (float32,) = (
        row for row in ceilings.rows if row[0] == "matmul.float32" and row[2] == "measured"
    )
    assert str(float32[1]).startswith("≥ 45")
    assert "below usual" in str(float32[3])
    (finding,) = doubtful_ceilings(facts_of(records[0]))
    assert finding.values["ceilings"] == "matmul.float32"


@pytest.mark.parametrize("surface", SURFACES)
def test_a_doubtful_ceiling_marks_the_limit_and_the_mfu(surface: Surface) -> None:
    record = with_rates()
    good, doubted = shown(surface, [record]), shown(surface, [with_doubt(record)])
    on_a_page = "The hardware limit is an upper bound: the machine was busy."
    bound = on_a_page if surface is on_page else "The hardware limit is at most"
    assert bound not in good
    assert "≤" not in good
    assert bound in doubted
    assert "the machine was busy" in doubted
    assert "hardware limit ≤" in doubted or ">≤" in doubted
    assert ("MFU, float32" if surface is on_page else "MFU in float32: at most") in doubted
    facts = verdict_facts(verdict_on(with_doubt(record)))
    assert facts is not None
    assert facts["limit"]["doubt"] == facts["mfu_doubt"] == "the machine was busy"


def test_a_step_above_a_doubtful_ceiling_is_not_invalid() -> None:
    """The ceiling is wrong, not the step."""
    record = with_rates(step=0.1)
    assert verdict_on(record).trust == "invalid"
    assert verdict_on(with_doubt(record)).trust == "good"
    # Such a bound of the MFU would be above 100 %.
    assert verdict_on(record).mfu is not None
    assert verdict_on(with_doubt(record)).mfu is None


def test_an_upper_bound_is_marked_in_every_writer() -> None:
    rows = [0.5, AtMost(value=0.25, reason="busy")]
    shares = table("t", "t", rows, [col("MFU", lambda share: share, "percent")])
    assert "≤ 25.0 %" in markdown(shares)
    assert r"\ensuremath{\leq} 25.0" in latex(shares)
    assert csv_text(shares).splitlines() == [
        "MFU (fraction),MFU is (fraction)",
        "0.5,",
        "0.25,at most",
    ]
    page = Page(title="x", subtitle="", headline=shares, sections=())
    assert "≤ 25.0 %" in html_page(page)
    json.loads(json_line({"cell": rows[1]}))


@pytest.mark.parametrize("surface", SURFACES)
def test_an_interrupted_recording_is_incomplete(surface: Surface) -> None:
    why = "the program ended after 14 of the 21 steps of a recording; it was ended by SIGINT"
    cut = with_rates(notes={"cut_short": why})
    text = shown(surface, [cut])
    assert "good measurement" not in text
    assert "incomplete" in text
    assert f"T{why[1:]}." in text
    assert verdict_on(cut).trust == "incomplete"
    noisy = msgspec.structs.replace(
        cut, failed_checks=(FailedCheck(code="busy-machine", message="busy"),)
    )
    assert verdict_on(noisy).trust == "noisy"


def test_a_rank_that_ended_early_makes_the_recording_incomplete() -> None:
    first = with_rates()
    second = with_rates(notes={"cut_short": "the program ended after 3 steps"})
    config = {"ranks": 2}
    ranks = [
        msgspec.structs.replace(one, id=f"rank{rank}", config=one.config | config | {"rank": rank})
        for rank, one in enumerate((first, second))
    ]
    assert verdict_on(*ranks[:1]).trust == "good"
    assert verdict_on(*ranks).trust == "incomplete"


def test_a_trace_is_not_checked_and_denies_no_change_it_cannot_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = training_step().write(tmp_path / "t.json")
    words = [str(file), "--out", str(tmp_path / "out")]
    assert trace(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "● not checked" in text
    assert "good measurement" not in text
    assert "No known change" not in text
    assert trace([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["verdict"]
    assert facts["trust"]["level"] == "unchecked"
    assert "how busy the machine was" in facts["trust"]["reason"]


def test_the_limit_and_its_part_of_the_bar_are_one_number() -> None:
    """The matmuls of this record would take longer at their ceiling than they took."""
    record = with_rates()
    slow = tuple(msgspec.structs.replace(one, value=3e16) for one in record.ceilings)
    verdict = verdict_on(msgspec.structs.replace(record, ceilings=slow))
    assert verdict.limit is not None
    assert verdict.limit.doubt
    assert verdict.parts[0].label == "hardware limit"
    assert verdict.parts[0].ms == pytest.approx(verdict.limit.ms)
    # The MFU rests on the same ceiling.
    assert isinstance(verdict.mfu, AtMost)
    assert "ideal time" not in " ".join(verdict_lines(verdict))


def test_measured_numbers_are_those_of_the_trials() -> None:
    records = read_records(SLOW)
    verdict, best = verdict_on(*records), best_of([Tried(one) for one in records[1:]])
    assert best is not None
    assert verdict.unchanged_ms == best.base_ms
    assert verdict.reachable_ms == best.changed_ms
    by_code = {one.trial.code: one for one in map(Tried, records[1:])}
    for change in verdict.changes:
        realized = by_code[change.code].realized
        assert realized is not None
        assert (change.gain.value, change.gain.measured) == (realized.value, True)
    text = " ".join(sentences(verdict))
    assert "34.0 ms instead of 261 ms, 7.68× as fast (measured)" in text


def test_gains_that_do_not_add_up_say_what_they_are_relative_to() -> None:
    record = with_advice(inspected_record(), [BF16, FUSED])
    alone = verdict_on(record, tried(20.0, BF16), tried(45.0, FUSED), tried(17.0, BF16, FUSED))
    text = " ".join(verdict_lines(alone))
    assert "Gains: each alone." in text
    on_top = verdict_on(record, tried(20.0, BF16), tried(50.0, FUSED), tried(14.0, BF16, FUSED))
    text = " ".join(" ".join(verdict_lines(on_top)).split())
    assert f"measured on top of {BF16.title}" in text
    assert "each alone" not in text


def test_a_step_of_another_speed_in_the_trials_is_explained() -> None:
    record = with_advice(inspected_record(step=50.2), [BF16])
    assert "at another time" not in " ".join(sentences(verdict_on(record, tried(20.0, BF16))))
    slower = with_advice(inspected_record(step=90.0), [BF16])
    text = " ".join(sentences(verdict_on(slower, tried(20.0, BF16))))
    assert "In the trials, at another time, the unchanged step took 50.0 ms;" in text
    assert "20.0 ms instead of 50.0 ms, 2.50× as fast (measured)" in text


@pytest.mark.parametrize(
    ("trials", "code", "words"),
    [
        ([tried(49.0, BF16, noise=8.0)], "advise.not-shown", "No gain is shown"),
        ([tried(51.0, BF16)], "advise.no-gain", "None of the tried changes is worth making"),
        (
            [tried(20.0, BF16, losses=(2.0, 1.5, 1.8, 2.0))],
            "advise.no-gain",
            "with the same loss",
        ),
        (
            [tried(0.0, BF16, status="error", reason="the script ended")],
            "advise.none-tried",
            "No change could be tried: the script ended.",
        ),
    ],
)
def test_trials_without_a_kept_change(trials: list[Record], code: str, words: str) -> None:
    (first, *_) = (block for block in trial_blocks(trials) if isinstance(block, Finding))
    assert first.code == code
    assert words in first.text
    assert first.tone == ("info" if code == "advise.no-gain" else "warn")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("status", "code"), [("error", 1), ("ok", 0)])
def test_advise_exits_with_1_if_no_trial_could_be_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool, status: str, code: int
) -> None:
    base = with_advice(inspected_record(), [BF16])
    trial = tried(20.0, BF16, status=status, reason="the script ended" if code else "")
    page = tmp_path / "page.html"
    options = AnswerOptions(json=as_json)
    assert conclude(page, options, RecordedStep(base), [base, trial], "latest") == code
    said = capsys.readouterr()
    assert ("no change could be tried: the script ended" in said.err) == bool(code)
    assert page.exists()


def test_where_nothing_can_be_ranked_no_change_is_denied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = (FailedCheck(code="busy-machine", message="busy"),)
    base = msgspec.structs.replace(with_rates(), failed_checks=busy)
    options = AnswerOptions(full=True)
    step = RecordedStep(with_advice(base, ()))
    assert conclude(tmp_path / "page.html", options, step, [base], "latest") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Order only; times are not reliable" in text
    assert "is predicted to gain 3 % or more" not in text
    assert "as predicted" not in text


@pytest.mark.parametrize("words", [{"ranks": 2}, {}])
def test_verification_is_not_suggested_for_a_distributed_program(
    words: Mapping[str, object],
) -> None:
    alone = with_rates()
    assert verdict_on(alone).next_command.startswith("stepscope advise --verify ")
    record = msgspec.structs.replace(alone, config=alone.config | words)
    if not words:
        setting = Setting(
            models=(), optimizers=(), compiled=False, parameter_formats={},
            matmul_precision="highest", distributed=True,
        )  # fmt: skip
        record = attached(alone, setting=setting)
    assert "--verify" not in verdict_on(record).next_command


def test_accelerate_is_not_promised_on_a_cpu() -> None:
    record = read_records(RESULTS / "advise-slow_cpu.jsonl")[0]
    facts = facts_of(record)
    assert not facts.on_gpu
    assert "accelerate" not in {one.code for one in advise(facts)}


def test_the_usual_ceilings_match_the_records() -> None:
    done = python("scripts/make_usual_ceilings.py", "--check", cwd=ROOT)
    assert done.returncode == 0, f"run scripts/make_usual_ceilings.py {done.stderr}"


def test_a_recording_that_ends_among_its_timed_steps_can_be_checked(tmp_path: Path) -> None:
    """The check for a busy machine needs a reading before and after the steps."""
    recorder = Recorder(Effort(warmup=1, timed=5), tmp_path)
    for _ in range(4):
        recorder.begin()
        recorder.end()
    recorder.finish()
    assert len(recorder.times) == 3
    assert "4 of the" in recorder.cut_short
    assert len(recorder.readings) == 2


def test_a_usual_ceiling_needs_the_same_device_and_power_limit() -> None:
    low = Ceiling(name="matmul.float32", value=4.5e13, unit="FLOP/s", source="measured")
    h200 = environment(device_name="NVIDIA H200", power_limit_w=700.0)
    assert low.checked(h200).doubt
    assert not msgspec.structs.replace(low, value=5.2e13).checked(h200).doubt
    assert not low.checked(msgspec.structs.replace(h200, power_limit_w=350.0)).doubt
    assert not low.checked(msgspec.structs.replace(h200, device_name="another")).doubt
    assert not msgspec.structs.replace(low, source="a datasheet").checked(h200).doubt
