"""Any file gives a summary, or one line that says why there is none."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analysis.trace.chrome import read_chrome
from stepscope.analysis.trace.summarize import summarize
from stepscope.analysis.trace.summary import Summary
from stepscope.errors import StepscopeError
from stepscope.report.blocks import Page, Section
from stepscope.report.html import html_page
from stepscope.views.trace.view import ledger_table, trace_blocks
from trace_files import training_step

COMPLETE = training_step().text().encode()

numbers = st.one_of(
    st.integers(-(2**63), 2**64), st.floats(allow_nan=False, allow_infinity=False), st.none()
)
names = st.sampled_from(
    [
        "forward",
        "backward",
        "ProfilerStep#1",
        "aten::mm",
        "</script>",
        "",
        "cudaDeviceSynchronize",
        "autograd::engine::evaluate_function: X",
        "ampere_sgemm_128x64_tn",
        "\x00",
        "é" * 300,
    ]
)
small = st.integers(-5, 60)
events = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "X", "X", "M", "f"])},
    optional={
        "cat": st.sampled_from(
            ["kernel", "cuda_runtime", "cpu_op", "user_annotation", "gpu_memcpy", "other"]
        ),
        "name": names,
        "tid": st.one_of(small, names),
        "ts": st.one_of(small, small, numbers),
        "dur": st.one_of(small, small, numbers),
        "args": st.fixed_dictionaries(
            {},
            optional={
                "correlation": st.one_of(small, numbers),
                "stream": st.one_of(small, names),
                "device": small,
                "Sequence number": st.one_of(small, numbers),
                "Fwd thread id": small,
            },
        ),
    },
)


def summarized_or_refused(data: bytes) -> None:
    try:
        summary = summarize(read_chrome(data, "trace"))
    except StepscopeError as error:
        message = str(error)
        assert len(message.splitlines()) == 1
        return
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary
    total = sum(line.ms for line in summary.lines)
    assert abs(total - summary.wall_ms) <= 1e-6 * summary.wall_ms
    page = Page(
        title="",
        subtitle="",
        headline=ledger_table(summary, "x"),
        sections=(Section(name="s", title="", question="", blocks=trace_blocks(summary)),),
    )
    assert html_page(page).count("</script>") == 3


@settings(max_examples=80)
@given(st.lists(events, max_size=14))
def test_any_events_are_summarized_or_refused(drawn: list[dict[str, Any]]) -> None:
    summarized_or_refused(json.dumps({"traceEvents": drawn}).encode())


@settings(max_examples=40)
@given(st.integers(0, len(COMPLETE) - 1), st.binary(max_size=6), st.integers(0, 8))
def test_a_damaged_trace_is_summarized_or_refused(at: int, new: bytes, lost: int) -> None:
    summarized_or_refused(COMPLETE[:at] + new + COMPLETE[at + lost :])
