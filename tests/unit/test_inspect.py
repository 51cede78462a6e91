"""`stepscope inspect`: a page about a script, whose output and exit status do not change."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from command_line import CommandLine, python
from stepscope.records.jsonl import read_records
from stepscope.report.verdict import lines_at
from stepscope.studies.trusted import banner
from stepscope.views.program.rows import ProgramRecord

TRAINING = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
print("torch" in sys.modules, __name__, sys.argv[1:], sys.path[0] == os.path.dirname(__file__))
import torch
from watched_models import Network, train
model = Network()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(sys.argv[1])):
    train(model, optimizer)
print("threads", torch.get_num_threads(), file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "lab" / "train.py"


@pytest.fixture
def command(tmp_path: Path, script: Path) -> CommandLine:
    script.parent.mkdir()
    return CommandLine(tmp_path)


def plain(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(str(script), *words)


def test_a_relative_path_of_the_script_is_absolute_in_the_script(
    command: CommandLine, script: Path
) -> None:
    """As for Python itself: files next to the script are found after `os.chdir`, and tracebacks
    are the same."""
    script.write_text(
        "import os, sys\n"
        "os.chdir('/')\n"
        "print(__file__, __loader__.get_filename('__main__'), sys.argv)\n"
        "raise ValueError(open(__file__).readline())\n"
    )
    relative = str(script.relative_to(command.out.parent))
    expected = python(relative, "x", cwd=command.out.parent)
    words = command.command(["inspect", relative, "x"])[1:]
    done = python(*words, cwd=command.out.parent, env=command.environment)
    assert (done.stdout, done.returncode) == (expected.stdout, expected.returncode)
    assert done.stderr.startswith(expected.stderr)
    assert str(script) in expected.stdout


def test_script_gets_a_page_and_keeps_its_output_and_exit_code(
    command: CommandLine, script: Path
) -> None:
    script.write_text(TRAINING)
    command.environment["COLUMNS"] = "60"
    done = command.line(
        f"inspect --warmup 2 --steps 5 --profiled-steps 2 --keep-traces {script} 14"
    )
    assert done.returncode == 7
    assert done.stdout == "False __main__ ['14'] True\n"
    page = command.out / "train.html"
    warning = banner(read_records(page.with_suffix(".jsonl")))
    output = done.stderr.splitlines()
    # Other tests may or may not use the cores.
    assert (f"stepscope: {warning}" in output) == bool(warning)
    first, *verdict, short, last = (line for line in output if line != f"stepscope: {warning}")
    assert (first, last) == ("threads 1", f"stepscope: page: {page.resolve()}")
    assert verdict[0].startswith("train.py on ")
    assert any(line.startswith("A step takes ") for line in verdict[1:3])
    # The path of the script in the next command may be longer.
    answer = itertools.takewhile(lambda line: not line.startswith("Next:"), verdict)
    assert max(map(len, answer)) == 60  # the bar
    (record,) = read_records(page.with_suffix(".jsonl"))
    assert record.notes["command"] == f"{script} 14"
    assert len(verdict) <= lines_at(60, 20)
    # On a busy machine traced and timed steps may differ.
    text = r"stepscope: a step takes [\d.]+ \ws( \(traced steps: .*\))?, peak memory [\d.]+ \w*B"
    assert re.fullmatch(text, short)
    assert "A step of train.py takes" in page.read_text()
    (record,) = read_records(page.with_suffix(".jsonl"))
    watched = ProgramRecord(record)
    assert watched.summary is not None
    assert len(watched.summary.steps) == 2
    saved = page.with_name("train.rank-0.trace.json.gz")
    text = command("trace", str(saved), "--json")
    assert len(json.loads(text.stdout)["summary"]["steps"]) == 2
    shown = command("show", "--full", str(page.with_suffix(".jsonl")))
    assert "Parts of the model by time" in shown.stdout


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("print('no torch here')", "ended without importing torch"),
        ("def f():\n    raise ValueError('planned')\nf()", "exit code 1 without importing torch"),
        ("import sys\nsys.exit('a last word')", "exit code 1 without importing torch"),
        ("def f(:\n", "exit code 1 without importing torch"),
        ("import os\nos._exit(4)", "exit code 4 without importing torch"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", "was ended by SIGTERM"),
    ],
)
def test_script_ends_as_without_inspect(
    command: CommandLine, script: Path, source: str, line: str
) -> None:
    script.write_text(source)
    alone, watched = plain(script), command("inspect", str(script))
    assert watched.returncode == alone.returncode
    assert watched.stdout == alone.stdout
    *own, last = watched.stderr.splitlines()
    assert own == alone.stderr.splitlines()
    assert last.startswith("stepscope: train.py ")
    assert line in last


OWN_FILE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    def forward(self, x):
        x = self.first(x).sigmoid()  # saved
        return self.last(x)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(14):
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def test_saved_activation_is_named_by_its_source_line(command: CommandLine, script: Path) -> None:
    # A directory of this name belongs to the script, not to torch.
    script = script.parent / "torch" / "net.py"
    script.parent.mkdir()
    script.write_text(OWN_FILE)
    command("inspect", "--warmup", "2", "--steps", "5", "--profiled-steps", "2", str(script))
    (record,) = read_records(command.out / "net.jsonl")
    account = ProgramRecord(record).account
    assert account is not None
    line = 1 + next(n for n, text in enumerate(OWN_FILE.splitlines()) if "# saved" in text)
    assert {one.code for one in account.saved if one.operator == "sigmoid"} == {f"net.py:{line}"}
    assert {one.code.partition(":")[0] for one in account.saved} == {"net.py"}


NO_REASON = """
import torch
class Silent(RuntimeError):
    pass
class Odd(torch.nn.Linear):
    def register_forward_pre_hook(self, *_, **__):
        raise Silent
model = Odd(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
print("trained")
raise SystemExit(5)
"""


def test_failed_recording_without_a_message_reports_type_and_location(
    command: CommandLine, script: Path
) -> None:
    script.write_text(NO_REASON)
    done = command("inspect", "--warmup", "2", "--steps", "5", "--profiled-steps", "2", str(script))
    assert (done.returncode, done.stdout) == (5, "trained\n")
    (line,) = done.stderr.splitlines()
    assert line.endswith("it was not recorded: Silent at train.py:7")


def test_one_line_of_json_leaves_standard_output_to_the_script(
    command: CommandLine, script: Path
) -> None:
    script.write_text(TRAINING)
    done = command.line(
        f"inspect --json --warmup 2 --steps 5 --profiled-steps 2 --out {command.out} {script} 14"
    )
    assert (done.returncode, done.stdout) == (7, "False __main__ ['14'] True\n")
    threads, line = done.stderr.splitlines()
    text = json.loads(line)
    assert threads == "threads 1"
    assert text.pop("verdict")["step_ms"] == text["step_ms"]
    (record,) = read_records(Path(text["records"]))
    assert text == {
        "page": str((command.out / "train.html").resolve()),
        "records": str((command.out / "train.jsonl").resolve()),
        "run": record.run,
        "step_ms": ProgramRecord(record).step_ms,
        "traced_ms": ProgramRecord(record).summary.wall_ms,  # type: ignore[union-attr]
        "peak_bytes": record.quantity("peak_bytes"),
        "reason": "",
        "exit_code": 7,
    }
    assert Path(text["page"]).exists()
    script.write_text("print('no torch here')")
    nothing = json.loads(command("inspect", "--json", str(script)).stderr)
    assert (nothing["page"], nothing["exit_code"]) == (None, 0)
    assert "without importing torch" in nothing["reason"]


def test_module_does_not_overwrite_the_page_of_a_script_of_the_same_name(
    command: CommandLine, script: Path
) -> None:
    package = script.parent / "pack"
    package.mkdir()
    (package / "train.py").write_text(TRAINING)
    script.write_text(TRAINING)
    command.environment["PYTHONPATH"] += f":{script.parent}"
    effort = ("--no-memory", "--warmup", "1", "--steps", "1", "--profiled-steps", "1")
    for target in ("train", "pack.train"):
        assert command("inspect", *effort, "-m", target, "8").returncode == 7
    assert {path.name for path in command.out.glob("*module*")} == {
        f"{name}-module.{ending}"
        for name in ("train", "pack.train")
        for ending in ("html", "jsonl")
    }


def test_crash_in_the_warm_up_is_reported_with_its_steps(
    command: CommandLine, script: Path
) -> None:
    script.write_text(TRAINING.replace("sys.exit(7)", "raise RuntimeError('planned')"))
    done = command("inspect", str(script), "3")
    assert done.returncode == 1
    assert "RuntimeError: planned" in done.stderr
    assert "stepscope/" not in done.stderr.replace(str(script.parent), "")
    last = done.stderr.splitlines()[-1]
    assert "ended with exit code 1 after 3 optimizer steps, before any was recorded" in last


def test_crash_during_the_recording_is_reported_with_partial_results(
    command: CommandLine, script: Path
) -> None:
    script.write_text(TRAINING.replace("sys.exit(7)", "raise RuntimeError('planned')"))
    done = command(
        "inspect", "--warmup", "2", "--steps", "5", "--profiled-steps", "2", str(script), "6"
    )
    assert done.returncode == 1
    why = "the program ended after 6 of the 12 steps of a recording; it ended with exit code 1"
    output = done.stderr.splitlines()[-2]
    fix = "(let it run more steps, or give a smaller --warmup and --steps)"
    assert output == f"stepscope: the recording is incomplete: {why} {fix}"
    assert why in (command.out / "train.html").read_text()


def test_page_that_cannot_be_written_is_refused_before_the_script_starts(
    command: CommandLine, script: Path
) -> None:
    script.write_text("print('started')")
    for page in (script / "in-a-file.html", script.parent):
        done = command("inspect", "--page", str(page), str(script))
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert str(page) in line
        assert "--page" in line


def test_records_are_named_if_the_page_cannot_be_written(
    command: CommandLine, script: Path
) -> None:
    page = command.out / "train.html"
    script.write_text(f"import os\nos.mkdir({str(page)!r})\n{TRAINING}")
    done = command(
        "inspect", "--warmup", "2", "--steps", "5", "--profiled-steps", "2", str(script), "14"
    )
    assert done.returncode == 7
    output = done.stderr.splitlines()[-1]
    assert f"cannot write {page}" in output
    records = page.with_suffix(".jsonl").resolve()
    assert output.endswith(f"the records are in {records}")
    assert len(read_records(records)) == 1


def test_steps_that_change_during_the_recording_are_reported(
    command: CommandLine, script: Path
) -> None:
    slow = "    import time; time.sleep(1.5 if _ > 6 else 0.0)\n"
    script.write_text(TRAINING.replace('print("threads', f'{slow}print("threads'))
    done = command.line(f"inspect --no-memory --warmup 1 --steps 5 --profiled-steps 2 {script} 11")
    (short,) = [line for line in done.stderr.splitlines() if "a step takes" in line]
    assert "so they differ from the timed steps)" in short


def test_interrupt_reaches_the_script_and_ends_inspect_the_same_way(
    command: CommandLine, script: Path, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    script.write_text(
        f"import pathlib, time\npathlib.Path({str(ready)!r}).touch()\n"
        "try:\n    time.sleep(60)\nfinally:\n    print('tidied up', flush=True)\n"
    )
    process = command.start("inspect", str(script))
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=400)
    assert process.returncode == -signal.SIGINT
    assert out == "tidied up\n"
    assert "KeyboardInterrupt" in errors
    assert "was ended by SIGINT" in errors.splitlines()[-1]
    assert command.left_behind() == []


def test_module_runs_as_with_python_m(command: CommandLine, script: Path) -> None:
    script.write_text("import sys\nprint(__name__, __spec__.name, sys.argv[1:])\n")
    command.environment["PYTHONPATH"] += f":{script.parent}"
    done = command("inspect", "-m", "train", "-x")
    assert done.stdout == "__main__ train ['-x']\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "no script is given"),
        (("missing.py",), "there is no script missing.py"),
        (("--steps", "0", __file__), "at least one step must be timed"),
        (("--profiled-steps", "-1", __file__), "at least one step must be timed"),
    ],
)
def test_invalid_options_are_refused(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepscope.cli import main

    assert main(["inspect", *words]) == 2
    assert expected in capsys.readouterr().err


def test_run_names_the_command_that_records_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.cli import main

    assert main(["run", "inspect"]) == 2
    assert "stepscope inspect script.py" in capsys.readouterr().err
