"""Settings of the test suite. Without a GPU the kernels run in Triton's interpreter, which must be
enabled before a test imports them. No test fails because a machine is slow."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import fast_interpreter
import fork_server
import shared_rewriting

collect_ignore = ["integrations"]
"""These tests need other libraries: `make test-integrations` installs them and runs the folder."""

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    fast_interpreter.install()
    # Tests run in parallel: more threads than cores spin in OpenMP's barriers, which doubles the
    # CPU time of everything that is timed.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    # Inductor compiles a program for each vector instruction set of the CPU to see which work, and
    # its vectorized kernels include long headers: 11 s of CPU time before the first kernel.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Tests run in parallel: a command that waits for an idle machine would never begin.
os.environ["STEPSCOPE_WAIT"] = "0"

settings.register_profile("slow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slow")

# The suite starts hundreds of processes, and every worker imports every test: without bytecode
# files, each of them compiles the package again, a quarter of the CPU time of a `stepscope run`.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
STARTUP = Path(__file__).with_name("startup")
# Messages name `stepscope` as it is called in this environment: without a path.
os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(STARTUP), os.environ.get("PYTHONPATH")))
)

# A shell starts background jobs with SIGINT ignored, and every child process inherits that: tests
# of an interrupt would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # In the process that starts the workers of pytest-xdist too: these are forks as well.
    fork_server.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("STEPSCOPE_TEST_ALL"):
        return
    skipped = pytest.mark.skip(reason="runs with STEPSCOPE_TEST_ALL=1")
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(skipped)


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the processes of a test as usual, not as forks of one that has imported torch."""
    monkeypatch.setenv(fork_server.COLD, "1")


def pytest_sessionstart(session: pytest.Session) -> None:
    shared_rewriting.rewrite_share(session.config, Path(__file__).parent)


# Imports and collection create almost no garbage, but trigger many garbage collections.
gc.disable()
_frozen_modules = 0


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze again what tests import and what those of a file leave behind: torch.compile's modules
    make a collection as slow again, and after thousands of tests it takes 0.15 s."""
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > _frozen_modules + 100:
        _freeze()


def _freeze() -> None:
    """Exempt the imported modules and collected tests from garbage collection: a pass over them
    takes 0.3 s, and everything that is timed collects garbage first."""
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)
