"""Progress of a run in the terminal, and the estimate of the time left."""

from __future__ import annotations

from pathlib import Path

import pytest

from sample_records import environment, record, run
from stepscope.cli.progress import LiveLine, PlainLines
from stepscope.records.store import Store
from stepscope.runner.estimate import Costs, TimeLeft, measured_costs, time_left
from stepscope.runner.words import case_words
from stepscope.studies.base import PlannedCase
from stepscope.studies.presets import preset_cases

COSTS = Costs(device="d", start_s=5.0, per_case_s=3.0, cases={"benchmark": {"a": 2.0, "b": 4.0}})


def case(key: str, study: str = "benchmark") -> PlannedCase:
    return PlannedCase(study=study, key=key, config={})


@pytest.mark.parametrize("kind", [PlainLines, LiveLine])
def test_cases_beyond_the_announced_total_are_counted(
    kind: type[PlainLines | LiveLine], capsys: pytest.CaptureFixture[str]
) -> None:
    with kind(run(), 1, 0) as observer:
        for key in ("a", "b"):
            observer.case_started(case(key))
            observer.case_finished(record(case=key, config={"size": key}))
    text = capsys.readouterr().err
    assert "2/1" not in text
    if kind is PlainLines:
        assert text.index("benchmark a,") < text.index("benchmark b,")
        assert "[1/1]" in text
        assert "[2/2]" in text
    else:
        assert "2 of 2 cases" in text


@pytest.mark.parametrize(("total", "expected"), [(0, ""), (1, ": 1 case"), (2, ": 2 cases")])
def test_first_line_counts_cases(
    total: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    PlainLines(run(), total, 0)
    assert capsys.readouterr().err == f"run {run().id}{expected}\n"


def test_first_line_says_how_long_it_will_take(capsys: pytest.CaptureFixture[str]) -> None:
    PlainLines(run(), 2, 0, TimeLeft([case("a"), case("b")], {}, COSTS))
    assert capsys.readouterr().err.endswith(": 2 cases, about 11 s\n")


def test_skipped_cases_are_counted_and_failures_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LiveLine(run(), 4, 0) as observer:
        for key in "abc":
            status = "error" if key == "c" else "skipped"
            observer.case_started(case(key))
            observer.case_finished(
                record(case=key, config={"size": key}, status=status, reason="no GPU", series=())
            )
    text = capsys.readouterr().err
    assert "2 cases skipped:" in text
    assert "  2: no GPU" in text
    assert "benchmark c, context 512, bfloat16, train-step: error: no GPU" in text
    assert "benchmark a," not in text


def test_the_live_line_fits_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    key = "tiny+d_ff=128+d_model=64+n_heads=2+n_layers=8+vocab=128_c128_b2_float32_reference"
    observer = LiveLine(run(), 100, 0, TimeLeft([case(key)], {("benchmark", key): 61.0}, None))
    observer.case_started(case(key))
    line = observer._line().plain
    assert line.startswith("[0/100] 0:00, about 1:0")
    assert len(line) < 80


@pytest.mark.parametrize(
    ("study", "config", "expected"),
    [
        (
            "benchmark",
            {"size": "tiny", "context": 32, "batch": 2, "dtype": "float32", "mode": "forward"}
            | {"attention": "reference", "compile": "no", "warmup": 5},
            "tiny, context 32, float32, forward",
        ),
        (
            "warmup",
            {"size": "mini", "context": 32, "dtype": "float32", "warmup": 0},
            "mini, context 32, float32, 0 warm-up steps",
        ),
        (
            "flash",
            {"attention": "sdpa", "seq": 128, "head": 64, "dtype": "float32"},
            "sdpa, length 128, head dimension 64, float32",
        ),
        (
            "fp8",
            {"size": "tiny", "part": "training", "scaling": "tensorwise", "seed": 0},
            "tiny, training, tensorwise scaling, seed 0",
        ),
        ("techniques", {"technique": "fusion", "mib": 16}, "fusion, 16 MiB"),
        ("allreduce", {"collective": "all-reduce", "ranks": 1}, "all-reduce, 1 rank"),
        ("own", {"kind": "other"}, "fusion, m16"),
    ],
)
def test_a_case_in_words(study: str, config: dict[str, object], expected: str) -> None:
    assert case_words(study, "fusion_m16", config) == expected


def test_the_name_of_a_script_keeps_its_underscores() -> None:
    config = {"program": {"target": "lab/train_gpt.py"}}
    assert case_words("advise", "train_gpt.py_compile", config) == "train_gpt.py, compile"


def test_every_case_of_a_preset_has_words() -> None:
    cases = preset_cases("quick", environment(device_kind="cpu"))
    words = {(one.study, case_words(one.study, one.key, one.config)) for one in cases}
    assert len(words) > 0.7 * len(cases)
    assert all(len(text) < 120 for _, text in words)


def test_the_time_left_is_corrected_by_finished_cases() -> None:
    left = TimeLeft([case("a"), case("b"), case("new")], {("benchmark", "b"): 10.0}, COSTS)
    assert left.seconds() == 2.0 + 10.0 + 3.0
    left.finished("benchmark", "a", 4.0)
    assert left.seconds() == 2 * (10.0 + 3.0)
    left.finished("benchmark", "b", 0.0)
    assert left.seconds() == 2 * 3.0


def test_an_unknown_study_is_estimated_once_a_case_has_finished() -> None:
    left = TimeLeft([case("a", "mine"), case("b", "mine")], {}, COSTS)
    assert left.seconds() is None
    left.finished("mine", "a", 7.0)
    assert left.seconds() == 7.0


def test_earlier_records_of_the_same_device_give_the_time(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_run(run())
        for index, (name, seconds) in enumerate((("NVIDIA H200", 3.0), ("other", 9.0))):
            store.add(
                record(
                    id=f"{index}",
                    case=f"c{index}",
                    elapsed_s=seconds,
                    environment=environment(device_name=name),
                )
            )
        assert store.durations("NVIDIA H200") == {("benchmark", "c0"): 3.0}
        left = time_left([case("c0")], store, environment())
        assert left.seconds() == 3.0


def test_preset_quick_has_an_estimate_on_a_cpu() -> None:
    cases = preset_cases("quick", environment(device_kind="cpu"))
    left = TimeLeft(cases, {}, measured_costs()["cpu"])
    seconds = left.seconds()
    assert seconds is not None
    assert 20 < seconds + left.start_s < 600
