"""The result of `accelerate`: what runs, what was left and why, and how to undo it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stepscope.acceleration.left import Left
from stepscope.errors import some
from stepscope.kernels.fp8.layers import Fp8Layers

if TYPE_CHECKING:
    from stepscope.acceleration.compiled import Compilation

FP8 = "fp8"
"""Name of the pass, and of the dtype of `accelerate`."""

_INDEX = re.compile(r"\.\d+(?=\.|$)")
_MAX_NAMES = 3


class Report:
    """Changes that `accelerate` made to a model. `print(report)` lists them; `undo()` restores the
    model and the optimizer."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.notes: list[str] = []
        self.fp8: Fp8Layers | None = None
        """The layers in FP8, if the model was accelerated with `dtype="fp8"`: `decisions` says why
        a layer stays in bf16, `override` changes the choice."""
        self.compilation: Compilation | None = None
        """What runs through the graph backend; None if the model was left as it is."""
        self._left: list[Left] = []
        self._undo: list[Callable[[], object]] = []
        self._undone = False

    @property
    def applied(self) -> dict[str, int]:
        """Number of operators that each pass has replaced in what runs."""
        counts: dict[str, int] = {}
        for function in () if self.compilation is None else self.compilation.functions:
            for (name, _), count in function.applied.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    @property
    def is_compiled(self) -> bool:
        """Whether training calls run compiled: not as it is, whatever the reason."""
        functions = [] if self.compilation is None else self.compilation.functions
        return any(one.is_used and not one.refused for one in functions)

    @property
    def left(self) -> list[Left]:
        """What stays as it is, with the reason."""
        compiled = [] if self.compilation is None else self.compilation.left
        return [*self._left, *compiled]

    def leave(self, *left: Left) -> None:
        """Record what stays as it is."""
        self._left += left

    def on_undo(self, action: Callable[[], object]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        """Restore the model and the optimizer as they were. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self._undone = True

    def __str__(self) -> str:
        if self._undone:
            return f"{self.model_name}: undone, it runs as before `accelerate`"
        lines = [f"accelerated {self.model_name}:"]
        if self.compilation is not None:
            lines += [f"  {line}" for line in self.compilation.lines()]
        lines += [f"  {note}" for note in self.notes]
        left_as_they_are = self.left
        if self.fp8 is not None:
            lines.append(f"  {FP8:<18} {self._fp8_layers(self.fp8, left_as_they_are)}")
        if len(lines) == 1:
            lines = [f"{self.model_name}: nothing to accelerate"]
        reasons: dict[tuple[str, str], list[str]] = {}
        # A layer that never runs in FP8 may also have been decided in a call.
        for left in dict.fromkeys(left_as_they_are):
            reasons.setdefault((left.piece, left.reason), []).append(left.name)
        if reasons:
            lines.append("left as they are:")
        for (piece, reason), names in reasons.items():
            lines.append(f"  {piece:<18} {len(names):>4} × {_patterns(names)}: {reason}")
        return "\n".join(lines)

    def _fp8_layers(self, fp8: Fp8Layers, left: list[Left]) -> str:
        """Return the layers in FP8, and add the others to `left`."""
        if not fp8.decisions:
            return f"{fp8.recipe}; layers are chosen by shape in their first call"
        names = [name for name, why in fp8.decisions.items() if why is None]
        left += [Left(FP8, name, why) for name, why in fp8.decisions.items() if why is not None]
        return f"{len(names):>4} × {_patterns(names)} ({fp8.recipe})" if names else "no layer"

    __repr__ = __str__


def name_pattern(name: str) -> str:
    """Return the name of a module with `*` for the index of a block."""
    return _INDEX.sub(".*", name)


def _patterns(names: Sequence[str]) -> str:
    """Return the names with `*` for the index of a block, the first few of them."""
    patterns = list(dict.fromkeys(name_pattern(name) or "(model)" for name in names))
    return some(patterns, _MAX_NAMES)
