from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sample_records import record, run
from stepscope.errors import StepscopeError
from stepscope.records import schema
from stepscope.records.jsonl import import_into, read_records, write_records
from stepscope.records.schema import encode
from stepscope.records.store import Store


def three() -> list[schema.Record]:
    return [record(config={"context": context}) for context in (128, 256, 512)]


def test_written_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    write_records(three(), path)
    assert list(read_records(path)) == three()
    assert len(path.read_bytes().splitlines()) == 3
    path.write_bytes(path.read_bytes() + b"\n \n")
    assert list(read_records(path)) == three()


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    write_records([], tmp_path / "none.jsonl")
    assert read_records(tmp_path / "none.jsonl") == ()


@pytest.mark.parametrize("broken", [b"{", b"", b'{"version": 99}', b"\xff\xfe"])
def test_an_error_names_file_and_line(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "records.jsonl"
    first, _, last = (encode(r) for r in three())
    path.write_bytes(b"\n".join([first, broken, last]))
    with pytest.raises(StepscopeError, match=r"records\.jsonl, line 2: "):
        read_records(path)


def test_the_error_for_a_truncated_file_tells_how_to_recover(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first, second, last = (encode(r) for r in three())
    path.write_bytes(b"\n".join([first, second, last[:-20]]))
    with pytest.raises(StepscopeError, match=r"line 3: .*truncated.*head -n 2 .*records\.jsonl"):
        read_records(path)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{\n  "rows": []\n}\n', "a file of records has one JSON object per line"),
        ('{"piece": "adamw"}\n', "not written by `stepscope export`"),
    ],
)
def test_the_error_for_another_kind_of_file_gives_a_hint(
    tmp_path: Path, text: str, hint: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(StepscopeError, match=hint):
        read_records(path)


def test_a_newer_record_is_refused_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 7)
    path = tmp_path / "records.jsonl"
    write_records([record(version=7)], path)
    monkeypatch.undo()
    with pytest.raises(StepscopeError, match=r"line 1: .*version 7.*install a newer Stepscope"):
        read_records(path)


def test_a_full_disk_leaves_only_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.jsonl"
    write_records(three(), path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StepscopeError, match=r"records\.jsonl is full.*free some space"):
        write_records(three()[:1], path)
    assert list(read_records(path)) == three()
    assert os.listdir(tmp_path) == ["records.jsonl"]


def test_a_failure_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_records(three(), path)

    def failing() -> object:
        yield record()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_records(failing(), path)  # type: ignore[arg-type]
    assert list(read_records(path)) == three()
    assert os.listdir(tmp_path) == ["records.jsonl"]


def test_paths_that_cannot_be_written_or_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StepscopeError, match="is a folder"):
        write_records([], tmp_path)
    with pytest.raises(StepscopeError, match=r"file.*\(choose a folder"):
        write_records([], tmp_path / "file" / "records.jsonl")
    with pytest.raises(StepscopeError, match=r"there is no file .*absent\.jsonl"):
        read_records(tmp_path / "absent.jsonl")


def test_the_file_has_default_permissions_and_keeps_changed_ones(tmp_path: Path) -> None:
    path, plain = tmp_path / "records.jsonl", tmp_path / "plain"
    plain.touch()
    write_records([], path)
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    write_records(three(), path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_an_import_adds_runs_and_can_be_repeated(tmp_path: Path) -> None:
    again = record(attempt=2, started="2025-01-01T00:00:00+00:00")
    with Store(tmp_path / "a.db") as store:
        assert import_into(store, [*three(), again]) == (4, 0)
        assert import_into(store, [*three(), again, again]) == (0, 5)
        imported = store.find_run("run-1")
        assert (imported.cases, imported.created) == (3, "2025-01-01T00:00:00+00:00")
        assert len(store.records(all_attempts=True)) == 4


def test_an_import_keeps_an_existing_run(tmp_path: Path) -> None:
    with Store(tmp_path / "a.db") as store:
        store.add_run(run())
        store.add(three()[0])
        assert import_into(store, three()) == (2, 1)
        assert store.runs() == (run(),)


@pytest.mark.parametrize(
    "conflict",
    [
        pytest.param({"elapsed_s": 1.0}, id="same id, other content"),
        pytest.param({"id": "another"}, id="other id, same attempt"),
    ],
)
def test_a_conflicting_record_is_refused_and_nothing_is_added(
    tmp_path: Path, conflict: dict[str, object]
) -> None:
    fresh = [record(case="fresh"), record(run="run-2", case="fresh")]
    with Store(tmp_path / "a.db") as store:
        import_into(store, [record()])
        with pytest.raises(StepscopeError, match="already"):
            import_into(store, [*fresh, record(**conflict)])
        assert store.records() == (record(),)
        assert len(store.runs()) == 1
        with pytest.raises(StepscopeError, match="already"):
            import_into(store, [*fresh, record(**conflict, case="fresh", run="run-2")])
        assert len(store.runs()) == 1
