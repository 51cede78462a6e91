"""Autograd in bytes: how many bytes each operator allocates and saves, and when they are freed.

A value is a buffer and the operator that produced it. The backward pass runs operators from the
last to the first, as PyTorch's engine does; an operator's saved buffers are freed right after it
ran. Inside a checkpointed segment nothing is saved: when the backward pass reaches the first
operator that needs a saved buffer, the segment is recomputed up to the last buffer that is needed,
as PyTorch does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from stepscope.analysis.predict.memory import Buffer, Memory
from stepscope.records.memory import GRADIENTS, KEPT_INPUT, PARAMETERS, RECOMPUTED, TEMPORARIES

Gradients = Sequence["Buffer | None"]
Rule = Callable[[Buffer], Gradients]
"""Maps the gradient of an operator's output to those of its inputs."""
JointRule = Callable[[dict[int, Buffer]], Gradients]
"""The same for several outputs: their gradients by output index, as far as they exist."""
Output = tuple[Buffer, int, int]
"""A buffer, its number of elements and the bytes per element."""


class Value:
    """An activation or a parameter: `width` is the bytes of one element."""

    __slots__ = ("buffer", "elements", "gradient", "index", "local_elements", "node", "width")

    def __init__(
        self,
        buffer: Buffer,
        elements: int,
        width: int,
        node: Node | None = None,
        local_elements: int | None = None,
        index: int = 0,
    ) -> None:
        self.buffer = buffer
        self.elements = elements
        self.width = width
        self.node = node
        self.index = index
        """Index among the outputs of its operator."""
        self.local_elements = elements if local_elements is None else local_elements
        """Elements stored by this rank, if parameters are sharded."""
        self.gradient: Buffer | None = None

    @property
    def bytes(self) -> int:
        return self.elements * self.width


class Node:
    """An operator with the buffers it saves for backward."""

    __slots__ = ("inputs", "number", "rule", "saved", "segment")

    def __init__(
        self,
        number: int,
        inputs: Sequence[tuple[Node, int] | Value | None],
        saved: Sequence[Buffer],
        rule: JointRule,
    ) -> None:
        self.number = number
        self.inputs = inputs
        """For each input the operator that produced it and the output index, or the parameter
        itself, or None."""
        self.saved: Sequence[Buffer] = saved
        self.rule: JointRule | None = rule
        self.segment: CheckpointedSegment | None = None
        """The checkpointed segment that will recompute the saved buffers."""


class CheckpointedSegment:
    """A checkpointed segment. Its inputs are saved, by itself or by the segment around it."""

    __slots__ = ("outer", "recompute", "saved", "savers")

    def __init__(
        self, recompute: Callable[[Sequence[Buffer]], object], outer: CheckpointedSegment | None
    ) -> None:
        self.recompute: Callable[[Sequence[Buffer]], object] | None = recompute
        """Runs the segment again from its inputs."""
        self.outer = outer
        self.saved: Sequence[Buffer] = ()
        self.savers: list[Node | CheckpointedSegment] = []
        """Operators and segments that saved something, in order."""


class _AllRestored(Exception):  # noqa: N818
    """Raised when the last buffer that a segment must restore is available."""


class Tape:
    """Records operators as they run; `module` names the part of the model they belong to."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.module = ""
        self.after_replay: Callable[[], None] = lambda: None
        """Called after a segment was recomputed."""
        self.on_gradient: Callable[[Value, Buffer], None] | None = None
        """Takes the gradient of each parameter instead of storing it, if the optimizer uses it at
        once."""
        self._count = 0
        self._segment: CheckpointedSegment | None = None
        self._restoring: Iterator[Node | CheckpointedSegment] | None = None
        self._missing = 0
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
        """Return the value in `output`; its operator is recorded with what it saves."""
        (value,) = self.joint_operator(
            name, ((output, elements, width),), inputs, lambda gradients: rule(gradients[0]), saved
        )
        return value

    def joint_operator(
        self,
        name: str,
        outputs: Sequence[Output],
        inputs: Sequence[Value | None],
        rule: JointRule,
        saved: Sequence[Buffer] = (),
    ) -> tuple[Value, ...]:
        """Record an operator with several outputs, which may share one buffer."""
        if self._restoring is not None and saved:
            self._restore(saved)
        if self._restoring is not None or not self._recording:
            return tuple(Value(*output) for output in outputs)
        self._count += 1
        sources = [
            None if value is None else (value if value.node is None else (value.node, value.index))
            for value in inputs
        ]
        node = Node(self._count, sources, saved, rule)
        if self._segment is not None and saved:
            node.saved, node.segment = (), self._segment
            self._segment.savers.append(node)
        for buffer in node.saved:
            buffer.saved_as = buffer.saved_as or f"{self.module}, {name}"
        return tuple(Value(*output, node=node, index=index) for index, output in enumerate(outputs))

    def checkpointed(
        self, inputs: Sequence[Value], body: Callable[[Sequence[Value]], Sequence[Value]]
    ) -> Sequence[Value]:
        """Return `body` of the inputs; only the inputs are saved for backward."""
        if self._restoring is not None or not self._recording:
            return self._within_replay(inputs, body)
        shapes, outer = [(x.elements, x.width) for x in inputs], self._segment
        segment = CheckpointedSegment(
            lambda buffers: body(
                [Value(buffer, *shape) for buffer, shape in zip(buffers, shapes, strict=True)]
            ),
            outer,
        )
        if outer is None:
            segment.saved = tuple(x.buffer for x in inputs)
            for buffer in segment.saved:
                buffer.saved_as = buffer.saved_as or KEPT_INPUT
        else:
            outer.savers.append(segment)
        self._segment = segment
        try:
            return body(inputs)
        finally:
            self._segment = outer

    def _within_replay(
        self, inputs: Sequence[Value], body: Callable[[Sequence[Value]], Sequence[Value]]
    ) -> Sequence[Value]:
        """Run an inner segment while an outer one is recomputed: its inputs are restored now, its
        saved buffers when the backward pass reaches it."""
        savers, recording = self._restoring, self._recording
        if savers is not None:
            self._restore(tuple(x.buffer for x in inputs))
        self._restoring, self._recording = None, False
        try:
            return body(inputs)
        finally:
            self._restoring, self._recording = savers, recording

    def _restore(self, saved: Sequence[Buffer]) -> None:
        assert self._restoring is not None
        next(self._restoring).saved = saved
        self._missing -= 1
        if not self._missing:
            raise _AllRestored

    def _recompute(self, segment: CheckpointedSegment) -> None:
        recompute, segment.recompute = segment.recompute, None
        if recompute is None:
            return
        if segment.outer is not None:
            self._recompute(segment.outer)
        self._restoring, self._missing = iter(segment.savers), len(segment.savers)
        self.memory.unnamed = RECOMPUTED
        try:
            recompute(segment.saved)
        except _AllRestored:
            pass
        finally:
            self._restoring, segment.savers = None, []
            if segment.outer is not None:
                # Restored for this recomputation alone.
                segment.saved = ()
            self.memory.unnamed = TEMPORARIES
            self.after_replay()

    def backward(self, last: Node, gradient: Buffer) -> None:
        """Run all operators behind `last`; gradients are stored in the leaves."""
        pending: dict[int, dict[int, Buffer]] = {last.number: {0: gradient}}
        waiting = [(-last.number, last)]
        del gradient
        while waiting:
            _, node = heapq.heappop(waiting)
            assert node.rule is not None
            if node.segment is not None:
                self._recompute(node.segment)
            grads = node.rule(pending.pop(node.number))
            node.rule, node.saved, node.segment = None, (), None
            for source, grad in zip(node.inputs, grads, strict=True):
                if source is None or grad is None:
                    continue
                if isinstance(source, Value):
                    self._accumulate(source, grad)
                    continue
                maker, index = source
                if maker.number not in pending:
                    pending[maker.number] = {}
                    heapq.heappush(waiting, (-maker.number, maker))
                # A second gradient is added in place: nothing else refers to the earlier one.
                pending[maker.number].setdefault(index, grad)
                del maker
            node.inputs = ()
            del grads, grad, source, node

    def _accumulate(self, leaf: Value, gradient: Buffer) -> None:
        if self.on_gradient is not None:
            gradient.line = GRADIENTS
            self.on_gradient(leaf, gradient)
            return
        if leaf.gradient is not None:
            return
        if leaf.local_elements < leaf.elements:
            gradient = self.memory.buffer(leaf.local_elements * leaf.width)
        leaf.gradient = gradient
        if leaf.buffer.line == PARAMETERS:
            gradient.line = GRADIENTS
