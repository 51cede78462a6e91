"""Workers that break the protocol, leave processes behind, or cannot build their model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_line import CommandLine
from planted_study import RAW_LINES
from stepscope.cli import main
from stepscope.runner.process import Lines

RUN = ("--device", "cpu", "--no-report")


def test_a_malformed_reply_is_an_error_row_and_the_next_case_runs(cli: CommandLine) -> None:
    done = cli("run", "planted", "--does", *RAW_LINES, "ok", *RUN)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    by_deed = {record.config["does"]: record for record in cli.records()}
    assert list(by_deed) == [*RAW_LINES, "ok"]
    assert by_deed["ok"].status == "ok"
    for name in RAW_LINES:
        assert by_deed[name].status == "error"
        assert "\n" not in by_deed[name].reason
    assert "'a library printed this'" in by_deed["noise"].reason
    assert "'[[[" in by_deed["deep"].reason
    assert "Dismissed, not a result" in by_deed["wrong-reply"].reason
    assert cli.left_behind() == []


def test_a_record_whose_summary_overflows_is_stored_and_the_next_case_runs(
    cli: CommandLine,
) -> None:
    done = cli("run", "planted", "--does", "huge", "ok", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert [record.series[0].values[0] for record in cli.records()] == [1e308, 1.0]
    assert (cli.out / "report.html").exists()


def test_a_line_without_an_end_is_an_error() -> None:
    read, write = os.pipe()
    lines = Lines(read, longest=1000)
    os.write(write, b"x" * 5000)
    with pytest.raises(OverflowError):
        lines.next(time.monotonic() + 5)
    os.close(read)
    os.close(write)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("deed", ["leave", "leave-and-die"])
def test_processes_in_other_sessions_end_with_the_run(cli: CommandLine, deed: str) -> None:
    cli("run", "planted", "--does", deed, "--times", "2", *RUN)
    assert [record.config["does"] for record in cli.records()] == [deed] * 2
    assert cli.left_behind() == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_processes_in_other_sessions_end_with_a_killed_runner(cli: CommandLine) -> None:
    started = cli.start("run", "planted", "--does", "leave", "hang", *RUN)
    assert started.stderr is not None
    while "leave-0" not in started.stderr.readline():
        assert started.poll() is None
    assert len(cli.processes()) > 3
    started.kill()
    started.wait()
    assert cli.left_behind() == []


@pytest.mark.parametrize("blocked", ["tyro", "msgspec"])
def test_sigterm_while_modules_are_imported_has_the_exit_code_of_an_interrupt(
    tmp_path: Path, blocked: str
) -> None:
    shadow = tmp_path / f"{blocked}.py"
    shadow.write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    started = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "report", "none.jsonl"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "importing\n"
    started.send_signal(signal.SIGTERM)
    _, message = started.communicate(timeout=400)
    assert started.returncode == 130
    assert message in ("", "stepscope: interrupted\n")


def in_this_process(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `main` do here what the command does in a process of its own."""
    folder = cli.out.parent
    cli.environment["PYTHONPATH"] += os.pathsep + str(folder)
    for name, value in cli.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(folder))


def write_models(folder: Path) -> None:
    (folder / "lab_models.py").write_text(
        "import torch\n"
        "number = 3\n"
        "def fails():\n    raise RuntimeError('no weights\\nhere')\n"
        "def lonely():\n    return torch.nn.Linear(2, 2)\n"
        "def frozen():\n    return torch.nn.ReLU(), lambda size, device: None\n"
    )
    (folder / "lab_syntax.py").write_text("def build(:\n")
    (folder / "lab_exits.py").write_text("raise SystemExit('not a library')\n")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("examples.nope:build", "examples.nope cannot be imported"),
        ("lab_models:nope", "lab_models has no nope"),
        ("lab_models:number", "lab_models:number is a int"),
        ("lab_models:fails", "RuntimeError: no weights"),
        ("lab_models:lonely", "must return (model, make_batch)"),
        ("lab_models:frozen", "no trainable parameters"),
        ("lab_syntax:build", "lab_syntax cannot be imported: SyntaxError"),
        ("lab_exits:build", "lab_exits cannot be imported: SystemExit"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_before_ceilings_are_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    model: str,
    message: str,
) -> None:
    write_models(tmp_path)
    in_this_process(CommandLine(tmp_path), monkeypatch)
    assert main(["run", "own", "--model", model, "--device", "cpu"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("stepscope: ")
    assert said.err.count("\n") == 1
    assert message in said.err
    # Neither ceilings nor a run without a record.
    assert not list((tmp_path / "cache").rglob("ceilings-*"))


@pytest.mark.parametrize("words", [("advise",), ("run", "memory"), ("run", "benchmark")])
def test_every_command_that_takes_a_model_refuses_a_missing_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    in_this_process(CommandLine(tmp_path), monkeypatch)
    assert main([*words, "--model", "examples.nope:build", "--device", "cpu"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert "examples.nope cannot be imported" in said.err
    assert said.err.count("\n") == 1
