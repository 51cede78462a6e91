"""The live view of `stepscope inspect --watch`, in a terminal and as lines."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from command_line import CommandLine
from stepscope.advisor.inspect.progress import LiveSteps, read_live, write_live
from stepscope.analysis.verdict import BreakdownPart, Estimate, Gain, RankedChange, Verdict
from stepscope.cli.live_view import PlainView, live_view, sparkline, view_lines
from watched_models import WIDTH, Network, train
from watched_programs import watching

STEP = Estimate(value=30.0, low=29.0, high=31.0)
VERDICT = Verdict(
    subject="train.py",
    device="H200",
    step=STEP,
    parts=(
        BreakdownPart(label="hardware limit", ms=10.0, meaning="ideal"),
        BreakdownPart(label="device idle", ms=20.0, meaning="idle"),
    ),
    changes=(
        RankedChange(
            code="compile", title="torch.compile", gain=Gain(value=9.0, low=7.0, high=11.0),
            risk="", lines=(),
        ),
    ),
)  # fmt: skip
LIVE = LiveSteps(
    steps=1234,
    step_ms=(30.0, 29.0, 31.0, 60.0),
    loading=0.25,
    memory_bytes=3 << 30,
    peak_bytes=5 << 30,
)


def lines(live: LiveSteps, verdict: Verdict | None = None, width: int = 90) -> list[str]:
    limited_by = "limited by the CPU" if verdict else ""
    return view_lines("train.py", live, verdict, limited_by, None, 75.0, width)


def test_view_before_during_and_after_the_recording() -> None:
    assert lines(LiveSteps())[1:] == ["waiting for the first steps"]
    recording = lines(LiveSteps(steps=3, step_ms=(30.0, 30.0), stage="timed"))
    assert recording[2] == "time    recording, timed step"
    title, steps, bar, legend, status, advice = lines(LIVE, VERDICT)
    assert title.startswith("stepscope: train.py, step 1,234, 1:15 ──")
    assert steps.startswith("step    60.0 ms (median 30.5 ms)")
    assert steps.endswith(" ▅▄▅█")
    assert (bar.count("█"), bar.count("░")) == (27, 55)
    assert legend.strip() == "█ hardware limit 10.0 ms, 33.3 %   ░ device idle 20.0 ms, 66.7 %"
    assert status.strip() == (
        "GPU memory 3.00 GiB (peak 5.00 GiB), loader wait 25.0 %, limited by the CPU"
    )
    assert advice.startswith("advice  torch.compile: −9.00 ms")


@pytest.mark.parametrize("width", [50, 60, 100])
def test_no_row_is_wider_than_the_terminal(width: int) -> None:
    assert all(len(line) <= width for line in lines(LIVE, VERDICT, width))


def test_sparkline_starts_at_zero_and_cuts_outliers() -> None:
    assert sparkline((1.0, 1.0, 1.0), 10) == "███"
    assert sparkline((1.0, 2.0, 100.0, 1.0, 1.0), 4) == "▃█▂▂"
    assert sparkline((0.0, 0.0), 10) == "▁▁"


def test_lines_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = live_view("train.py", tmp_path, os.getpid())
    assert isinstance(view, PlainView)
    view.close()
    write_live(tmp_path, LIVE)
    view.verdict, view.limited_by = VERDICT, "limited by the CPU"
    view.close()
    view.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(
        "stepscope: step 1,234, 30.5 ms a step, GPU memory 3.00 GiB (peak 5.00 GiB),"
        " loader wait 25.0 %, limited by the CPU, torch.compile: −9.00 ms"
    )


def test_all_steps_are_timed_also_after_the_recording(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    data = SlowData()
    with watching(tmp_path, live=True):
        for _ in DataLoader(data, batch_size=None):
            train(model, optimizer)
    live = read_live(tmp_path)
    assert live.steps == len(data)
    assert len(live.step_ms) == len(data) - 1
    assert live.stage == ""
    assert 0.05 < live.loading < 1
    assert live.memory_bytes is None


class SlowData(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= len(self):
            raise IndexError
        time.sleep(0.005)
        return torch.zeros(WIDTH)


SCRIPT = """
import sys, time
import torch
from watched_models import Network, train
model = Network()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    train(model, optimizer)
print("hello", input("name? "))
try:
    while True:
        train(model, optimizer)
        time.sleep(0.01)
except KeyboardInterrupt:
    print("closed by its own decision")
    sys.exit(7)
"""


class Terminal:
    """A command in a terminal of its own."""

    def __init__(
        self, command: CommandLine, *words: str, rows: int = 30, columns: int = 100
    ) -> None:
        arguments = command.command(words)
        # A thread of numpy, which must not take Ctrl-C.
        environment = command.environment | {"TERM": "xterm", "OPENBLAS_NUM_THREADS": "2"}
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, arguments, environment)
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.output = ""

    def read_until(self, text: str, within_s: float = 300.0) -> None:
        deadline = time.monotonic() + within_s
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            if select.select([self.end], [], [], 0.1)[0]:
                self.output += os.read(self.end, 1 << 16).decode(errors="replace")

    def enter(self, text: str) -> None:
        os.write(self.end, f"{text}\n".encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self.end, b"\x03")

    def wait(self) -> int:
        while True:
            try:
                self.output += os.read(self.end, 1 << 16).decode(errors="replace")
            except OSError:
                # The last process of the terminal has ended.
                break
        os.close(self.end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def threads_that_take(number: signal.Signals, process: int) -> list[str]:
    """Return the threads, but for the main one, that do not block a signal of the process."""
    tasks = [path for path in Path(f"/proc/{process}/task").glob("*") if path.name != str(process)]
    blocked = {
        path.name: re.search(r"SigBlk:\s*(\w+)", (path / "status").read_text()) for path in tasks
    }
    return [
        name
        for name, found in blocked.items()
        if found is not None and not int(found[1], 16) >> (number - 1) & 1
    ]


@pytest.mark.usefixtures("cold_start")
def test_closing_the_view_and_an_interrupt_leave_the_script_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = CommandLine(tmp_path)
    plan = ("--warmup", "1", "--steps", "3", "--profiled-steps", "1", "--no-memory")
    terminal = Terminal(command, "inspect", "--watch", *plan, str(script))
    terminal.read_until("q Enter: close this view")
    terminal.read_until("name? ")
    terminal.enter("Ada")
    terminal.read_until("hello Ada")
    terminal.read_until("(median")
    assert re.search(r"step    [\d.]+ .s \(median", terminal.output)
    assert "\x1b[1;23r" in terminal.output
    assert not threads_that_take(signal.SIGINT, terminal.pid)
    terminal.enter("q")
    terminal.read_until("\x1b[r")
    seen = len(terminal.output)
    terminal.interrupt()
    assert terminal.wait() == 7
    after = terminal.output[seen:]
    assert "closed by its own decision" in after
    assert "q Enter" not in after
    assert "A step takes" in terminal.output
    assert (command.out / "train.html").exists()
