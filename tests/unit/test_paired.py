"""Interleaved implementations: ratios per round, of the slowest rank and of all CPU time."""

from __future__ import annotations

from pathlib import Path

import pytest
from paired_ratio import STUDY, paired

from sample_records import record
from stepscope.records.jsonl import read_records, write_records
from stepscope.records.schema import Record, Series

ROOT = Path(__file__).resolve().parents[2]


def race(ratio: float = 0.9, spread: float = 0.0) -> Record:
    """Rank 1 is the slowest of both; every round is off by `spread`, with alternating sign."""
    rounds = [ratio + (spread if number % 2 else -spread) for number in range(20)]
    times = {
        ("stepscope", "step", 0): [50.0] * 20,
        ("stepscope", "step", 1): [100 * value for value in rounds],
        ("baseline", "step", 0): [99.0] * 20,
        ("baseline", "step", 1): [100.0] * 20,
        ("stepscope", "cpu", 0): [30.0] * 20,
        ("stepscope", "cpu", 1): [50.0] * 20,
        ("baseline", "cpu", 0): [40.0] * 20,
        ("baseline", "cpu", 1): [60.0] * 20,
    }
    series = tuple(
        Series(name=name, variant=side, unit="ms", rank=rank, values=tuple(values))
        for (side, name, rank), values in times.items()
    )
    config = {"stepscope": "DDP", "baseline": "torch's", "size": "mini", "context": 16, "ranks": 2}
    return record(study=STUDY, case="ddp", config=config, series=series)


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_ratios_use_the_slowest_rank_of_each_round(spread: float) -> None:
    ratios = paired(race(1.1, spread))
    assert ratios.wall.median == pytest.approx(1.1)
    assert (ratios.wall.low, ratios.wall.high) == pytest.approx((1.1 - spread, 1.1 + spread))
    assert ratios.cpu.median == pytest.approx(0.8)
    assert ratios.baseline_ms == 100.0


def test_the_page_has_a_row_for_each_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from parallel_page import against_torch

    path = tmp_path / "races.jsonl"
    write_records([race(), race(1.1)], path)
    text = "\n".join(against_torch(read_records(path)))
    assert "parallel_against_torch.py --context 16 --out" in text
    assert "| DDP | torch's | mini | 16 | 2 | 100.0 |" in text
    assert "| 0.9000 [0.9000, 0.9000] |" in text
    assert "| 1.100 [1.100, 1.100] |" in text
