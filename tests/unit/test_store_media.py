"""The store on disks that are full, read-only or owned by another user."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from media import MountTmpfs, make_read_only, unprivileged
from sample_records import record, run
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import read_records, write_records
from stepscope.records.schema import Record
from stepscope.records.store import Store


def filled(path: Path, count: int = 3) -> list[Record]:
    added = [record(case=f"case-{n}") for n in range(count)]
    with Store(path) as store:
        store.add_run(run())
        for each in added:
            store.add(each)
    return added


def add_until_full(store: Store) -> list[Record]:
    added: list[Record] = []

    def add() -> None:
        for n in range(1000):
            each = record(case=f"full-{n}")
            store.add(each)
            added.append(each)

    with pytest.raises(StepscopeError, match=r"runs\.db is full; .* are safe \(free some space"):
        add()
    return added


def test_a_store_that_cannot_grow_keeps_its_records(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.db") as store:
        store.add_run(run())
        store._connection.execute("PRAGMA max_page_count = 60")
        added = add_until_full(store)
        assert len(added) > 3
        assert list(store.records()) == added
        store._connection.execute("PRAGMA max_page_count = 1000")
        store.add(record(case="after"))
    with Store(tmp_path / "runs.db", create=False) as store:
        assert list(store.records()) == [*added, record(case="after")]


def test_a_store_on_a_full_disk_keeps_its_records_and_can_resume(mount_tmpfs: MountTmpfs) -> None:
    disk = mount_tmpfs("size=512k")
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(200 << 10))
    with Store(disk / "runs.db") as store:
        store.add_run(run())
        added = add_until_full(store)
        assert len(added) > 3
        assert list(store.records()) == added
        ballast.unlink()
        store.add(record(case="after"))
        assert list(store.records()) == [*added, record(case="after")]
    with Store(disk / "runs.db", create=False) as store:
        assert list(store.records()) == [*added, record(case="after")]


def test_a_store_on_a_full_disk_can_be_read(mount_tmpfs: MountTmpfs) -> None:
    disk = mount_tmpfs("size=512k")
    added = filled(disk / "runs.db")
    with pytest.raises(OSError, match="No space"):
        (disk / "ballast").write_bytes(bytes(1 << 20))
    with Store(disk / "runs.db", create=False) as store:
        assert list(store.records()) == added
    with pytest.raises(StepscopeError, match="is full"):
        Store(disk / "runs.db").add(record(case="more"))
    with pytest.raises(StepscopeError, match="is full"):
        Store(disk / "new.db")
    with Store(disk / "runs.db", create=False) as store:
        assert list(store.records()) == added


def test_a_full_disk_leaves_an_exported_file_unchanged(mount_tmpfs: MountTmpfs) -> None:
    disk = mount_tmpfs("size=64k")
    write_records([record()], disk / "records.jsonl")
    with pytest.raises(StepscopeError, match=r"records\.jsonl is full"):
        write_records([record(case=str(n)) for n in range(100)], disk / "records.jsonl")
    assert read_records(disk / "records.jsonl") == (record(),)
    assert os.listdir(disk) == ["records.jsonl"]


def test_a_read_only_mount_can_be_read_but_not_added_to(mount_tmpfs: MountTmpfs) -> None:
    disk = mount_tmpfs("size=1m")
    added = filled(disk / "runs.db")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with Store(disk / "runs.db", create=False) as store:
        assert list(store.records()) == added
        with pytest.raises(StepscopeError, match="is read-only"):
            store.add(record(case="more"))
        with pytest.raises(StepscopeError, match="read-only"), store.hold_run("run-1"):
            pass
    with pytest.raises(StepscopeError, match=r"read-only|cannot be opened"):
        Store(disk / "runs.db")
    with pytest.raises(StepscopeError, match=r"read-only|cannot be opened"):
        Store(disk / "new" / "runs.db")


def test_a_read_only_folder_can_be_read_but_not_added_to(public: Path) -> None:
    added = filled(public / "runs.db")
    make_read_only(public)
    with unprivileged():
        with Store(public / "runs.db", create=False) as store:
            assert list(store.records()) == added
            with pytest.raises(StepscopeError, match="is read-only"):
                store.add(record(case="more"))
        with pytest.raises(StepscopeError, match=r"runs\.db .*(read-only|cannot be opened)"):
            Store(public / "runs.db")
        with pytest.raises(StepscopeError, match=r"new\.db cannot be opened \(check"):
            Store(public / "new.db")
        with pytest.raises(StepscopeError, match=r"deeper: permission denied \(choose"):
            Store(public / "deeper" / "runs.db")


def test_a_read_only_file_in_a_writable_folder_is_named(public: Path) -> None:
    added = filled(public / "runs.db")
    (public / "runs.db").chmod(0o444)
    public.chmod(0o777)
    with unprivileged():
        with pytest.raises(StepscopeError, match=r"is read-only .*make the file"):
            Store(public / "runs.db")
        with Store(public / "runs.db", create=False) as store:
            assert list(store.records()) == added


def test_a_write_ahead_log_is_read_from_a_read_only_folder(public: Path) -> None:
    origin, copy = public / "origin", public / "copy"
    for folder in (origin, copy):
        folder.mkdir(mode=0o755)
    with Store(origin / "runs.db") as store:
        store.add_run(run())
        store.add(record())
        for name in ("runs.db", "runs.db-wal"):
            shutil.copy(origin / name, copy / name)
    make_read_only(copy)
    with unprivileged(), Store(copy / "runs.db", create=False) as store:
        assert store.records() == (record(),)
        with pytest.raises(StepscopeError, match="is read-only"):
            store.add(record(case="more"))


def test_an_unreadable_file_is_named(public: Path) -> None:
    filled(public / "runs.db")
    (public / "runs.db").chmod(0o000)
    for create in (True, False):
        with unprivileged(), pytest.raises(StepscopeError, match=r"runs\.db: permission denied"):
            Store(public / "runs.db", create)
