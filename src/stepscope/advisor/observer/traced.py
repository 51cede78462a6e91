"""Traces of a few steps after a deviation, taken on all ranks at once, and their verdict.

The first rank requests them in a file, for a step that is far enough ahead for the others to have
read it. Its thread then has another process analyze the traces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from stepscope.advisor.scope.tracing import StepTrace
from stepscope.analysis.observed.lines import Traced
from stepscope.files import replace_file
from stepscope.measure.device import Device
from stepscope.processes import own_command
from stepscope.records.decoding import from_json

STEPS = 3
MOST = 3
"""Traces of a job: each is tens of megabytes for a large model."""
_PAUSE_STEPS = 1000
"""Steps between two requests."""
_MAX_RANKS = 16
_AHEAD_S, _AHEAD_ALONE_S = 2.0, 0.2
"""Time in which all ranks have read a request."""
_WITHIN_S = 120.0
REQUEST = "trace-request.json"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Steps to trace, and the ranks that do."""

    step: int
    """The profiler is prepared in the step after it; those that follow are traced."""
    ranks: tuple[int, ...]

    def folder(self, parent: Path) -> Path:
        return parent / f"traces-{self.step}"


def read_request(folder: Path) -> Request | None:
    try:
        return from_json((folder / REQUEST).read_bytes(), Request)
    except (OSError, msgspec.DecodeError):
        return None


class Requests:
    """Requests traces, and waits for their verdict; on the first rank, in the writer's thread."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks
        # That of an earlier job.
        (folder / REQUEST).unlink(missing_ok=True)
        self._requested = 0
        self._next = 0
        self._open: Request | None = None
        self._since = 0.0
        self._analysis: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes]

    def ask(self, step: int, rank: int, step_ms: float, every: int) -> None:
        """Request traces because of a deviation at `rank`."""
        if self._open is not None or self._requested >= MOST or step < self._next:
            return
        ahead_s, least = (_AHEAD_S, 2 * every) if self._ranks > 1 else (_AHEAD_ALONE_S, 2)
        ahead = max(least, int(1e3 * ahead_s / max(step_ms, 1e-3)) + 1)
        near = range(max(0, rank - 1), min(self._ranks, rank + 2))
        few = self._ranks <= _MAX_RANKS
        ranks = range(self._ranks) if few else sorted({0, *near})
        request = Request(step=step + ahead, ranks=tuple(ranks))
        shutil.rmtree(request.folder(self._folder), ignore_errors=True)
        request.folder(self._folder).mkdir(parents=True)
        replace_file(self._folder / REQUEST, [msgspec.json.encode(request)])
        self._open, self._since = request, time.monotonic()
        self._requested += 1
        self._next = request.step + _PAUSE_STEPS

    def result(self, *, ending: bool = False) -> Traced | None:
        """Return the verdict once it is there; at the end of the job, wait for one that is on the
        way."""
        request = self._open
        if request is None:
            return None
        folder = request.folder(self._folder)
        if self._analysis is None:
            written = len(list(folder.glob("rank-*.trace.json.gz")))
            late = ending or time.monotonic() - self._since > _WITHIN_S
            if written < len(request.ranks) and not late:
                return None
            if not written:
                return None if ending else self._ended(request, "no rank wrote a trace")
            self._printed = tempfile.TemporaryFile()  # noqa: SIM115, closed once it is read
            self._analysis = subprocess.Popen(
                own_command("stepscope", "trace", str(folder), "--json", "--out", str(folder)),
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            os.setpriority(os.PRIO_PROCESS, self._analysis.pid, 19)
        try:
            code = self._analysis.wait(_WITHIN_S / 4 if ending else 0)
        except subprocess.TimeoutExpired:
            return None
        self._printed.seek(0)
        with self._printed as printed:
            text = printed.read().decode(errors="replace").strip()
        return self._ended(request, _answer(text, code))

    def _ended(self, request: Request, verdict: str) -> Traced:
        self._open = self._analysis = None
        name = request.folder(self._folder).name
        return Traced(at=time.time(), step=request.step, folder=name, verdict=verdict)


def _answer(text: str, code: int) -> str:
    """The parts of the step, and the rank that the others wait for."""
    try:
        facts = from_json(text) if code == 0 else None
    except msgspec.DecodeError:
        facts = None
    if not isinstance(facts, dict):
        return f"`stepscope trace` ended with exit code {code}: {text.splitlines()[-1:]}"
    verdict: dict[str, Any] = facts["verdict"]
    largest = sorted(verdict["parts"], key=lambda part: -part["ms"])[:3]
    parts = ", ".join(f"{part['label']} {part['ms']:.3g} ms" for part in largest)
    answer = f"a traced step takes {verdict['step_ms']:.4g} ms: {parts}"
    for one in (facts.get("job") or {}).get("stragglers", ())[:1]:
        at = one["collective"]["collective"]
        answer += f"; rank {one['rank']} is {one['late_ms']:.3g} ms late at {at}"
    return answer


class TracedSteps:
    """Traces the requested steps of this rank; called at the end of each step. `write` is given
    the function that writes the trace."""

    def __init__(self, write: Callable[[Callable[[], None]], None]) -> None:
        self._write = write
        self._trace = StepTrace(Path(), self.drop)

    def watching_others(self) -> AbstractContextManager[None]:
        """Context that detects profilers started by the program."""
        return self._trace.watching_others()

    def drop(self) -> None:
        """Stop without a trace."""
        if self._trace.running:
            self._trace.drop()

    def edge(
        self, step: int, first: int, path: Path, device: Device, models: Sequence[torch.nn.Module]
    ) -> None:
        """End a step; `first` is the one in which the profiler starts up."""
        trace = self._trace
        if step == first and not trace.profiler_is_taken:
            trace.drop()
            trace.path = path
            trace.prepare(device, models, models)
        elif trace.running and step > first:
            if step > first + 1:
                trace.end()
            if step <= first + STEPS:
                trace.begin(by_edges=True)
                return
            trace.mark_edge()
            device.synchronize()
            self._write(trace.stopped())
