"""Live view of an observed script (`inspect --watch`): the last rows of a terminal, or plain lines.

The script writes to the terminal itself, in a scroll region above the view, so its output stays as
it is and nothing is read or changed on the way. The view reads files that the script's process
writes, and the keyboard only when nobody else does.
"""

from __future__ import annotations

import array
import fcntl
import os
import statistics
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from stepscope.advisor.inspect.progress import LiveSteps, read_live
from stepscope.analysis.verdict import RELIABLE, Verdict
from stepscope.cli.messages import log
from stepscope.errors import in_one_line
from stepscope.report.answer import gain_text
from stepscope.report.format import bytes_, count, duration, percent
from stepscope.report.verdict import bar_text, legend_lines

ROWS = 7
_LEAST_ROWS, _LEAST_COLUMNS = 20, 50
_MAX_COLUMNS = 100
_DRAW_EVERY_S = 0.5
_FIRST_LINE_S, _LINE_EVERY_S = 2.0, 10.0
_UNREAD_S = 0.4
"""A line that the script has not read after this time was not meant for it."""
_LEVELS = "▁▂▃▄▅▆▇█"
_FAR = 4.0
"""Steps that take longer than this many medians are drawn at full height."""
_SAVE, _RESTORE = "\x1b7", "\x1b8"


class LiveView:
    """Shows the latest steps. Call `update` several times a second, and `close` at the end."""

    def __init__(self, name: str, folder: Path, process: int) -> None:
        self.verdict: Verdict | None = None
        """The verdict, once the recording is analyzed."""
        self.limited_by = ""
        """What limits the step, once it is known."""
        self._name, self._folder = name, folder
        self._process = process
        self._started = self._drawn = time.monotonic()

    def update(self) -> None:
        """Draw if it is time. An error closes the view and never reaches the script."""
        try:
            self._update(time.monotonic())
        except Exception:
            self.close()
            self.update = _nothing  # type: ignore[method-assign]

    def close(self) -> None:
        raise NotImplementedError

    def _update(self, now: float) -> None:
        raise NotImplementedError

    def _lines(self, live: LiveSteps, width: int) -> list[str]:
        elapsed = time.monotonic() - self._started
        memory = resident_bytes(self._process)
        return view_lines(self._name, live, self.verdict, self.limited_by, memory, elapsed, width)


class PlainView(LiveView):
    """One line on standard error every few seconds."""

    _printed = 0

    def close(self) -> None:
        """Print the last state, unless it has been printed."""
        with suppress(Exception):
            self._print()

    def _update(self, now: float) -> None:
        wait = _LINE_EVERY_S if self._printed else _FIRST_LINE_S
        if now - self._drawn >= wait and self._print():
            self._drawn = now

    def _print(self) -> bool:
        live = read_live(self._folder)
        if not live.step_ms or live.steps == self._printed:
            return False
        self._printed = live.steps
        facts = [f"step {count(live.steps)}", f"{duration(statistics.median(live.step_ms))} a step"]
        facts += status_facts(live, self.limited_by, resident_bytes(self._process))
        if advice := best_advice(self.verdict):
            facts.append(advice)
        log(", ".join(facts))
        return True


class TerminalView(LiveView):
    """The last rows of the terminal. `q` and Enter close it; Ctrl-C reaches the script alone."""

    def __init__(self, name: str, folder: Path, process: int) -> None:
        super().__init__(name, folder, process)
        self._size: os.terminal_size | None = None
        self._closed = False
        self._unread_since: float | None = None

    def close(self) -> None:
        if self._size is not None and not self._closed:
            top = self._size.lines - ROWS + 1
            self._write(f"{_SAVE}\x1b[r\x1b[{top};1H\x1b[J{_RESTORE}")
        self._closed = True

    def _update(self, now: float) -> None:
        if self._closed or now - self._drawn < _DRAW_EVERY_S:
            return
        self._drawn = now
        if self._quit_requested(now):
            self.close()
            return
        size = os.get_terminal_size(sys.stderr.fileno())
        if not _fits(size):
            self.close()
            return
        # Scroll the script's output up once, to make room below it.
        room = "\n" * ROWS + f"\x1b[{ROWS}A" if self._size is None else ""
        self._size = size
        top = size.lines - ROWS + 1
        lines = self._lines(read_live(self._folder), min(size.columns - 1, _MAX_COLUMNS))
        drawn = "".join(f"\x1b[{top + row};1H\x1b[2K{line}" for row, line in enumerate(lines))
        # Setting the region moves the cursor, hence between save and restore.
        self._write(f"{room}{_SAVE}\x1b[1;{top - 1}r\x1b[{top};1H\x1b[J{drawn}{_RESTORE}")

    def _quit_requested(self, now: float) -> bool:
        """Return True if `q` was entered. The terminal stays in its mode, and a line is read only
        if it has been waiting: a script that reads the keyboard takes its lines at once."""
        if not _keyboard_is_ours() or not _waiting_bytes():
            self._unread_since = None
            return False
        if self._unread_since is None:
            self._unread_since = now
        if now - self._unread_since < _UNREAD_S:
            return False
        self._unread_since = None
        return os.read(0, 1024).strip().lower() == b"q"

    def _write(self, text: str) -> None:
        """Write in one call, so that it does not mix with the output of the script."""
        sys.stderr.flush()
        os.write(sys.stderr.fileno(), text.encode(errors="replace"))


def live_view(name: str, folder: Path, process: int) -> LiveView:
    """Return a view in the terminal, or plain lines where there is no terminal of sufficient
    size."""
    stderr = sys.stderr
    if stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        with suppress(OSError):
            if _fits(os.get_terminal_size(stderr.fileno())):
                return TerminalView(name, folder, process)
    return PlainView(name, folder, process)


def view_lines(
    name: str,
    live: LiveSteps,
    verdict: Verdict | None,
    limited_by: str,
    memory_bytes: int | None,
    elapsed_s: float,
    width: int,
) -> list[str]:
    """The rows of the view: title, steps, breakdown with its legend, status, advice."""
    minutes, seconds = divmod(int(elapsed_s), 60)
    title = f"stepscope: {in_one_line(name)}, step {count(live.steps)}, {minutes}:{seconds:02}"
    hint = "q Enter: close this view"
    rule = "─" * max(1, width - len(title) - len(hint) - 4)
    lines = [f"{title} {rule} {hint}"]
    if not live.step_ms:
        return [*lines, "waiting for the first steps"]
    median = statistics.median(live.step_ms)
    text = f"{duration(live.step_ms[-1])} (median {duration(median)})"
    lines.append(f"step    {text:<30} {sparkline(live.step_ms, max(1, width - 40))}")
    if verdict is not None and verdict.parts:
        lines.append(f"time    {bar_text(verdict, width - 8)}")
        lines += [f"        {line}" for line in legend_lines(verdict, width - 8)[:2]]
    else:
        doing = f"recording, {live.stage} step" if live.stage else "analyzing the recording"
        lines.append(f"time    {doing}")
    lines.append("        " + ", ".join(status_facts(live, limited_by, memory_bytes)))
    if advice := best_advice(verdict):
        lines.append(f"advice  {advice}")
    elif verdict is not None and verdict.trust not in RELIABLE:
        lines.append(f"advice  none: {verdict.trust_reason}")
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines[:ROWS]]


def status_facts(live: LiveSteps, limited_by: str, resident: int | None) -> list[str]:
    """Memory, waits for the loader, and what limits the step."""
    facts = []
    if live.memory_bytes is not None:
        peak = bytes_(live.peak_bytes or 0)
        facts.append(f"GPU memory {bytes_(live.memory_bytes)} (peak {peak})")
    elif resident is not None:
        facts.append(f"memory {bytes_(resident)}")
    facts.append(f"loader wait {percent(live.loading)}")
    return [*facts, *([limited_by] if limited_by else [])]


def best_advice(verdict: Verdict | None) -> str:
    """The first ranked change with its gain; empty without one."""
    if verdict is None or not verdict.changes:
        return ""
    best = verdict.changes[0]
    return in_one_line(f"{best.title}: {gain_text(best)}")


def sparkline(values: Sequence[float], width: int) -> str:
    """The latest values as bars from zero, at most `width` of them."""
    shown = values[-width:]
    top = min(max(shown), _FAR * statistics.median(shown)) or 1.0
    last = len(_LEVELS) - 1
    return "".join(_LEVELS[min(last, int(last * value / top + 0.5))] for value in shown)


def resident_bytes(process: int) -> int | None:
    """Memory of the script's process; None once it has ended."""
    try:
        return int(psutil.Process(process).memory_info().rss)
    except psutil.Error:
        return None


def _fits(size: os.terminal_size) -> bool:
    return size.lines >= _LEAST_ROWS and size.columns >= _LEAST_COLUMNS


def _keyboard_is_ours() -> bool:
    """True if this process may read the terminal: reading in the background would stop it."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _waiting_bytes() -> int:
    """Number of entered bytes that nobody has read."""
    size = array.array("i", [0])
    fcntl.ioctl(0, termios.FIONREAD, size)
    return size[0]


def _nothing() -> None:
    return
