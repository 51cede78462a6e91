"""Store files from an untrusted source: refused with one line, without running their code."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from prepared_store import Desk, fill, one_line, run_of
from stepscope.cli.messages import log
from stepscope.records.database import APPLICATION_ID, STORE_VERSION
from stepscope.records.store import Store

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
RECORDS = (
    "CREATE TABLE records (id TEXT, run TEXT, study TEXT, case_key TEXT, attempt INTEGER,"
    " status TEXT, started TEXT, body TEXT)"
)
RUNS = "CREATE TABLE runs (id TEXT, created TEXT, command TEXT, plan TEXT, cases INTEGER)"
SCHEMAS = {
    "a view for runs": (
        f"CREATE VIEW runs AS {ENDLESS} 'r', i AS created, '', '', 1 FROM n",
        RECORDS,
    ),
    "a view for records": (
        RUNS,
        f"CREATE VIEW records AS {ENDLESS} i AS id, 'r' AS run, 's' AS study, 'c' AS case_key,"
        " i AS attempt, 'ok' AS status, '' AS started, '' AS body FROM n",
    ),
    "a virtual table": (
        "CREATE VIRTUAL TABLE runs USING fts5(id, created, command, plan, cases)",
        RECORDS,
    ),
    "a trigger": (
        RUNS,
        RECORDS,
        "CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM runs; END",
    ),
    "other columns": (RUNS.replace("plan TEXT, ", ""), RECORDS),
    "a computed column": (RUNS.replace("plan TEXT", "plan TEXT AS (hex(zeroblob(9)))"), RECORDS),
    "no records": (RUNS,),
    "no tables": (),
}
READERS = (("list", "runs"), ("show",), ("report",), ("export",), ("compare", "latest", "latest"))


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    (tmp_path / "out").mkdir()
    return Desk(tmp_path / "out", capsys)


def plant(path: Path, statements: tuple[str, ...]) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {STORE_VERSION}")


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.timeout(60)
def test_a_store_with_another_schema_is_refused(desk: Desk, name: str) -> None:
    try:
        plant(desk.store, SCHEMAS[name])
    except sqlite3.OperationalError as error:
        pytest.skip(str(error))
    for words in READERS:
        one_line(desk(*words), 1, "is not a Stepscope store")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("UPDATE runs SET id = '../../x'", ["'../../x' is not a valid name"]),
        ("UPDATE runs SET id = char(27) || '[31mred'", ["not a valid name"]),
        ("UPDATE runs SET cases = 'many'", ["Expected `int`", "cases"]),
        ("UPDATE runs SET command = x'ff00'", ["Expected `str`", "command"]),
    ],
)
def test_an_invalid_run_is_refused(desk: Desk, change: str, parts: list[str]) -> None:
    fill(desk.store, {"base": run_of("base")})
    with closing(sqlite3.connect(desk.store, isolation_level=None)) as store:
        store.execute("PRAGMA foreign_keys = OFF")
        store.execute(change)
    for words in READERS:
        output = desk(*words)
        one_line(output, 1, *parts)
        assert "\x1b" not in output.err
    assert not list(desk.out.parent.glob("x*"))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("UPDATE records SET id = char(27) || 'x' || rowid", "is stored as"),
        ("UPDATE records SET body = replace(body, ':\"base\"', ':\"../x\"')", "'../x'"),
        ("UPDATE records SET body = '[' || body", "not a record"),
    ],
)
def test_a_record_that_does_not_match_its_row_is_refused(
    desk: Desk, change: str, part: str
) -> None:
    fill(desk.store, {"base": run_of("base")})
    with closing(sqlite3.connect(desk.store, isolation_level=None)) as store:
        store.execute(change)
    for words in (("show",), ("report",), ("export",)):
        output = desk(*words)
        one_line(output, 1, part)
        assert "\x1b" not in output.err


def test_reading_a_store_cannot_change_it(desk: Desk) -> None:
    fill(desk.store, {"base": run_of("base")})
    with Store(desk.store, create=False) as store, pytest.raises(Exception, match="read"):
        store.expect("base", 99)


def test_messages_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    log("a\x1b[2Jb\x9bc\rd\u202ee\x00f")
    assert capsys.readouterr().err == ("stepscope: a\\u001b[2Jb\\u009bc\\rd\\u202ee\\u0000f\n")
