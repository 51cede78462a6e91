"""A trace read in chunks equals the trace read at once; nesting of spans."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.trace import chrome, chunks
from stepscope.analysis.trace.model import NO_NUMBER, Spans, Trace, ordered_spans
from stepscope.analysis.trace.nesting import NO_SPAN, nearest, parents
from trace_files import operator_step, training_step

LAYOUTS = {
    "one line": lambda text: text,
    "compact": lambda text: json.dumps(json.loads(text), separators=(",", ":")),
    "indented": lambda text: json.dumps(json.loads(text), indent=2),
    "bare list": lambda text: json.dumps(json.loads(text)["traceEvents"], indent=1),
    "name behind": lambda text: text[:-1] + ', "traceName": "/tmp/a[1].json]" }',
}


def columns(trace: Trace) -> list[object]:
    """Return everything, with names instead of their numbers, whose order differs."""
    everything: list[object] = [trace.device_name]
    for part in (trace.kernels, trace.calls, trace.spans, trace.flows):
        for name, column in vars(part).items():
            values = column.tolist()
            everything.append([trace.names[v] for v in values] if name == "name" else values)
    return everything


def at_once(text: str) -> Trace:
    events, device_name = chrome._at_once(text.encode(), "whole")
    return events.trace(device_name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 500, 1 << 20])
def test_every_layout_and_chunk_size_gives_the_same_trace(
    monkeypatch: pytest.MonkeyPatch, layout: str, size: int
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", size)
    for built in (training_step(steps=2), operator_step()):
        text = LAYOUTS[layout](built.text())
        decoded = chrome._in_chunks(text.encode())
        assert decoded is not None
        assert columns(decoded[0].trace(decoded[1])) == columns(at_once(text))


def test_a_chunk_contains_as_many_events_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10)
    data = b'{"traceEvents": [{"a": 1}, {"b": 2},\n  {"c": 3} ], "traceName": "x"}'
    cut = next(chunks.possible_cuts(data))
    assert list(cut.chunks()) == [b'[{"a": 1}, {"b": 2}]', b'[{"c": 3} ]']
    assert cut.around() == b'{"traceEvents": [], "traceName": "x"}'


@pytest.mark.parametrize(
    "odd",
    [
        '{"ph": "X", "cat": "cpu_op", "name": "o}, {\\"x", "ts": 1, "dur": 2, "tid": 1}',
        '{"ph": "X", "cat": "cpu_op", "name": "o", "ts": 1, "dur": 2, "tid": 1,'
        ' "args": {"inputs": [{"a": 1}, {"b": 2}, {"c": 3}]}}',
    ],
)
def test_if_a_cut_splits_an_event_the_file_is_read_at_once(
    monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    text = f'{{"traceEvents": [{odd}, {odd}]}}'
    assert chrome._in_chunks(text.encode()) is None
    trace = chrome.read_chrome(text.encode(), "odd")
    assert len(trace.spans) == 2
    assert trace.spans.end.tolist() == [3000, 3000]


def test_of_two_lists_of_events_the_outer_one_counts() -> None:
    event = '{"ph": "X", "cat": "cpu_op", "name": "%s", "ts": 1, "dur": 2, "tid": 1}'
    inner, outer = event % "inner", event % "outer"
    text = f'{{"more": {{"traceEvents": [{inner}]}}, "traceEvents": [{outer}]}}'
    assert chrome.read_chrome(text.encode(), "two").names == ("outer",)


def test_the_number_of_candidate_cuts_is_bounded() -> None:
    data = b'{"traceEvents": [' + b"]" * 4000
    assert len(list(chunks.possible_cuts(data))) == 16


SPAN = st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 12), st.booleans())


def spans_of(drawn: list[tuple[int, int, int, bool]]) -> tuple[Spans, np.ndarray]:
    thread, start, length, _ = (np.array(c, np.int64) for c in zip(*drawn, strict=True))
    count = len(drawn)
    spans = ordered_spans(
        name=np.arange(count),
        start=start,
        end=start + length,
        thread=thread,
        is_range=np.zeros(count, np.bool_),
        sequence=np.full(count, NO_NUMBER),
        in_backward=np.zeros(count, np.bool_),
    )
    return spans, np.array([one[3] for one in drawn])


@given(st.lists(SPAN, min_size=1, max_size=60))
def test_the_innermost_open_span_of_the_thread_is_the_parent(
    drawn: list[tuple[int, int, int, bool]],
) -> None:
    spans, wanted = spans_of(drawn)
    parent = parents(spans)
    for index, (thread, start) in enumerate(
        zip(spans.thread.tolist(), spans.start.tolist(), strict=True)
    ):
        still_open = [
            other
            for other in range(index)
            if spans.thread[other] == thread and spans.end[other] > start
        ]
        assert parent[index] == max(still_open, default=NO_SPAN)
    for index, ancestor in enumerate(nearest(parent, wanted).tolist()):
        at = index
        while at != NO_SPAN and not wanted[at]:
            at = int(parent[at])
        assert ancestor == at
