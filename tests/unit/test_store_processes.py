"""The store with several processes, and with processes that are killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sample_records import record, run
from stepscope.errors import StepscopeError
from stepscope.records import database
from stepscope.records.store import Store

TESTS = Path(__file__).parents[1]

WRITER = """
import sys
from sample_records import record, run
from stepscope.records.store import Store
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Store(path, wait_s=60) as store:
    store.add_run(run(id=name))
    for n in range(count):
        store.add(record(run=name, case=f"case-{n}"))
        print(n, flush=True)
"""

HOLDER = """
import sys
from stepscope.records.store import Store
with Store(sys.argv[1]) as store, store.hold_run("run-1"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_concurrent_writers_lose_no_records(tmp_path: Path) -> None:
    path, names, count = tmp_path / "runs.db", ("run-a", "run-b", "run-c"), 40
    with (
        python(WRITER, path, names[0], count) as a,
        python(WRITER, path, names[1], count) as b,
        python(WRITER, path, names[2], count) as c,
    ):
        assert [process.wait(timeout=400) for process in (a, b, c)] == [0, 0, 0]
    with Store(path, create=False) as store:
        assert {r.id for r in store.runs()} == set(names)
        for name in names:
            assert [r.case for r in store.records(name)] == [f"case-{n}" for n in range(count)]


@pytest.mark.parametrize("survivors", [1, 7, 25])
def test_records_added_before_a_kill_are_stored(tmp_path: Path, survivors: int) -> None:
    path = tmp_path / "runs.db"
    with python(WRITER, path, "run-a", 100_000) as writer:
        assert writer.stdout is not None
        for _ in range(survivors):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        seen = survivors + len(writer.stdout.readlines())
        writer.wait()
    with Store(path) as store:
        cases = [r.case for r in store.records()]
        assert cases == [f"case-{n}" for n in range(len(cases))]
        assert seen <= len(cases) <= seen + 1
        store.add(record(run="run-a", case="after"))
        assert len(store.records()) == len(cases) + 1


def test_a_run_is_locked_by_one_process_until_it_releases_it_or_dies(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with Store(path) as store, python(HOLDER, path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        busy = pytest.raises(StepscopeError, match=rf"process {holder.pid} is working on run run-1")
        with busy, store.hold_run("run-1"):
            pass
        with store.hold_run("run-2"):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with store.hold_run("run-1"):
            mine = pytest.raises(StepscopeError, match=f"process {os.getpid()} is working")
            with mine, store.hold_run("run-1"):
                pass
        with store.hold_run("run-1"):
            pass
    assert not list(tmp_path.glob("*.lock"))


def test_a_lock_on_a_removed_file_is_acquired_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "runs.db.run-1.lock"
    take = fcntl.flock
    removals = [lock]

    def removed_meanwhile(descriptor: int, operation: int) -> None:
        if removals:
            removals.pop().unlink()
        take(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with Store(tmp_path / "runs.db") as store, store.hold_run("run-1"):
        assert lock.read_text() == f"{os.getpid()}\n"


def test_a_lock_is_not_inherited_by_child_processes(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.db") as store:
        store.add_run(run())
        with store.hold_run("run-1"):
            worker = subprocess.Popen(["sleep", "60"], close_fds=False)
        try:
            with store.hold_run("run-1"):
                pass
        finally:
            worker.kill()
            worker.wait()


def test_an_exception_releases_the_lock(tmp_path: Path) -> None:
    def fails(store: Store) -> None:
        with store.hold_run("run-1"):
            raise KeyError

    with Store(tmp_path / "runs.db") as store:
        with pytest.raises(KeyError):
            fails(store)
        with store.hold_run("run-1"):
            pass


def test_a_store_that_is_created_concurrently_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.db"
    real, created = database._pragma, []

    def meanwhile(connection: sqlite3.Connection, name: str) -> int:
        value = real(connection, name)
        if not created:
            created.append(name)
            # It may have to wait for the first connection.
            with contextlib.suppress(StepscopeError):
                Store(path, wait_s=0.05).close()
        return value

    monkeypatch.setattr(database, "_pragma", meanwhile)
    Store(path).close()
    assert created == ["application_id"]
