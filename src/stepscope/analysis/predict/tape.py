"""Autograd in sizes: which operator makes and keeps how many bytes, and when they are let go.

A value is a buffer and the operator that made it. The backward takes operators from the last to
the first, as torch's engine does; an operator's saved buffers are let go right after it ran. Inside
of a checkpointed stretch nothing is saved: when the backward comes to the first operator that needs
something, the stretch is played again up to the last buffer that is needed, as torch does it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from stepscope.analysis.predict.memory import Buffer, Memory
from stepscope.records.memory import GRADIENTS, KEPT_INPUT, PARAMETERS, RECOMPUTED, TEMPORARIES

Gradients = Sequence["Buffer | None"]
Rule = Callable[[Buffer], Gradients]
"""From the gradient of an operator's output to those of its inputs."""


class Value:
    """An activation or a parameter: `width` is the bytes of one element."""

    __slots__ = ("buffer", "elements", "gradient", "kept", "node", "width")

    def __init__(
        self,
        buffer: Buffer,
        elements: int,
        width: int,
        node: Node | None = None,
        kept: int | None = None,
    ) -> None:
        self.buffer = buffer
        self.elements = elements
        self.width = width
        self.node = node
        self.kept = elements if kept is None else kept
        """Elements that this rank keeps, where parameters are divided among ranks."""
        self.gradient: Buffer | None = None

    @property
    def bytes(self) -> int:
        return self.elements * self.width


class Node:
    """An operator with what it keeps for its backward."""

    __slots__ = ("inputs", "number", "rule", "saved", "stretch")

    def __init__(
        self,
        number: int,
        inputs: Sequence[Node | Value | None],
        saved: Sequence[Buffer],
        rule: Rule,
    ) -> None:
        self.number = number
        self.inputs = inputs
        """Of each input the operator that made it, or the parameter itself, or neither."""
        self.saved: Sequence[Buffer] = saved
        self.rule: Rule | None = rule
        self.stretch: Stretch | None = None
        """The checkpointed stretch that will bring back what it saved."""


class Stretch:
    """A checkpointed stretch: its input is what it keeps, itself or in the stretch around it."""

    __slots__ = ("again", "outer", "places", "saved")

    def __init__(self, again: Callable[[Buffer], object], outer: Stretch | None) -> None:
        self.again: Callable[[Buffer], object] | None = again
        """Plays it again from its input."""
        self.outer = outer
        self.saved: Sequence[Buffer] = ()
        self.places: list[Node | Stretch] = []
        """Who saved something, in order."""


class _AllIsBack(Exception):  # noqa: N818
    """Raised when the last buffer that a stretch must bring back is there."""


class Tape:
    """Records operators as they run; `module` names the part of the model they belong to."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.module = ""
        self.after_replay: Callable[[], None] = lambda: None
        """Called when a stretch was played again."""
        self._count = 0
        self._stretch: Stretch | None = None
        self._bringing_back: Iterator[Node | Stretch] | None = None
        self._left = 0
        self._recording = True

    @contextmanager
    def inside(self, module: str) -> Iterator[None]:
        outer, self.module = self.module, module
        try:
            yield
        finally:
            self.module = outer

    def operator(
        self,
        name: str,
        output: Buffer,
        elements: int,
        width: int,
        inputs: Sequence[Value | None],
        rule: Rule,
        saved: Sequence[Buffer] = (),
    ) -> Value:
        """The value in `output`; its operator is recorded with what it saves."""
        if self._bringing_back is not None:
            if saved:
                self._bring(saved)
            return Value(output, elements, width)
        if not self._recording:
            return Value(output, elements, width)
        self._count += 1
        sources = [
            None if value is None else (value if value.node is None else value.node)
            for value in inputs
        ]
        node = Node(self._count, sources, saved, rule)
        if self._stretch is not None and saved:
            node.saved, node.stretch = (), self._stretch
            self._stretch.places.append(node)
        for buffer in node.saved:
            buffer.saved_as = buffer.saved_as or f"{self.module}, {name}"
        return Value(output, elements, width, node)

    def checkpointed(self, x: Value, body: Callable[[Value], Value]) -> Value:
        """`body` of x, of which nothing but x is kept for the backward."""
        if self._bringing_back is not None or not self._recording:
            return self._within_replay(x, body)
        elements, width, outer = x.elements, x.width, self._stretch
        stretch = Stretch(lambda kept: body(Value(kept, elements, width)), outer)
        if outer is None:
            x.buffer.saved_as = x.buffer.saved_as or KEPT_INPUT
            stretch.saved = (x.buffer,)
        else:
            outer.places.append(stretch)
        self._stretch = stretch
        try:
            return body(x)
        finally:
            self._stretch = outer

    def _within_replay(self, x: Value, body: Callable[[Value], Value]) -> Value:
        """An inner stretch while an outer one is played again: its input is brought back, what it
        saved comes when the backward is there."""
        places, recording = self._bringing_back, self._recording
        if places is not None:
            self._bring((x.buffer,))
        self._bringing_back, self._recording = None, False
        try:
            return body(x)
        finally:
            self._bringing_back, self._recording = places, recording

    def _bring(self, saved: Sequence[Buffer]) -> None:
        assert self._bringing_back is not None
        next(self._bringing_back).saved = saved
        self._left -= 1
        if not self._left:
            raise _AllIsBack

    def _play_again(self, stretch: Stretch) -> None:
        again, stretch.again = stretch.again, None
        if again is None:
            return
        if stretch.outer is not None:
            self._play_again(stretch.outer)
        self._bringing_back, self._left = iter(stretch.places), len(stretch.places)
        self.memory.unnamed = RECOMPUTED
        try:
            again(stretch.saved[0])
        except _AllIsBack:
            pass
        finally:
            self._bringing_back, stretch.places = None, []
            self.memory.unnamed = TEMPORARIES
            self.after_replay()

    def backward(self, last: Node, gradient: Buffer) -> None:
        """Run all operators behind `last`; gradients stay in the values that no operator made."""
        pending: dict[int, Buffer] = {last.number: gradient}
        waiting = [(-last.number, last)]
        del gradient
        while waiting:
            _, node = heapq.heappop(waiting)
            assert node.rule is not None
            if node.stretch is not None:
                self._play_again(node.stretch)
            grads = node.rule(pending.pop(node.number))
            node.rule, node.saved, node.stretch = None, (), None
            for source, grad in zip(node.inputs, grads, strict=True):
                if source is None or grad is None:
                    continue
                if isinstance(source, Value):
                    self._accumulate(source, grad)
                elif source.number in pending:
                    # Added in place: by now nobody else holds the earlier one.
                    pass
                else:
                    pending[source.number] = grad
                    heapq.heappush(waiting, (-source.number, source))
            node.inputs = ()
            del grads, grad, source, node

    def _accumulate(self, leaf: Value, gradient: Buffer) -> None:
        if leaf.gradient is not None:
            return
        if leaf.kept < leaf.elements:
            gradient = self.memory.buffer(leaf.kept * leaf.width)
        leaf.gradient = gradient
        if leaf.buffer.line == PARAMETERS:
            gradient.line = GRADIENTS
