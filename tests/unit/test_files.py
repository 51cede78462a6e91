"""Every path that is written: regular files and streams only."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import stepscope
from stepscope import files
from stepscope.advisor.advise.history import add_to_history, history_file
from stepscope.cli import main
from stepscope.cli.common import require_writable, write_text
from stepscope.errors import StepscopeError, UsageError
from stepscope.measure.packing import pack
from stepscope.records.jsonl import write_records
from stepscope.records.lock import locked
from stepscope.records.schema import decode, encode
from stepscope.records.store import Store
from stepscope.report.run_index import RunEntry, write_entry
from study_records import benchmark_record

SOURCE = Path(stepscope.__file__).parent


def link(path: Path) -> str:
    path.with_name("mine").write_text("mine")
    path.symlink_to(path.with_name("mine"))
    return "a link"


def broken_link(path: Path) -> str:
    path.symlink_to(path.with_name("nothing"))
    return "a link"


def device(path: Path) -> str:
    try:
        os.mknod(path, 0o20666, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("a device cannot be created here")
    return "a device"


def socket(path: Path) -> str:
    os.mknod(path, 0o140666)
    return "a socket"


def identity(path: Path) -> tuple[int, int]:
    return path.lstat().st_ino, path.lstat().st_mode


KINDS: dict[str, Callable[[Path], str]] = {
    "link": link,
    "broken link": broken_link,
    "device": device,
    "socket": socket,
}


def write_lock(path: Path) -> None:
    with locked(path, "run"):
        pass


def write_history(path: Path) -> None:
    assert path == history_file()
    add_to_history([])


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "text": ("out/page.html", lambda path: write_text(path, "text")),
    "records": ("out/a.jsonl", lambda path: write_records([benchmark_record()], path)),
    "packed": ("out/a.json.gz", lambda path: pack(Path(__file__), path)),
    "entry": (
        "out/run.json",
        lambda path: write_entry(path.parent, RunEntry(run="r", title="", subtitle="")),
    ),
    "copy": ("out/a", lambda path: files.copy_file(Path(__file__), path)),
    "store": ("out/records.db", Store),
    "log of the store": ("out/records.db-wal", lambda path: Store(path.with_name("records.db"))),
    "lock": ("out/a.lock", write_lock),
    "history": ("cache/stepscope/advice.jsonl", write_history),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, writer: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name, write = WRITERS[writer]
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    shown = KINDS[kind](path)
    before = identity(path)
    with pytest.raises((OSError, StepscopeError), match=f"is {shown}, not a regular file"):
        write(path)
    assert identity(path) == before
    assert {one.name for one in path.parent.iterdir()} <= {path.name, "mine"}
    if kind == "link":
        assert path.read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_to_anything_else_is_one_line(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "source.jsonl", tmp_path / "target"
    source.write_bytes(encode(benchmark_record()) + b"\n")
    shown = KINDS[kind](target)
    before = identity(target)
    for words in (("jsonl",), ("csv", "--table", "benchmark-times"), ("markdown",)):
        command = ["export", str(source), "--to", str(target), "--format", *words]
        assert main(command) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"is {shown}, not a regular file" in line
    with pytest.raises(UsageError, match=f"cannot write .*: it is {shown}, not a regular file"):
        require_writable(target, "")
    assert identity(target) == before


def test_a_pipe_and_standard_output_are_written(tmp_path: Path) -> None:
    source, pipe = tmp_path / "source.jsonl", tmp_path / "pipe"
    source.write_bytes(encode(decode(encode(benchmark_record()))) + b"\n")
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    assert main(["export", str(source), "--to", str(pipe)]) == 0
    reader.join()
    assert read == [source.read_bytes()]
    code = f"from stepscope.cli import main; main(['export', {str(source)!r}, '--to', TO])"
    for name in ("/dev/stdout", "/dev/fd/1"):
        words = [sys.executable, "-c", code.replace("TO", repr(name))]
        done = subprocess.run(words, capture_output=True, check=True)
        assert done.stdout == source.read_bytes()


def test_permissions_are_kept_and_a_failure_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    path.chmod(0o600)

    def parts() -> object:
        yield b"after"
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        files.replace_file(path, parts())  # type: ignore[arg-type]
    assert path.read_text() == "before"
    files.replace_file(path, [b"after"])
    assert path.read_text() == "after"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_store_is_not_read_from_a_device(tmp_path: Path) -> None:
    device(tmp_path / "records.db")
    with pytest.raises(StepscopeError, match="is a device, not a regular file"):
        Store(tmp_path / "records.db", create=False)


PRIVATE = {
    "advisor/inspect/progress.py": "the folder of a recording",
    "advisor/judge/observer.py": "a temporary folder",
    "advisor/judge/referee.py": "a temporary folder",
    "advisor/patch/observer.py": "a temporary folder",
    "advisor/scope/once_imported.py": "a temporary folder",
    "advisor/scope/overlay.py": "a temporary folder",
    "grading/ranks/collectives.py": "a temporary folder",
    "advisor/inspect/rendezvous.py": "a folder that only the user can enter",
    "advisor/scope/watching.py": "the folder of a recording",
    "advisor/trial/planner.py": "a temporary folder",
    "measure/device.py": "/proc",
    "parallel/checkpoint/__init__.py": "a folder that this checkpoint has created",
    "parallel/checkpoint/checksums.py": "a folder that this checkpoint has created",
    "parallel/heartbeat.py": "the folder of a job",
    "parallel/rank_process.py": "the folder of a job",
    "records/database.py": "a temporary folder",
    "runner/process.py": "a pipe",
    "runner/worker.py": "/proc",
}
"""Modules that write files elsewhere, and where they are."""
WRITING = {"write_text", "write_bytes", "touch", "rename", "copyfile", "copy2", "mkstemp"}


def writes(file: Path) -> bool:
    text = file.read_text()
    if not any(name in text for name in ("open", "replace", *WRITING)):
        return False
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
        modes = [one.strip("b") for one in texts if isinstance(one, str)]
        match node.func:
            case ast.Attribute(attr="open" | "fdopen") | ast.Name(id="open"):
                if {"w", "a", "x", "w+", "a+", "r+"} & set(modes):
                    return True
            case ast.Attribute(value=ast.Name(id="os"), attr="replace"):
                return True
            case ast.Attribute(attr=name) if name in WRITING:
                return True
    return False


def test_every_other_file_is_written_by_one_module() -> None:
    found = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if writes(file)}
    assert found == {*PRIVATE, "files.py"}
