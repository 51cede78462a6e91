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
JointRule = Callable[[dict[int, Buffer]], Gradients]
"""The same for several outputs: their gradients by place, where there are any."""
Output = tuple[Buffer, int, int]
"""A buffer, its elements and the bytes of each."""


class Value:
    """An activation or a parameter: `width` is the bytes of one element."""

    __slots__ = ("buffer", "elements", "gradient", "kept", "node", "place", "width")

    def __init__(
        self,
        buffer: Buffer,
        elements: int,
        width: int,
        node: Node | None = None,
        kept: int | None = None,
        place: int = 0,
    ) -> None:
        self.buffer = buffer
        self.elements = elements
        self.width = width
        self.node = node
        self.place = place
        """Which output of its operator it is."""
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
        inputs: Sequence[tuple[Node, int] | Value | None],
        saved: Sequence[Buffer],
        rule: JointRule,
    ) -> None:
        self.number = number
        self.inputs = inputs
        """Of each input the operator that made it and as which output, or the parameter itself, or
        neither."""
        self.saved: Sequence[Buffer] = saved
        self.rule: JointRule | None = rule
        self.stretch: CheckpointedSegment | None = None
        """The checkpointed stretch that will bring back what it saved."""


class CheckpointedSegment:
    """A checkpointed stretch: its inputs are what it keeps, itself or in the stretch around it."""

    __slots__ = ("again", "outer", "places", "saved")

    def __init__(
        self, again: Callable[[Sequence[Buffer]], object], outer: CheckpointedSegment | None
    ) -> None:
        self.again: Callable[[Sequence[Buffer]], object] | None = again
        """Plays it again from its inputs."""
        self.outer = outer
        self.saved: Sequence[Buffer] = ()
        self.places: list[Node | CheckpointedSegment] = []
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
        self.take: Callable[[Value, Buffer], None] | None = None
        """Gets the gradient of each parameter in place of the parameter, where somebody uses it at
        once."""
        self._count = 0
        self._stretch: CheckpointedSegment | None = None
        self._bringing_back: Iterator[Node | CheckpointedSegment] | None = None
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
        (made,) = self.joint_operator(
            name, ((output, elements, width),), inputs, lambda gradients: rule(gradients[0]), saved
        )
        return made

    def joint_operator(
        self,
        name: str,
        outputs: Sequence[Output],
        inputs: Sequence[Value | None],
        rule: JointRule,
        saved: Sequence[Buffer] = (),
    ) -> tuple[Value, ...]:
        """The same with several outputs, which may lie in one buffer."""
        if self._bringing_back is not None and saved:
            self._bring(saved)
        if self._bringing_back is not None or not self._recording:
            return tuple(Value(*output) for output in outputs)
        self._count += 1
        sources = [
            None if value is None else (value if value.node is None else (value.node, value.place))
            for value in inputs
        ]
        node = Node(self._count, sources, saved, rule)
        if self._stretch is not None and saved:
            node.saved, node.stretch = (), self._stretch
            self._stretch.places.append(node)
        for buffer in node.saved:
            buffer.saved_as = buffer.saved_as or f"{self.module}, {name}"
        return tuple(Value(*output, node=node, place=place) for place, output in enumerate(outputs))

    def checkpointed(
        self, inputs: Sequence[Value], body: Callable[[Sequence[Value]], Sequence[Value]]
    ) -> Sequence[Value]:
        """`body` of the inputs, of which nothing but these is kept for the backward."""
        if self._bringing_back is not None or not self._recording:
            return self._within_replay(inputs, body)
        shapes, outer = [(x.elements, x.width) for x in inputs], self._stretch
        stretch = CheckpointedSegment(
            lambda kept: body(
                [Value(buffer, *shape) for buffer, shape in zip(kept, shapes, strict=True)]
            ),
            outer,
        )
        if outer is None:
            stretch.saved = tuple(x.buffer for x in inputs)
            for buffer in stretch.saved:
                buffer.saved_as = buffer.saved_as or KEPT_INPUT
        else:
            outer.places.append(stretch)
        self._stretch = stretch
        try:
            return body(inputs)
        finally:
            self._stretch = outer

    def _within_replay(
        self, inputs: Sequence[Value], body: Callable[[Sequence[Value]], Sequence[Value]]
    ) -> Sequence[Value]:
        """An inner stretch while an outer one is played again: its inputs are brought back, what it
        saved comes when the backward is there."""
        places, recording = self._bringing_back, self._recording
        if places is not None:
            self._bring(tuple(x.buffer for x in inputs))
        self._bringing_back, self._recording = None, False
        try:
            return body(inputs)
        finally:
            self._bringing_back, self._recording = places, recording

    def _bring(self, saved: Sequence[Buffer]) -> None:
        assert self._bringing_back is not None
        next(self._bringing_back).saved = saved
        self._left -= 1
        if not self._left:
            raise _AllIsBack

    def _play_again(self, stretch: CheckpointedSegment) -> None:
        again, stretch.again = stretch.again, None
        if again is None:
            return
        if stretch.outer is not None:
            self._play_again(stretch.outer)
        self._bringing_back, self._left = iter(stretch.places), len(stretch.places)
        self.memory.unnamed = RECOMPUTED
        try:
            again(stretch.saved)
        except _AllIsBack:
            pass
        finally:
            self._bringing_back, stretch.places = None, []
            if stretch.outer is not None:
                # Brought back for this replay alone.
                stretch.saved = ()
            self.memory.unnamed = TEMPORARIES
            self.after_replay()

    def backward(self, last: Node, gradient: Buffer) -> None:
        """Run all operators behind `last`; gradients stay in the values that no operator made."""
        pending: dict[int, dict[int, Buffer]] = {last.number: {0: gradient}}
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
                    continue
                maker, place = source
                if maker.number not in pending:
                    pending[maker.number] = {}
                    heapq.heappush(waiting, (-maker.number, maker))
                # A second one is added in place: by now nobody else holds the earlier.
                pending[maker.number].setdefault(place, grad)
                del maker
            node.inputs = ()
            del grads, grad, source, node

    def _accumulate(self, leaf: Value, gradient: Buffer) -> None:
        if self.take is not None:
            gradient.line = GRADIENTS
            self.take(leaf, gradient)
            return
        if leaf.gradient is not None:
            return
        if leaf.kept < leaf.elements:
            gradient = self.memory.buffer(leaf.kept * leaf.width)
        leaf.gradient = gradient
        if leaf.buffer.line == PARAMETERS:
            gradient.line = GRADIENTS
