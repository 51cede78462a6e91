"""Runs a script as Python itself would, with a watcher beside it.

    python -m stepscope.advisor.scope.launch FOLDER ORDER

ORDER is a JSON object; see `Order`. The script sees its own words, its folder on the path and its
own `__main__`; an exception, `sys.exit` or Ctrl-C ends the process as it would without us.
"""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from stepscope.advisor.inspect.order import Order
from stepscope.advisor.scope.stages import Effort
from stepscope.advisor.scope.watching import Watcher
from stepscope.advisor.trial.process import Contender
from stepscope.records.decoding import from_json

_QUIET = "KINETO_LOG_LEVEL"


def main(folder: str, text: str) -> None:
    order = from_json(text, Order)
    watcher = _watcher(order, Path(folder))
    watcher.start()
    # The profiler's library writes lines of its own to standard error, which is the script's.
    silenced = os.environ.setdefault(_QUIET, "6") == "6"
    try:
        if order.module:
            _run_module(order)
        else:
            _run_script(order)
    except SystemExit:
        raise
    except BaseException as error:
        _show(error)
        raise
    finally:
        # A second Ctrl-C must not cut off what is being written.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        watcher.finish()
        if silenced:
            os.environ.pop(_QUIET, None)


def _watcher(order: Order, folder: Path) -> Watcher | Contender:
    if order.channel is not None:
        return Contender(order.channel, order.settings, order.warmup)
    effort = Effort(
        warmup=order.warmup, timed=order.timed, traced=order.traced, memory=order.memory
    )
    return Watcher(folder, effort, order.name, list(order.words), stop=order.stop)


def _run_script(order: Order) -> None:
    path = Path(order.target)
    main_module = ModuleType("__main__")
    main_module.__dict__.update(
        __file__=order.target, __builtins__=builtins, __cached__=None, __doc__=None
    )
    sys.modules["__main__"] = main_module
    sys.argv = [order.target, *order.words]
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    code = compile(path.read_bytes(), order.target, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def _run_module(order: Order) -> None:
    sys.argv = [order.target, *order.words]
    runpy.run_module(order.target, run_name="__main__", alter_sys=True)


def _show(error: BaseException) -> None:
    """The traceback as the script's own, and then silence: Python would show ours once more."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.excepthook = _say_nothing


def _is_ours(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file == __file__ or file.startswith("<frozen runpy") or file == runpy.__file__


def _say_nothing(*_: Any) -> None:
    return


if __name__ == "__main__":
    main(*sys.argv[1:3])
