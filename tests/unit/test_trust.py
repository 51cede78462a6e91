"""Trust levels: those that the failed_checks determine, and those that the samples determine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sample_records import record as make_record
from stepscope.analysis.checks import codes
from stepscope.analysis.trust import trust_of
from stepscope.records.jsonl import read_records
from stepscope.records.schema import FailedCheck, Reading, Record, Series
from stepscope.records.trust import LEVEL_OF, SPREAD, reason, trust

RESULTS = Path(__file__).parents[2] / "results"


def record_of(*values: float, failed_checks: tuple[str, ...] = (), **more: object) -> Record:
    series = (Series(name="step", unit="ms", values=values),) if values else ()
    flagged = tuple(FailedCheck(code=code, message="planted") for code in failed_checks)
    return make_record(**{"series": series, "failed_checks": flagged} | more)


def test_every_lint_has_a_level_and_no_other_code_has() -> None:
    assert set(LEVEL_OF) == set(codes())


@pytest.mark.parametrize(("code", "level"), sorted(LEVEL_OF.items()))
def test_a_lint_gives_its_level(code: str, level: str) -> None:
    verdict = trust(record_of(10.0, 10.1, 10.2, 10.1, 10.0, failed_checks=(code,)))
    assert (verdict.level, verdict.codes) == (level, () if level == "good" else (code,))


def test_the_worst_lint_decides_and_is_named() -> None:
    verdict = trust(record_of(10.0, 10.1, 10.2, failed_checks=("busy-machine", "above-ceiling")))
    assert (verdict.level, verdict.codes) == ("invalid", ("above-ceiling",))


def test_an_unknown_lint_is_noisy() -> None:
    verdict = trust(record_of(10.0, 10.1, 10.2, failed_checks=("from-the-future",)))
    assert (verdict.level, verdict.reason) == (
        "noisy",
        "the measurement is flagged from-the-future",
    )


@pytest.mark.parametrize(
    "values",
    [
        pytest.param((10.0, 10.1, 10.2, 10.1, 47.0), id="one far sample"),
        pytest.param((95.0, 10.1, 10.2, 10.1, 10.0), id="a first call"),
        pytest.param((6.0, 10.0, 14.0) * 40, id="uneven samples whose median is known"),
        pytest.param((10.0, 30.0), id="too few to judge"),
    ],
)
def test_samples_with_a_known_median_are_good(values: tuple[float, ...]) -> None:
    flagged = ("wide-spread", "first-call-inside", "few-samples", "clocks-dropped")
    assert trust(record_of(*values, failed_checks=flagged)).good


@pytest.mark.parametrize(
    "values",
    [(206.0, 812.0, 999.0, 230.0), (10.0, 31.0, 12.0, 48.0, 25.0), (3.0, 0.3, 3.0, 0.3, 3.0)],
)
def test_samples_without_a_known_median_are_noisy(values: tuple[float, ...]) -> None:
    verdict = trust(record_of(*values))
    assert (verdict.level, verdict.codes) == ("noisy", (SPREAD,))
    assert verdict.uncertainty > 0.5


def test_the_longest_time_of_a_sweep_over_sizes_decides() -> None:
    wild = Series(name="1024", unit="ms", values=(0.1, 0.9, 0.2, 1.4, 0.5))
    long = Series(name="67108864", unit="ms", values=(90.0, 91.0, 92.0, 91.0, 90.0))
    assert trust(make_record(series=(wild, long))).good
    assert not trust(make_record(series=(wild,))).good


def test_a_warm_up_of_half_of_the_samples_is_good_only_in_the_warmup_study() -> None:
    settles, never = (900.0, 800.0, 700.0, 600.0) + (100.0,) * 4, (100.0, 400.0, 150.0, 900.0) * 2
    assert trust(record_of(*settles, study="warmup")).good
    assert not trust(record_of(*settles)).good
    assert not trust(record_of(*never, study="warmup")).good


def test_a_record_without_a_result_is_good() -> None:
    assert trust(
        record_of(failed_checks=("busy-machine",), status="oom", reason="out of memory")
    ).good


def test_waiting_for_cores_makes_a_record_noisy_without_a_stored_lint() -> None:
    readings = (Reading(at_s=0.0, waited_s=0.0), Reading(at_s=10.0, waited_s=8.0))
    record = record_of(10.0, 10.1, 10.2, 10.1, 10.0, readings=readings, ceilings=())
    assert trust(record).good
    assert trust_of(record).codes == ("busy-machine",)


RECORD_FILES = [
    path
    for path in sorted(RESULTS.glob("*_h200.jsonl"))
    if "version" in msgspec.json.decode(path.read_text().partition("\n")[0])
]


def test_most_files_of_the_h200_contain_records() -> None:
    assert len(RECORD_FILES) > 10


@pytest.mark.parametrize("path", RECORD_FILES, ids=lambda path: path.stem)
def test_every_committed_h200_record_is_good(path: Path) -> None:
    assert {trust_of(record).level for record in read_records(path)} == {"good"}


def test_reasons_are_clauses() -> None:
    for code in (*(code for code, level in LEVEL_OF.items() if level != "good"), SPREAD):
        assert reason(code).startswith(("the ", "another ", "part "))
        assert not reason(code).endswith(".")
