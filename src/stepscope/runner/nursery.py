"""A process that has torch loaded and forks workers, so that a worker starts in 0.1 s.

Importing torch and what an optimizer's constructor imports takes seconds, which a study with a
process per case would pay every time. The nursery imports them once, runs nothing and never
touches a device, so a forked worker is as fresh as a new process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from stepscope.processes import own_command
from stepscope.runner.descendants import WORKER, new_tag, tagged
from stepscope.studies.registry import viewables

_MESSAGE = struct.Struct("qq")
"""A request: its number, and a worker to wait for, or 0 for a new one. The reply: the number of
the request, and the new worker's process id or the exit code."""
_NEW = 0
_PATIENCE_S = 180.0
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
_LOADED = (
    "torch._dynamo",
    "torch.profiler",
    "stepscope.measure.environment",
    "stepscope.measure.timer",
    "stepscope.model.transformer",
    "stepscope.training.parts",
    "stepscope.runner.worker",
)
"""Imports of every worker; none of them opens a device or starts a thread."""


def can_fork() -> bool:
    """True on Linux unless STEPSCOPE_FORK=no; elsewhere system libraries do not survive a fork."""
    return sys.platform == "linux" and os.environ.get("STEPSCOPE_FORK") != "no"


def may_have_gpu(device: str) -> bool:
    """False if a CPU was asked for, or if the machine has no driver of a GPU."""
    return device != "cpu" and any(Path(driver).exists() for driver in _GPU_DRIVERS)


class Nursery:
    """The runner's handle of the nursery process."""

    def __init__(self, device: str) -> None:
        self.mark = new_tag()
        self._line, theirs = socket.socketpair()
        self._line.settimeout(_PATIENCE_S)
        with theirs:
            self._process = subprocess.Popen(
                own_command("stepscope.runner.nursery", device, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=tagged(self.mark) | {WORKER: self.mark},
            )
        self._asked = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, files: Sequence[int]) -> Forked:
        """Start a worker with these as standard input, output and error; OSError on failure."""
        child = self.ask(_NEW, files)
        if child <= 1:
            # A signal to 0, 1 or a negative number would reach processes other than the worker.
            raise ConnectionError(f"the nursery answered with process {child}")
        return Forked(self, child)

    def ask(self, what: int, files: Sequence[int] = ()) -> int:
        self._asked += 1
        socket.send_fds(self._line, [_MESSAGE.pack(self._asked, what)], files)
        while True:
            answer = self._line.recv(_MESSAGE.size, socket.MSG_WAITALL)
            if len(answer) < _MESSAGE.size:
                raise ConnectionError("the nursery process of the workers has ended")
            # An interrupt may have left the reply to an earlier request unread.
            number, value = _MESSAGE.unpack(answer)
            if number == self._asked:
                return int(value)

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait()


class Forked:
    """A worker forked by the nursery; the counterpart of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self._code: int | None = None
        self.pid = pid

    def wait(self) -> int:
        if self._code is None:
            try:
                self._code = self._nursery.ask(self.pid)
            except OSError:
                self._code = 1
        return self._code


def main(device: str, line: socket.socket) -> None:
    _load()
    while True:
        message, files, _, _ = socket.recv_fds(line, _MESSAGE.size, 3)
        if len(message) < _MESSAGE.size:
            return
        number, what = _MESSAGE.unpack(message)
        if what == _NEW:
            answer = _fork(device, line, files)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(what, 0)[1])
        line.sendall(_MESSAGE.pack(number, answer))


def _load() -> None:
    for name in _LOADED:
        importlib.import_module(name)
    viewables()
    # Collections in a worker skip these objects and do not copy their pages.
    gc.collect()
    gc.freeze()


def _fork(device: str, line: socket.socket, files: Sequence[int]) -> int:
    child = os.fork()
    if child:
        for file in files:
            os.close(file)
        return child
    try:
        os.setsid()
        line.close()
        for descriptor, file in enumerate(files):
            os.dup2(file, descriptor)
            os.close(file)
        from stepscope.runner.worker import main as work

        work(device)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    # Libraries have threads that a fork does not need.
    warnings.simplefilter("ignore", DeprecationWarning)
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
