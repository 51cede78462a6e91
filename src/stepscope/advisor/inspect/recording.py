"""Run a script once to record a few of its steps, with its output captured."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import IO

import msgspec

from stepscope.advisor.advise.interleaved import ScriptOutOfMemoryError
from stepscope.advisor.inspect.child import describe_end
from stepscope.advisor.inspect.gather import gather, parts
from stepscope.advisor.inspect.order import Order
from stepscope.advisor.inspect.progress import CHILD_STEPPED, read_progress, why_nothing
from stepscope.advisor.scope.once_imported import FAILED
from stepscope.errors import StepscopeError
from stepscope.processes import script_command
from stepscope.records.schema import Record
from stepscope.runner.descendants import end_tagged, new_tag, tagged
from stepscope.views.program.rows import ProgramRecord

_LAST_LINES = 3
_FIX = "let it run more steps"


def run_observed(order: Order, folder: Path, log: IO[bytes]) -> int:
    """Run the script until it ends, with its output in `log`; return its wait status."""
    ranks = order.ranks if order.ranks > 1 else 0
    command = script_command(str(folder), msgspec.json.encode(order).decode(), ranks=ranks)
    tag = new_tag()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=tagged(tag)
    )
    try:
        _, status, _ = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    except BaseException:
        child.kill()
        child.wait()
        end_tagged(tag)
        raise
    return status


def run_observer(order: Order, folder: Path) -> tuple[int, str]:
    """Run the script under an observer that writes to the folder; return its wait status and how it
    ended: the reason why the observer failed, or the last lines of the output."""
    with tempfile.TemporaryFile() as output:
        status = run_observed(order, folder, output)
        lines = _last_lines(output)
    failed = folder / FAILED
    why = [failed.read_text()] if failed.exists() else lines
    return status, " | ".join((f"{order.target} {describe_end(status)}", *why))


def _last_lines(output: IO[bytes]) -> list[str]:
    output.seek(0)
    return output.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]


def record_script(order: Order) -> list[Record]:
    """Run the script and return the records of its timed and traced steps, one of each rank. If
    there is none of the first rank, raise an error with the reason and, if the script failed, the
    last lines of its output."""
    with (
        tempfile.TemporaryDirectory(prefix="stepscope-advise-") as name,
        tempfile.TemporaryFile() as log,
    ):
        folder = Path(name)
        status = run_observed(order, folder, log)
        if parts(folder):
            records = gather(folder, describe_end(status), order.command)
            missing = ProgramRecord(records[0]).missing
            if not missing:
                return records
            why = f"no advice for {order.name}: {missing}"
        else:
            stepped = (folder / CHILD_STEPPED).exists()
            progress = read_progress(folder)
            why = why_nothing(progress, order.name, status, stepped, _FIX)
            if progress.out_of_memory:
                raise ScriptOutOfMemoryError(why)
        raise StepscopeError(" | ".join((why, *(_last_lines(log) if status else ()))))
