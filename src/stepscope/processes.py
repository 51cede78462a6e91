"""Commands of the Python processes that Stepscope starts.

`python -m` and `python -c` put the current folder first on `sys.path`: a file such as
`./multiprocessing.py` would be imported instead of the module of that name. Processes of Stepscope
start with `-P`, which leaves the folder out; `multiprocessing` passes it on to their children. A
user's script gets its folder on the path once Stepscope's modules are loaded.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

_OF_TORCHRUN = (
    *("TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_"),
)
"""Beginnings of the variables with which torchrun tells a process which rank it is."""
_SCRIPT_START = Path(__file__).parent / "advisor" / "scope" / "start.py"


def own_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module of Stepscope."""
    return [sys.executable, "-P", "-m", module, *words]


def script_command(folder: str, order: str, *flags: str, ranks: int = 0) -> list[str]:
    """Return the command that runs a user's script under observation: see `advisor.scope.start`.
    `flags` are options of the interpreter; torchrun starts `ranks`, if any, on this machine."""
    start = (*flags, str(_SCRIPT_START), folder, order)
    return torchrun_command(ranks, *start) if ranks else [sys.executable, *start]


def torchrun_command(ranks: int, *words: str) -> list[str]:
    """Return the command that starts Python with these words as ranks on this machine."""
    torchrun = ("-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return [sys.executable, *torchrun, "--no-python", "--", sys.executable, "-u", *words]


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """Return the variables of each rank of a job on this machine, as torchrun sets them; of a
    program that is not started as a rank, none."""
    if ranks < 2:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"stepscope-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    own = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    return [world | dict.fromkeys(own, str(rank)) for rank in range(ranks)]


def leave_job() -> None:
    """Remove the variables of torchrun from this process: what it starts is no rank of that job."""
    for name in [one for one in os.environ if one.startswith(_OF_TORCHRUN)]:
        del os.environ[name]


def signal_name(number: int) -> str:
    """Return the name of a signal, also of a real-time signal, which has none in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
