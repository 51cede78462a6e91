"""How a command ends, and what it prints: signals, closed streams, hostile text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from command_line import CommandLine
from stepscope.cli import main
from stepscope.records.schema import Ceiling, Record, Series, encode
from stepscope.report.run_index import RunEntry, index_page, read_entries, write_entry
from study_records import benchmark_record

HOSTILE = "a\x1b[31mred\u202etxt\u200b"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_inspect_ends_by_the_signal_of_the_script(
    tmp_path: Path, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os, resource; from stepscope.advisor.inspect.child import end_alike;"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0));"
        f"end_alike({int(number)})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert done.returncode == -number
    assert capfd.readouterr().err == ""


def test_a_hostile_entry_is_left_out_of_the_index(tmp_path: Path) -> None:
    good = RunEntry(run="good", title=HOSTILE, subtitle="", step_ms=1.0)
    (tmp_path / "good").mkdir()
    write_entry(tmp_path / "good", good)
    texts = {
        "link": msgspec.json.encode(msgspec.structs.replace(good, run="javascript:alert(1)")),
        "javascript:alert(1)": msgspec.json.encode(
            msgspec.structs.replace(good, run="javascript:alert(1)")
        ),
        "other": msgspec.json.encode(good),
        "bytes": b'{"run": "bytes", "title": "\xff\xfe", "subtitle": ""}',
        "deep": b"[" * 100_000,
        "long": b" " * (2 << 20),
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_bytes(text)
    (tmp_path / "endless").mkdir()
    (tmp_path / "endless" / "run.json").symlink_to("/dev/zero")
    assert read_entries(tmp_path) == [good]
    page = index_page([good, msgspec.structs.replace(good, run="huge", step_ms=1e308)])
    assert "javascript:" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page


def hostile_record(value: float = 2.0) -> Record:
    record = benchmark_record()
    series = tuple(
        Series(name="step", unit="ms", values=(value, value * 1.01, value * 1.02), variant=variant)
        for variant in (HOSTILE, "plain")
    )
    rate = min(1e12 * value, 1e308)
    ceiling = Ceiling(name="matmul.float32", value=rate, unit="FLOP/s", source="measured")
    return msgspec.structs.replace(record, series=series, ceilings=(ceiling,))


def write(path: Path, record: Record, **environment: str) -> str:
    changed = msgspec.structs.replace(record.environment, **environment)
    path.write_bytes(encode(msgspec.structs.replace(record, environment=changed)) + b"\n")
    return str(path)


@pytest.mark.parametrize("words", [("--markdown",), (), ("--json",), ("--fail-above", "1%")])
def test_a_comparison_escapes_control_characters(
    tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    base = write(tmp_path / "base.jsonl", hostile_record())
    new = write(tmp_path / "new.jsonl", hostile_record(4.0))
    main(["compare", base, new, *words])
    printed = capsys.readouterr().out
    assert "red" in printed
    assert not {"\x1b", "\u202e", "\u200b"} & set(printed)


def test_tables_and_pages_escape_control_characters(tmp_path: Path) -> None:
    record = hostile_record()
    raw = json.loads(encode(record))
    raw["environment"]["device_name"] = HOSTILE
    source = tmp_path / "records.jsonl"
    source.write_text(json.dumps(raw))
    for format in ("markdown", "latex", "csv"):
        to = tmp_path / format
        assert main(["export", str(source), "--format", format, "--to", str(to)]) == 0
    assert main(["report", str(source), "--out", str(tmp_path / "out")]) == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != source]
    assert {path.suffix for path in written} >= {".html", ".md"}
    for path in written:
        assert not {"\x1b", "\u202e"} & set(path.read_text()), path


@pytest.mark.parametrize("value", [1e308, 1e-300])
def test_extreme_values_are_not_compared(
    tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write(tmp_path / "base.jsonl", hostile_record())
    new = write(tmp_path / "new.jsonl", hostile_record(value), device_name="other")
    assert main(["compare", base, new, "--across"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no measured case in common" in line


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(tmp_path: Path, closed: str) -> None:
    source = tmp_path / "records.jsonl"
    source.write_bytes(encode(benchmark_record()) + b"\n")
    words = f"{sys.executable} -m stepscope show {source} --json {closed}"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))


LATE = """
import atexit, os, signal, sys
sys.argv = ["stepscope", "--version"]
from stepscope.__main__ import main

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

late = Late()
code = main()
sys.modules["kept"] = late
sys.exit(code)
"""


def test_an_interrupt_during_the_exit_does_not_end_by_the_signal() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, check=False)
    assert done.returncode in (0, 130)
    assert done.stderr == b""


TWICE = """
import os, signal, sys
import stepscope.cli as cli
from stepscope.__main__ import main

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    raise KeyboardInterrupt

cli._dispatch = interrupt
cli.log = interrupt
sys.exit(main())
"""


def test_a_second_interrupt_gives_the_same_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, check=False)
    assert done.returncode == 130
    assert done.stderr == b""


def test_an_interrupt_at_any_moment_gives_130_or_the_result(cli: CommandLine) -> None:
    """From the moment at which Python runs Stepscope's first line."""
    code = (
        "import os, sys; sys.argv = ['stepscope', 'list']; from stepscope.__main__ import main;"
        "os.write(1, b'started\\n'); sys.exit(main())"
    )
    for delay in (0.0, 0.03, 0.1):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=cli.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 8)
        time.sleep(0.02 + delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
        assert process.returncode in (0, 130), errors
        assert b"Traceback" not in errors
