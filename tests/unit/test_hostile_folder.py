"""A folder whose files have the names of modules: no command imports them."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import FrozenImporter
from pathlib import Path

import pytest

import stepscope
from command_line import CommandLine
from stepscope.processes import own_command
from trace_files import SGEMM, ChromeTrace

SOURCE = Path(stepscope.__file__).parent
PACKAGES = ("msgspec", "numpy", "psutil", "torch", "triton", "tyro", "rich", "jinja2", "stepscope")
"""Besides the standard library."""
PROGRAM = """
import sys
import torch
import neighbor
assert sys.path[0] == {folder!r}, sys.path
assert not sys.flags.safe_path
weight = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
for _ in range(22):
    weight(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
NSYS = """#!/bin/sh
while [ "$#" -gt 0 ] && [ "$1" != {python} ]; do shift; done
[ "$#" -eq 0 ] || "$@" >/dev/null 2>&1
exit 0
"""


class HostileFolder:
    """A folder in which every import of a file leaves a mark."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "hostile"
        self.marks = root / "marks"
        self.folder.mkdir()
        self.marks.mkdir()
        line = f"open({str(self.marks)!r} + '/' + __name__, 'w').close()\n"
        for name in (*sys.stdlib_module_names, *PACKAGES):
            # The interpreter has these before it has a path.
            if name not in sys.builtin_module_names and not FrozenImporter.find_spec(name):
                (self.folder / f"{name}.py").write_text(line)

    @property
    def imported(self) -> list[str]:
        return sorted(path.name for path in self.marks.iterdir())


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> HostileFolder:
    return HostileFolder(tmp_path_factory.mktemp("root"))


def traces(root: Path) -> list[str]:
    for rank in (0, 1):
        trace = ChromeTrace()
        trace.range("ProfilerStep#0", 0, 1000)
        trace.kernel(SGEMM, 100, 900, launch=(50, 60))
        trace.write(root / f"rank{rank}.json")
    return ["trace", str(root), "--workers", "2"]


def script(root: Path) -> Path:
    (root / "script").mkdir()
    (root / "script" / "neighbor.py").touch()
    path = root / "script" / "train.py"
    path.write_text(PROGRAM.format(folder=str(path.parent)))
    return path


def inspected(root: Path) -> list[str]:
    return ["inspect", "--warmup", "2", "--steps", "3", str(script(root))]


def advised(root: Path) -> list[str]:
    return ["advise", str(script(root))]


def profiled(root: Path) -> list[str]:
    (root / "nsys").write_text(NSYS.format(python=shlex.quote(sys.executable)))
    (root / "nsys").chmod(0o755)
    return ["profile-nsys", "--size", "tiny", "--context", "8"]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "trace": traces,
    "doctor": lambda _: ["doctor"],
    "run": lambda _: ["run", "planted-ranks", "--ranks", "2"],
    "inspect": inspected,
    "advise": advised,
    "profile-nsys": profiled,
}
MAIN = ("trace", "run", "inspect")


@pytest.mark.usefixtures("cold_start")
@pytest.mark.parametrize(
    "command",
    # The others start their processes in the same way.
    [
        *MAIN,
        *(pytest.param(name, marks=pytest.mark.thorough) for name in COMMANDS if name not in MAIN),
    ],
)
def test_no_command_imports_from_the_current_folder(
    hostile: HostileFolder, tmp_path: Path, command: str
) -> None:
    line = CommandLine(tmp_path)
    line.know_ceilings()
    words = COMMANDS[command](tmp_path)
    environment = line.environment | {
        "STEPSCOPE_STUDIES": "planted_ranks_study",
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    installed = Path(sys.executable).with_name("stepscope")
    done = subprocess.run(
        [str(installed), *words],
        cwd=hostile.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert hostile.imported == []
    if command != "profile-nsys":
        assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("cold_start")
def test_the_folder_is_hostile(hostile: HostileFolder) -> None:
    code = "import multiprocessing, msgspec"
    subprocess.run([sys.executable, "-c", code], cwd=hostile.folder, check=False)
    assert hostile.imported == ["msgspec", "multiprocessing"]
    for mark in hostile.marks.iterdir():
        mark.unlink()


def starts_python(file: Path) -> list[int]:
    """Lines that name the interpreter, or a way of `multiprocessing` to start it."""
    text = file.read_text()
    if not any(name in text for name in ("executable", "get_context", "ProcessPoolExecutor")):
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Attribute) and node.attr in ("executable", "get_context"))
        or (isinstance(node, ast.Name) and node.id == "ProcessPoolExecutor")
    ]


def test_every_process_is_started_by_one_module() -> None:
    starting = {
        str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if starts_python(file)
    }
    # A follower replaces its process; ranks are started by torch in a process that has -P. The
    # program of a command line is only named.
    assert starting == {"processes.py", "training/ranks/cases.py", "cli/program.py"}
    assert own_command("stepscope")[1] == "-P"
