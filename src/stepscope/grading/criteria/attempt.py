"""Findings of one criterion: what is wrong, with the cause if one explains it."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.errors import one_line
from stepscope.grading.check.cases import Fault, Outcome
from stepscope.grading.criteria.accuracy import allowed_error, largest, where_wrong
from stepscope.grading.criteria.implementation import in_folder
from stepscope.measure.time_limit import TookTooLong, at_most
from stepscope.report.format import number

REFUSALS = (RuntimeError, ValueError, NotImplementedError, AssertionError)
"""Exceptions by which a program says that it does not support an input. Others, such as an
AttributeError, are mistakes."""
_EXPLAINED = 0.02
"""Largest part of a deviation that its cause may leave unexplained."""


class Cause(NamedTuple):
    """A mistake, and the result that it would give."""

    code: str
    text: str
    result: Tensor
    rows: slice = slice(None)
    """Rows (of the second last dimension) in which the mistake has a defined result."""


class Attempt:
    """Collects the findings of one criterion."""

    def __init__(self, folder: str = "", seconds: float = 60.0, beyond: bool = False) -> None:
        self.folder = folder
        self._seconds = seconds
        self._beyond = beyond
        self.faults: list[Fault] = []
        self.notes: list[str] = []

    def fault(self, code: str, text: str, **values: Any) -> None:
        self.faults.append(Fault(code=code, text=text, values=values))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def outcome(self) -> Outcome:
        return Outcome(faults=tuple(self.faults), notes=tuple(self.notes))

    @contextmanager
    def calling(self, what: str, *, may_refuse: bool = False) -> Iterator[None]:
        """Call the user's code in the block: an exception or an endless loop becomes a finding."""
        try:
            with at_most(self._seconds):
                yield
        except TookTooLong as late:
            line = user_line(late, self.folder)
            self.fault("hangs", f"{what} was not done after {self._seconds:g} s, {line}")
        except Exception as error:
            text = f"{one_line(error)} ({user_line(error, self.folder)})"
            refuses = isinstance(error, REFUSALS) and not isinstance(error, RecursionError)
            if (may_refuse or self._beyond) and refuses:
                self.note(f"refuses {what}: {text}")
            else:
                self.fault("raises", f"{what} raises {text}", error=type(error).__name__)

    def compare(
        self,
        name: str,
        what: str,
        actual: Tensor | None,
        exact: Tensor,
        reference: Tensor,
        causes: Iterable[Cause] = (),
        dtype: torch.dtype | None = None,
        size: float = 0.0,
    ) -> bool:
        """Compare one result with the exact one; if it is wrong, name the cause that explains it,
        which is looked for only then.
        Returns whether it holds."""
        if actual is None:
            self.fault(f"missing-{name}", f"{what} has no {name}: it is None")
            return False
        if actual.shape != exact.shape:
            text = f"{name} has shape {tuple(actual.shape)} instead of {tuple(exact.shape)}"
            self.fault(f"shape-of-{name}", f"{text} for {what}")
            return False
        if dtype is not None and actual.dtype != dtype:
            text = f"{name} is {_short(actual.dtype)} for inputs of {_short(dtype)}"
            self.fault(f"dtype-of-{name}", f"{text}: {what}")
            return False
        allowed = allowed_error(exact, reference, dtype, size)
        actual = actual.detach().to(exact)
        error = largest(actual - exact)
        if error <= allowed:
            return True
        cause = explain(actual, exact, causes)
        values = {"error": error, "allowed": allowed, "of": name}
        where = where_wrong(actual, exact, allowed)
        text = f"{name} is wrong by up to {number(error)} (allowed {number(allowed)}) {where}"
        code, why = cause or (f"wrong-{name}", "")
        self.fault(code, f"{text} for {what}{': ' if why else ''}{why}", **values)
        return False


def explain(actual: Tensor, exact: Tensor, causes: Iterable[Cause]) -> tuple[str, str] | None:
    """Code and text of the cause whose result is nearest to a wrong one, if it explains it."""
    if not actual.isfinite().all() and exact.isfinite().all():
        return "nan", "NaN or Inf: an exp that overflows, 0/0, or a row without a visible key"
    best: tuple[float, tuple[str, str]] | None = None
    for cause in causes:
        rows = (..., cause.rows, slice(None)) if actual.ndim > 1 else (...,)
        near, deviation = (actual - cause.result)[rows], (actual - exact)[rows]
        if not deviation.numel() or largest(deviation) == 0.0:
            continue
        left = largest(near) / largest(deviation)
        # Of explanations that rounding does not tell apart, the first counts.
        if left <= _EXPLAINED and (best is None or left < best[0] / 2):
            best = left, (cause.code, cause.text)
    return best[1] if best else _as_factor(actual, exact)


def _as_factor(actual: Tensor, exact: Tensor) -> tuple[str, str] | None:
    """A constant factor that explains the deviation."""
    if largest(actual) == 0.0:
        return "zero", "it is zero"
    square = (exact * exact).sum()
    factor = ((actual * exact).sum() / square).item() if square else 0.0
    if factor and largest(actual - factor * exact) <= _EXPLAINED * largest(actual - exact):
        return "wrong-factor", f"it is {number(factor)} times the right value"
    return None


def user_line(error: BaseException, folder: str) -> str:
    """File and line of the user's code that raised, or the last line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if in_folder(frame.filename, folder)]
    last = (own or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}, in {last.name}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
