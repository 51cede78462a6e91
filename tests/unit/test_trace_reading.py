"""Trace readers: what they read, and what they refuse in one line."""

from __future__ import annotations

import gzip
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stepscope.analysis.trace import chrome
from stepscope.analysis.trace.files import Limits, read_trace
from stepscope.analysis.trace.model import EVERY_THREAD, Trace
from stepscope.errors import StepscopeError
from trace_files import ENGINE, MAIN, SGEMM, ChromeTrace, nsight_file, training_step


def names(trace: Trace, numbers: np.ndarray) -> list[str]:
    return [trace.names[number] for number in numbers.tolist()]


@pytest.mark.parametrize("suffix", ["trace.json", "trace.json.gz", "odd-name"])
def test_a_chrome_trace_is_read_to_the_nanosecond(tmp_path: Path, suffix: str) -> None:
    built = ChromeTrace()
    built.operator("aten::mm", 3861178836729.255, 3861178836759.256, sequence=5, back=1)
    built.range("block 0", 3861178836700.0, 3861178836800.0)
    built.kernel(
        SGEMM, 3861178836760.001, 3861178836790.004, launch=(3861178836740.5, 3861178836744.75)
    )
    trace = read_trace(built.write(tmp_path / suffix))
    assert trace.source == "torch.profiler"
    assert trace.device_name == "NVIDIA H200"
    assert names(trace, trace.kernels.name) == [SGEMM]
    assert trace.kernels.start.tolist() == [3861178836760001]
    assert trace.kernels.end.tolist() == [3861178836790004]
    assert trace.kernels.stream.tolist() == [7]
    assert trace.calls.correlation.tolist() == trace.kernels.correlation.tolist() == [1]
    assert trace.calls.start.tolist() == [3861178836740500]
    assert names(trace, trace.spans.name) == ["block 0", "aten::mm"]
    assert trace.spans.is_range.tolist() == [True, False]
    assert trace.spans.sequence.tolist() == [-1, 5]
    assert trace.spans.in_backward.tolist() == [False, True]
    assert trace.spans.thread.tolist() == [MAIN, MAIN]
    assert trace.window() == (3861178836700000, 3861178836800000)


def test_spans_come_by_thread_with_parents_before_children() -> None:
    trace = training_step().read()
    spans = trace.spans
    order = list(
        zip(spans.thread.tolist(), spans.start.tolist(), (-spans.end).tolist(), strict=True)
    )
    assert order == sorted(order)
    assert set(trace.spans.thread.tolist()) == {MAIN, ENGINE}
    assert (np.diff(trace.kernels.start) >= 0).all()


def test_a_bare_list_of_events_and_named_threads_are_read() -> None:
    events = [
        {
            "ph": "X",
            "cat": "Kernel",
            "name": "k",
            "pid": 0,
            "tid": "stream 7",
            "ts": 1,
            "dur": 2,
            "args": {"stream": "stream 7", "device": "0", "correlation": 3},
        },
        {"ph": "X", "cat": "Operator", "name": "o", "pid": "x", "tid": "main", "ts": 0, "dur": 9},
        {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "tid": "main", "ts": 0, "dur": 1},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    ]
    trace = chrome.read_chrome(b"\n " + json.dumps(events).encode(), "bare")
    assert trace.kernels.stream.tolist() == [7]
    assert trace.calls.thread.tolist() == trace.spans.thread.tolist() == [-2]


def test_an_nsight_export_is_read(tmp_path: Path) -> None:
    trace = read_trace(nsight_file(tmp_path / "report.sqlite"))
    assert trace.source == "Nsight Systems"
    assert trace.device_name == "NVIDIA H200"
    assert names(trace, trace.kernels.name) == [
        "ampere_sgemm_128x64_tn",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nt_align1>(T1::Params)",
        "Memcpy DtoH",
    ]
    assert trace.kernels.correlation.tolist() == [11, 12, 13]
    assert "cudaLaunchKernel" in trace.names
    assert names(trace, trace.spans.name) == ["step 0", "forward", "backward", "block 0"]
    assert trace.spans.thread.tolist()[:3] == [EVERY_THREAD] * 3


def refused(path: Path, **limits: float) -> str:
    with pytest.raises(StepscopeError) as caught:
        read_trace(path, Limits(**limits))  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"hello", "is not complete JSON"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kern', "is not complete JSON"),
        (training_step().text().encode()[:300], "is not complete JSON"),
        (b"{}", "is not a trace of torch.profiler: Object missing required field `traceEvents`"),
        (b"3", "is not a trace of torch.profiler: Expected `object`"),
        (b'{"traceEvents": []}', "has no kernels and no operators"),
        (b'{"traceEvents": [{"ph": "X", "cat": "python_function"}]}', "no kernels and no operat"),
        (b'{"traceEvents": [{}]}', "is not a trace of torch.profiler"),
        (b'{"traceEvents": [{"ph": 1}]}', "is not a trace of torch.profiler"),
        (b'{"traceEvents":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "is not a trace of"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "is nested too deeply"),
        (b'{"traceEvents": [{"ph": "X", "args": {"grid":' + b"[" * 10_000, "is nested too deeply"),
        (b'{"traceEvents": [{"ph":"X","cat":"kernel","ts":1e300}]}', "an invalid time or number"),
        (
            b'{"traceEvents": [{"ph":"X","cat":"kernel",'
            b'"args":{"correlation":9223372036854775808}}]}',
            "an invalid time or number",
        ),
        (b"\xff\xfe" * 100, "is not complete JSON"),
        (gzip.compress(training_step().text().encode(), mtime=0)[:15], "is truncated"),
        (b"\x1f\x8b" + b"x" * 100, "is damaged"),
        (b"QDSTRM" + b"\0" * 100, "is an Nsight Systems report"),
        (b"SQLite format 3\x00" + b"junk" * 100, "is a damaged Nsight Systems export"),
    ],
    ids=lambda value: value[:24].decode("latin1") if isinstance(value, bytes) else "",
)
def test_a_file_that_is_not_a_trace_is_refused_in_one_line(
    tmp_path: Path, content: bytes, why: str
) -> None:
    (tmp_path / "trace").write_bytes(content)
    assert why in refused(tmp_path / "trace")


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    assert "there is no file" in refused(tmp_path / "nothing.json")
    assert "is a folder" in refused(tmp_path)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = training_step(blocks=20).write(tmp_path / "trace.json")
    assert "the limit is" in refused(path, file_bytes=1000)
    packed = training_step(blocks=20).write(tmp_path / "trace.json.gz")
    assert "unpacks to more than" in refused(packed, unpacked_bytes=5000)
    monkeypatch.setattr(chrome, "MAX_OBJECTS", 50)
    assert "more than 25 events" in refused(path)


def test_an_unrelated_sqlite_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE songs (name TEXT)")
    assert "is an sqlite file, but not an Nsight Systems export" in refused(path)


def test_an_export_without_kernels_is_refused(tmp_path: Path) -> None:
    path = nsight_file(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL")
        database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY")
    assert "has no kernels" in refused(path)


def test_an_export_with_text_in_number_columns_is_refused(tmp_path: Path) -> None:
    path = nsight_file(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'")
    assert "is a damaged Nsight Systems export" in refused(path)


BOMB = """
import resource, sys
from pathlib import Path
from stepscope.analysis.trace.files import read_trace
from stepscope.errors import StepscopeError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_trace(Path(sys.argv[1]))
except StepscopeError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_decompression_bomb_is_stopped_early(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb") as file:
        file.write(b'{"traceEvents": [')
        for _ in range(400):
            file.write(b'{"ph": "X"},' * (1 << 16))
    unpacked = 400 * 12 * (1 << 16)
    assert path.stat().st_size * 200 < unpacked
    done = subprocess.run([sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True)
    message, grown_mib = done.stdout.splitlines()
    assert "times its size, unlike any trace" in message
    assert int(grown_mib) < 250 < unpacked / 2**20
