"""The result of `accelerate`: what was replaced, what was left and why, and how to undo it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from stepscope.acceleration.compiled import Compilation
from stepscope.acceleration.patches import Patch
from stepscope.acceleration.replacement import Left
from stepscope.errors import some
from stepscope.kernels.fp8.layers import Fp8Layers

FP8 = "fp8"
"""Name of the piece, and of the dtype of `accelerate`."""

_INDEX = re.compile(r"\.\d+(?=\.|$)")
_MAX_NAMES = 3


class Report:
    """Changes that `accelerate` made to a model. `print(report)` lists them; `undo()` restores the
    model and the optimizer."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.notes: list[str] = []
        self.on_cpu = False
        """True if the model was on a CPU, where the kernels cannot run."""
        self.fp8: Fp8Layers | None = None
        """The layers in FP8, if the model was accelerated with `dtype="fp8"`: `decisions` says why
        a layer stays in bf16, `override` changes the choice."""
        self.compilation: Compilation | None = None
        """What runs through the graph backend, if the model was accelerated with `compile`."""
        self._left: list[Left] = []
        self._patches: list[Patch] = []
        self._undo: list[Callable[[], object]] = []
        self._undone = False

    @property
    def replaced(self) -> dict[str, list[str]]:
        """Names of the replaced modules, by piece."""
        names: dict[str, list[str]] = {}
        for patch in self._patches:
            if patch.declined:
                continue
            names.setdefault(patch.replacement.piece, []).append(patch.replacement.name)
        return names

    @property
    def left(self) -> list[Left]:
        """Modules that stay as they are, and those whose original has run in every call so far."""
        declined = (
            Left(patch.replacement.piece, patch.replacement.name, patch.declined)
            for patch in self._patches
            if patch.declined
        )
        compiled = [] if self.compilation is None else self.compilation.left
        return [*self._left, *declined, *compiled]

    @property
    def unchecked(self) -> int:
        """Number of replacements that have not been compared with the original yet: this happens
        in their first call with gradients."""
        return sum(not (patch.is_checked or patch.declined) for patch in self._patches)

    def add(self, patch: Patch) -> None:
        self._patches.append(patch)
        self._undo.append(patch.undo)

    def leave(self, *left: Left) -> None:
        """Record modules that stay as they are."""
        self._left += left

    def on_undo(self, action: Callable[[], object]) -> None:
        self._undo.append(action)

    def reject(self, patch: Patch, reason: str) -> None:
        """Record that a replacement differed from the original, which runs instead."""
        self._patches.remove(patch)
        self.leave(Left(patch.replacement.piece, patch.replacement.name, reason))

    def undo(self) -> None:
        """Restore the model and the optimizer as they were. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self._patches.clear()
        self._undone = True

    def __str__(self) -> str:
        if self._undone:
            return f"{self.model_name}: undone, it runs as before `accelerate`"
        lines = [f"accelerated {self.model_name}:"]
        for piece, names in self.replaced.items():
            lines.append(f"  {piece:<18} {len(names):>4} × {_patterns(names)}")
        if self.compilation is not None:
            lines += [f"  {line}" for line in self.compilation.lines()]
        lines += [f"  {note}" for note in self.notes]
        left_as_they_are = self.left
        if self.fp8 is not None:
            lines.append(f"  {FP8:<18} {self._fp8_layers(self.fp8, left_as_they_are)}")
        if len(lines) == 1:
            lines = [f"{self.model_name}: nothing to accelerate"]
        elif self.on_cpu and self.compilation is None:
            lines.append("on a CPU the replacements run in plain PyTorch; the kernels need a GPU")
        reasons: dict[tuple[str, str], list[str]] = {}
        # A layer that never runs in FP8 may also have been decided in a call.
        for left in dict.fromkeys(left_as_they_are):
            reasons.setdefault((left.piece, left.reason), []).append(left.name)
        if reasons:
            lines.append("left as they are:")
        for (piece, reason), names in reasons.items():
            lines.append(f"  {piece:<18} {len(names):>4} × {_patterns(names)}: {reason}")
        if self.unchecked:
            many = "s are" if self.unchecked > 1 else " is"
            lines.append(f"{self.unchecked} replacement{many} compared in the first training call")
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


def excluded(piece: str, name: str, kind: type, patterns: Iterable[str | type]) -> bool:
    """Return whether a module is excluded: by its piece, its name, a pattern of its name, or its
    class."""
    from fnmatch import fnmatchcase

    return any(
        issubclass(kind, pattern)
        if isinstance(pattern, type)
        else pattern == piece or fnmatchcase(name, pattern)
        for pattern in patterns
    )
