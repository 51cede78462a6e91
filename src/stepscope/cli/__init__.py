"""Entry point of the command line: list of commands, dispatch, and exit codes.

Only the module of the chosen command is imported, and no command imports torch at start-up, so
`--help` is instant.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import stepscope
from stepscope.cli.encoding import use_locale
from stepscope.cli.messages import log
from stepscope.errors import StepscopeError, in_one_line, unknown_name

COMMANDS = {
    "run": "measure a preset or one study, then write the report",
    "inspect": "run your script; show where its step's time and memory go",
    "observe": "run your script; watch all its steps, on every rank",
    "advise": "list changes with predicted gains; --verify measures them",
    "check": "grade your own attention, RMSNorm, DDP, FSDP, ShardedOptimizer",
    "judge": "decide if a changed script is faster at the same training",
    "report": "write the HTML and Markdown report of a run or record file",
    "show": "print the findings and tables of a run, or one record",
    "export": "write records as JSON Lines, or tables as Markdown, LaTeX or CSV",
    "import": "add the records of a JSON Lines file to the store",
    "compare": "compare two runs or two records; usable as a CI gate",
    "predict": "predict the peak memory of a training step; needs no GPU",
    "fit": "plan the memory of your script's step within a budget",
    "calc": "calculate communication and memory of parallel training",
    "cs336": "answer the CS336 systems assignment on this machine",
    "rehearse": "predict the time of a recorded step on a cluster",
    "snapshot": "show what a CUDA memory snapshot contains at its peak",
    "trace": "show where the time goes in a profiler trace",
    "profile-nsys": "profile a training step with Nsight Systems",
    "list": "list studies, presets, model sizes, dtypes, attentions, runs",
    "doctor": "check what is installed and how to install what is missing",
}

EXIT_CODES = """\
exit codes:
  0    success
  1    a failure; one line on standard error says what failed and how to fix it
  2    invalid command line, or a file that does not exist
  3    `compare --fail-above` found a slowdown; `judge` refused the change
  4    these two cannot tell: too few samples, or a busy machine
  130  interrupted; finished measurements are saved"""

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _prepare_process()
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except StepscopeError as error:
        log(in_one_line(error))
        return error.exit_code
    except KeyboardInterrupt:
        log("interrupted")
        # dataclasses run `exec` on a string. If the interrupt propagated out of such an `exec`,
        # CPython marks it as unhandled and `python -m` would die by the signal; a new `exec` clears
        # the mark.
        exec("")
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe, for example `| head`.
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        log(in_one_line(error))
        return StepscopeError.exit_code


def _prepare_process() -> None:
    """Treat SIGTERM as an interrupt: finished work is saved, workers end, and the command that
    resumes the run is printed."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        use_locale(stream)
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def _open_standard_streams() -> None:
    """Open the null device in place of standard streams that the caller has closed (`>&-`): a file
    that is opened later would get their numbers, and the output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number.
            os.open(os.devnull, os.O_RDWR)
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _drop_output() -> None:
    """Discard unwritten output, so that the interpreter does not fail while flushing at exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"stepscope {stepscope.__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    # `import` is a keyword, so its module is `import_`.
    file = {"import": "import_"}.get(name, name.replace("-", "_"))
    module = importlib.import_module(f"stepscope.cli.commands.{file}")
    return int(module.main(rest))


def _help() -> str:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"""\
usage: stepscope COMMAND [options]

Shows where a training step's time and memory go, how far that is from the
hardware's limit, and which change is worth making.

commands:
{listed}

examples:
  stepscope inspect train.py --batch-size 8
  stepscope advise --verify train.py --batch-size 8
  stepscope run
  stepscope run benchmark --size small medium --dtype float32 bfloat16
  stepscope run --preset seeds --resume
  stepscope compare latest~1 latest --fail-above 3%

Run `stepscope COMMAND --help` for the options of a command.

{EXIT_CODES}"""
