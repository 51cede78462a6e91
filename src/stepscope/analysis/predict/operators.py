"""What each operator of eager PyTorch makes, keeps for its backward, and makes there.

Written from what torch's operators do, and held against a count of every tensor in the tests.
"""

from __future__ import annotations

from collections.abc import Callable

from stepscope.analysis.predict.memory import Buffer
from stepscope.analysis.predict.tape import Tape, Value
from stepscope.records.memory import WEIGHT_COPIES

FLOAT32 = 4


class Operators:
    """The operators, on a tape. `autocast` is the width matrix products are cast to, or None."""

    def __init__(self, tape: Tape, autocast: int | None = None) -> None:
        self.tape = tape
        self.autocast = autocast
        self._copies: dict[int, Value] = {}
        self.read_beside: Callable[[Buffer, int], None] = lambda _, __: None
        """Told of a buffer that work beside the backward still reads."""
        self.hand_over: Callable[[Buffer, int], None] | None = None
        """Takes gradients of weights in the format of joined products, where somebody does."""
        # A stretch that runs again enters autocast for itself.
        tape.after_replay = self.leave_autocast

    def new(self, size: int) -> Buffer:
        return self.tape.memory.buffer(size)

    def leave_autocast(self) -> None:
        """Copies of weights live as long as the context, and as long as the graph keeps them."""
        self._copies.clear()

    def cast(self, x: Value, width: int) -> Value:
        if x.width == width:
            return x
        size = x.bytes
        return self.tape.operator(
            "cast", self.new(x.elements * width), x.elements, width, (x,),
            lambda _: (self.new(size),),
        )  # fmt: skip

    def linear(self, x: Value, weight: Value, outputs: int) -> Value:
        """x·Wᵀ; keeps both in the format of the product."""
        x, weight = self._for_product(x), self._weight_for_product(weight)
        rows = x.elements * outputs // weight.elements
        x_bytes, weight_bytes = x.bytes, weight.bytes
        return self.tape.operator(
            "matrix product", self.new(rows * outputs * x.width), rows * outputs, x.width,
            (x, weight),
            lambda _: (self.new(x_bytes), self.new(weight_bytes)),
            (x.buffer, weight.buffer),
        )  # fmt: skip

    def batched_product(self, a: Value, b: Value, elements: int) -> Value:
        a, b = self._for_product(a), self._for_product(b)
        a_bytes, b_bytes = a.bytes, b.bytes
        return self.tape.operator(
            "batched product", self.new(elements * a.width), elements, a.width, (a, b),
            lambda _: (self.new(a_bytes), self.new(b_bytes)),
            (a.buffer, b.buffer),
        )  # fmt: skip

    def add(self, a: Value, b: Value) -> Value:
        """In the wider format; the gradient of the narrower one is a copy."""
        width = max(a.width, b.width)

        def rule(gradient: Buffer) -> tuple[Buffer, Buffer]:
            first = gradient if a_width == width else self.new(elements * a_width)
            return first, gradient if b_width == width else self.new(elements * b_width)

        elements, a_width, b_width = a.elements, a.width, b.width
        return self.tape.operator("sum", self.new(elements * width), elements, width, (a, b), rule)

    def multiply(self, a: Value, b: Value) -> Value:
        """Elementwise, the smaller one spread over the larger: both gradients are made whole, then
        the smaller one's is summed."""
        elements, width = max(a.elements, b.elements), max(a.width, b.width)
        sizes = [(value.elements, value.width) for value in (a, b)]

        def rule(_: Buffer) -> list[Buffer]:
            grads = [self.new(elements * width) for _ in sizes]
            for place, (own, own_width) in enumerate(sizes):
                if (own, own_width) != (elements, width):
                    grads[place] = self.new(own * own_width)
            return grads

        return self.tape.operator(
            "product", self.new(elements * width), elements, width, (a, b), rule,
            (a.buffer, b.buffer),
        )  # fmt: skip

    def scaled(self, x: Value, name: str = "scale", saved: tuple[Buffer, ...] = ()) -> Value:
        """Any elementwise operator with one input whose backward makes one tensor."""
        size = x.bytes
        return self.tape.operator(
            name, self.new(size), x.elements, x.width, (x,), lambda _: (self.new(size),), saved
        )

    def keeps_input(self, x: Value, name: str) -> Value:
        return self.scaled(x, name, (x.buffer,))

    def keeps_output(self, x: Value, name: str) -> Value:
        out, size = self.new(x.bytes), x.bytes
        return self.tape.operator(
            name, out, x.elements, x.width, (x,), lambda _: (self.new(size),), (out,)
        )

    def mean_square(self, x: Value, rows: int) -> Value:
        """mean(x²) over the last dimension: the squares are let go at once."""
        size, small = x.bytes, rows * x.width
        square = self.new(size)

        def backward_of_square(_: Buffer) -> tuple[Buffer]:
            # gradient · (2 · x): temporaries of one C++ expression die together.
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
        return self.keeps_output(self.scaled(x, "shift"), "inverse root")

    def around(self, x: Value, before: Callable[[], None]) -> Value:
        """The same value; `before` is done when the backward comes to it."""

        def rule(gradient: Buffer) -> tuple[Buffer]:
            before()
            return (gradient,)

        return self.tape.operator("ranks", x.buffer, x.elements, x.width, (x,), rule)

    def _for_product(self, x: Value) -> Value:
        return x if self.autocast is None else self.cast(x, self.autocast)

    def _weight_for_product(self, weight: Value) -> Value:
        if self.autocast is None or weight.width == self.autocast:
            return weight
        if weight.kept < weight.elements:
            # Gathered from all ranks in the format of the product already.
            return self.tape.operator(
                "gather", weight.buffer, weight.elements, self.autocast, (weight,),
                lambda gradient: (gradient,),
            )  # fmt: skip
        if id(weight) not in self._copies:
            copy = self.cast(weight, self.autocast)
            copy.buffer.line = WEIGHT_COPIES
            self._copies[id(weight)] = copy
        return self._copies[id(weight)]
