"""The flame graph: a tree whose values add up, and speedscope's file format."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.flame import (
    Frame,
    Profile,
    Weighted,
    memory_stacks,
    speedscope,
    time_stacks,
    tree,
)
from stepscope.analysis.trace.summary import Summary
from stepscope.records.jsonl import read_records
from stepscope.records.memory import SavedTensor
from stepscope.report.blocks import Flame
from stepscope.report.html import html_page
from stepscope.studies.page import make_page
from stepscope.views.flame import flame_blocks

RESULTS = Path(__file__).parents[2] / "results"
NAMES = st.sampled_from(["a", "b", "c"])
STACKS = st.lists(
    st.builds(Weighted, st.lists(NAMES, min_size=1, max_size=4).map(tuple), st.floats(0.01, 1e3)),
    min_size=1,
    max_size=20,
)


def totals(frame: Frame) -> None:
    below = sum(child.value for child in frame.children)
    assert below <= frame.value * (1 + 1e-9)
    assert [child.value for child in frame.children] == sorted(
        (child.value for child in frame.children), reverse=True
    )
    for child in frame.children:
        totals(child)


@given(STACKS)
def test_a_frame_holds_its_children(stacks: list[Weighted]) -> None:
    root = tree(stacks)
    assert root.value == pytest.approx(sum(one.value for one in stacks))
    totals(root)


@given(STACKS)
def test_speedscope_has_every_stack_with_its_weight(stacks: list[Weighted]) -> None:
    made = speedscope([Profile("time", "milliseconds", tuple(stacks))], "step")
    (profile,) = made["profiles"]
    frames = [frame["name"] for frame in made["shared"]["frames"]]
    assert len(frames) == len(set(frames))
    paths = [tuple(frames[index] for index in sample) for sample in profile["samples"]]
    assert paths == [one.path for one in stacks]
    assert profile["weights"] == [one.value for one in stacks]
    assert profile["endValue"] == pytest.approx(sum(profile["weights"]))


def test_the_step_of_a_program_has_time_and_memory() -> None:
    (record, *_) = read_records(RESULTS / "advise-slow_h200.jsonl")
    summary = record.required("profile", Summary)
    stacks = list(time_stacks(summary))
    assert sum(one.value for one in stacks) == pytest.approx(summary.wall_ms, rel=0.02)
    assert {"forward", "backward", "optimizer", "idle"} <= {one.path[0] for one in stacks}
    page = make_page([record])
    flames = [b for section in page.sections for b in section.blocks if isinstance(b, Flame)]
    assert [view.unit for view in flames[0].views] == ["ms", "bytes"]
    html = html_page(page)
    assert 'data-flame="inspect-flame"' in html
    assert '"inspect-flame"' in html


def test_memory_counts_repeated_tensors() -> None:
    saved = SavedTensor(
        module="blocks.*.attention", operator="softmax", shape=(2, 3), dtype="float32", bytes=24,
        code="model.py:1", times=12,
    )  # fmt: skip
    (stack,) = memory_stacks([saved])
    assert stack == Weighted(("blocks", "attention", "softmax", "2×3 float32"), 288.0)


def test_nothing_to_draw_draws_nothing() -> None:
    assert flame_blocks(None, (), "x") == ()
