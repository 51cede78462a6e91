"""`launch` from every kind of program: what works, and the error where it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import fork_server

FAR_TOO_LONG_S = 400.0
MARK = "STEPSCOPE_TEST_PROGRAM"
"""An environment variable that all processes of a program inherit."""
HEAD = """
import dataclasses, functools, os, sys, threading, time, types
import concurrent.futures
import torch
from torch import nn
from stepscope.parallel import Limits, launch
LIMITS = Limits(start=200.0, step=100.0, beat=60.0, total=300.0)

def outcome(function, *arguments):
    try:
        return launch(function, arguments, ranks=1, limits=LIMITS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
DEFINITIONS = """
SCALE = 3

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
    def forward(self, x): return helper((self.weight * x).sum())

@dataclasses.dataclass
class Config:
    width: int = 4

def helper(x): return SCALE * x

def train(world, config):
    model = Model()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        loss = pool.submit(lambda: model(torch.ones(2))).result()
    loss.backward()
    return world.rank, loss.item(), model.weight.grad.tolist(), Config(config.width + world.rank)

class Runner:
    def __init__(self, n): self.n = n
    def run(self, world): return self.n + world.rank

def counting():
    n = 0
    def up():
        nonlocal n
        n += 1
    def run(world):
        up(); up()
        return n
    return run
"""
RUN = """
results = launch(train, (Config(),), ranks=2, limits=LIMITS)
assert results == [(0, 6.0, [3.0, 3.0], Config(4)), (1, 6.0, [3.0, 3.0], Config(5))], results
print("trained")
"""
MORE = """
print(outcome(lambda world: world.size * SCALE))
print(outcome(functools.partial(lambda world, a, *, b: (a, b), b=5), 4))
print(outcome(Runner(7).run))
print(outcome(counting()))
lock = threading.Lock()
def locked(world):
    with lock: return 1
print(outcome(locked))
print(outcome(lambda world, batches: 1, (n for n in range(3))))
print(outcome(lambda world: lock))
"""
EXPECTED = """\
[3]
[(4, 5)]
[7]
[2]
UsageError: the function locked cannot be sent to the ranks: lock: a lock (cannot pickle \
'_thread.lock' object) (create it in the function)
UsageError: argument 0 cannot be sent to the ranks: a generator (cannot pickle 'generator' \
object) (create it in the function)
UsageError: the function <lambda> cannot be sent to the ranks: lock: a lock (cannot pickle \
'_thread.lock' object) (create it in the function)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a program; checks at the end that no process of it remains."""
    mark = str(tmp_path)
    # The path of a socket has at most 107 bytes: that of a test would be too long.
    with tempfile.TemporaryDirectory() as short:
        yield {**os.environ, MARK: mark, "TMPDIR": short}
        until = time.monotonic() + FAR_TOO_LONG_S / 4
        while (left := processes_of(mark)) and time.monotonic() < until:
            time.sleep(0.1)
        for process in left:
            process.kill()
        assert not left


def processes_of(mark: str) -> list[psutil.Process]:
    matches = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                matches.append(process)
        except psutil.Error:
            continue
    return matches


def output(arguments: list[str], program: dict[str, str], text: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        env=program,
        capture_output=True,
        text=True,
        timeout=FAR_TOO_LONG_S,
        cwd=program[MARK],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def failure(path: Path, program: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, str(path)],
        env=program,
        capture_output=True,
        text=True,
        timeout=FAR_TOO_LONG_S,
    )
    assert done.returncode == 1, done.stdout
    return done.stderr


def written(folder: Path, *parts: str, name: str = "program.py") -> Path:
    path = folder / name
    path.write_text("".join(parts))
    return path


def guarded(source: str) -> str:
    return 'if __name__ == "__main__":\n' + textwrap.indent(source, "    ")


NOTEBOOK = """
notebook = types.ModuleType("__main__")
sys.modules["__main__"] = notebook
for cell in (HEAD, DEFINITIONS, RUN):
    exec(compile(cell, "/tmp/ipykernel_1/1.py", "exec"), vars(notebook))
"""


def test_standard_input_exec_and_a_notebook(program: dict[str, str]) -> None:
    sources = f"HEAD, DEFINITIONS, RUN = {HEAD!r}, {DEFINITIONS!r}, {RUN!r}\n"
    in_own_namespace = 'exec(HEAD + DEFINITIONS + RUN, {"__name__": "cell"})\n'
    text = "".join((HEAD, DEFINITIONS, RUN, MORE, sources, in_own_namespace, NOTEBOOK))
    assert output(["-"], program, text) == f"trained\n{EXPECTED}trained\ntrained\n"


MESH = """
import sys
from pathlib import Path
import torch.distributed as dist
from stepscope.parallel import launch

connect = dist.init_process_group
planted, failures = (Path(__file__).with_name(name) for name in ("planted", "failures"))

def refused(*arguments, **how):
    before = len(failures.read_text())
    if before < int(planted.read_text()):
        failures.write_text("x" * (before + 1))
        raise RuntimeError("Gloo connectFullMesh failed with [planted]")
    return connect(*arguments, **how)

dist.init_process_group = refused

def rank(world): return world.rank

if __name__ == "__main__":
    for number in sys.argv[1:]:
        planted.write_text(number)
        failures.write_text("")
        try:
            print(launch(rank, ranks=1))
        except Exception as error:
            print(error)
        print(len(failures.read_text()))
"""


def test_ranks_that_fail_to_connect_are_started_again_twice(program: dict[str, str]) -> None:
    path = written(Path(program[MARK]), MESH)
    after_two, two, after_three, three = output([str(path), "2", "3"], program).splitlines()
    assert (after_two, two, three) == ("[0]", "2", "3")
    assert after_three == (
        "rank 0 raised RuntimeError: Gloo connectFullMesh failed with [planted] before its"
        " first step"
    )


def test_a_command(program: dict[str, str]) -> None:
    assert output(["-c", HEAD + DEFINITIONS + RUN], program) == "trained\n"


IN_A_SCRIPT = """
exec("def added(world): return SCALE")
print(outcome(added))
module = types.ModuleType("made")
sys.modules["made"] = module
exec("def dynamic(world): return 11", vars(module))
print(outcome(module.dynamic))
import plugin
print(outcome(plugin.act))
os.rename("plugin.py", "gone.py")
print(outcome(plugin.act))
def under_the_guard(world): return 12
print(outcome(under_the_guard))
def failing(world): raise ValueError("no such token")
print(outcome(failing))
"""
EXPECTED_IN_A_SCRIPT = """\
[3]
[11]
[13]
UsageError: a rank cannot load the function or its arguments: ModuleNotFoundError: No module named \
'plugin' (define them in a module that a rank can import, or at the top level of the script)
UsageError: a rank cannot load the function or its arguments: AttributeError: \
"""


def test_a_script(program: dict[str, str], tmp_path: Path) -> None:
    written(tmp_path, "def act(world): return 13\n", name="plugin.py")
    path = written(tmp_path, HEAD, DEFINITIONS, guarded(RUN + MORE + IN_A_SCRIPT))
    program[fork_server.COLD] = "1"
    text = output([str(path)], program)
    # Ranks know these from their own import of the script.
    expected = EXPECTED.splitlines()[:4]
    assert text.splitlines()[:5] == ["trained", *expected]
    rest = text.splitlines()[8:]
    assert rest[:4] == EXPECTED_IN_A_SCRIPT.splitlines()[:4]
    assert rest[4].startswith(EXPECTED_IN_A_SCRIPT.splitlines()[4])
    assert "under_the_guard" in rest[4]


def test_a_script_without_a_guard(program: dict[str, str], tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, DEFINITIONS, RUN)
    words = f"UsageError: every rank imports {path}, which calls launch in line"
    last = failure(path, program).splitlines()[-1]
    assert words in last
    assert last.endswith('(call launch under `if __name__ == "__main__":`)')


def test_a_rank_detects_a_missing_guard(program: dict[str, str], tmp_path: Path) -> None:
    """The call is in a branch: only the import shows that a rank reaches it as well."""
    path = written(tmp_path, HEAD, DEFINITIONS, "if SCALE:\n", textwrap.indent(RUN, "    "))
    words = f"stepscope.errors.UsageError: every rank imports {path}, which calls launch again"
    assert words in failure(path, program)


def test_a_script_that_ranks_cannot_import(program: dict[str, str], tmp_path: Path) -> None:
    odd = 'if __name__ != "__main__":\n    raise RuntimeError("only to be run")\n'
    stderr = failure(written(tmp_path, HEAD, odd, DEFINITIONS, guarded(RUN)), program)
    assert "UsageError: a rank cannot import" in stderr
    assert "RuntimeError: only to be run" in stderr


LONG = """
import subprocess
def long(world, folder):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open(f"{folder}/rank-{world.rank}", "w").close()
    if os.path.exists(f"{folder}/dies") and world.rank == 1:
        os.kill(os.getpid(), 9)
    for number in range(10000):
        world.step(number)
        time.sleep(0.05)
"""
START = """
open("starting", "w").close()
launch(long, (os.getcwd(),), ranks=2, limits=LIMITS)
"""


@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGTERM, ("starting",)),
        (signal.SIGTERM, ("rank-0", "rank-1")),
        (signal.SIGKILL, ("rank-0", "rank-1")),
    ],
)
def test_a_signal_ends_ranks_and_what_they_started(
    program: dict[str, str], tmp_path: Path, number: signal.Signals, when: tuple[str, ...]
) -> None:
    path = written(tmp_path, HEAD, LONG, guarded(START))
    with subprocess.Popen(
        [sys.executable, str(path)], env=program, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + FAR_TOO_LONG_S
        while not all((tmp_path / one).exists() for one in when) and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(number)
        stderr = process.communicate(timeout=FAR_TOO_LONG_S)[1]
    assert process.returncode == -number, stderr
    # A rank that is being started may still report that its launcher is gone.
    assert not stderr or number == signal.SIGKILL or when == ("starting",), stderr
    if number != signal.SIGKILL:
        assert not list(Path(program["TMPDIR"]).glob("stepscope-ranks-*"))


def test_children_of_a_rank_that_died_are_ended(program: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "dies").touch()
    program["PWD"] = str(tmp_path)
    path = written(tmp_path, HEAD, LONG, f"os.chdir({str(tmp_path)!r})\n", guarded(START))
    assert "RankFailed: rank 1 died of SIGKILL before its first step" in failure(path, program)
