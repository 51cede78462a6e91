"""`stepscope run` end to end: output, exit codes, and interrupts."""

from __future__ import annotations

import json
import re
import shlex
import signal
import textwrap
import time
from pathlib import Path

from command_line import CommandLine, python
from stepscope.records.jsonl import read_records

ANNOUNCED = re.compile(r"\[\d+/\d+\] planted (\S+):")


def interrupt(
    cli: CommandLine, words: list[str], how: signal.Signals, after: int
) -> tuple[int, str]:
    """Start a run, send the signal once so many cases are announced; return exit code and lines."""
    process = cli.start(*words)
    assert process.stderr is not None
    lines: list[str] = []
    done = 0
    for line in process.stderr:
        lines.append(line)
        done += bool(ANNOUNCED.match(line))
        if done == after:
            process.send_signal(how)
            done = -(10**6)
    code = process.wait(timeout=400)
    process.communicate()
    return code, "".join(lines)


def test_run_prints_one_line_of_json_and_stores_everything(cli: CommandLine) -> None:
    done = cli("run", "planted", "--does", "ok", "raise", "skip", "--device", "cpu", "--json")
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    facts = json.loads(done.stdout)
    assert facts["status"] == {"ok": 1, "error": 1, "skipped": 1}
    assert facts["cases"] == 3
    records = cli.records()
    assert read_records(facts["records"]) == records
    for page in (facts["report"], facts["markdown"]):
        assert all(record.case in Path(page).read_text() for record in records)
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"run {facts['run']}: 3 cases, about ")
    assert lines[2].startswith("[2/3] planted raise-0: error: RuntimeError: planted (0:")

    again = cli.line(
        "run planted --does ok raise skip --device cpu --json --resume --retry --no-report"
    )
    assert json.loads(again.stdout)["run"] == facts["run"]
    assert ANNOUNCED.findall(again.stderr) == ["raise-0"]
    assert "report" not in json.loads(again.stdout)
    attempts = cli.records(all_attempts=True)
    assert attempts[:3] == records
    assert [(r.case, r.attempt) for r in attempts[3:]] == [("raise-0", 2)]


def test_run_without_success_preserves_the_existing_report(cli: CommandLine) -> None:
    cli.out.mkdir()
    page = cli.out / "report.html"
    page.write_text("the old page")
    done = cli("run", "planted", "--does", "raise", "skip", "--device", "cpu")
    assert done.returncode == 1
    assert "no case succeeded, so no report is written" in done.stderr
    assert page.read_text() == "the old page"


def test_run_that_succeeds_prints_the_headline_and_exits_with_0(cli: CommandLine) -> None:
    done = cli.line(
        "run benchmark --size tiny --context 8 --batch 1 --steps 3 --min-seconds 0 --vocab 9"
        " --device cpu"
    )
    assert done.returncode == 0, done.stderr
    assert "A step takes" in done.stdout
    assert str(cli.out / "report.html") in done.stdout
    assert {r.config["mode"] for r in cli.records()} == {
        "forward",
        "forward-backward",
        "train-step",
    }
    assert all(r.config["overrides"] == {"vocab": 9} for r in cli.records())


def test_interrupt_saves_finished_cases_and_prints_how_to_resume(cli: CommandLine) -> None:
    words = ["run", "planted", "--times", "8", "--seconds", "0.1", "--device", "cpu", "--no-report"]
    for how, before in ((signal.SIGINT, 0), (signal.SIGTERM, 2)):
        code, output = interrupt(cli, words, how, after=2)
        assert code == 130
        assert "Traceback" not in output
        announced = set(ANNOUNCED.findall(output))
        saved = [record.case for record in cli.records()]
        assert len(saved) == len(set(saved)) >= before + 2
        assert announced <= set(saved)
        assert re.search(rf"interrupted: {len(saved)} of 8 cases are saved in run", output)
        assert cli.left_behind() == []
        (command,) = re.findall(r"resume with: stepscope (.*)", output)
        words = shlex.split(command)
        assert words[-1] == "--resume"

    first = cli.records(all_attempts=True)
    done = cli(*words)
    assert done.returncode == 0, done.stderr
    assert not set(ANNOUNCED.findall(done.stderr)) & {record.case for record in first}
    assert cli.records(all_attempts=True)[: len(first)] == first
    assert sorted(r.case for r in cli.records()) == [f"ok-{n}" for n in range(8)]

    nothing_left = cli(*words)
    assert nothing_left.returncode == 0
    assert ANNOUNCED.findall(nothing_left.stderr) == []
    assert len(cli.records(all_attempts=True)) == 8


def test_interrupt_inside_dataclass_creation_has_exit_code_130(tmp_path: Path) -> None:
    """Only `python -m` checks whether CPython marked the interrupt as unhandled."""
    module = tmp_path / "stopped.py"
    module.write_text(
        textwrap.dedent("""
        import sys

        import stepscope.cli

        def stopped(words):
            exec("raise KeyboardInterrupt")

        stepscope.cli._dispatch = stopped
        sys.exit(stepscope.cli.main([]))
        """)
    )
    done = python("-m", "stopped", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "stepscope: interrupted\n")


def test_interrupt_while_a_case_hangs_ends_its_worker(cli: CommandLine) -> None:
    words = ["run", "planted", "--does", "ok", "hang", "--device", "cpu", "--no-report"]
    code, output = interrupt(cli, words, signal.SIGINT, after=1)
    assert code == 130
    assert "interrupted: 1 of 2 cases are saved" in output
    assert cli.left_behind() == []


def test_interrupt_before_the_first_case_leaves_no_records(cli: CommandLine) -> None:
    process = cli.start("run", "planted", "--device", "cpu")
    deadline = time.monotonic() + 60
    while len(cli.processes()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=400)
    assert process.returncode == 130
    assert "interrupted" in output
    assert "Traceback" not in output
    assert cli.left_behind() == []


def test_two_concurrent_runs_do_not_share_a_run(cli: CommandLine) -> None:
    words = shlex.split("run planted --times 2 --does ok hang --device cpu --no-report --resume")
    first = cli.start(*words)
    assert first.stderr is not None
    try:
        for line in first.stderr:
            if ANNOUNCED.match(line):
                break
        second = cli(*words)
        assert second.returncode == 1
        assert f"process {first.pid} is working on run" in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        first.kill()
        first.communicate()
    assert cli.left_behind() == []
