"""The fused and the joined layers of `stepscope.model` in sizes: what `model.kernels` makes, keeps.

A kernel makes what it returns and nothing else, so an operator here is a whole piece of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stepscope.analysis.predict.layers import Layers
from stepscope.analysis.predict.memory import Buffer
from stepscope.analysis.predict.operators import FLOAT32
from stepscope.analysis.predict.tape import Value
from stepscope.kernels.activation_policy import ALL, INPUTS, NORMS
from stepscope.records.memory import WEIGHT_COPIES

WARPS_TO_A_PROCESSOR = 32
PROGRAMS_INTERPRETED = 4


class Normed(NamedTuple):
    """What a product reads, and the unit rows that it can be made of again."""

    value: Value
    unit: Buffer | None = None


class FusedLayers(Layers):
    """Kernels between the products of torch."""

    processors = 132
    """Of the device: a norm's backward has a partial sum for each program."""

    def norm(self, x: Value, weight: Value) -> Value:
        return self.normed_sum(x, None, weight)[1].value

    def normed_sum(
        self, x: Value, branch: Value | None, weight: Value, units: bool = False
    ) -> tuple[Value, Normed]:
        """x with the branch, where there is one, and its norm in the format of the products."""
        ops, elements = self.ops, x.elements
        width = ops.autocast or x.width
        stream_width = max(x.width, branch.width) if branch is not None else x.width
        branch_width = branch.width if branch is not None else stream_width
        stream = x.buffer if branch is None else ops.new(elements * stream_width)
        normed = ops.new(elements * width)
        unit = ops.new(elements * width) if units else None
        inverse = ops.new(self.shape.tokens * FLOAT32)
        partial_bytes, weight_bytes = self._partial_bytes(), weight.bytes

        def rule(_: dict[int, Buffer]) -> tuple[Buffer, ...]:
            grad_sum = ops.new(elements * stream_width)
            split = branch_width != stream_width
            grad_branch = ops.new(elements * branch_width) if split else grad_sum
            partial = ops.new(partial_bytes)
            grad_weight = ops.new(weight_bytes)
            ops.read_beside(partial, partial_bytes)
            return (grad_sum, *([grad_branch] if added else []), grad_weight)

        added = branch is not None
        made = ops.tape.joint_operator(
            "norm",
            [(normed, elements, width), *([(stream, elements, stream_width)] if added else [])],
            (x, weight) if branch is None else (x, branch, weight),
            rule,
            (stream if unit is None else unit, inverse),
        )
        return made[1] if added else x, Normed(made[0], unit)

    def _partial_bytes(self) -> int:
        d, rows = self.shape.d_model, self.shape.tokens
        programs = PROGRAMS_INTERPRETED
        if self.on_cuda:
            block = 1 << (d - 1).bit_length()
            programs = self.processors * (WARPS_TO_A_PROCESSOR // min(16, max(4, block // 256)))
        return -(-rows // -(-rows // programs)) * d * FLOAT32

    def block(self, x: Value, weights: Sequence[Value]) -> Value:
        tape = self.ops.tape
        first_norm, query, key, value, output, second_norm, w1, w2, w3 = weights
        with tape.inside("norm"):
            read = self.norm(x, first_norm)
        branch = self.attention(read, query, key, value, output)
        with tape.inside("norm"):
            x, normed = self.normed_sum(x, branch, second_norm)
            read = normed.value
            del normed
        with tape.inside("feed-forward"):
            return self.ops.add(x, self.feed_forward(read, w1, w2, w3))

    def feed_forward(self, x: Value, w1: Value, w2: Value, w3: Value) -> Value:
        ops, d_ff = self.ops, self.shape.d_ff
        return ops.linear(
            self._gated(ops.linear(x, w1, d_ff), ops.linear(x, w3, d_ff)), w2, self.shape.d_model
        )

    def _gated(self, gate: Value, up: Value) -> Value:
        ops, size = self.ops, gate.bytes
        return ops.tape.operator(
            "gate", ops.new(size), gate.elements, gate.width, (gate, up),
            lambda _: (ops.new(size), ops.new(size)), (gate.buffer, up.buffer),
        )  # fmt: skip

    def _rotate(self, x: Value) -> Value:
        """Where it lies."""
        size = x.bytes
        return self.ops.tape.operator(
            "rotation", x.buffer, x.elements, x.width, (x,), lambda _: (self.ops.new(size),)
        )

    def _output_joins_itself(self, heads: Value) -> bool:  # noqa: ARG002
        """Heads are views of a projection, and attention answers in the layout of its queries."""
        return True


class FusedProjectionLayers(FusedLayers):
    """One product where several read the same input, from copies of weights that are kept."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._copies: dict[tuple[int, ...], tuple[Buffer, ...]] = {}

    def narrow(self, weights: Sequence[Value]) -> tuple[Buffer, ...]:
        """What products read: one copy with all rows, or the weights themselves."""
        width = self.ops.autocast
        if width is None or all(weight.width == width for weight in weights):
            return tuple(weight.buffer for weight in weights)
        key = tuple(map(id, weights))
        if key not in self._copies:
            size = sum(weight.elements for weight in weights) * width
            self._copies[key] = (self.ops.tape.memory.buffer(size, WEIGHT_COPIES),)
        return self._copies[key]

    def joined_block(
        self, x: Value, branch: Value | None, weights: Sequence[Value], keep: str
    ) -> tuple[Value, Value]:
        """On a stream whose last branch is not yet added; gives such a stream."""
        tape = self.ops.tape
        first_norm, query, key, value, output, second_norm, w1, w2, w3 = weights
        with tape.inside("norm"):
            x, read = self._for_products(x, branch, first_norm, keep)
        branch = self._joined_attention(read, (query, key, value), output)
        with tape.inside("norm"):
            x, read = self._for_products(x, branch, second_norm, keep)
        with tape.inside("feed-forward"):
            return x, self._joined_feed_forward(read, w1, w3, w2, keep)

    def _for_products(
        self, x: Value, branch: Value | None, weight: Value, keep: str
    ) -> tuple[Value, Normed]:
        stream, normed = self.normed_sum(x, branch, weight, units=keep != ALL)
        return stream, Normed(normed.value) if keep == NORMS else normed

    def _joined_attention(self, x: Normed, weights: Sequence[Value], output: Value) -> Value:
        tape = self.ops.tape
        with tape.inside("projections"):
            parts = self.product(x, weights)
        with tape.inside("rotary"):
            q, k, v = self._rotated_parts(parts)
        with tape.inside("attention"):
            heads = self._scores_form(q, k, v) if self.saves_scores else self._flash_form(q, k, v)
        with tape.inside("projections"):
            return self.product(Normed(heads), (output,))

    def product(self, x: Normed, weights: Sequence[Value]) -> Value:
        """x times each weight transposed, side by side."""
        ops, read = self.ops, x.value
        d, width = self.shape.d_model, read.width
        narrow = self.narrow(weights)
        rows = sum(weight.elements for weight in weights) // d
        elements = read.elements // d * rows
        read_elements, remade = read.elements, x.unit is not None

        def rule(_: Buffer) -> list[Buffer | None]:
            again = ops.new(read_elements * width) if remade else None
            grad_x = ops.new(read_elements * width)
            grads = self._weight_gradients(weights, width, elements, read_elements)
            del again
            return [grad_x, *grads]

        return ops.tape.operator(
            "matrix product", ops.new(elements * width), elements, width, (read, *weights), rule,
            (read.buffer if x.unit is None else x.unit, *narrow),
        )  # fmt: skip

    def _weight_gradients(
        self, weights: Sequence[Value], width: int, *factors: int
    ) -> list[Buffer | None]:
        """Parts of one, in the weights' format at once: a CPU brings both factors into that format
        first. Whoever takes them as they are made gets them in the products'."""
        ops, weight_width = self.ops, weights[0].width
        elements = sum(weight.elements for weight in weights)
        if ops.hand_over is not None and width != weight_width:
            made = ops.new(elements * width)
            for weight in weights:
                ops.hand_over(made, weight.elements * width)
            return [None] * len(weights)
        widens = width != weight_width and not self.on_cuda
        wide = [ops.new(elements * weight_width) for elements in factors if widens]
        made = ops.new(elements * weight_width)
        del wide
        return [made] * len(weights)

    def _rotated_parts(self, parts: Value) -> tuple[Value, ...]:
        ops, size = self.ops, parts.bytes
        part = (parts.buffer, parts.elements // 3, parts.width)
        return ops.tape.joint_operator(
            "rotation", (part,) * 3, (parts,), lambda _: (ops.new(size),)
        )

    def _joined_feed_forward(self, x: Normed, w1: Value, w3: Value, w2: Value, keep: str) -> Value:
        ops, read = self.ops, x.value
        first, second = self.narrow((w1, w3)), self.narrow((w2,))
        elements, width, hidden = read.elements, read.width, self.shape.tokens * self.shape.d_ff
        gates, gated = ops.new(2 * hidden * width), ops.new(hidden * width)
        out = ops.new(elements * width)
        held = {ALL: (gates, gated), INPUTS: ()}.get(keep, (gates,))
        remade = x.unit is not None

        def rule(_: Buffer) -> list[Buffer | None]:
            again = ops.new(elements * width) if remade else None
            grad_gated = ops.new(hidden * width)
            gates = ops.new(2 * hidden * width) if keep == INPUTS else None
            gated = ops.new(hidden * width) if keep != ALL else None
            # Gates that were made for this alone give their room to their gradient.
            grad_gates = gates or ops.new(2 * hidden * width)
            grad_x = ops.new(elements * width)
            of_second = self._weight_gradients((w2,), width, elements, hidden)
            of_first = self._weight_gradients((w1, w3), width, 2 * hidden, elements)
            del again, grad_gated, gated, grad_gates
            return [grad_x, *of_first, *of_second]

        return ops.tape.operator(
            "feed-forward", out, elements, width, (read, w1, w3, w2), rule,
            (read.buffer if x.unit is None else x.unit, *first, *second, *held),
        )  # fmt: skip
