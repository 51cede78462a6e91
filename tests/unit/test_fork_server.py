"""Processes forked by the server of the tests are as if the interpreter had been started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import fork_server
from command_line import GONE_WITHIN_S

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available() or bool(os.environ.get(fork_server.COLD)),
    reason="processes are started as usual",
)
SERVED = "import sys; print('fork_server' in sys.modules)"
FACTS = """
import builtins, os, signal, sys, tempfile
print(__name__, globals().get("__file__"), __builtins__ is builtins, __spec__)
print(sys.argv, sys.orig_argv, sys.path, sys.flags, os.getcwd(), tempfile.gettempdir())
print(os.getppid(), os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid())
print([(one.fileno(), one.encoding, one.errors, one.line_buffering, one.newlines) for one in
    (sys.stdin, sys.stdout, sys.stderr)], sys.stdin.read())
print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(sorted(open("/proc/self/environ").read().strip("\\0").split("\\0")))
print(sorted(os.environ.items()))
print([name for name in ("torch", "numpy", "sympy", "stepscope") if name in sys.modules])
print([one for one in map(int, os.listdir("/proc/self/fd")) if one < 400])
raise ValueError("planned")
"""


def run(
    words: Sequence[str],
    variables: Mapping[str, str],
    *,
    cold: bool = False,
    text: str = "typed",
    **how: object,
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | dict(variables) | {"PYTHONHASHSEED": "0"}
    with pytest.MonkeyPatch.context() as patched:
        if cold:
            patched.setattr(subprocess, "_fork_exec", fork_server._cold_fork_exec)
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            [sys.executable, *words],
            env=environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=400,
            **how,
        )


@pytest.mark.parametrize("kind", ["script", "code", "standard input"])
def test_a_fork_sees_what_a_new_interpreter_sees(tmp_path: Path, kind: str) -> None:
    (tmp_path / "program.py").write_text(FACTS)
    programs = {"script": ("program.py", "-x"), "code": ("-c", FACTS, "-x"), "standard input": "-"}
    words = programs[kind]
    how = {"cwd": tmp_path, "start_new_session": kind == "code"}
    if kind == "standard input":
        how["text"] = FACTS
    variables = {"TMPDIR": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    cold, forked = (run(words, variables, cold=cold, **how) for cold in (True, False))
    assert forked.stdout.splitlines() == cold.stdout.splitlines()
    assert forked.stderr == cold.stderr
    assert forked.returncode == cold.returncode == 1


def test_modules_are_hidden_until_they_are_imported(tmp_path: Path) -> None:
    code = """
import sys, fork_server
assert "torch" not in sys.modules
import torch.nn as nn
assert "numpy" in sys.modules and "torch._dynamo" not in sys.modules
source = nn.__spec__.loader.get_source("torch.nn")
print(nn.Linear(2, 2)(sys.modules["torch"].ones(2)).shape, "import" in source)
"""
    done = run(("-c", code), {})
    assert (done.stdout, done.stderr) == ("torch.Size([2]) True\n", "")
    (tmp_path / "torch.py").write_text("found = 'another'")
    shadowed = run(("-c", "import torch; print(torch.found)"), {"PYTHONPATH": str(tmp_path)})
    assert shadowed.stdout == "another\n"


@pytest.mark.parametrize("words", [("-B",), ("-P",), ()])
def test_options_are_seen(words: tuple[str, ...]) -> None:
    code = "import sys; print(sys.dont_write_bytecode, sys.flags.dont_write_bytecode, sys.path[0])"
    variables = {} if words else {"PYTHONDONTWRITEBYTECODE": "1"}
    cold, forked = (run((*words, "-c", code), variables, cold=cold) for cold in (True, False))
    assert forked.stdout == cold.stdout
    assert run((*words, "-c", SERVED), variables).stdout == "True\n"


@pytest.mark.parametrize(("value", "kind"), [("1", "InterpretedFunction"), ("0", "JITFunction")])
def test_triton_is_imported_again_if_its_functions_are_not_interpreted(
    value: str, kind: str
) -> None:
    code = f"""
{SERVED}
import torch._dynamo.utils, triton
assert torch._dynamo.utils.triton is triton is sys.modules["triton"]
print(type(triton.language.sum).__name__)
"""
    done = run(("-c", code), {"TRITON_INTERPRET": value})
    assert done.stdout.split() == ["True", kind], done.stderr


def test_modules_of_the_package_are_those_of_its_imports(tmp_path: Path) -> None:
    code = """
import sys
assert "stepscope" not in sys.modules
import MODULE
print([name for name in sys.modules if name.startswith("stepscope")])
print("torch" in sys.modules, MODULE.__spec__.loader.get_source("MODULE") is not None)
"""
    for module in ("stepscope.records.stats", "stepscope.advisor.scope.library"):
        text = code.replace("MODULE", module)
        cold, forked = (run(("-c", text), {}, cold=cold) for cold in (True, False))
        assert (forked.stdout, forked.stderr) == (cold.stdout, "")
        assert cold.stdout
    # Those of another folder register their operators again.
    package = next(one for one in sys.path if Path(one, "stepscope", "version.py").is_file())
    shutil.copytree(Path(package, "stepscope"), tmp_path / "stepscope")
    text = "import stepscope.acceleration.backend as module; print(module.__file__)"
    for variables in ({"PYTHONPATH": str(tmp_path)}, {"NSYS_PROFILING_SESSION_ID": "1"}):
        done = run(("-c", text), variables)
        folder = variables.get("PYTHONPATH", os.path.abspath(package))
        assert done.stdout.startswith(folder), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_fork(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", f"{SERVED}; sys.stdout.flush(); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    process.send_signal(number)
    process.communicate(timeout=400)
    assert process.returncode == -number


def test_a_fork_has_a_server_of_its_own_which_ends_with_it() -> None:
    code = f"""
import os, subprocess, sys
print(subprocess.run([sys.executable, "-c", {SERVED!r}], capture_output=True, text=True).stdout)
print(open(f"/proc/self/task/{{os.getpid()}}/children").read())
"""
    served, _, children = run(("-c", code), {}).stdout.splitlines()
    assert served == "True"
    assert len(children.split()) == 1
    deadline = time.monotonic() + GONE_WITHIN_S
    while Path(f"/proc/{children.strip()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("-c", SERVED), {"OMP_NUM_THREADS": "2"}),
        (("-c", SERVED), {fork_server.COLD: "1"}),
        (("-I", "-c", SERVED), {}),
    ],
    ids=["variable", "requested", "option"],
)
def test_what_a_fork_cannot_imitate_is_started_as_usual(
    words: Sequence[str], variables: Mapping[str, str]
) -> None:
    assert run(("-c", SERVED), {}).stdout == "True\n"
    assert run(words, variables).stdout == "False\n"
