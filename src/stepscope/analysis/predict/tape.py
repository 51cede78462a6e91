"""Autograd in sizes: which operator makes and keeps how many bytes, and when they are let go.

A value is a buffer and the operator that made it. The backward takes operators from the last to
the first, as torch's engine does; an operator's saved buffers are let go right after it ran.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from stepscope.analysis.predict.memory import Buffer, Memory
from stepscope.records.memory import GRADIENTS, PARAMETERS

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

    __slots__ = ("inputs", "number", "rule", "saved")

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


class Tape:
    """Records operators as they run; `module` names the part of the model they belong to."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.module = ""
        self.recording = True
        """Off inside of a checkpointed stretch: its operators run again in the backward."""
        self._count = 0

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
        if not self.recording:
            return Value(output, elements, width)
        self._count += 1
        for buffer in saved:
            buffer.saved_as = buffer.saved_as or f"{self.module}, {name}"
        sources = [
            None if value is None else (value if value.node is None else value.node)
            for value in inputs
        ]
        return Value(output, elements, width, Node(self._count, sources, saved, rule))

    def backward(self, last: Node, gradient: Buffer) -> None:
        """Run all operators behind `last`; gradients stay in the values that no operator made."""
        pending: dict[int, Buffer] = {last.number: gradient}
        waiting = [(-last.number, last)]
        del gradient
        while waiting:
            _, node = heapq.heappop(waiting)
            assert node.rule is not None
            grads = node.rule(pending.pop(node.number))
            node.rule, node.saved = None, ()
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
