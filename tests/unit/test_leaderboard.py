"""The leaderboard test: scaled down on this machine, and its findings from planted records."""

from __future__ import annotations

import os

import pytest

from parallel_records import leaderboard_record
from quiet_bench import QuietBench
from sample_records import environment, value_of
from stepscope.report.blocks import Finding
from stepscope.studies.base import CaseSkipped
from stepscope.studies.leaderboard import STUDY
from stepscope.studies.leaderboard.cases import LeaderboardFlags
from stepscope.studies.leaderboard.measure import empty_caches, workload_of
from view_blocks import findings_of

SMALL = LeaderboardFlags(
    size="tiny", context=16, layers=1, vocab=64, dtype="float32", warmup_seconds=0.0, seconds=0.01
)


def by_code(*records: object) -> dict[str, Finding]:
    found = findings_of(STUDY.view(records))  # type: ignore[arg-type]
    return {finding.code.removeprefix("leaderboard."): finding for finding in found}


def test_the_defaults_are_the_test_of_the_handout() -> None:
    (case,) = STUDY.cases(LeaderboardFlags())
    model = case.shape
    assert (model.n_layers, model.d_model, model.d_ff, model.n_heads) == (34, 4096, 11_008, 32)
    assert (model.vocab, case.context, case.per_rank * case.ranks) == (151_936, 32_768, 2)
    assert workload_of(case, "cuda").batch == 1
    assert "missing" not in by_code(leaderboard_record())


def test_it_runs_scaled_down_on_two_ranks() -> None:
    (case,) = STUDY.cases(SMALL)
    before = {name: os.environ.get(name) for name in ("TRITON_CACHE_DIR",)}
    done = STUDY.measure(case, QuietBench())
    assert {name: os.environ.get(name) for name in before} == before
    steps = [series for series in done.series if series.name == "step"]
    assert [series.rank for series in steps] == [0, 1]
    assert len({len(series.values) for series in steps}) == 1
    total, first = (value_of(done.quantities, name) for name in ("total_s", "first_s"))
    assert 0 < first < total


def test_caches_are_empty_and_gone_afterwards() -> None:
    with empty_caches():
        folders = [os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
        assert not any(map(os.path.exists, folders))
    assert folders[0] not in os.environ.values()


def test_what_is_less_than_the_handout_is_listed() -> None:
    cpu = environment(device_kind="cpu", device_name="a CPU")
    flags = {"size": "tiny", "context": 64, "dtype": "float32"}
    missing = by_code(leaderboard_record(flags=flags, backend="gloo", environment=cpu))["missing"]
    for gap in ("a CPU instead of 2 GPUs", "n_layers 2 instead of 34", "context 64", "float32"):
        assert gap in missing.text
    half = by_code(leaderboard_record(ranks=1))["missing"]
    assert half.values["missing"] == 2
    assert "1 GPU instead of 2, batch 1 instead of 2" in half.text


@pytest.mark.parametrize(("seconds", "tone"), [(599.0, "info"), (601.0, "warn")])
def test_the_run_has_ten_minutes(seconds: float, tone: str) -> None:
    total = by_code(leaderboard_record(total_s=seconds))["total"]
    assert total.tone == tone
    assert total.values["within"] is (tone == "info")


def test_a_model_that_does_not_fit_is_skipped_before_it_starts() -> None:
    (case,) = STUDY.cases(LeaderboardFlags(dtype="float32"))
    with pytest.raises(CaseSkipped, match="choose a smaller --size"):
        STUDY.measure(case, QuietBench())
