"""The command line: which commands there are, and how failures leave the program.

Only the chosen command's module is loaded, and none of them imports torch: help is instant.
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
from stepscope.cli.messages import log
from stepscope.errors import StepscopeError, in_one_line, unknown_name

COMMANDS = {
    "run": "measure: a preset, or one study with your own cases; then write the report",
    "inspect": "run your own training script and show where its step's time and memory go",
    "advise": "changes worth making, with predicted gains; --verify proves them here",
    "report": "write the HTML and Markdown page of a run or of a record file",
    "show": "print the findings and tables of a run, or one record, in the terminal",
    "export": "write records as JSON Lines, or tables as Markdown, LaTeX or CSV",
    "import": "add the records of a JSON Lines file to the store",
    "compare": "hold two runs or two records against each other; a gate for CI",
    "predict": "the memory that a training step will need, by phase and line; needs no GPU",
    "rehearse": "a recorded step on a cluster: step time, exposed communication, best bucket size",
    "snapshot": "what held the memory at the peak, from a snapshot of CUDA's allocator",
    "trace": "where the time goes in a trace of torch.profiler or Nsight Systems",
    "profile-nsys": "record a training step with Nsight Systems and read the recording",
    "list": "studies, presets, sizes, and the runs that are stored",
    "doctor": "what this machine has, what is missing, and how to get it",
}

EXIT_CODES = """\
exit codes:
  0    done
  1    something failed; one line on standard error says what and how to mend it
  2    the command line is not understood, or names a file that is not there
  3    `compare --fail-above` found a slowdown
  4    `compare --fail-above` cannot tell: too few samples, or a busy machine
  130  interrupted; what was measured is kept"""

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
        # Of one that left an `exec` of a string (a dataclass is made by one) Python remembers that
        # nobody caught it there, and `python -m` would end by the signal. This makes it forget.
        exec("")
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        log(in_one_line(error))
        return StepscopeError.exit_code


def _prepare_process() -> None:
    """A polite kill is an interrupt: what is done is kept, workers end, and the way on is said."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        # A path may hold bytes that no encoding has.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Keep the interpreter from failing at its exit over what could not be written."""
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

Where a Transformer training step's time and memory go, and how far that is from the limit.

commands:
{listed}

examples:
  stepscope run
  stepscope run benchmark --size small medium --context 128 512 --dtype float32 bfloat16
  stepscope run --preset seeds --resume
  stepscope compare latest~1 latest --fail-above 3%

`stepscope COMMAND --help` has the options of a command.

{EXIT_CODES}"""
