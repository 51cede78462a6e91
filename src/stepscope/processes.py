"""Commands of the Python processes that Stepscope starts.

`python -m` and `python -c` put the current folder first on `sys.path`: a file such as
`./multiprocessing.py` would be imported instead of the module of that name. Processes of Stepscope
start with `-P`, which leaves the folder out; `multiprocessing` passes it on to their children. A
user's script gets its folder on the path once Stepscope's modules are loaded.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

_SCRIPT_START = Path(__file__).parent / "advisor" / "scope" / "start.py"


def own_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module of Stepscope."""
    return [sys.executable, "-P", "-m", module, *words]


def script_command(folder: str, order: str, *flags: str, ranks: int = 0) -> list[str]:
    """Return the command that runs a user's script under observation: see `advisor.scope.start`.
    `flags` are options of the interpreter; torchrun starts `ranks`, if any, on this machine."""
    torchrun = ("-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return [sys.executable, *flags, *(torchrun if ranks else ()), str(_SCRIPT_START), folder, order]


def signal_name(number: int) -> str:
    """Return the name of a signal, also of a real-time signal, which has none in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
