"""Snapshots of the CUDA allocator: computed peaks, and hostile files that are refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import python
from stepscope.analysis.snapshot import read_snapshot, summarize
from stepscope.cli import main
from stepscope.errors import StepscopeError
from stepscope.pickles import MAX_NESTED_TUPLES, UnsafePickleError, check, load_plain

MIB = 1 << 20
HUGE = 10**6000


def frames(line: int) -> list[dict[str, Any]]:
    return [
        {"filename": "/lib/torch/nn/functional.py", "line": 9, "name": "linear"},
        {"filename": "/home/me/model.py", "line": line, "name": "forward"},
    ]


def event(action: str, address: int, size: int, line: int = 1) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames(line)}


def snapshot(events: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """One segment of 20 MiB: 4 MiB in use, the rest free."""
    blocks = [
        {"size": 4 * MIB, "state": "active_allocated", "address": 1000, "frames": frames(7)},
        {"size": 16 * MIB, "state": "inactive", "address": 1000 + 4 * MIB},
    ]
    segment = {"device": 0, "address": 1000, "total_size": 20 * MIB, "blocks": blocks}
    return {"segments": [segment], "device_traces": [events or []]}


HISTORY = [
    event("alloc", 1000, 4 * MIB, line=7),
    event("alloc", 9000, 10 * MIB, line=8),
    event("free_requested", 9000, 10 * MIB, line=8),
    event("free_completed", 9000, 10 * MIB, line=8),
    event("alloc", 9000, 3 * MIB, line=9),
    event("free_completed", 9000, 3 * MIB, line=9),
]


def written(path: Path, raw: Any) -> Path:
    path.write_bytes(pickle.dumps(raw))
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a snapshot is written below the current folder."""
    monkeypatch.chdir(tmp_path)


def test_the_peak_is_when_most_bytes_were_live(tmp_path: Path) -> None:
    result = read_snapshot(written(tmp_path / "s.pickle", snapshot(HISTORY)))
    assert result.reserved == 20 * MIB
    assert result.active == 4 * MIB
    assert result.peak == 14 * MIB
    assert result.largest is not None
    assert (result.largest.bytes, result.largest.code) == (
        10 * MIB,
        "model.py:8 forward",
    )
    assert [(p.code, p.bytes) for p in result.places] == [
        ("model.py:8 forward", 10 * MIB),
        ("model.py:7 forward", 4 * MIB),
    ]


def test_an_allocation_of_an_inspected_step_is_attributed_to_the_programs_line() -> None:
    own = {"filename": "/lib/stepscope/measure/tensors.py", "line": 88, "name": "dispatch"}
    raw = snapshot([event("alloc", 1000, 4 * MIB, line=7) | {"frames": [own, *frames(7)]}])
    assert [line.code for line in summarize(raw).places] == ["model.py:7 forward"]


def test_blocks_of_autograds_thread_are_distinguished_from_earlier_ones() -> None:
    raw = snapshot([event("alloc", 1000, 4 * MIB) | {"frames": []}])
    raw["segments"][0]["blocks"][0]["frames"] = []
    raw["segments"][0]["blocks"][1] |= {"state": "active_allocated"}
    assert [(line.code, line.bytes) for line in summarize(raw).places] == [
        ("allocated before the recording began", 16 * MIB),
        ("no Python stack (autograd's thread: the backward)", 4 * MIB),
    ]


def test_a_history_without_its_beginning_is_right_for_the_rest() -> None:
    summary = summarize(snapshot(HISTORY[4:]))
    assert summary.peak == 7 * MIB
    assert summary.events == 2


def test_a_full_buffer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = [event("alloc", 4096, 512), event("free_completed", 4096, 512)]
    for entries in (1000, 65536):
        path = written(tmp_path / "full", snapshot(pair * (entries // 2)))
        assert main(["snapshot", str(path), "--full"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "events is at least 4.00 MiB" in printed
        assert "The history buffer is full, so earlier events were overwritten" in printed
    assert main(["snapshot", str(written(tmp_path / "part", snapshot(pair * 499))), "--full"]) == 0
    assert "history buffer is full" not in capsys.readouterr().out


def test_without_history_only_the_end_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "s.pickle", snapshot())
    assert main(["snapshot", str(path), "--full"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "20.0 MiB reserved, 4.00 MiB in use at the end" in printed
    assert "The snapshot has no history" in printed


def test_the_command_prints_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "s.pickle", snapshot(HISTORY))
    assert main(["snapshot", str(path), "--top", "1", "--full"]) == 0
    printed = capsys.readouterr().out
    assert "model.py:8 forward" in printed
    assert "1 more" in printed
    assert main(["snapshot", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["snapshot"]["peak"] == 14 * MIB
    assert facts["verdict"]["peak_bytes"] == 14 * MIB
    assert facts["verdict"]["memory"] == [
        {"owner": "model.py:8 forward", "bytes": 10 * MIB},
        {"owner": "model.py:7 forward", "bytes": 4 * MIB},
    ]


def test_the_command_ends_with_the_memory_by_owner_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = written(tmp_path / "s.pickle", snapshot(HISTORY))
    assert main(["snapshot", str(path), "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("s.pickle on GPU 0"))
    verdict = lines[start:-1]
    assert len(verdict) <= 20
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80
    assert verdict[1].startswith("The peak is 14.0 MiB. The largest owner is model.py:8 forward")
    bar = verdict[3]
    assert (bar.count("█"), bar.count("▓")) == (57, 23)
    assert lines[-1] == f"page: {tmp_path / 'out' / 'snapshot.html'}"
    page = (tmp_path / "out" / "snapshot.html").read_text()
    assert page.index('class="verdict"') < page.index('class="headline"')
    assert 'class="part memory n0"' in page


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_a_malicious_global_is_refused_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = snapshot(HISTORY) | {"extra": Payload()}
    with pytest.raises(StepscopeError, match="mkdir"):
        read_snapshot(written(tmp_path / "evil.pickle", raw))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_reported_in_one_line(tmp_path: Path, share: float) -> None:
    complete = pickle.dumps(snapshot(HISTORY))
    path = tmp_path / "cut.pickle"
    path.write_bytes(complete[: int(share * len(complete))])
    with pytest.raises(StepscopeError, match="damaged or not a snapshot"):
        read_snapshot(path)


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {"pools": []},
        {"segments": 3},
        {"segments": [{"device": 0}]},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
    ],
)
def test_another_format_is_refused(raw: Any) -> None:
    with pytest.raises(StepscopeError, match="format"):
        summarize(raw)


def test_an_empty_snapshot_is_not_an_error() -> None:
    summary = summarize({"segments": [], "device_traces": []})
    assert (summary.reserved, summary.peak, summary.largest) == (0, 0, None)


def test_a_missing_file_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["snapshot", str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


DEPTH = 200_000
HOSTILE = {
    "tuples as a key, nested": b"\x80\x04})" + b"\x85" * DEPTH + b"Ns.",
    "pairs as a key, nested": b"\x80\x04}N" + b"N\x86" * DEPTH + b"Ns.",
    "marked tuples as a key, nested": b"\x80\x04}" + b"(" * DEPTH + b"t" * DEPTH + b"Ns.",
    "tuples as a key, nested through the memo": (
        b"\x80\x04}N" + b"\x85q\x000h\x00" * DEPTH + b"Ns."
    ),
    "a huge index in the memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "a huge index in the memo, as text": b"Np999999999\n.",
    "a negative index in the memo": b"Np-1\n.",
    "a string longer than the file": b"\x80\x04\x8d\x00\x00\x00\x00\x01\x00\x00\x00ab.",
    "a bytearray longer than the file": b"\x80\x05\x96\x00\x00\x00\x00\x00\x01\x00\x00.",
    "an opcode that does not exist": b"\x80\x04\xfe.",
    "no end": b"\x80\x04]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_before_loading(name: str) -> None:
    with pytest.raises(UnsafePickleError):
        check(HOSTILE[name])


def test_a_hostile_pickle_neither_crashes_the_command_nor_takes_memory(tmp_path: Path) -> None:
    """In a separate process: the tested faults would end this one."""
    for index, data in enumerate(HOSTILE.values()):
        (tmp_path / f"{index}.pickle").write_bytes(data)
    program = """
import resource, sys
from stepscope.cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
codes = {main(["snapshot", path]) for path in sys.argv[1:]}
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(codes, grown < 200_000, grown)
"""
    done = python("-c", program, *map(str, sorted(tmp_path.iterdir())))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{1} True"), done.stdout
    assert len(done.stderr.strip().splitlines()) == len(HOSTILE)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_binary_protocol_is_read(protocol: int) -> None:
    raw = snapshot(HISTORY * 100) | {
        "pools": [(i, -i) for i in range(3 * MAX_NESTED_TUPLES)],
        "mixed": [(1.5, None, "é" * 300, 1 << 70, True), {"a": {1: 2}}, ("one", "two")],
    }
    assert load_plain(pickle.dumps(raw, protocol=protocol), "s") == raw


def test_text_and_sets_are_read() -> None:
    raw = snapshot(HISTORY)
    assert load_plain(pickle.dumps(raw, protocol=0), "s") == raw
    assert load_plain(pickle.dumps([{1, 2}, frozenset("a"), b"x" * 300]), "s")[2] == b"x" * 300


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("total_size", float("inf")),
        ("total_size", float("nan")),
        ("total_size", HUGE),
        ("total_size", -1),
        ("total_size", 1.5),
        ("total_size", "7"),
        ("device", -3),
        ("device", 1 << 70),
        ("address", None),
        ("address", -1),
    ],
    ids=itertools.count(),
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_number_out_of_range_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any, as_json: bool
) -> None:
    raw = snapshot(HISTORY)
    raw["segments"][0][key] = value
    path = written(tmp_path / "s.pickle", raw)
    assert main(["snapshot", str(path), *(["--json"] if as_json else [])]) == 1
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1
    assert key in printed[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", float("inf")),
        ("size", HUGE),
        ("addr", -1),
        ("addr", "x"),
        ("frames", [[]]),
        ("frames", [{"filename": [[]], "line": 1, "name": "f"}]),
        ("frames", [{"filename": "a.py", "line": HUGE, "name": "f"}]),
        ("frames", [{"filename": "a.py", "line": [], "name": "f"}]),
    ],
    ids=itertools.count(),
)
def test_an_event_with_a_bad_field_is_refused(key: str, value: Any) -> None:
    with pytest.raises(StepscopeError, match="format"):
        summarize(snapshot([HISTORY[0], HISTORY[1] | {key: value}]))


def test_sizes_that_add_up_beyond_64_bits_are_refused() -> None:
    events = [event("free_completed", 512 * i, (1 << 50) - 1) for i in range(1 << 13)]
    with pytest.raises(StepscopeError, match="64 bits"):
        summarize(snapshot(events))


PLAIN = pickle.dumps(snapshot(HISTORY))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(PLAIN)), st.binary(max_size=6), st.integers(0, 12)), max_size=4
    )
)
def test_any_damage_gives_a_summary_or_an_error(edits: list[tuple[int, bytes, int]]) -> None:
    data = PLAIN
    for at, new, lost in edits:
        data = data[:at] + new + data[at + lost :]
    with contextlib.suppress(StepscopeError):
        summarize(load_plain(data, "s"))


@pytest.mark.parametrize("data", [b"Fx\r\x0by\n.", b"\x80\x04\x8c\x03a\nb\x8c\x02\x1bc\x93."])
def test_text_of_the_file_does_not_break_the_error_line(data: bytes) -> None:
    with pytest.raises(StepscopeError) as error:
        load_plain(data, "s")
    assert str(error.value).isprintable()
