"""Run a script as Python itself would, with an observer attached.

    python -m stepscope.advisor.scope.launch FOLDER ORDER

ORDER is a JSON object; see `Order`. The script sees its own arguments, its directory on `sys.path`
and its own `__main__`; an exception, `sys.exit` or Ctrl-C ends the process as it normally would.
"""

from __future__ import annotations

import builtins
import runpy
import signal
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from stepscope.advisor.inspect.order import Order
from stepscope.advisor.scope.stages import Effort
from stepscope.advisor.scope.watching import Watcher
from stepscope.advisor.trial.process import InterleavedRun
from stepscope.records.decoding import from_json


def main(folder: str, text: str) -> None:
    order = from_json(text, Order)
    watcher = _watcher(order, Path(folder))
    watcher.start()
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
        # A second Ctrl-C must not interrupt the writing of the recording.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        watcher.finish()


def _watcher(order: Order, folder: Path) -> Watcher | InterleavedRun:
    if order.channel is not None:
        return InterleavedRun(order.channel, order.settings, order.warmup)
    effort = Effort(
        warmup=order.warmup, timed=order.timed, traced=order.traced, memory=order.memory
    )
    return Watcher(folder, effort, order.name, list(order.words), stop=order.stop, live=order.live)


def _run_script(order: Order) -> None:
    # As for Python itself: absolute, so that it stays valid after os.chdir.
    path = Path.cwd() / order.target
    main_module = ModuleType("__main__")
    main_module.__dict__.update(
        __file__=str(path),
        __loader__=SourceFileLoader("__main__", str(path)),
        __builtins__=builtins,
        __cached__=None,
        __doc__=None,
    )
    sys.modules["__main__"] = main_module
    sys.argv = [order.target, *order.words]
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def _run_module(order: Order) -> None:
    sys.argv = [order.target, *order.words]
    runpy.run_module(order.target, run_name="__main__", alter_sys=True)


def _show(error: BaseException) -> None:
    """Print the traceback without Stepscope's frames, and keep Python from printing it again."""
    trace = error.__traceback__
    while trace is not None and _is_launcher_frame(trace):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.excepthook = _ignore


def _is_launcher_frame(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file == __file__ or file.startswith("<frozen runpy") or file == runpy.__file__


def _ignore(*_: Any) -> None:
    return


if __name__ == "__main__":
    main(*sys.argv[1:3])
