"""benchmarks/goals.py: thresholds against committed records and against planted ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from paired_ratio import STUDY as AGAINST_TORCH

from command_line import python
from parallel_records import ddp_record
from rehearsal_records import check_record
from sample_records import record as sample_record
from step_records import step_race_record
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Record, Series
from study_records import race_record

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import goals  # noqa: E402
from goals import Evidence, Goal, Judged  # noqa: E402

SHAPES = ("1,16,16384,64", "4,16,4096,64")


def judged(
    records: Sequence[Record] = (), *, lines: Sequence[Mapping[str, Any]] = (), **goal: Any
) -> list[Judged]:
    return goals.judge([Goal(**goal)], Evidence(tuple(records), tuple(map(dict, lines))))


def outcomes(
    records: Sequence[Record] = (), *, lines: Sequence[Mapping[str, Any]] = (), **goal: Any
) -> list[str]:
    return [one.outcome for one in judged(records, lines=lines, **goal)]


def against_torch(ratio: float, spread: float = 0.0) -> Record:
    series = tuple(
        Series(
            name=kind,
            variant=side,
            unit="ms",
            rank=0,
            values=tuple(base * (1 + spread * (-1) ** n) for n in range(20)),
        )
        for side, base in (("stepscope", 100 * ratio), ("baseline", 100.0))
        for kind in ("step", "cpu")
    )
    config = {
        "stepscope": "bucketed",
        "baseline": "DistributedDataParallel",
        "size": "mini",
        "context": 16,
        "ranks": 1,
    }
    mixed = tuple(s if s.variant == "stepscope" else _flat(s) for s in series)
    return sample_record(study=AGAINST_TORCH, case="ddp", config=config, series=mixed)


def _flat(series: Series) -> Series:
    return msgspec.structs.replace(series, values=(100.0,) * len(series.values))


class TestSteps:
    """Consecutive steps decide, by the interval of their ratio if blocks alternated."""

    goal: Mapping[str, Any] = {"measure": "step-speedup", "case": ("xl-512",), "at_least": 1.4}

    def race(self, ours: float, baseline: Sequence[float] = (139.0, 140.0, 141.0)) -> Record:
        return step_race_record(
            "xl-512",
            {"baseline: a": 300.0, "stepscope: b": 100.0},
            consecutive={"baseline": baseline, "stepscope": (ours,) * 3},
        )

    @pytest.mark.parametrize(
        ("ours", "outcome"), [(90.0, "reached"), (100.0, "inconclusive"), (110.0, "missed")]
    )
    def test_a_threshold_within_the_interval_is_inconclusive(
        self, ours: float, outcome: str
    ) -> None:
        (result,) = judged([self.race(ours)], **self.goal)
        assert result.outcome == outcome
        assert result.measured.value == pytest.approx(140 / ours)
        assert result.goal.margin(result.measured.value) == pytest.approx(140 / ours / 1.4 - 1)

    def test_one_block_per_side_decides_without_an_interval(self) -> None:
        drawn = {"baseline": (690.0, 120.0, 1700.0), "stepscope": (690.0, 100.0, 1600.0)}
        race = step_race_record("xl-512", {"baseline: a": 140.0, "stepscope: b": 90.0}, drawn=drawn)
        (result,) = judged([race], **self.goal)
        assert result.measured == ("xl-512", pytest.approx(1.2), None, None)
        assert result.outcome == "missed"

    def test_another_device_and_a_failed_race_are_not_measured(self) -> None:
        assert outcomes([self.race(90.0)], **self.goal, device="B200") == ["not measured"]
        lost = step_race_record("xl-512", status="oom", reason="too large")
        assert outcomes([lost], **self.goal) == ["not measured"]
        assert outcomes([], **self.goal) == ["not measured"]

    def test_time_memory_and_utilization(self) -> None:
        race = step_race_record(
            "2.7b-2048",
            {"baseline: a": 360.0, "stepscope: b": 320.0, "low-memory: c": 400.0},
            peaks={"baseline": 80.0, "stepscope": 60.0, "low-memory": 40.0},
            consecutive={"baseline": (360.0,) * 3, "stepscope": (318.0, 320.0, 322.0)},
        )
        case: dict[str, Any] = {"case": ("2.7b-2048",)}
        assert outcomes([race], measure="step-ms", at_most=330.0, **case) == ["reached"]
        assert outcomes([race], measure="step-ms", at_most=321.0, **case) == ["inconclusive"]
        memory = {"measure": "step-memory", **case}
        assert outcomes([race], at_most=0.75, **memory) == ["reached"]
        assert outcomes([race], at_most=0.7, **memory) == ["missed"]
        assert outcomes([race], at_most=0.5, side="low-memory", **memory) == ["reached"]
        (mfu,) = judged([race], measure="step-mfu", at_least=0.1, **case)
        assert mfu.measured.value == pytest.approx(28e12 / 0.32 / 780e12)
        assert mfu.measured.low is not None
        assert mfu.measured.high is not None
        assert mfu.measured.low < mfu.measured.value < mfu.measured.high


class TestAttention:
    def races(self, *baseline_ms: float) -> list[Record]:
        return [
            race_record({"triton": 1.0, "flex": ms}, sizes.replace(",", "x"))
            for ms, sizes in zip(baseline_ms, SHAPES, strict=False)
        ]

    def test_each_shape_is_judged_separately(self) -> None:
        goal = {"measure": "attention-speedup", "baseline": "flex", "case": SHAPES, "at_least": 1.2}
        assert outcomes(self.races(2.0, 1.1), **goal) == ["reached", "missed"]
        assert outcomes(self.races(2.0), **goal) == ["reached", "not measured"]

    def test_a_mean_over_some_of_the_shapes_is_not_measured(self) -> None:
        goal = {"measure": "attention-mean-speedup", "baseline": "flex", "case": SHAPES}
        (result,) = judged(self.races(2.0, 1.125), at_least=1.4, **goal)
        assert (result.outcome, result.measured.value) == ("reached", pytest.approx(1.5))
        assert outcomes(self.races(2.0, 1.125), at_least=1.6, **goal) == ["missed"]
        assert outcomes(self.races(2.0), at_least=1.4, **goal) == ["not measured"]

    @pytest.mark.parametrize(("ours", "outcome"), [(4.5, "reached"), (4.9, "missed")])
    def test_the_time_of_one_shape(self, ours: float, outcome: str) -> None:
        records = [race_record({"triton": ours})]
        assert outcomes(records, measure="attention-ms", case=SHAPES[:1], at_most=4.7) == [outcome]

    def test_the_slowest_of_the_short_shapes_decides(self) -> None:
        races = [
            race_record(
                {"triton": 0.01, "sdpa": 0.02},
                f"1x1x{seq}x64",
                in_a_row={"triton": 0.2, "sdpa": wall},
            )
            for seq, wall in ((128, 0.1), (256, 0.3))
        ]
        goal = {"measure": "attention-short-speedup", "case": ("triton", "auto"), "at_least": 1.0}
        ours, auto = judged(races, **goal)
        assert (ours.measured.case, ours.outcome) == ("triton 1,1,128,64", "missed")
        assert auto.outcome == "not measured"


class TestRanks:
    @pytest.mark.parametrize(("step", "outcome"), [(100.0, "reached"), (140.0, "missed")])
    def test_ddp_against_torch(self, step: float, outcome: str) -> None:
        record = ddp_record({"bucketed 1 MiB": step, "bucketed 10 MiB": 150.0})
        assert outcomes([record], measure="ddp-step-ratio", at_most=1.02) == [outcome]

    @pytest.mark.parametrize(
        ("ratio", "spread", "outcome"),
        [(0.9, 0.01, "reached"), (1.1, 0.01, "missed"), (1.02, 0.05, "inconclusive")],
    )
    def test_wrappers(self, ratio: float, spread: float, outcome: str) -> None:
        goal = {"measure": "wrapper-step-ratio", "at_most": 1.02}
        records = [against_torch(ratio, spread)]
        assert outcomes(records, case=("DistributedDataParallel",), **goal) == [outcome]
        assert outcomes(records, case=("fully_shard",), **goal) == ["not measured"]

    def test_the_worst_prediction_decides(self) -> None:
        goal = {"measure": "rehearsal-error", "at_most": 0.15}
        (result,) = judged([check_record({"flat": 0.25})], **goal)
        assert (result.measured.value, result.outcome) == (pytest.approx(0.2, abs=2e-3), "missed")
        assert outcomes([check_record()], **goal) == ["reached"]

    def test_a_fault_without_a_named_rank_is_missed(self) -> None:
        goal = {"measure": "rank-fault-seconds", "case": ("dies",), "at_most": 1.0}
        named = [{"fault": "dies", "seconds": s, "named": True} for s in (0.1, 0.3)]
        (result,) = judged(lines=named, **goal)
        assert (result.measured.value, result.outcome) == (0.3, "reached")
        other = [*named, {"fault": "dies", "seconds": 0.1, "named": False}]
        result = judged(lines=other, **goal)[0]
        assert result.outcome == "missed"
        goals.print_judged([result])


def test_lines_of_benchmarks_without_records() -> None:
    cost = {"case": "a", "device": "NVIDIA H200", "ms": {"plain": [1.0] * 9, "history": [1.05] * 9}}
    goal = {"measure": "recording-cost", "case": ("history",)}
    assert outcomes(lines=[cost], at_most=1.1, device="H200", **goal) == ["reached"]
    assert outcomes(lines=[cost], at_most=1.01, **goal) == ["missed"]
    assert outcomes(lines=[cost], at_most=1.1, device="B200", **goal) == ["not measured"]
    ran = [{"command": "help", "seconds": 0.2}]
    command = {"measure": "command-seconds", "at_most": 0.3}
    assert outcomes(lines=ran, case=("help", "quick"), **command) == ["reached", "not measured"]


def test_committed_records_are_judged_by_committed_goals() -> None:
    evidence = goals.read_evidence(sorted((ROOT / "results").glob("*.jsonl")))
    wanted = goals.read_goals()
    assert {goal.measure for goal in wanted} == set(goals.MEASURES)
    results = goals.judge(wanted, evidence)
    by_outcome: dict[str, set[str]] = {}
    for one in results:
        assert (
            one.measured.low is None
            or one.measured.value is None
            or one.measured.high is None
            or (one.measured.low <= one.measured.value <= one.measured.high)
        ), one
        by_outcome.setdefault(one.outcome, set()).add(one.goal.measure)
    # Everything but the command line has a committed record.
    assert by_outcome["not measured"] == {"command-seconds"}
    assert by_outcome["reached"] >= {"step-ms", "attention-ms", "rehearsal-error"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(str(ROOT / "benchmarks" / "goals.py"), *arguments)


def test_strict_exits_with_1_only_if_a_goal_is_missed(tmp_path: Path) -> None:
    slow, fast = tmp_path / "slow.jsonl", tmp_path / "fast.jsonl"
    write_records([against_torch(1.5, 0.01)], slow)
    write_records([against_torch(0.5, 0.01)], fast)
    done = run(str(slow))
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("missed"))
    assert re.search(r"bucketed, context 16, 1 ranks +1\.500 +\[.*\] +≤ 1\.02 +-47\.1%", line)
    assert run("--strict", str(slow)).returncode == 1
    assert run("--strict", str(fast)).returncode == 0


def test_a_missed_aim_is_not_a_failure(tmp_path: Path) -> None:
    race = step_race_record(
        "2.7b-512", {"baseline: a": 200.0, "stepscope: b": 100.0}, peaks={"stepscope": 90.0}
    )
    path = tmp_path / "race.jsonl"
    write_records([race], path)
    (mfu,) = [
        one
        for one in goals.judge(goals.read_goals(), goals.read_evidence([path]))
        if one.goal.measure == "step-mfu" and one.measured.case == "2.7b-512"
    ]
    assert mfu.goal.aim
    assert (mfu.outcome, run("--strict", str(path)).returncode) == ("missed", 0)


@pytest.mark.parametrize(
    ("text", "message"), [("[1]\n", "line 1 is not a record"), ('{"a": 1}\n{\n', "line 2")]
)
def test_a_file_without_json_lines_is_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(StepscopeError, match=message):
        goals.read_evidence([path])
    done = run(str(tmp_path / "absent.jsonl"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "absent.jsonl" in done.stderr


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ("measure = 'speed'\nat_least = 1", "measure is speed, not one of step-speedup"),
        ("measure = 'step-ms'", "step-ms needs either at_least or at_most"),
        ("measure = 'step-ms'\nat_least = 1\nat_most = 2", "either at_least or at_most"),
        ("measure = 'step-ms'\nat_most = 2\nleast = 1", "unknown field `least`"),
    ],
)
def test_an_invalid_goal_is_reported(tmp_path: Path, goal: str, message: str) -> None:
    path = tmp_path / "goals.toml"
    path.write_text(f"[[goal]]\n{goal}\n")
    with pytest.raises(StepscopeError, match=re.escape(message)):
        goals.read_goals(path)


@pytest.mark.parametrize("page", ["step", "flash", "parallel", "memory"])
def test_generated_pages_have_no_goals(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert not re.findall(r"\b[Gg]oals?\b", text)
    titles = {
        cell.strip()
        for line in text.splitlines()
        if line.startswith("|")
        for cell in line.split("|")
    }
    assert not titles & {"goal", "must", "aim", "at most", "reached", "missed", "below"}


def test_times_of_commands_are_judged(tmp_path: Path) -> None:
    path = tmp_path / "latency.jsonl"
    path.write_text(
        "".join(
            json.dumps({"command": name, "seconds": seconds}) + "\n"
            for name, seconds in (("help", 0.1), ("report", 5.0))
        )
    )
    done = run("--strict", str(path))
    assert done.returncode == 1
    assert re.search(r"^missed +command-seconds +report +5\.000 +≤ 3 +-66\.7%$", done.stdout, re.M)
