"""Runs a script once to record some of its steps, with its output out of the way."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from stepscope.advisor.inspect.child import describe_end
from stepscope.advisor.inspect.gather import gather, parts
from stepscope.advisor.inspect.order import Order
from stepscope.advisor.inspect.progress import CHILD_STEPPED, read_progress, why_nothing
from stepscope.errors import StepscopeError
from stepscope.records.schema import Record
from stepscope.studies.program.rows import Watched
from stepscope.studies.runner.descendants import end_tagged, new_tag, tagged

_LAST_LINES = 3
_MEND = "let it make more"


def record_script(order: Order) -> Record:
    """The record of its steps, timed and traced; an error says why there is none, with the end of
    what a script said that failed."""
    with tempfile.TemporaryDirectory(prefix="stepscope-advise-") as name, \
            tempfile.TemporaryFile() as log:  # fmt: skip
        folder = Path(name)
        command = [sys.executable, "-m", "stepscope.advisor.scope.launch", name,
                   msgspec.json.encode(order).decode()]  # fmt: skip
        mark = new_tag()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=tagged(mark)
        )
        try:
            _, status, _ = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            child.kill()
            child.wait()
            end_tagged(mark)
            raise
        ending = describe_end(status)
        if parts(folder):
            record = gather(folder, ending)[0]
            missing = Watched(record).missing
            if not missing:
                return record
            why = f"{order.name} gives no advice: {missing}"
        else:
            stepped = (folder / CHILD_STEPPED).exists()
            why = why_nothing(read_progress(folder), order.name, ending, stepped, _MEND)
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        raise StepscopeError(" | ".join((why, *(said if status else ()))))
