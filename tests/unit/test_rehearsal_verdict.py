"""The verdict on a rehearsal: its cluster and strategy, what a step loses and what would help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from rehearsal_records import recorded_record
from stepscope.analysis.rehearsal.memory import StepMemory
from stepscope.analysis.rehearsal.sweep import ALL
from stepscope.analysis.verdict import Verdict
from stepscope.cli import main
from stepscope.records.jsonl import read_records, write_records
from stepscope.records.schema import FailedCheck
from stepscope.report.answer import sentences, trust_text
from stepscope.report.html import html_page
from stepscope.report.text import markdown_page
from stepscope.report.verdict import verdict_lines
from stepscope.studies.page import make_page, verdict_of
from stepscope.studies.rehearsal.inspected import inspected_subject
from stepscope.studies.rehearsal.subject import Question, Subject, predict, preset_network
from stepscope.studies.rehearsal.verdict import PREDICTED, rehearsal_verdict
from study_records import benchmark_record

GPT = Path(__file__).resolve().parents[2] / "results" / "advise-nano_gpt_h200.jsonl"


def subject(**changes: object) -> Subject:
    (record,) = (one for one in read_records(GPT) if one.study == "inspect")
    found = inspected_subject(record)
    assert found is not None
    return found._replace(**changes)


def question(*links: str, ranks: int = 64, strategies: tuple[str, ...] = ALL) -> Question:
    networks = tuple(preset_network(link) for link in links or ("infiniband",))
    return Question(networks, (8, ranks), strategies=strategies)


def verdict(of: Subject, asked: Question) -> Verdict:
    found = rehearsal_verdict([of], asked)
    assert found is not None
    assert found.step is not None
    assert sum(part.ms for part in found.parts) == pytest.approx(found.step.value)
    return found


def test_it_is_about_the_most_ranks_over_a_network_that_can_have_them() -> None:
    presets = ("nvlink", "infiniband", "ethernet")
    clusters = [verdict(subject(), question(*presets, ranks=n)).cluster for n in (64, 1024)]
    assert [(one.ranks, one.link) for one in clusters if one] == [
        (64, "nvlink"),
        (1024, "infiniband"),
    ]
    nvlink = question("nvlink")
    assert rehearsal_verdict([subject()], nvlink._replace(ranks=(1024,))) is None
    both = nvlink._replace(ranks=(8, 72, 1024))
    only = verdict(subject(), both).cluster
    assert only is not None
    assert (only.ranks, only.link) == (72, "nvlink")


def test_its_numbers_are_those_of_the_prediction() -> None:
    asked = question("ethernet", ranks=256, strategies=("naive",))
    found, recorded = verdict(subject(), asked), subject().recording
    step = predict(subject(), asked)[-1].steps["naive"]
    assert found.step is not None
    assert found.cluster is not None
    assert found.step.value == step.step_ms
    assert found.cluster.alone_ms == recorded.compute_ms
    assert found.cluster.efficiency == recorded.compute_ms / step.step_ms
    assert {part.label: part.ms for part in found.parts} == pytest.approx(
        {
            "compute": recorded.compute_ms,
            "exposed communication": step.exposed_ms
            - (packing := recorded.gradient_bytes * subject().upkeep.pack_byte),
            "packing gradients": packing,
        }
    )
    assert found.largest_loss is not None
    assert found.largest_loss.label == "exposed communication"


def test_the_usual_strategy_is_taken_if_it_is_as_fast() -> None:
    found = verdict(subject(), question())
    assert found.cluster is not None
    assert found.cluster.strategy.startswith("DDP in buckets of ")


def test_a_strategy_that_does_not_fit_is_not_taken() -> None:
    memory = StepMemory(peak=100e9, parameters=20e9, gradients=20e9, state=40e9)
    found = verdict(subject(memory=memory, device_bytes=50 * 10**9), question())
    assert found.cluster is not None
    assert found.cluster.strategy.startswith("FSDP in units of ")
    assert found.cluster.fits
    assert "which fits into the 46.6 GiB of the recorded device" in " ".join(sentences(found))
    small = verdict(subject(memory=memory, device_bytes=10**9), question())
    assert small.cluster is not None
    assert small.cluster.fits is False
    assert "which does not fit into the 954 MiB" in " ".join(sentences(small))
    unknown = verdict(subject(memory=None), question())
    assert "Peak memory" not in " ".join(sentences(unknown))


def test_changes_are_what_gains_at_least_three_percent() -> None:
    slow = verdict(subject(), question("ethernet", ranks=1024, strategies=("naive",)))
    assert [one.code for one in slow.changes] == ["strategy", "batch", "link-infiniband"]
    assert slow.step is not None
    assert all(one.gain.value >= 0.03 * slow.step.value for one in slow.changes)
    best = slow.changes[0]
    assert best.lines == ("DistributedDataParallel(model, bucket_cap_mb=10)",)
    alone = verdict(subject(), question("ethernet", ranks=1024, strategies=("bucketed",)))
    assert alone.step is not None
    assert best.gain.value == pytest.approx(slow.step.value - alone.step.value)
    assert alone.changes == ()
    assert "No known change is predicted to gain 3 % or more." in " ".join(sentences(alone))


def test_a_larger_batch_that_does_not_fit_is_not_advised() -> None:
    memory = StepMemory(peak=30e9, parameters=1e9, gradients=1e9, state=2e9)
    asked = question("ethernet", ranks=1024, strategies=("naive",))
    roomy = verdict(subject(memory=memory, device_bytes=80 * 10**9), asked)
    tight = verdict(subject(memory=memory, device_bytes=40 * 10**9), asked)
    assert "batch" in [one.code for one in roomy.changes]
    assert "batch" not in [one.code for one in tight.changes]
    assert memory.with_batch(2).peak == 4e9 + 2 * 26e9


def test_the_next_command_follows_from_what_is_exposed() -> None:
    hidden = verdict(subject(), question())
    assert hidden.next_command.startswith("stepscope advise --verify nano_gpt.py --device cuda")
    exposed = rehearsal_verdict(
        [subject()._replace(recording=subject().recording.on_faster_device(50))],
        question("ethernet", ranks=1024),
        ["a file.jsonl", "--faster", "50"],
    )
    assert exposed is not None
    assert exposed.next_command == (
        "stepscope rehearse 'a file.jsonl' --faster 50 --ranks 1024 --link ethernet"
        f" --batch {2 * subject().batch:g}"
    )
    assert exposed.cluster is not None
    assert exposed.cluster.stops_paying_at is not None
    assert "of a step is not compute from" in " ".join(sentences(exposed))


def test_a_recording_that_is_not_trusted_ranks_nothing() -> None:
    (record,) = (one for one in read_records(GPT) if one.study == "inspect")
    busy = replace(record, failed_checks=(FailedCheck(code="busy-machine", message="busy"),))
    noisy = inspected_subject(busy)
    assert noisy is not None
    found = verdict(noisy, question("ethernet", ranks=1024, strategies=("naive",)))
    assert (found.trust, found.changes) == ("noisy", ())
    text = " ".join(sentences(found))
    assert "The times are not reliable: the machine was busy, so changes are not ranked." in text
    assert trust_text(found).startswith("noisy")


def test_the_sentences_of_a_rehearsal() -> None:
    found = verdict(subject(), question("ethernet", ranks=1024, strategies=("naive",)))
    text = " ".join(sentences(found))
    assert text.startswith(
        "On 1,024 ranks over ethernet, a step is predicted to take 164 ms with one all-reduce per"
        " parameter after the backward pass; one rank alone takes 108 ms: 65.9 % scaling"
        " efficiency. The largest part beyond compute: exposed communication,"
    )
    assert text.endswith("of the recorded device. Predicted from one recorded step, not measured.")
    assert verdict_lines(found)[0].endswith("● predicted, not measured")
    assert trust_text(found) == "predicted, not measured"


def test_the_command_ends_with_it_and_the_page_opens_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rehearse", str(GPT), "--ranks", "64", "--link", "ethernet", "--out", str(tmp_path)]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.endswith("● predicted, not measured"))
    assert lines[start + 1].startswith("On 64 ranks over ethernet, a step is predicted to take ")
    assert lines[-1].startswith("page: ")
    page = (tmp_path / "rehearsal.html").read_text()
    assert page.index('class="verdict"') < page.index('class="headline"')
    for shown in ("step on 64 ranks over ethernet", "scaling efficiency", "peak memory of a rank"):
        assert page.index(shown) < page.index('class="headline"')
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    ((prediction,),) = (one["predictions"] for one in facts["rehearsals"])
    given = facts["verdict"]
    assert given["step_ms"] == prediction["strategies"]["bucketed"]["step_ms"]
    assert given["trust"] == {"level": "good", "reason": PREDICTED}
    cluster = given["cluster"]
    assert (cluster["ranks"], cluster["link"], cluster["fits"]) == (64, "ethernet", True)
    assert cluster["memory_bytes"] == prediction["strategies"]["bucketed"]["memory_bytes"]


def test_another_batch_has_other_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rehearse", str(GPT), "--ranks", "8", "--link", "nvlink", "--out", str(tmp_path)]
    sizes = []
    for batch in ("1", "2"):
        assert main([*words, "--batch", batch, "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["verdict"]["cluster"]["memory_bytes"])
    assert 1.5 < sizes[1] / sizes[0] < 2


def test_the_study_has_it_unless_the_page_has_other_measurements(tmp_path: Path) -> None:
    record = recorded_record()
    found = verdict_of([record])
    assert found is not None
    assert found.cluster is not None
    assert found.cluster.memory_bytes is not None
    assert found.next_command == ""
    page = make_page([record])
    assert "a step is predicted to take" in " ".join(markdown_page(page).split())
    assert 'class="verdict"' in html_page(page)
    other = verdict_of([record, benchmark_record()])
    assert other is not None
    assert other.cluster is None
    failed = recorded_record(status="error", reason="it failed")
    assert verdict_of([failed]) is None
    write_records([record], tmp_path / "one.jsonl")
    assert main(["show", str(tmp_path / "one.jsonl")]) == 0
