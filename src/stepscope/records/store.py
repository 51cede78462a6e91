"""The store: runs and their records in one SQLite file. A record is durable once it is added."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from stepscope.errors import StepscopeError, UsageError, in_one_line, some
from stepscope.records.database import open_database
from stepscope.records.failures import plain_errors
from stepscope.records.lock import locked
from stepscope.records.schema import Record, Run, decode, encode

_NEWEST_ATTEMPT = """attempt = (SELECT max(attempt) FROM records AS other WHERE
    other.run = records.run AND other.study = records.study
    AND other.case_key = records.case_key)"""
_CANDIDATES_SHOWN = 8


class Store:
    """A store at `path`. Without `create` it must exist and may be on a read-only medium."""

    def __init__(
        self, path: str | os.PathLike[str], create: bool = True, *, wait_s: float = 10.0
    ) -> None:
        self.path = Path(path)
        self._connection = open_database(self.path, create=create, wait_s=wait_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with plain_errors(self.path):
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Store all additions inside, or none of them."""
        if self._connection.in_transaction:
            yield
            return
        with plain_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                # After some failures SQLite has already rolled back, and ROLLBACK raises.
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    def add_run(self, run: Run) -> None:
        with self.transaction():
            if self._run(run.id) is not None:
                raise StepscopeError(f"run {run.id} is in {self.path} already")
            self._connection.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?)",
                (run.id, run.created, run.command, run.plan, run.cases),
            )

    def expect(self, run_id: str, cases: int) -> None:
        """Raise the number of cases of a run to at least `cases`: a result may require more."""
        with self.transaction():
            self._connection.execute(
                "UPDATE runs SET cases = max(cases, ?) WHERE id = ?", (cases, run_id)
            )

    def runs(self) -> tuple[Run, ...]:
        """All runs, newest first."""
        rows = self._rows("SELECT * FROM runs ORDER BY created DESC, rowid DESC")
        return tuple(map(self._run_of, rows))

    def latest_with_plan(self, digest: str) -> Run | None:
        return next((run for run in self.runs() if run.plan == digest), None)

    def find_run(self, text: str) -> Run:
        """Find a run by `latest`, `latest~2`, a full id or a prefix of an id."""
        runs = self.runs()
        if not runs:
            raise UsageError(
                f"{self.path} has no runs yet",
                "create one with `stepscope inspect SCRIPT` or `stepscope run`",
            )
        counted = re.fullmatch(r"latest(?:~(\d+))?", text)
        if counted:
            back = int(counted[1] or 0)
            if back >= len(runs):
                raise UsageError(f"there is no run {text}: {self.path} has {len(runs)}")
            return runs[back]
        by_id = {run.id: run for run in runs}
        return by_id[_matching_id("run", text, list(by_id))]

    def add(self, record: Record) -> None:
        """Store a record durably."""
        body = encode(record)
        try:
            decode(body)
        except StepscopeError as error:
            raise StepscopeError(
                f"the record of {record.study} {record.case} could not be read back: {error}",
                "its numbers must be finite",
            ) from error
        key = (record.run, record.study, record.case, record.attempt)
        with self.transaction():
            if self._run(record.run) is None:
                raise StepscopeError(f"run {record.run} is not in {self.path}", "add it first")
            duplicates = self._rows(
                "SELECT id FROM records WHERE id = ? OR"
                " (run, study, case_key, attempt) = (?, ?, ?, ?)",
                (record.id, *key),
            )
            if duplicates:
                raise StepscopeError(
                    f"attempt {record.attempt} at {record.study} {record.case} of run {record.run}"
                    f" is stored already as {duplicates[0][0]}"
                )
            self._connection.execute(
                "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (record.id, *key, record.status, record.started, body.decode()),
            )

    def records(
        self, run_id: str | None = None, study: str | None = None, all_attempts: bool = False
    ) -> tuple[Record, ...]:
        """Records in the order they were added; only the newest attempt of each case, unless
        `all_attempts`."""
        conditions = [
            "(:run IS NULL OR run = :run)",
            "(:study IS NULL OR study = :study)",
        ]
        if not all_attempts:
            conditions.append(_NEWEST_ATTEMPT)
        rows = self._rows(
            f"SELECT id, body FROM records WHERE {' AND '.join(conditions)} ORDER BY rowid",
            {"run": run_id, "study": study},
        )
        return tuple(self._decode(*row) for row in rows)

    def find_record(self, prefix: str) -> Record:
        """Find a record by its id or a prefix of it."""
        rows = self._rows(
            "SELECT id, body FROM records WHERE substr(id, 1, length(:prefix)) = :prefix"
            " ORDER BY rowid",
            {"prefix": prefix},
        )
        bodies = {str(name): body for name, body in rows}
        record_id = _matching_id("record", prefix, list(bodies))
        return self._decode(record_id, bodies[record_id])

    def finished(self, run_id: str) -> dict[tuple[str, str], tuple[str, int]]:
        """Status and number of the newest attempt, by study and case."""
        rows = self._rows(
            f"SELECT study, case_key, status, attempt FROM records WHERE run = ? AND"
            f" {_NEWEST_ATTEMPT} ORDER BY rowid",
            (run_id,),
        )
        return {(study, case): (status, attempt) for study, case, status, attempt in rows}

    def durations(self, device: str) -> dict[tuple[str, str], float]:
        """Seconds of the newest successful record of each case on a device, by study and case."""
        rows = self._rows(
            "SELECT study, case_key, json_extract(body, '$.elapsed_s') FROM records WHERE"
            " status = 'ok' AND json_extract(body, '$.environment.device_name') = ?"
            " ORDER BY rowid",
            (device,),
        )
        return {(study, case): float(seconds) for study, case, seconds in rows if seconds}

    def hold_run(self, run_id: str) -> AbstractContextManager[None]:
        """Lock a run for this process. The lock is released when the process ends; a child that was
        forked without exec keeps it."""
        return locked(self.path.with_name(f"{self.path.name}.{run_id}.lock"), f"run {run_id}")

    def _run(self, run_id: str) -> Run | None:
        rows = self._rows("SELECT * FROM runs WHERE id = ?", (run_id,))
        return self._run_of(rows[0]) if rows else None

    def _run_of(self, row: tuple[Any, ...]) -> Run:
        fields = dict(zip(("id", "created", "command", "plan", "cases"), row, strict=True))
        try:
            return msgspec.convert(fields, Run)
        except msgspec.ValidationError as error:
            raise StepscopeError(f"a run in {self.path}: {in_one_line(error)}") from error

    def _rows(
        self, query: str, values: tuple[object, ...] | dict[str, object] = ()
    ) -> list[tuple[Any, ...]]:
        with plain_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    def _decode(self, record_id: str, body: str) -> Record:
        try:
            record = decode(body)
        except StepscopeError as error:
            raise StepscopeError(f"record {record_id!a} in {self.path}: {error}") from error
        if record.id != record_id:
            raise StepscopeError(f"record {record_id!a} in {self.path} is stored as {record.id}")
        return record


def _matching_id(kind: str, text: str, ids: list[str]) -> str:
    """Return the id that is `text`, or the only id that begins with it."""
    if text in ids:
        return text
    matches = [known for known in ids if text and known.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        shown = f"one of: {some(ids, _CANDIDATES_SHOWN)}" if ids else ""
        raise UsageError(f"no {kind} has an id that begins with {text!r}", shown)
    raise UsageError(
        f"{len(matches)} {kind}s begin with {text!r}", f"one of: {some(matches, _CANDIDATES_SHOWN)}"
    )
