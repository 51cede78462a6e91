"""Steps of a watched program: from edge to edge, with the work outside the model."""

from __future__ import annotations

import pytest

from stepscope.analysis.trace.collectives import collective_starts, lateness_ms, times_last
from stepscope.analysis.trace.steps import find_steps
from stepscope.analysis.trace.summarize import summarize
from stepscope.analysis.trace.work import device_work
from trace_files import ADD, ALL_REDUCE, ENGINE, SGEMM, ChromeTrace


def watched(steps: int = 2) -> ChromeTrace:
    """Steps of 100 µs on the host; the device is 30 µs behind, and its first kernel is the last of
    a step before the first edge."""
    trace = ChromeTrace()
    trace.kernel(ADD, 20, 35, launch=(0, 2))
    for step in range(steps):
        at = 10 + 100 * step
        # As an optimizer hook records it: inside the optimizer's own range.
        trace.range("Optimizer.step#AdamW.step", at - 4, at + 2)
        trace.range(f"StepEdge#{step}", at, at + 1)
        trace.operator("aten::copy_", at + 5, at + 8)
        trace.kernel("Memcpy HtoD", at + 30, at + 35, launch=(at + 6, at + 7))
        trace.range("forward", at + 10, at + 40)
        trace.range("blocks.0", at + 11, at + 39)
        trace.operator("aten::mm", at + 12, at + 20)
        trace.kernel(SGEMM, at + 40, at + 110, launch=(at + 14, at + 16))
        trace.operator("nccl:all_reduce", at + 42, at + 50)
        trace.kernel(ALL_REDUCE, at + 110, at + 120, launch=(at + 44, at + 46), stream=9)
    trace.range(f"StepEdge#{steps}", 10 + 100 * steps, 11 + 100 * steps)
    return trace


def test_a_step_lasts_until_the_device_is_done_with_it() -> None:
    steps = find_steps(device_work(watched().read()))
    assert [(s.name, s.start, s.end) for s in steps] == [
        # The first begins when the device has finished what was launched before its edge.
        ("step 0", 35_000, 130_000),
        ("step 1", 130_000, 230_000),
    ]


def unmarked(steps: int, optimizers: tuple[str, ...] = ("AdamW",), **others: int) -> ChromeTrace:
    """Unmarked iterations of 100 µs: a forward, a backward, then each optimizer; `others` step once
    in so many iterations, before those."""
    trace = ChromeTrace()
    for iteration in range(steps):
        at = 100 * iteration
        trace.operator("aten::mm", at + 1, at + 30)
        trace.operator("autograd::engine::evaluate_function: MmBackward0", at + 31, at + 60, ENGINE)
        late = [name for name, every in others.items() if iteration % every == every - 1]
        for index, name in enumerate((*late, *optimizers)):
            begin = at + 65 + 5 * index
            trace.range(f"Optimizer.step#{name}.step", begin, begin + 4)
            trace.operator("aten::_foreach_add_", begin + 1, begin + 3)
    return trace


def cuts(trace: ChromeTrace) -> list[tuple[int, int]]:
    return [
        (step.start // 1000, step.end // 1000) for step in find_steps(device_work(trace.read()))
    ]


def test_unmarked_steps_end_with_the_optimizer() -> None:
    assert cuts(unmarked(4)) == [(69, 169), (169, 269), (269, 369)]
    summary = summarize(unmarked(4).read())
    assert (summary.cut, summary.steps) == ("optimizer", (0.1, 0.1, 0.1))
    assert summary.phase_ms("backward") == pytest.approx(0.029)
    assert summarize(watched().read()).cut == "marks"


def test_few_optimizer_steps_mark_nothing() -> None:
    assert cuts(unmarked(2)) == [(1, 169)]
    assert summarize(unmarked(2).read()).cut == "nothing"
    assert summarize(unmarked(3).read()).cut == "optimizer"


def test_with_several_optimizers_a_step_is_one_iteration() -> None:
    assert cuts(unmarked(3, ("Muon", "AdamW"))) == [(74, 174), (174, 274)]
    # Two of one class share a name, and have no backward between them.
    assert cuts(unmarked(3, ("AdamW", "AdamW"))) == [(74, 174), (174, 274)]
    assert cuts(unmarked(6, SGD=2)) == [(169, 369), (369, 569)]


def test_an_optimizer_that_calls_backward_itself_steps_every_time() -> None:
    trace = ChromeTrace()
    for iteration in range(3):
        at = 100 * iteration
        trace.range("Optimizer.step#LBFGS.step", at, at + 90)
        trace.operator("autograd::engine::evaluate_function: MmBackward0", at + 9, at + 60, ENGINE)
    assert cuts(trace) == [(90, 190), (190, 290)]


def test_work_outside_of_the_model_has_its_own_phase() -> None:
    summary = summarize(watched().read())
    assert summary.unattributed_ms == 0
    assert summary.doubt == ""
    phases = {use.kernel: use.phase for use in summary.uses}
    assert phases[next(name for name in phases if "sgemm" in name)] == "forward"
    assert phases[next(name for name in phases if "Memcpy" in name)] == "outside"
    assert {use.module for use in summary.uses} == {"", "blocks.*"}


def test_without_edges_unmarked_work_is_unattributed() -> None:
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 100)
    trace.range("forward", 0, 50)
    trace.operator("aten::mm", 10, 40)
    trace.operator("aten::add", 60, 80)
    assert summarize(trace.read()).unattributed_ms == 0.02


def test_an_outside_range_names_otherwise_unmarked_work() -> None:
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 100)
    trace.range("outside", 1, 99)
    trace.range("forward", 2, 50)
    trace.operator("aten::mm", 10, 40)
    trace.operator("aten::add", 60, 80)
    summary = summarize(trace.read())
    assert summary.unattributed_ms == 0
    assert summary.phase_ms("outside") == 0.02
    assert summary.phase_ms("forward") == 0.03


def test_time_in_a_data_loader_is_counted_within_steps() -> None:
    trace = watched(2)
    trace.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 20, 50)
    trace.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 220, 260)
    # Steps last from 35 to 130 and to 230 µs: they contain 15 and 10 µs of loading.
    summary = summarize(trace.read())
    assert summary.data_ms == pytest.approx(0.0125)
    assert summarize(watched(2).read()).data_ms == 0


def test_starts_of_collectives_by_step() -> None:
    assert collective_starts(watched(2).read()) == ((120_000,), (220_000,))


def test_on_a_cpu_a_collective_within_another_counts_once() -> None:
    trace = ChromeTrace()
    for step in range(3):
        trace.range(f"StepEdge#{step}", 100 * step, 100 * step + 1)
    trace.operator("c10d::allreduce_", 10, 40)
    trace.operator("gloo:all_reduce", 20, 30)
    assert collective_starts(trace.read()) == ((10_000,), ())


def test_the_last_rank_is_late() -> None:
    starts = {0: ((0, 10), (100,)), 1: ((2_000_000, 10), (4_000_100,))}
    assert lateness_ms(starts) == {0: 0.0, 1: 2.0}
    assert lateness_ms({0: ((1,),), 1: ((1, 2),)}) == {}
    assert lateness_ms({0: ((),), 1: ((),)}) == {}
    assert lateness_ms({0: ((1,),)}) == {}


def test_last_arrivals_are_counted() -> None:
    starts = {0: ((0, 30), (100,)), 1: ((20, 10), (104,)), 2: ((1, 2), (3,))}
    assert times_last(starts) == {0: 1, 1: 2, 2: 0}
    assert times_last({0: ((1,),), 1: ((1, 2),)}) == {}
