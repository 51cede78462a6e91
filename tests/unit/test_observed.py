"""What an observer finds in its lines: pure functions on synthetic series."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from stepscope.advisor.observer.prometheus import prometheus_text
from stepscope.analysis.observed.deviation import MemoryGrowth, StepDeviation
from stepscope.analysis.observed.lines import (
    Alarm,
    Line,
    Start,
    Steps,
    Tail,
    Wait,
    is_observed,
    rank_file,
    read_folder,
)
from stepscope.analysis.observed.stragglers import Stragglers
from stepscope.cli import main
from stepscope.report.blocks import Finding
from stepscope.views.trace.observed import alarm_text, alarms_of, observed_blocks

Floats = NDArray[np.float64]
EVERY = 10
GIB = 1 << 30


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def dependent(count: int, std: float, seed: int, phi: float = 0.9) -> Floats:
    """An autoregressive series."""
    noise = rng(seed).normal(0.0, std * math.sqrt(1 - phi**2), count)
    values = np.zeros(count)
    for index in range(1, count):
        values[index] = phi * values[index - 1] + noise[index]
    return values


def paused(every: int, factor: float, count: int, seed: int) -> Floats:
    values = 10.0 + rng(seed).normal(0.0, 0.1, count)
    values[::every] *= factor
    return values


def line(
    index: int,
    step_ms: float,
    *,
    own_ms: float | None = None,
    loader_ms: float = 0.0,
    usual_ms: float | None = None,
    **more: object,
) -> Steps:
    own = step_ms if own_ms is None else own_ms
    return Steps(
        at=float(index),
        step=(index + 1) * EVERY,
        steps=EVERY,
        step_ms=step_ms,
        slowest_ms=step_ms,
        compute_ms=own - loader_ms,
        communication_ms=step_ms - own,
        loader_ms=loader_ms,
        host_ms=0.0,
        usual_ms=own if usual_ms is None else usual_ms,
        **more,  # type: ignore[arg-type]
    )


def of_lines(values: Floats) -> Floats:
    return values[: len(values) // EVERY * EVERY].reshape(-1, EVERY)


def means(values: Floats) -> list[float]:
    return [float(mean) for mean in of_lines(values).mean(axis=1)]


def deviations(values: Floats) -> list[Alarm]:
    detector = StepDeviation()
    lines = (line(index, mean) for index, mean in enumerate(means(values)))
    return [alarm for one in lines if (alarm := detector.add(one)) is not None]


EVEN: dict[str, Callable[[int, int], Floats]] = {
    "even": lambda n, seed: 10.0 + rng(seed).normal(0.0, 0.05, n),
    "noisy": lambda n, seed: 10.0 * np.exp(rng(seed).normal(0.0, 0.2, n)),
    "dependent": lambda n, seed: 10.0 * np.exp(dependent(n, 0.1, seed)),
    "heavy tails": lambda n, seed: 10.0 * (1.0 + 0.1 * rng(seed).standard_t(3, n) ** 2),
    "validation every 100": lambda n, seed: paused(100, 30.0, n, seed),
    "checkpoint every 37": lambda n, seed: paused(37, 50.0, n, seed),
    "pauses every 15": lambda n, seed: paused(15, 5.0, n, seed),
}


@pytest.mark.parametrize("kind", EVEN)
def test_ten_thousand_even_steps_raise_no_alarm(kind: str) -> None:
    assert deviations(EVEN[kind](10_000, 1)) == []


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("level-shift", lambda n: np.where(np.arange(n) < n // 2, 1.0, 1.1)),
        ("drift", lambda n: 1.0 + np.linspace(0.0, 0.15, n)),
    ],
)
def test_a_slower_step_is_found_once(code: str, change: Callable[[int], Floats]) -> None:
    count = 1_600
    found = deviations(EVEN["even"](count, 2) * change(count))
    assert found
    assert found[0].code == code
    assert found[0].part == "compute"
    assert 0.04 < found[0].relative < 0.12
    if code == "level-shift":
        assert len(found) == 1
        assert 0 < found[0].step - count // 2 <= 70


def test_a_faster_step_is_a_new_level_without_an_alarm() -> None:
    values = EVEN["even"](3_000, 3)
    values[1_000:] *= 0.8
    assert deviations(values) == []
    values[2_000:] *= 1.2
    assert [alarm.code for alarm in deviations(values)] == ["level-shift"]


def test_traced_steps_do_not_count() -> None:
    detector = StepDeviation()
    for index in range(100):
        slow = 2.0 if 50 <= index < 60 else 1.0
        one = line(index, 10.0 * slow, traced=50 <= index < 60)
        assert detector.add(one) is None


def growing(sizes: Sequence[float]) -> list[Alarm]:
    detector = MemoryGrowth()
    lines = (line(i, 10.0, allocated_bytes=int(size)) for i, size in enumerate(sizes))
    return [alarm for one in lines if (alarm := detector.add(one)) is not None]


@pytest.mark.parametrize("lines", [60, 1_000])
def test_a_leak_is_found_at_any_rate(lines: int) -> None:
    sizes = 10.0 * GIB + np.linspace(0, 2 * GIB, lines) + rng().choice([0, GIB], lines)
    found = growing(list(sizes))
    assert [alarm.code for alarm in found] == ["memory-growth"] * len(found)
    assert 1 <= len(found) <= 3
    per_step = 2 * GIB / lines / EVERY
    assert 0.5 * per_step < found[0].more < 2.0 * per_step


def test_steady_and_settling_memory_is_no_growth() -> None:
    count = 1_000
    assert growing([10 * GIB] * count) == []
    assert growing(list(10 * GIB + rng().choice([0.0, 3 * GIB], count))) == []
    jump = [10 * GIB] * 300 + [12 * GIB] * 700
    assert growing(jump) == []
    assert growing([GIB * (1 + 9 * (1 - math.exp(-i / 5))) for i in range(count)]) == []


def compared(own: Floats, loader: Floats | None = None) -> list[Alarm]:
    """Feed the lines of ranks, a row of own times each, that step together."""
    detector = Stragglers(len(own))
    times = [means(row) for row in own]
    usual = [np.median(of_lines(row), axis=1) for row in own]
    loads = None if loader is None else [means(row) for row in loader]
    found = []
    for index in range(len(times[0])):
        step = max(rank[index] for rank in times)
        for rank, values in enumerate(times):
            loaded = 0.0 if loads is None else loads[rank][index]
            waits = (
                Wait("all_gather", 1.0, 0.1),
                Wait("all_reduce", values[index], step - values[index]),
            )
            one = line(
                index,
                step,
                own_ms=values[index],
                loader_ms=loaded,
                usual_ms=float(usual[rank][index]),
                waits=waits,
            )
            found += detector.add(rank, one)
    return found


@pytest.mark.parametrize("kind", ["even", "noisy", "dependent", "heavy tails"])
def test_even_ranks_have_no_straggler(kind: str) -> None:
    assert compared(np.stack([EVEN[kind](10_000, 10 + rank) for rank in range(4)])) == []


def test_a_pause_of_one_rank_is_no_straggler() -> None:
    own = np.stack([EVEN["even"](10_000, rank) for rank in range(4)])
    own[0, ::100] *= 30.0
    assert compared(own) == []


@pytest.mark.parametrize("part", ["compute", "loader"])
def test_a_straggler_of_five_percent_is_named_within_fifty_steps(part: str) -> None:
    own = np.stack([EVEN["even"](400, rank) for rank in range(4)])
    own[2] += 0.5
    loader = np.zeros_like(own)
    if part == "loader":
        loader[2] = 0.5
    (alarm,) = compared(own, loader)
    assert (alarm.code, alarm.rank, alarm.part) == ("straggler", 2, part)
    assert alarm.collective == "all_reduce"
    assert alarm.step <= 50
    assert alarm.relative == pytest.approx(0.05, abs=0.01)
    assert alarm.more == pytest.approx(0.5, abs=0.1)


def test_a_straggler_of_a_noisy_job_is_named_later() -> None:
    own = 100.0 * np.exp(rng(5).normal(0.0, 0.04, (4, 1_000)))
    own[1] *= 1.05
    found = compared(own)
    assert {alarm.rank for alarm in found} == {1}
    assert found[0].step <= 400


def test_delays_of_single_steps_do_not_hide_a_straggler() -> None:
    own = 100.0 + rng(6).normal(0.0, 0.3, (4, 200)) + 60.0 * (rng(7).random((4, 200)) < 0.05)
    own[3] += 6.0
    found = compared(own)
    assert {alarm.rank for alarm in found} == {3}
    assert found[0].step <= 100


def test_a_straggler_that_recovers_can_be_named_again() -> None:
    own = np.stack([EVEN["even"](900, rank) for rank in range(2)])
    own[0, :300] *= 1.1
    own[0, 600:] *= 1.1
    assert [alarm.rank for alarm in compared(own)] == [0, 0]


def test_a_rank_that_writes_no_lines_is_left_out() -> None:
    detector = Stragglers(3)
    found = []
    for index in range(20):
        for rank in range(2):
            found += detector.add(rank, line(index, 10.0, own_ms=10.0 if rank else 8.0))
    assert [alarm.rank for alarm in found] == [1]


START = Start(
    at=1.0, rank=0, ranks=2, every=EVERY, host="a", pid=1, device="CPU", program="train.py"
)


def write(folder: Path, rank: int, lines: Sequence[Line], at: float = 1.0) -> Path:
    start = msgspec.structs.replace(START, rank=rank, at=at)
    path = rank_file(folder, rank)
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (start, *lines)))
    return path


def job(folder: Path) -> Iterator[Alarm]:
    """Two ranks, the second of which is late."""
    lines = {
        rank: [line(i, 10.0, own_ms=10.0 if rank else 8.0) for i in range(8)] for rank in (0, 1)
    }
    detector = Stragglers(2)
    alarms = [
        alarm for i in range(8) for rank in (0, 1) for alarm in detector.add(rank, lines[rank][i])
    ]
    write(folder, 0, [*lines[0], *alarms])
    write(folder, 1, lines[1])
    yield from alarms


def test_files_of_a_job_are_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (alarm,) = job(tmp_path)
    assert is_observed(tmp_path)
    blocks = observed_blocks(read_folder(tmp_path))
    codes = [one.code for one in blocks if isinstance(one, Finding)]
    assert codes == ["observed.steps", "observed.straggler"]
    out = tmp_path / "out"
    assert main(["trace", str(tmp_path), "--out", str(out)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"Step {alarm.step}: {alarm_text(alarm)}." in output
    assert "rank 1 takes 25.0 % longer" in output
    page = (out / "trace.html").read_text()
    assert "Own time of the ranks" in page
    assert main(["trace", str(tmp_path), "--out", str(out), "--json"]) == 0
    facts = msgspec.json.decode(capsys.readouterr().out)
    assert facts["observed"]["alarms"][0]["rank"] == 1


def test_stragglers_are_found_in_files_that_were_collected(tmp_path: Path) -> None:
    (alarm,) = job(tmp_path)
    ranks = [msgspec.structs.replace(one, alarms=()) for one in read_folder(tmp_path)]
    assert alarms_of(ranks) == [alarm]


def test_watch_prints_new_deviations_and_renews_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [line(index, 10.0, own_ms=9.0) for index in range(5)]
    write(tmp_path, 0, slow[:2])
    added: list[Line] = [
        *slow[2:],
        Alarm(step=50, code="drift", rank=0, before=8, after=10, more=2),
    ]

    def meanwhile(_: float) -> None:
        if not added:
            raise KeyboardInterrupt
        with rank_file(tmp_path, 0).open("ab") as file:
            file.write(b"".join(msgspec.json.encode(one) + b"\n" for one in added))
        added.clear()

    monkeypatch.setattr("stepscope.cli.commands.trace.time.sleep", meanwhile)
    assert main(["trace", "--watch", str(tmp_path), "--out", str(tmp_path / "out")]) == 130
    output = capsys.readouterr().out
    assert output.index("20 steps on 1 rank") < output.index("50 steps on 1 rank")
    assert output.count("Step 50: the step has drifted from 8.00 ms to 10.0 ms") == 1
    assert "has drifted" in (tmp_path / "out" / "trace.html").read_text()


def test_watch_needs_the_files_of_an_observer(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("{}")
    assert main(["trace", "--watch", str(tmp_path)]) == 2


def test_damaged_lines_and_ranks_of_an_earlier_job_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [line(0, 10.0)], at=9.0)
    path.write_bytes(path.read_bytes() + b'{"kind":"later"}\n{"kind":"ste\xff\n[[[[\n')
    write(tmp_path, 3, [line(0, 10.0)], at=1.0)
    (rank,) = read_folder(tmp_path)
    assert len(rank.steps) == 1
    missing = [one for one in observed_blocks([rank]) if isinstance(one, Finding)][-1]
    assert missing.code == "observed.missing"


def test_a_tail_reads_complete_lines_and_follows_a_moved_file(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [line(0, 10.0)])
    tail = Tail(path)
    assert len(tail.read()) == 2
    text = msgspec.json.encode(line(1, 10.0)) + b"\n"
    with path.open("ab") as file:
        file.write(text[:20])
        file.flush()
        assert tail.read() == []
        file.write(text[20:])
    assert [one.step for one in tail.read() if isinstance(one, Steps)] == [20]
    path.rename(path.with_suffix(".1"))
    write(tmp_path, 0, [])
    assert len(tail.read()) == 1


def test_prometheus_text() -> None:
    one = line(4, 12.5, own_ms=10.0, loader_ms=2.0, resident_bytes=4096)
    text = prometheus_text(3, one, ["drift", "drift"])
    assert 'stepscope_steps_total{rank="3"} 50\n' in text
    assert 'stepscope_step_part_seconds{rank="3",part="loader"} 0.002\n' in text
    assert 'stepscope_memory_bytes{rank="3",kind="resident"} 4096\n' in text
    assert 'stepscope_alarms_total{rank="3",code="drift"} 2\n' in text
    assert text.count("# TYPE") == 5
