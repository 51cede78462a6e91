"""Limits of what is read: a file beyond one is refused, and work grows with the size of a file."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import sqlite3
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stepscope import pickles
from stepscope.analysis import snapshot
from stepscope.analysis.trace import files, nsight
from stepscope.cli import main
from stepscope.errors import StepscopeError
from stepscope.parallel.checkpoint import reading
from stepscope.parallel.errors import ParallelError
from stepscope.records import jsonl, sqlite
from stepscope.records.schema import encode
from stepscope.records.store import Store
from stepscope.report import run_index
from study_records import benchmark_record
from trace_files import nsight_file, training_step

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start FROM n"
HOSTILE = {
    "a virtual table over a view": (
        f"CREATE VIEW endless AS {ENDLESS}",
        "CREATE VIRTUAL TABLE {table} USING fts5(start, content='endless', content_rowid='start')",
    ),
    "a view": (f"CREATE VIEW {{table}} AS {ENDLESS}",),
    "a computed column": ("CREATE TABLE {table} (x, start AS (hex(zeroblob(100000000))))",),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(120)
def test_only_ordinary_tables_of_an_export_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in HOSTILE[name]:
            try:
                database.execute(statement.format(table="CUPTI_ACTIVITY_KIND_KERNEL"))
            except sqlite3.OperationalError as error:
                pytest.skip(str(error))
    with pytest.raises(StepscopeError, match=r"not an Nsight Systems export|has no kernels"):
        files.read_trace(path)


def test_a_query_has_a_limit_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite.connect(None)) as database:
        monkeypatch.setattr(sqlite, "MAX_INSTRUCTIONS", 100_000)
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            database.execute(ENDLESS).fetchall()
        # The limit is per statement.
        for _ in range(20):
            limited = f"SELECT * FROM ({ENDLESS} LIMIT 2000)"
            assert len(database.execute(limited).fetchall()) == 2000
    monkeypatch.setattr(sqlite, "MAX_INSTRUCTIONS", 10_000)
    export = nsight_file(tmp_path / "export.sqlite")
    with closing(sqlite3.connect(export)) as database, database:
        rows = ((number, "name") for number in range(10_000, 40_000))
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", rows)
    with pytest.raises(StepscopeError, match="takes longer to read than the limit"):
        files.read_trace(export)


def test_a_store_has_the_same_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(tmp_path / "records.db") as store:
        store._connection.execute(
            "INSERT INTO runs SELECT 'r' || i, '', '', '', 1 FROM (WITH RECURSIVE n(i) AS"
            " (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 20000) SELECT i FROM n)"
        )
        monkeypatch.setattr(sqlite, "MAX_INSTRUCTIONS", 50_000)
        with pytest.raises(StepscopeError, match="takes far longer than in any store"):
            store.runs()


def test_the_text_of_an_export_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsight, "MAX_CHARACTERS", 10)
    with pytest.raises(StepscopeError, match="more text than any export"):
        files.read_trace(nsight_file(tmp_path / "export.sqlite"))


def test_members_of_a_gzip_file_are_limited(tmp_path: Path) -> None:
    text = training_step().text().encode()
    path = tmp_path / "trace.json.gz"
    step = len(text) // 9
    parts = [gzip.compress(text[at : at + step]) for at in range(0, len(text), step)]
    path.write_bytes(b"".join(parts))
    files.read_trace(path, files.Limits(members=len(parts)))
    with pytest.raises(StepscopeError, match=rf"more than {len(parts) - 1} gzip members"):
        files.read_trace(path, files.Limits(members=len(parts) - 1))


def test_a_member_does_not_copy_the_rest_of_the_file(tmp_path: Path) -> None:
    """zlib copies the input that follows a member: with the rest of a large read, 400,000 members
    copied 200 GB."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" ") * 20_000)
    copied = 0
    decompress = files.zlib.decompressobj

    class Counted:
        def __init__(self, bits: int) -> None:
            self._member = decompress(bits)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._member, name)

        def decompress(self, data: bytes, most: int) -> bytes:
            nonlocal copied
            result = self._member.decompress(data, most)
            copied += len(self._member.unused_data)
            return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.zlib, "decompressobj", Counted)
        with pytest.raises(StepscopeError):
            files.read_trace(path)
    assert 0 < copied < 20_000 * (1 << 16)


SMALL = 100


def too_long_records(path: Path) -> None:
    path.write_bytes(encode(benchmark_record()) + b"\n")
    jsonl.read_records(path)


def too_long_snapshot(path: Path) -> None:
    path.write_bytes(pickle.dumps({"segments": [0] * 1000}))
    snapshot.read_snapshot(path)


def too_long_metadata(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(b"\x80\x04" + b"N0" * 1000 + b"N.")
    reading.VerifyingReader(path)


TOO_LONG: dict[str, tuple[Any, str, Callable[[Path], None]]] = {
    "records": (jsonl, "MAX_BYTES", too_long_records),
    "snapshot": (snapshot, "MAX_BYTES", too_long_snapshot),
    "metadata": (reading, "MAX_METADATA_BYTES", too_long_metadata),
}


@pytest.mark.parametrize("kind", TOO_LONG)
def test_a_file_beyond_its_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    module, limit, read = TOO_LONG[kind]
    monkeypatch.setattr(module, limit, SMALL)
    with pytest.raises((StepscopeError, ParallelError), match="the limit is 100 bytes"):
        read(tmp_path / "file")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_an_endless_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_BYTES", SMALL)
    with pytest.raises(StepscopeError, match="the limit is 100 bytes"):
        jsonl.read_records("/dev/zero")


def changed(number: int, kind: str) -> bytes:
    raw = json.loads(encode(benchmark_record()))
    raw["id"] = f"id-{number}"
    if kind == "cases":
        raw["case"] = f"case-{number}"
        raw["config"]["context"] = number + 1
    elif kind != "attempts":
        raw[kind] = f"{kind}-{number}"
    return json.dumps(raw).encode()


def calls_of_show(path: Path, count: int, kind: str) -> int:
    """Number of function calls that `show --json` takes for so many records."""
    path.write_bytes(b"\n".join(changed(number, kind) for number in range(count)))
    calls = 0

    def count_call(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        assert main(["show", str(path), "--json"]) == 0
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("kind", ["attempts", "cases", "run", "study"])
def test_work_is_proportional_to_the_records(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.jsonl"
    calls_of_show(path, 20, kind)  # Imports, and caches of the parser.
    small, medium, large = (calls_of_show(path, count, kind) for count in (20, 40, 80))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["records"][79]["id"] == "id-79"
    # Twice as many if it is linear, four times as many if it is quadratic.
    assert large - medium < 3 * (medium - small)
    assert (large - medium) / 40 < 300


def test_memory_of_a_record(tmp_path: Path) -> None:
    """100,000 records fit into 1 GB."""
    path, count = tmp_path / "records.jsonl", 200
    path.write_bytes(b"\n".join(changed(number, "cases") for number in range(count)))
    jsonl.read_records(path)
    tracemalloc.start()
    try:
        records = jsonl.read_records(path)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 8_000 * len(records)


def test_the_documented_limits_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", text.partition("### Limits")[2], re.M))
    limits = files.Limits()
    instructions = f"{sqlite.MAX_INSTRUCTIONS // 10**6:,} million instructions"
    expected = {
        "record file": [_mib(jsonl.MAX_BYTES)],
        "store": [_mib(sqlite.MAX_CELL_BYTES), instructions],
        "Chrome trace": [
            _mib(limits.file_bytes),
            f"{limits.ratio:.0f} times",
            f"{limits.members:,} gzip members",
        ],
        "Nsight Systems export": [
            _mib(8 * limits.file_bytes),
            f"{nsight.MAX_ROWS:,} rows",
            f"{nsight.MAX_CHARACTERS:,} characters",
            instructions,
        ],
        "allocator snapshot": [_mib(snapshot.MAX_BYTES)],
        "metadata of a checkpoint": [
            _mib(reading.MAX_METADATA_BYTES),
            f"{pickles.MAX_NESTED_TUPLES:,} deep",
        ],
        "entry of the index of runs (`run.json`)": [_mib(run_index.MAX_ENTRY_BYTES)],
    }
    assert expected.keys() == rows.keys() - {"input", "---"}
    for name, parts in expected.items():
        assert all(part in rows[name] for part in parts), (name, parts, rows[name])


def _mib(size: int) -> str:
    return f"{size >> 20:,} MiB"
