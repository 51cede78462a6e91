"""Records of every study made noisy: no success, no ranking and no cause may rest on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from hostile_records import real_records
from sample_records import record as make_record
from stepscope.analysis.trust import trust_of
from stepscope.records.schema import FailedCheck, Reading, Record, Series, decode
from stepscope.records.trust import Trust
from stepscope.report.blocks import Finding
from stepscope.report.html import html_page
from stepscope.report.text import markdown_page
from stepscope.studies.page import make_page, study_sections
from stepscope.studies.registry import viewables
from stepscope.studies.trusted import banner, tally, temper, tempered
from view_blocks import findings_of

GOOD = Trust()
BUSY = Trust(level="noisy", codes=("busy-machine",))
WRONG = Trust(level="invalid", codes=("above-ceiling",))


@cache
def committed(study: str) -> tuple[Record, ...]:
    return tuple(decode(msgspec.json.encode(raw)) for raw in real_records()[study])


def flagged(record: Record) -> Record:
    busy = FailedCheck(code="busy-machine", message="planted")
    return msgspec.structs.replace(record, failed_checks=(*record.failed_checks, busy))


def waited(record: Record) -> Record:
    readings = (Reading(at_s=0.0, waited_s=0.0), Reading(at_s=5.0, waited_s=4.0))
    return msgspec.structs.replace(record, readings=readings)


def spread(record: Record) -> Record:
    """Samples divided and multiplied by three, alternating."""

    def wild(series: Series) -> Series:
        if series.unit != "ms" or len(series.values) < 3:
            return series
        values = (v * (3.0 if i % 2 else 0.3) for i, v in enumerate(series.values))
        return msgspec.structs.replace(series, values=tuple(values))

    return msgspec.structs.replace(record, series=tuple(map(wild, record.series)))


def findings(records: list[Record]) -> list[Finding]:
    return [one for section in study_sections(records) for one in findings_of(section.blocks)]


@pytest.mark.parametrize("make", [flagged, waited], ids=lambda make: make.__name__)
@pytest.mark.parametrize("study", sorted(viewables()))
def test_nothing_is_concluded_from_a_busy_machine(
    study: str, make: Callable[[Record], Record]
) -> None:
    tempered_findings = findings([make(record) for record in committed(study)])
    assert tempered_findings
    for finding in (one for one in tempered_findings if one.timed):
        assert finding.tone != "good", finding.text
        assert not finding.conclusion
        assert finding.sentence.endswith(".")
        assert "inconclusive: the machine was busy" in finding.sentence


@pytest.mark.parametrize("study", sorted(viewables()))
def test_nothing_is_concluded_from_samples_that_spread(study: str) -> None:
    records = [spread(record) for record in committed(study)]
    if all(one.good for one in (trust_of(record) for record in records)):
        pytest.skip("its cases have too few samples to spread")
    for finding in (one for one in findings(records) if one.timed):
        assert finding.tone != "good", finding.text
        assert not finding.conclusion
        assert "inconclusive: " in finding.sentence


@pytest.mark.parametrize("study", sorted({"attention", "benchmark", "flash", "step", "warmup"}))
def test_good_records_keep_their_findings(study: str) -> None:
    """All sentences of the view are unchanged if every record is good."""
    records = [
        record for record in committed(study) if "h200" in record.environment.device_name.lower()
    ]
    blocks = viewables()[study].view(records)
    assert tempered(blocks, records) == blocks


def test_a_finding_is_tempered_only_by_the_records_it_names() -> None:
    trusts = {"a": GOOD, "b": BUSY, "c": GOOD}
    sure = Finding(text="A is faster.", tone="good", conclusion="Use A.", records=("a", "c"))
    assert temper(sure, trusts) == sure
    doubted = temper(msgspec.structs.replace(sure, records=("a", "b")), trusts)
    assert (doubted.tone, doubted.conclusion) == ("warn", "")
    assert doubted.text == (
        "A is faster; inconclusive: the machine was busy in 1 of 2 measurements (b)."
    )
    assert temper(msgspec.structs.replace(sure, records=()), trusts).tone == "warn"


@pytest.mark.parametrize("tone", ["info", "warn"])
def test_other_tones_stay(tone: str) -> None:
    finding = Finding(text="A takes 3 ms.", tone=tone, records=("b",))  # type: ignore[arg-type]
    doubted = temper(finding, {"b": BUSY})
    assert (doubted.tone, doubted.text) == (
        tone,
        "A takes 3 ms; inconclusive: the machine was busy.",
    )


def test_a_finding_without_times_is_tempered_only_by_invalid_records() -> None:
    peak = Finding(text="The peak is as predicted.", tone="good", timed=False)
    assert temper(peak, {"a": BUSY}) == peak
    assert temper(peak, {"a": WRONG}).tone == "warn"


def test_page_markdown_and_terminal_carry_the_banner() -> None:
    busy = [flagged(record) for record in committed("warmup")[:2]]
    page = make_page([*busy, *committed("warmup")[2:3]])
    assert page.banner == (
        "The machine was busy in 2 of 3 measurements; their times are unreliable: end other work on"
        " this machine and measure again."
    )
    assert page.banner in html_page(page)
    assert page.banner in markdown_page(page)
    assert tally(busy) == {"good": 0, "noisy": 2, "invalid": 0}


def test_good_records_have_no_banner() -> None:
    records = committed("warmup")
    assert banner(records) == ""
    assert 'role="alert"' not in html_page(make_page(records))


def test_records_without_a_result_are_not_measurements() -> None:
    failed = make_record(status="oom", reason="out of memory", series=())
    assert banner([failed]) == ""
    assert tally([failed]) == {"good": 0, "noisy": 0, "invalid": 0}
