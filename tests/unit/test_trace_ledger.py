"""The time ledger adds up, and the trace proves every cause it names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.kernels.names import describe
from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.intervals import gaps, length_before, own_lengths, union
from stepscope.analysis.trace.ledger import Ledger, ledgers, total
from stepscope.analysis.trace.steps import find_steps
from stepscope.analysis.trace.work import device_work
from trace_files import (
    ADD,
    ALL_REDUCE,
    SGEMM,
    ChromeTrace,
    nsight_file,
    replayed_step,
    training_step,
)

intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 2)), max_size=12
)


def columns(drawn: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ordered = sorted(drawn, key=lambda one: one[0])
    start = np.array([s for s, _, _ in ordered], np.int64)
    end = start + np.array([d for _, d, _ in ordered], np.int64)
    return start, end, np.array([tier for *_, tier in ordered], np.int64)


def owner(moment: int, start: np.ndarray, end: np.ndarray, tier: np.ndarray) -> int | None:
    """Return the interval that owns a moment: the lowest tier, then the one that began first."""
    running = [i for i in range(len(start)) if start[i] <= moment < end[i]]
    return min(running, key=lambda i: (tier[i], i), default=None)


@given(intervals)
def test_own_lengths_match_a_count_of_every_moment(drawn: list[tuple[int, int, int]]) -> None:
    start, end, tier = columns(drawn)
    counted = [0] * len(start)
    for moment in range(60):
        index = owner(moment, start, end, tier)
        if index is not None:
            counted[index] += 1
    assert own_lengths(start, end, tier).tolist() == counted


@given(intervals, st.integers(0, 60))
def test_a_union_and_its_gaps_fill_the_window(
    drawn: list[tuple[int, int, int]], moment: int
) -> None:
    start, end, _ = columns(drawn)
    merged = union(start, end)
    covered = {t for s, e in zip(start, end, strict=True) for t in range(s, e)}
    assert int((merged[1] - merged[0]).sum()) == len(covered)
    assert (merged[0][1:] > merged[1][:-1]).all()
    idle = gaps(*merged, 0, 60)
    assert int((idle[1] - idle[0]).sum()) == 60 - len(covered)
    before = length_before(*merged, np.array([moment], np.int64))
    assert before.tolist() == [len([t for t in covered if t < moment])]


kernels = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(0, 25),
        st.sampled_from([SGEMM, ADD, ALL_REDUCE, "adamw_one_kernel"]),
        st.one_of(st.none(), st.integers(1, 20)),
        st.integers(7, 9),
    ),
    min_size=1,
    max_size=10,
)
waits = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 15)), max_size=3)
Drawn = list[tuple[int, int, str, int | None, int]]


def drawn_trace(drawn: Drawn, waiting: list[tuple[int, int]]) -> ChromeTrace:
    """Kernels launched some time before they begin, within one operator and one step."""
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", -30, 100)
    trace.operator("aten::mm", -30, 100)
    for start, length, name, lead, stream in drawn:
        launch = None if lead is None else (start - lead, start - lead + 0.5)
        trace.kernel(name, start, start + length, launch=launch, stream=stream)
    for start, length in waiting:
        trace.call("cudaDeviceSynchronize", start, start + length)
    return trace


LOWER_TIERS = {"optimizer": 1, "communication": 2}
"""Classes that get a moment only if nothing in an earlier tier runs."""


def by_moment(drawn: Drawn, waiting: list[tuple[int, int]]) -> Ledger:
    """Compute the same ledger, half a microsecond at a time."""
    ordered = sorted(enumerate(drawn), key=lambda one: (one[1][0], one[0]))
    runs = [(s, s + d, n, lead) for _, (s, d, n, lead, _) in ordered]
    launches = any(lead is not None for *_, lead in runs)
    last = max([100, *(end for _, end, _, lead in runs if lead is not None)])
    work: dict[tuple[str, str], int] = {}
    cause = dict.fromkeys(("cpu", "synchronization", "queue", "no_phase", "no_launch"), 0)
    for half in range(-60, 2 * last):
        t = half / 2
        running = [
            (LOWER_TIERS.get(describe(name).kind, 0), index, name, lead)
            for index, (start, end, name, lead) in enumerate(runs)
            if start <= t < end
        ]
        if running:
            _, _, name, lead = min(running, key=lambda one: one[:2])
            if lead is None:
                cause["no_phase"] += 500
            else:
                key = ("forward", describe(name).kind)
                work[key] = work.get(key, 0) + 500
            continue
        later = [run for run in runs if run[0] > t]
        began = max([-30.0, *(e for s, e, *_ in runs if e <= t and e > s)])
        queued = bool(later) and later[0][3] is not None
        queued = queued and later[0][0] - later[0][3] + 0.5 <= began
        if launches and not queued and any(s <= t < s + d for s, d in waiting):
            cause["synchronization"] += 500
        elif not later:
            cause["cpu"] += 500
        elif later[0][3] is None:
            cause["no_launch"] += 500
        else:
            cause["queue" if queued else "cpu"] += 500
    return Ledger(wall=(last + 30) * 1000, work=work, **cause)


@settings(max_examples=200)
@given(kernels, waits)
def test_a_ledger_adds_up_and_matches_a_count_of_every_moment(
    drawn: Drawn, waiting: list[tuple[int, int]]
) -> None:
    drawn = [one for one in drawn if one[1] > 0] or [(0, 5, SGEMM, 3, 7)]
    (ledger,) = ledgers(device_work(drawn_trace(drawn, waiting).read()))
    assert sum(length for *_, length in ledger.lines()) == ledger.wall
    slow = by_moment(drawn, waiting)
    assert ledger.wall == slow.wall
    assert {k: v for k, v in ledger.work.items() if v} == slow.work
    names = ("cpu", "synchronization", "queue", "no_phase", "no_launch")
    assert {n: getattr(ledger, n) for n in names} == {n: getattr(slow, n) for n in names}


def test_a_training_step_closes_with_every_line() -> None:
    (ledger,) = ledgers(device_work(training_step().read()))
    assert ledger.wall == 1_000_000
    assert ledger.lines() == [
        ("forward", "matmul", 80_000),
        ("forward", "elementwise", 20_000),
        ("loss", "elementwise", 10_000),
        ("backward", "matmul", 80_000),
        ("backward", "elementwise", 20_000),
        ("optimizer", "optimizer", 30_000),
        ("idle", "CPU: nothing was launched", 280_000),
        ("idle", "synchronization: the CPU waits for the GPU", 480_000),
        ("", "unattributed", 0),
    ]
    assert ledger.adds_up
    assert ledger.doubt() == ""
    assert (ledger.busy, ledger.idle) == (240_000, 760_000)
    assert (ledger.waited, ledger.waited_busy) == (480_000, 0)


def test_communication_counts_only_while_nothing_else_runs() -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 100)
    trace.kernel(SGEMM, 10, 50, launch=(1, 2))
    trace.kernel(ALL_REDUCE, 20, 80, launch=(3, 4), stream=20)
    (ledger,) = ledgers(device_work(trace.read()))
    assert ledger.work == {("forward", "matmul"): 40_000, ("forward", "communication"): 30_000}


def test_an_optimizer_overlapped_with_the_backward_counts_only_while_alone() -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 100)
    trace.kernel("adamw_one_kernel", 5, 90, launch=(1, 2), stream=20)
    trace.kernel(SGEMM, 10, 50, launch=(3, 4))
    trace.kernel(ALL_REDUCE, 60, 95, launch=(5, 6), stream=30)
    (ledger,) = ledgers(device_work(trace.read()))
    assert ledger.work == {
        ("forward", "matmul"): 40_000,
        ("forward", "optimizer"): 45_000,
        ("forward", "communication"): 5_000,
    }


def test_a_gap_before_a_queued_kernel_is_not_a_launch_gap() -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 100)
    trace.kernel(SGEMM, 10, 50, launch=(1, 2))
    trace.kernel(SGEMM, 60, 100, launch=(3, 4))
    (ledger,) = ledgers(device_work(trace.read()))
    assert (ledger.cpu, ledger.queue) == (10_000, 10_000)


def test_a_wait_is_divided_into_busy_and_idle_time() -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 100)
    trace.kernel(SGEMM, 10, 50, launch=(1, 2))
    trace.call("cudaStreamSynchronize", 20, 60)
    trace.call("cudaStreamSynchronize", 0, 100, thread=999)  # a thread that launches nothing
    (ledger,) = ledgers(device_work(trace.read()))
    assert (ledger.synchronization, ledger.waited, ledger.waited_busy) == (10_000, 40_000, 30_000)


def test_unexplained_time_keeps_the_ledger_open_with_a_reason() -> None:
    trace = training_step()
    trace.kernel("mystery", 900, 950)
    (ledger,) = ledgers(device_work(trace.read()))
    assert not ledger.adds_up
    assert ledger.no_phase == 50_000
    # During most of the gap before it the host was seen waiting, but not before that wait.
    assert ledger.no_launch == 18_000
    assert ledger.doubt() == (
        "6.8% of the time is kernels whose phase no operator or range determines"
    )


def test_steps_follow_one_another_when_the_device_runs_behind() -> None:
    trace = ChromeTrace()
    for step in range(3):
        trace.range(f"ProfilerStep#{step}", step * 10, step * 10 + 10)
        trace.operator("aten::mm", step * 10, step * 10 + 9)
        trace.kernel(SGEMM, 5 + step * 40, 45 + step * 40, launch=(step * 10 + 1, step * 10 + 2))
    work = device_work(trace.read())
    assert [(s.start, s.end) for s in find_steps(work)] == [
        (0, 45_000),
        (45_000, 85_000),
        (85_000, 125_000),
    ]
    parts = ledgers(work)
    assert [part.work for part in parts] == [{("forward", "matmul"): 40_000}] * 3
    summed = total(parts)
    assert (summed.wall, summed.steps) == (125_000, 3)
    assert sum(length for *_, length in summed.lines()) == summed.wall


def test_a_trace_without_marks_is_one_step() -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 5, 30)
    trace.kernel(SGEMM, 20, 50, launch=(10, 12))
    (step,) = find_steps(device_work(trace.read()))
    assert (step.name, step.start, step.end) == ("whole trace", 5_000, 50_000)


def test_on_a_cpu_operators_stand_for_kernels() -> None:
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 100)
    trace.range("forward", 0, 60)
    trace.operator("aten::mm", 10, 40)
    trace.operator("aten::_softmax", 45, 50)
    trace.operator("autograd::engine::evaluate_function: MmBackward0", 60, 90)
    trace.operator("aten::mm", 65, 85)
    (ledger,) = ledgers(device_work(trace.read()))
    assert ledger.lines() == [
        ("forward", "matmul", 30_000),
        ("forward", "softmax", 5_000),
        ("backward", "matmul", 20_000),
        ("backward", "other", 10_000),
        ("idle", "between operators", 35_000),
        ("", "unattributed", 0),
    ]


def test_a_ledger_of_an_nsight_trace_closes(tmp_path: Path) -> None:
    (ledger,) = ledgers(device_work(read_trace(nsight_file(tmp_path / "report.sqlite"))))
    assert ledger.lines() == [
        ("forward", "matmul", 4_000),
        ("backward", "matmul", 3_000),
        ("backward", "copy/cast", 500),
        ("idle", "CPU: nothing was launched", 2_200),
        ("idle", "synchronization: the CPU waits for the GPU", 300),
        ("", "unattributed", 0),
    ]


def test_every_class_has_a_position_in_the_order() -> None:
    work = {("forward", kind): 1 for kind in CLASSES}
    ledger = Ledger(wall=len(CLASSES), work=work)
    assert [kind for _, kind, _ in ledger.lines()[:-1]] == list(CLASSES)
    with pytest.raises(KeyError):
        Ledger(wall=1, work={("nap", "matmul"): 1}).lines()


def test_replayed_work_has_its_own_line_unless_a_range_names_the_phase() -> None:
    (bare,) = ledgers(device_work(replayed_step().read()))
    assert bare.work == {("graph", "matmul"): 180_000, ("graph", "elementwise"): 10_000}
    assert bare.adds_up
    # Gaps between kernels of one launch belong to the device, even while the CPU waits.
    assert (bare.cpu, bare.queue, bare.synchronization) == (60_000, 15_000, 235_000)
    with_range = replayed_step()
    with_range.range("forward", 5, 65)
    (marked,) = ledgers(device_work(with_range.read()))
    assert set(marked.work) == {("forward", "matmul"), ("forward", "elementwise")}
