"""Samples of the lines that a DataLoader runs: in its workers, or in the process of the training.

A thread looks at the stack some times per second. Only what runs while a batch is made counts.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec

from stepscope.advisor.lines.places import relative
from stepscope.advisor.lines.stack import Kind, kind_of, source_of
from stepscope.analysis.lines.observed import LoaderLine, LoaderSamples
from stepscope.files import replace_file

_EVERY_S = 0.005
_WRITE_EVERY = 40
"""Samples after which a worker writes what it has: it may be killed at any time."""
_MOST = 2_000
_SWITCH_S = 2e-5
"""Interval after which Python lets the sampler run. With the usual 5 ms it would run only where the
sampled thread releases the lock of the interpreter by itself, and always see those lines."""
_MAKING = f"{os.sep}utils{os.sep}data{os.sep}_utils{os.sep}fetch.py"
"""File of the function of torch that makes a batch."""


class Sampler(threading.Thread):
    """Samples what another thread runs, within `sampling`."""

    def __init__(
        self, thread: int, into: Counter[tuple[CodeType, int] | None], note: Callable[[], None]
    ) -> None:
        super().__init__(name="stepscope-loader", daemon=True)
        self._thread, self._into, self._note = thread, into, note
        self._ended = threading.Event()

    def run(self) -> None:
        # An error in it must not appear on the program's standard error.
        with suppress(Exception):
            while not self._ended.wait(_EVERY_S) and self._into.total() < _MOST:
                self._sample()
                self._note()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self.start()
        try:
            yield
        finally:
            self._ended.set()
            # No thread may be left when the program forks.
            self.join()
            sys.setswitchinterval(usual)

    def _sample(self) -> None:
        frame = sys._current_frames().get(self._thread)
        own: tuple[CodeType, int] | None = None
        while frame is not None:
            if own is None and kind_of(frame.f_code) is Kind.USER:
                own = frame.f_code, frame.f_lineno
            if frame.f_code.co_filename.endswith(_MAKING):
                self._into[own] += 1
                return
            frame = frame.f_back


class LoaderLines:
    """Samples loaders from `attach` to `remove`; `write` stores those of this process."""

    def __init__(self, folder: Path, name: str, root: Path) -> None:
        self._folder, self._name, self._root = folder, name, root
        self._samples: Counter[tuple[CodeType, int] | None] = Counter()
        self._plain: Any = None

    def attach(self) -> None:
        """Sample the workers that start from now on."""
        workers: Any = sys.modules.get("torch.utils.data._utils.worker")
        if workers is None:
            return
        self._plain = workers._worker_loop
        workers._worker_loop = functools.partial(
            _sampled_worker, self._plain, self._folder, self._name, self._root
        )

    def remove(self) -> None:
        if self._plain is not None:
            sys.modules["torch.utils.data._utils.worker"]._worker_loop = self._plain  # type: ignore[attr-defined]
            self._plain = None

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample this thread, which loads a batch by itself."""
        with Sampler(threading.get_ident(), self._samples, lambda: None).sampling():
            yield

    def write(self) -> None:
        if self._samples:
            path = self._folder / f"{self._name}.loader-{os.getpid()}.json"
            _write(path, self._samples, self._root, in_worker=False)


def _sampled_worker(
    plain: Callable[..., None], folder: Path, name: str, root: Path, *given: Any, **named: Any
) -> None:
    """The main function of a worker."""
    samples: Counter[tuple[CodeType, int] | None] = Counter()
    path = folder / f"{name}.loader-{os.getpid()}.json"

    def note() -> None:
        if samples.total() % _WRITE_EVERY == 0 and samples and folder.is_dir():
            _write(path, samples, root, in_worker=True)

    with Sampler(threading.get_ident(), samples, note).sampling():
        plain(*given, **named)


def _named(code: CodeType) -> str:
    """Return the name of the function that the code is a part of, such as one with a generator."""
    names = code.co_qualname.split(".")
    return next((name for name in reversed(names) if not name.startswith("<")), code.co_name)


def _write(
    path: Path, samples: Counter[tuple[CodeType, int] | None], root: Path, *, in_worker: bool
) -> None:
    lines = tuple(
        LoaderLine(
            file=relative(code.co_filename, root),
            line=line,
            function=_named(code),
            code=source_of(code.co_filename).code(line),
            samples=count,
        )
        for (code, line), count in ((key, n) for key, n in samples.items() if key is not None)
    )
    content = LoaderSamples(lines=lines, total=samples.total(), in_worker=in_worker)
    replace_file(path, [msgspec.json.encode(content)])
