"""Run a script as Python itself would, with an observer attached.

`start` calls `main` in a process of its own. ORDER is a JSON object; see `Order`. The script sees
its own arguments, its directory on `sys.path` and its own `__main__`; an exception, `sys.exit` or
Ctrl-C ends the process as it normally would.
"""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol

from stepscope.advisor.inspect.order import Order
from stepscope.advisor.observer.script import ObservedScript
from stepscope.advisor.scope.once_imported import OnceImported
from stepscope.advisor.scope.overlay import source_of, use_overlay
from stepscope.advisor.scope.stages import Effort
from stepscope.advisor.scope.watching import Watcher
from stepscope.advisor.trial.process import InterleavedRun
from stepscope.records.decoding import from_json

_START = str(Path(__file__).with_name("start.py"))
_OBSERVERS = Path(__file__).parents[1]


def main(folder: str, text: str) -> None:
    order = from_json(text, Order)
    watcher = _watcher(order, Path(folder))
    if order.overlay:
        use_overlay(Path(order.overlay))
    watcher.start()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
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


class Observer(Protocol):
    """Observer of the script's process."""

    def start(self) -> None: ...

    def finish(self) -> None: ...


def _watcher(order: Order, folder: Path) -> Observer:
    if order.observe == "always":
        return ObservedScript(
            folder, every=order.every, trace=order.traced > 0, prometheus=order.prometheus
        )
    if order.observe != "steps":
        return OnceImported(order, _of_rank(folder))
    if order.channel is not None:
        return InterleavedRun(order.channel, order.settings, order.warmup, order.optimizers)
    effort = Effort(
        warmup=order.warmup,
        timed=order.timed,
        traced=order.traced,
        memory=order.memory,
        # All ranks time and trace the same steps.
        within_s=0.0 if "RANK" in os.environ else order.within_s,
    )
    return Watcher(
        folder,
        effort,
        order.name,
        list(order.words),
        stop=order.stop,
        plans=order.plans,
    )


def _of_rank(folder: Path) -> Path:
    """A folder for what each rank observes: that of the first one is the folder itself."""
    if (rank := os.environ.get("RANK", "0")) == "0":
        return folder
    folder = folder / f"rank-{rank}"
    folder.mkdir()
    return folder


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
    _put_on_path(path.resolve().parent)
    code = compile(source_of(path), str(path), "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def _put_on_path(folder: Path) -> None:
    """Put the folder first on the path, as Python does, unless its -P was given."""
    if not sys.flags.safe_path:
        sys.path.insert(0, str(folder))


def _run_module(order: Order) -> None:
    _put_on_path(Path.cwd())
    sys.argv = [order.target, *order.words]
    runpy.run_module(order.target, run_name="__main__", alter_sys=True)


def _show(error: BaseException) -> None:
    """Print the traceback without Stepscope's frames, and keep Python from printing it again."""
    seen: list[BaseException] = []
    chain: BaseException | None = error
    while chain is not None and not any(chain is one for one in seen):
        seen.append(chain)
        chain.__traceback__ = _of_user(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook = _ignore


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that observe the script, wherever they are: an interrupt
    often falls into a hook."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept = None
    for one in reversed(frames):
        if not _is_observer(one.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def _is_observer(file: str) -> bool:
    return (
        file in (_START, runpy.__file__)
        or file.startswith("<frozen runpy")
        or Path(file).is_relative_to(_OBSERVERS)
    )


def _ignore(*_: Any) -> None:
    return
