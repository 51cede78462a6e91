"""Memory of eager PyTorch's operators: outputs, tensors saved for backward, and gradients.

Modeled on PyTorch's operators; the tests compare it with a count of every tensor.
"""

from __future__ import annotations

from collections.abc import Callable

from stepscope.analysis.predict.memory import Buffer
from stepscope.analysis.predict.tape import Tape, Value
from stepscope.records.memory import WEIGHT_COPIES

FLOAT32 = 4


class Operators:
    """Operators that record on a tape. `autocast` is the width matmuls are cast to, or None."""

    def __init__(self, tape: Tape, autocast: int | None = None) -> None:
        self.tape = tape
        self.autocast = autocast
        self._copies: dict[int, Value] = {}
        self.read_by_side_stream: Callable[[Buffer, int], None] = lambda _, __: None
        """Called with a buffer that a side stream still reads during the backward pass."""
        self.on_weight_gradient: Callable[[Buffer, int], None] | None = None
        """Takes weight gradients in the dtype of fused projections, if the optimizer uses them."""
        # A recomputed segment enters autocast itself.
        tape.after_replay = self.leave_autocast

    def new(self, size: int) -> Buffer:
        return self.tape.memory.buffer(size)

    def leave_autocast(self) -> None:
        """Casts of weights live as long as the context, or as long as the graph saves them."""
        self._copies.clear()

    def cast(self, x: Value, width: int) -> Value:
        if x.width == width:
            return x
        size = x.bytes
        return self.tape.operator(
            "cast",
            self.new(x.elements * width),
            x.elements,
            width,
            (x,),
            lambda _: (self.new(size),),
        )

    def linear(self, x: Value, weight: Value, outputs: int) -> Value:
        """x·Wᵀ; saves both in the compute dtype."""
        x, weight = self._matmul_input(x), self._matmul_weight(weight)
        rows = x.elements * outputs // weight.elements
        x_bytes, weight_bytes = x.bytes, weight.bytes
        return self.tape.operator(
            "matmul",
            self.new(rows * outputs * x.width),
            rows * outputs,
            x.width,
            (x, weight),
            lambda _: (self.new(x_bytes), self.new(weight_bytes)),
            (x.buffer, weight.buffer),
        )

    def batched_matmul(self, a: Value, b: Value, elements: int) -> Value:
        a, b = self._matmul_input(a), self._matmul_input(b)
        a_bytes, b_bytes = a.bytes, b.bytes
        return self.tape.operator(
            "batched matmul",
            self.new(elements * a.width),
            elements,
            a.width,
            (a, b),
            lambda _: (self.new(a_bytes), self.new(b_bytes)),
            (a.buffer, b.buffer),
        )

    def add(self, a: Value, b: Value) -> Value:
        """Add in the wider dtype; the gradient of the narrower one is a copy."""
        width = max(a.width, b.width)

        def rule(gradient: Buffer) -> tuple[Buffer, Buffer]:
            first = gradient if a_width == width else self.new(elements * a_width)
            return first, gradient if b_width == width else self.new(elements * b_width)

        elements, a_width, b_width = a.elements, a.width, b.width
        return self.tape.operator("sum", self.new(elements * width), elements, width, (a, b), rule)

    def multiply(self, a: Value, b: Value) -> Value:
        """Elementwise with broadcasting: both gradients are computed at full size, then the smaller
        one is reduced."""
        elements, width = max(a.elements, b.elements), max(a.width, b.width)
        sizes = [(value.elements, value.width) for value in (a, b)]

        def rule(_: Buffer) -> list[Buffer]:
            grads = [self.new(elements * width) for _ in sizes]
            for index, (own, own_width) in enumerate(sizes):
                if (own, own_width) != (elements, width):
                    grads[index] = self.new(own * own_width)
            return grads

        return self.tape.operator(
            "multiply",
            self.new(elements * width),
            elements,
            width,
            (a, b),
            rule,
            (a.buffer, b.buffer),
        )

    def scaled(self, x: Value, name: str = "scale", saved: tuple[Buffer, ...] = ()) -> Value:
        """Any elementwise operator with one input whose backward pass creates one tensor."""
        size = x.bytes
        return self.tape.operator(
            name, self.new(size), x.elements, x.width, (x,), lambda _: (self.new(size),), saved
        )

    def saves_input(self, x: Value, name: str) -> Value:
        return self.scaled(x, name, (x.buffer,))

    def saves_output(self, x: Value, name: str) -> Value:
        out, size = self.new(x.bytes), x.bytes
        return self.tape.operator(
            name, out, x.elements, x.width, (x,), lambda _: (self.new(size),), (out,)
        )

    def mean_square(self, x: Value, rows: int) -> Value:
        """mean(x²) over the last dimension; the squares are freed at once."""
        size, small = x.bytes, rows * x.width
        square = self.new(size)

        def backward_of_square(_: Buffer) -> tuple[Buffer]:
            # gradient · (2 · x): temporaries of one C++ expression are freed together.
            power, doubled = self.new(size), self.new(size)
            out = self.new(size)
            del power, doubled
            return (out,)

        squared = self.tape.operator(
            "square", square, x.elements, x.width, (x,), backward_of_square, (x.buffer,)
        )
        return self.tape.operator(
            "mean", self.new(small), rows, x.width, (squared,), lambda _: (self.new(size),)
        )

    def inverse_root(self, x: Value) -> Value:
        """rsqrt(x + eps) of a small tensor."""
        return self.saves_output(self.scaled(x, "shift"), "inverse root")

    def with_backward_hook(self, x: Value, before: Callable[[], None]) -> Value:
        """Return the same value; `before` is called when the backward pass reaches it."""

        def rule(gradient: Buffer) -> tuple[Buffer]:
            before()
            return (gradient,)

        return self.tape.operator("ranks", x.buffer, x.elements, x.width, (x,), rule)

    def _matmul_input(self, x: Value) -> Value:
        return x if self.autocast is None else self.cast(x, self.autocast)

    def _matmul_weight(self, weight: Value) -> Value:
        if self.autocast is None or weight.width == self.autocast:
            return weight
        if weight.local_elements < weight.elements:
            # Gathered from all ranks in the compute dtype already.
            return self.tape.operator(
                "gather",
                weight.buffer,
                weight.elements,
                self.autocast,
                (weight,),
                lambda gradient: (gradient,),
            )
        if id(weight) not in self._copies:
            copy = self.cast(weight, self.autocast)
            copy.buffer.line = WEIGHT_COPIES
            self._copies[id(weight)] = copy
        return self._copies[id(weight)]
