from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import python
from sample_records import record, run
from stepscope.errors import StepscopeError, UsageError
from stepscope.records import database
from stepscope.records.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store(tmp_path / "runs.db")
    opened.add_run(run())
    return opened


def test_records_are_read_back_unchanged_and_in_order(store: Store) -> None:
    added = [record(case=f"case-{n}") for n in (3, 1, 2)]
    for each in added:
        store.add(each)
    store.close()
    with Store(store.path, create=False) as again:
        assert list(again.records()) == added
        assert again.runs() == (run(),)


def test_write_ahead_logging_with_synced_commits(store: Store) -> None:
    settings_in_use = [
        store._connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("journal_mode", "synchronous", "busy_timeout")
    ]
    assert settings_in_use == ["wal", 2, 10_000]


def test_only_the_newest_attempt_is_returned_by_default(store: Store) -> None:
    first = record(status="oom", reason="out of memory", series=())
    other = record(case="other")
    second = record(attempt=2)
    for each in (first, other, second):
        store.add(each)
    assert store.records() == (other, second)
    assert store.records(all_attempts=True) == (first, other, second)
    key = ("benchmark", first.case)
    assert store.finished("run-1") == {("benchmark", "other"): ("ok", 1), key: ("ok", 2)}
    assert store.finished("run-2") == {}


def test_records_are_selected_by_run_and_study(store: Store) -> None:
    store.add_run(run(id="run-2"))
    stored = {(r, s): record(run=r, study=s) for r in ("run-1", "run-2") for s in ("flash", "step")}
    for each in stored.values():
        store.add(each)
    assert store.records("run-2") == (stored["run-2", "flash"], stored["run-2", "step"])
    assert store.records(study="step") == (stored["run-1", "step"], stored["run-2", "step"])
    assert store.records("run-1", "flash") == (stored["run-1", "flash"],)


def test_a_repeated_attempt_is_refused_and_changes_nothing(store: Store) -> None:
    store.add(record())
    with pytest.raises(StepscopeError, match=r"attempt 1 at benchmark .* is stored already"):
        store.add(record(id="another"))
    with pytest.raises(StepscopeError, match="is stored already"):
        store.add(record(case="another", id=record().id))
    with pytest.raises(StepscopeError, match="run run-9 is not in"):
        store.add(record(run="run-9"))
    with pytest.raises(StepscopeError, match=r"run run-1 is in .* already"):
        store.add_run(run(command="other"))
    assert store.records() == (record(),)
    assert store.runs() == (run(),)


def test_a_record_that_could_not_be_read_back_is_refused(store: Store) -> None:
    with pytest.raises(StepscopeError, match="must be finite"):
        store.add(record(elapsed_s=float("nan")))
    assert store.records() == ()


def test_runs_are_found_by_age_id_and_prefix(tmp_path: Path) -> None:
    runs = [
        run(id="ab12", created="2026-01-01T00:00:00", plan="p"),
        run(id="ab34", created="2026-01-03T00:00:00", plan="q"),
        run(id="cd", created="2026-01-02T00:00:00", plan="p"),
        run(id="cdef", created="2025-01-02T00:00:00", plan="p"),
    ]
    with Store(tmp_path / "runs.db") as store:
        with pytest.raises(UsageError, match="has no runs yet"):
            store.find_run("latest")
        for each in runs:
            store.add_run(each)
        assert [r.id for r in store.runs()] == ["ab34", "cd", "ab12", "cdef"]
        wanted = {
            "latest": "ab34",
            "latest~0": "ab34",
            "latest~2": "ab12",
            "ab1": "ab12",
            "cd": "cd",
            "cde": "cdef",
        }
        assert {text: store.find_run(text).id for text in wanted} == wanted
        assert store.latest_with_plan("p") == runs[2]
        assert store.latest_with_plan("none") is None
        with pytest.raises(UsageError, match=r"2 runs begin with 'ab' \(one of: ab34, ab12\)"):
            store.find_run("ab")
        with pytest.raises(UsageError, match=r"no run .* 'x' .*ab34, cd, ab12, cdef"):
            store.find_run("x")
        with pytest.raises(UsageError, match=r"no run latest~4: .* has 4"):
            store.find_run("latest~4")
        with pytest.raises(UsageError, match="no run"):
            store.find_run("")


def test_a_record_is_found_by_a_prefix_of_its_id(store: Store) -> None:
    for case, name in (("a", "aa-1"), ("b", "aa_2"), ("c", "aa")):
        store.add(record(case=case, id=name))
    assert [store.find_record(text).case for text in ("aa-", "aa_", "aa")] == ["a", "b", "c"]
    with pytest.raises(UsageError, match=r"3 records begin with 'a' .*aa-1, aa_2, aa"):
        store.find_record("a")
    with pytest.raises(UsageError, match="no record"):
        store.find_record("%")


def test_a_failed_transaction_stores_nothing(store: Store) -> None:
    def fails() -> None:
        with store.transaction():
            store.add(record())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert store.records() == ()
    store.add(record())
    assert store.records() == (record(),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"just text, and enough of it to fill a header" * 100, "is not a database"),
        (b"short", "is not a database"),
    ],
)
@pytest.mark.parametrize("create", [True, False])
def test_a_file_that_is_not_a_database_is_not_modified(
    tmp_path: Path, content: bytes, message: str, create: bool
) -> None:
    path = tmp_path / "runs.db"
    path.write_bytes(content)
    with pytest.raises(StepscopeError, match=rf"runs\.db {message} \(name another"):
        Store(path, create)
    assert path.read_bytes() == content


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    "statement", ["CREATE TABLE songs (id)", "PRAGMA application_id = 5", "PRAGMA user_version = 1"]
)
def test_the_database_of_another_application_is_not_modified(
    tmp_path: Path, statement: str, create: bool
) -> None:
    path = tmp_path / "runs.db"
    with sqlite3.connect(path) as other:
        other.execute(statement)
    other.close()
    before = path.read_bytes()
    with pytest.raises(StepscopeError, match=r"runs\.db is not a Stepscope store"):
        Store(path, create)
    assert path.read_bytes() == before


@pytest.mark.parametrize("create", [True, False])
def test_a_newer_store_is_refused(store: Store, create: bool) -> None:
    store._connection.execute(f"PRAGMA user_version = {database.STORE_VERSION + 1}")
    store.close()
    with pytest.raises(StepscopeError, match=r"version 2, .* up to 1 \(install a newer"):
        Store(store.path, create)


def test_invalid_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StepscopeError, match=r"is a folder .*name a file in it"):
        Store(tmp_path)
    with pytest.raises(StepscopeError, match="there is no store at"):
        Store(tmp_path / "absent.db", create=False)
    assert not (tmp_path / "absent.db").exists()
    for create in (True, False):
        with pytest.raises(StepscopeError, match="file"):
            Store(tmp_path / "file" / "deeper" / "runs.db", create)
    with pytest.raises(StepscopeError, match="is not a Stepscope store"):
        Store(tmp_path / "file", create=False)


def test_folders_are_created_and_unusual_names_work(tmp_path: Path) -> None:
    path = tmp_path / "new" / "what? 100%#1" / "runs.db"
    with Store(path) as store:
        store.add_run(run())
    with Store(path, create=False) as store:
        assert store.runs() == (run(),)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "runs.db"
    with Store(path) as store:
        store.add_run(run())
        for n in range(30):
            store.add(record(case=f"case-{n}"))
    return path


@given(data=st.data())
@settings(max_examples=60)
def test_a_truncated_store_is_reported_as_damaged(
    large: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    intact = large.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "runs.db"
    path.write_bytes(intact[: data.draw(st.integers(1, len(intact) - 1))])
    for create in (True, False):
        with pytest.raises(StepscopeError, match=r"damaged|not a database"):
            Store(path, create).records()


def test_a_truncated_last_page_is_detected_when_opening(large: Path, tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    path.write_bytes(large.read_bytes()[:-100])
    for create in (True, False):
        with pytest.raises(StepscopeError, match="is damaged: its last page is truncated"):
            Store(path, create)


@given(data=st.data())
@settings(max_examples=150)
def test_a_corrupted_store_gives_a_clear_error_or_records(
    large: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(large.read_bytes())
    scribble = data.draw(st.binary(min_size=1, max_size=64))
    at = data.draw(st.integers(0, len(content) - len(scribble)))
    content[at : at + len(scribble)] = scribble
    path = tmp_path_factory.mktemp("scribbled") / "runs.db"
    path.write_bytes(content)
    with suppress(StepscopeError), Store(path) as store:
        assert len(store.runs()) <= 1
        assert len(store.records(all_attempts=True)) <= 30
        store.finished("run-1")


def test_a_lock_held_for_too_long_is_reported(store: Store) -> None:
    with Store(store.path, wait_s=0.05) as impatient:
        store._connection.execute("BEGIN IMMEDIATE")
        for attempt in (lambda: impatient.add(record()), lambda: Store(store.path, wait_s=0.05)):
            with pytest.raises(StepscopeError, match="locked by another process for too long"):
                attempt()
        assert impatient.runs() == (run(),)
        store._connection.execute("ROLLBACK")
        impatient.add(record())
        assert impatient.records() == (record(),)


def test_a_transaction_is_exclusive_from_its_start(store: Store) -> None:
    with Store(store.path, wait_s=0.05) as other, store.transaction():
        with pytest.raises(StepscopeError, match="locked"):
            other.add(record(case="other"))
        store.add(record())
    assert store.records() == (record(),)


def test_store_and_schema_load_without_numpy_and_torch() -> None:
    code = (
        "import sys, stepscope.records.store, stepscope.records.schema;"
        "sys.exit(', '.join({'numpy', 'torch'} & set(sys.modules)) or 0)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
