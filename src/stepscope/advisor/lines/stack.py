"""Where the program is: the calls of the user's code, and the iterations of their loops.

The stack is read at each operator. A loop has begun another iteration if the innermost frame that
is still the same has gone back in its code, or executes an instruction again.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from stepscope.analysis.lines.syntax import Source, Span

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_STEPSCOPE = f"{Path(__file__).parents[2]}{os.sep}"
_INSTRUMENTS = (
    *(f"{_STEPSCOPE}{name}{os.sep}" for name in ("advisor", "measure")),
    # Wrappers that torch puts around the methods of modes.
    f"{_TORCH}_compile.py",
    f"{_TORCH}_dynamo{os.sep}",
)
_OF_TORCH_ITSELF = tuple(
    f"{_TORCH}{part}"
    for part in (
        f"nn{os.sep}",
        "_",
        "functional.py",
        "overrides.py",
        f"utils{os.sep}_",
        f"utils{os.sep}checkpoint.py",
        f"amp{os.sep}",
        f"autograd{os.sep}",
        f"special{os.sep}",
        f"linalg{os.sep}",
    )
)
"""Parts of torch whose work belongs to the line that calls them. Optimizers, data loaders and
collectives are libraries of their own."""
_GENERATED = "torchinductor"
"""In the path of code that torch.compile has written."""
_STANDARD = tuple({f"{sysconfig.get_path(one)}{os.sep}" for one in ("stdlib", "platstdlib")})
_ENGINE = f"{_TORCH}autograd{os.sep}graph.py", "_engine_run_backward"


class Kind(Enum):
    """Whose code a frame runs."""

    USER = "user"
    TORCH = "torch"
    LIBRARY = "library"
    OURS = "ours"
    ENGINE = "engine"
    """The autograd engine: what is called from it runs within a backward pass."""


@cache
def kind_of(code: CodeType) -> Kind:
    file = code.co_filename
    if (file, code.co_name) == _ENGINE:
        return Kind.ENGINE
    if file.startswith(_INSTRUMENTS):
        return Kind.OURS
    if file.startswith(_OF_TORCH_ITSELF) or _GENERATED in file:
        return Kind.TORCH
    packages = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
    if file.startswith(("<", _STEPSCOPE, *_STANDARD)) or any(one in file for one in packages):
        return Kind.LIBRARY
    return Kind.USER


@cache
def source_of(file: str) -> Source:
    return Source("".join(linecache.getlines(file)))


@cache
def _positions(code: CodeType) -> tuple[tuple[int | None, int | None, int | None, int | None], ...]:
    return tuple(code.co_positions())


LoopKey = tuple[CodeType, int]
"""A loop: the function, and its index in the source file."""


class Instruction(NamedTuple):
    """What is executed at a position of a function of the user."""

    line: int
    loops: tuple[LoopKey, ...]
    """The loops around it, outermost first."""
    call: str


@cache
def instruction(code: CodeType, offset: int) -> Instruction:
    index, known = offset // 2, _positions(code)
    line, last, column, last_column = known[index] if 0 <= index < len(known) else (None,) * 4
    if line is None or last is None or column is None or last_column is None:
        return Instruction(line or code.co_firstlineno, (), "")
    source = source_of(code.co_filename)
    span: Span = line, last, column, last_column
    loops = source.loops_at((line, column), code.co_firstlineno)
    return Instruction(line, tuple((code, loop) for loop in loops), source.called(span))


class Activation:
    """One entry into a loop."""

    __slots__ = ("iteration", "key", "number")

    def __init__(self, key: LoopKey, number: int) -> None:
        self.key = key
        self.number = number
        self.iteration = 0


class _Level:
    """A frame of the stack at the last operator."""

    __slots__ = ("call", "frame", "kind", "loops", "offset")

    def __init__(self, frame: FrameType, kind: Kind) -> None:
        self.frame, self.kind = frame, kind
        self.offset = frame.f_lasti
        self.call = 0
        self.loops: list[Activation] = []


class Stack:
    """The stack of one thread, updated at each operator. It keeps the frames of the last operator
    alive until the next one: two frames may otherwise have the same address."""

    def __init__(self) -> None:
        self._levels: list[_Level] = []
        self._activations = 0
        self.anew = True
        """True if the innermost call of the user has just been executed anew."""

    def read(self, frame: FrameType | None, call: int) -> None:
        """Update to this frame; `call` is the number of the outermost call of a torch function."""
        frames = list(_own_frames(frame))
        frames.reverse()
        common = 0
        for level, (now, _) in zip(self._levels, frames, strict=False):
            if level.frame is not now:
                break
            common += 1
        left = len(self._levels) > common
        del self._levels[common:]
        new = left or len(frames) > common
        moved = bool(common) and self._move(self._levels[-1], call, new)
        inside = len(self._levels) - 1 - self._innermost
        for now, kind in frames[common:]:
            level = _Level(now, kind)
            level.call = call
            if kind is Kind.USER:
                keys = instruction(now.f_code, level.offset).loops
                level.loops = [self._enter(key) for key in keys]
            self._levels.append(level)
        self.anew = self._innermost >= common or (moved and not inside)

    def _move(self, level: _Level, call: int, other_calls: bool) -> bool:
        """Update the innermost frame that is still the same. Return True if it executes another
        instruction, or one again."""
        before, now = level.offset, level.frame.f_lasti
        again = now == before and (other_calls or call != level.call)
        level.offset, level.call = now, call
        if level.kind is not Kind.USER:
            return again or now != before
        keys = instruction(level.frame.f_code, now).loops
        if now < before or again:
            both = [one for one in level.loops if one.key in keys]
            if both:
                repeated = both[-1]
                repeated.iteration += 1
                level.loops = both
        level.loops = [one for one in level.loops if one.key in keys]
        known = {one.key for one in level.loops}
        level.loops += [self._enter(key) for key in keys if key not in known]
        return again or now != before

    @property
    def _innermost(self) -> int:
        """Index of the innermost level of the user; -1 without one."""
        for index in range(len(self._levels) - 1, -1, -1):
            if self._levels[index].kind is Kind.USER:
                return index
        return -1

    def _enter(self, key: LoopKey) -> Activation:
        self._activations += 1
        return Activation(key, self._activations)

    @property
    def in_backward(self) -> bool:
        """True if code of the user, or of a library that it calls, runs within a backward pass."""
        return any(level.kind is Kind.ENGINE for level in self._levels)

    @property
    def recomputes(self) -> bool:
        """True if the innermost code of the user was called by the autograd engine."""
        for level in reversed(self._levels):
            if level.kind is Kind.ENGINE:
                return False
            if level.kind is Kind.USER:
                return self.in_backward
        return False

    @property
    def own(self) -> bool:
        """True if the user's code calls torch without a library between."""
        for level in reversed(self._levels):
            if level.kind is not Kind.TORCH:
                return level.kind is Kind.USER
        return False

    @property
    def calls(self) -> tuple[tuple[CodeType, int], ...]:
        """The functions of the user on the stack and the positions in them, outermost first."""
        return tuple(
            (one.frame.f_code, one.offset) for one in self._levels if one.kind is Kind.USER
        )

    @property
    def loops(self) -> list[Activation]:
        """The loops around the current position, outermost first."""
        return [loop for level in self._levels for loop in level.loops]

    def clear(self) -> None:
        self._levels.clear()


def _own_frames(frame: FrameType | None) -> Iterator[tuple[FrameType, Kind]]:
    while frame is not None:
        kind = kind_of(frame.f_code)
        if kind is not Kind.OURS:
            yield frame, kind
        frame = frame.f_back


def calls_of(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    """The user's functions on a stack and the positions in them, outermost first."""
    calls = [
        (one.f_code, one.f_lasti) for one, kind in _own_frames(frame) if kind is Kind.USER
    ]  # fmt: skip
    return tuple(reversed(calls))


def main_frame() -> FrameType | None:
    """The frame that the main thread executes."""
    return sys._current_frames().get(threading.main_thread().ident or 0)
