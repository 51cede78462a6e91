"""Memory of the fused layers, with separate or fused projections: buffers created and saved.

A kernel allocates only its outputs, so one operator here is an entire part of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stepscope.analysis.predict.layers import Layers
from stepscope.analysis.predict.memory import Buffer
from stepscope.analysis.predict.operators import FLOAT32
from stepscope.analysis.predict.tape import Value
from stepscope.kernels.activation_policy import ALL, INPUTS, NORMS
from stepscope.kernels.triton import launches
from stepscope.records.memory import WEIGHT_COPIES


class Normed(NamedTuple):
    """Input of a matmul, and the unit rows from which it can be recomputed."""

    value: Value
    unit: Buffer | None = None
    is_saved: bool = False
    """The operator that computed it saves it."""


class FusedLayers(Layers):
    """Layers with fused kernels between PyTorch's matmuls."""

    processors = 132
    """Streaming multiprocessors of the device: a norm's backward has a partial sum per program."""

    def norm(self, x: Value, weight: Value) -> Value:
        return self.normed_sum(x, None, weight)[1].value

    def normed_sum(
        self, x: Value, branch: Value | None, weight: Value, units: bool = False
    ) -> tuple[Value, Normed]:
        """Return x plus the branch, if any, and its norm in the compute dtype."""
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
            ops.read_by_side_stream(partial, partial_bytes)
            return (grad_sum, *([grad_branch] if added else []), grad_weight)

        added = branch is not None
        outputs = ops.tape.joint_operator(
            "norm",
            [(normed, elements, width), *([(stream, elements, stream_width)] if added else [])],
            (x, weight) if branch is None else (x, branch, weight),
            rule,
            (stream if unit is None else unit, inverse),
        )
        return outputs[1] if added else x, Normed(outputs[0], unit)

    def _partial_bytes(self) -> int:
        d, rows = self.shape.d_model, self.shape.tokens
        programs = launches.PROGRAMS_INTERPRETED
        if self.on_cuda:
            programs = self.processors * launches.norm_backward(d).per_processor
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
            "gate",
            ops.new(size),
            gate.elements,
            gate.width,
            (gate, up),
            lambda _: (ops.new(size), ops.new(size)),
            (gate.buffer, up.buffer),
        )

    def _rotate(self, x: Value) -> Value:
        """Rotate in place."""
        size = x.bytes
        return self.ops.tape.operator(
            "rotation", x.buffer, x.elements, x.width, (x,), lambda _: (self.ops.new(size),)
        )

    def _output_needs_no_copy(self, heads: Value) -> bool:  # noqa: ARG002
        """Heads are views of a projection, and attention returns the layout of its queries."""
        return True


class FusedProjectionLayers(FusedLayers):
    """One matmul for projections that read the same input, from stored copies of the weights."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._copies: dict[tuple[int, ...], tuple[Buffer, ...]] = {}

    def narrow(self, weights: Sequence[Value], padding: int = 0) -> tuple[Buffer, ...]:
        """Return what matmuls read: one copy with all rows and so many further elements, or the
        weights themselves."""
        width = self.ops.autocast
        if width is None or all(weight.width == width for weight in weights):
            return tuple(weight.buffer for weight in weights)
        key = tuple(map(id, weights))
        if key not in self._copies:
            size = (sum(weight.elements for weight in weights) + padding) * width
            self._copies[key] = (self.ops.tape.memory.buffer(size, WEIGHT_COPIES),)
        return self._copies[key]

    def fused_block(
        self, x: Value, branch: Value | None, weights: Sequence[Value], policy: str
    ) -> tuple[Value, Value]:
        """Apply a block to a stream whose last branch is not yet added; return such a stream."""
        tape = self.ops.tape
        first_norm, query, key, value, output, second_norm, w1, w2, w3 = weights
        with tape.inside("norm"):
            x, read = self._matmul_input(x, branch, first_norm, policy)
        branch = self._fused_qkv_attention(read, (query, key, value), output)
        with tape.inside("norm"):
            x, read = self._matmul_input(x, branch, second_norm, policy)
        with tape.inside("feed-forward"):
            return x, self._fused_feed_forward(read, w1, w3, w2, policy)

    def _matmul_input(
        self, x: Value, branch: Value | None, weight: Value, policy: str
    ) -> tuple[Value, Normed]:
        stream, normed = self.normed_sum(x, branch, weight, units=policy != ALL)
        return stream, Normed(normed.value) if policy == NORMS else normed

    def _fused_qkv_attention(self, x: Normed, weights: Sequence[Value], output: Value) -> Value:
        tape = self.ops.tape
        with tape.inside("projections"):
            parts = self.matmul(x, weights)
        with tape.inside("rotary"):
            q, k, v = self._rotated_parts(parts)
        with tape.inside("attention"):
            attend = self._naive_attention if self.saves_scores else self._flash_attention
            heads = attend(q, k, v)
        with tape.inside("projections"):
            return self.matmul(Normed(heads, is_saved=True), (output,))

    def matmul(self, x: Normed, weights: Sequence[Value]) -> Value:
        """Return x times each transposed weight, concatenated."""
        ops, read = self.ops, x.value
        d, width = self.shape.d_model, read.width
        narrow = self.narrow(weights)
        rows = sum(weight.elements for weight in weights) // d
        elements = read.elements // d * rows
        read_elements, recomputes = read.elements, x.unit is not None

        def rule(_: Buffer) -> list[Buffer | None]:
            recomputed = ops.new(read_elements * width) if recomputes else None
            grad_x = ops.new(read_elements * width)
            grads = self._weight_gradients(weights, width, elements, read_elements)
            del recomputed
            return [grad_x, *grads]

        return ops.tape.operator(
            "matmul",
            ops.new(elements * width),
            elements,
            width,
            (read, *weights),
            rule,
            (read.buffer if x.unit is None else x.unit, *narrow),
        )

    def _weight_gradients(
        self, weights: Sequence[Value], width: int, *factors: int
    ) -> list[Buffer | None]:
        """Return slices of one gradient in the weights' dtype; a CPU casts both factors first.

        An optimizer that uses gradients as they are produced gets them in the compute dtype.
        """
        ops, weight_width = self.ops, weights[0].width
        elements = sum(weight.elements for weight in weights)
        if ops.on_weight_gradient is not None and width != weight_width:
            gradient = ops.new(elements * width)
            for weight in weights:
                ops.on_weight_gradient(gradient, weight.elements * width)
            return [None] * len(weights)
        widens = width != weight_width and not self.on_cuda
        wide = [ops.new(elements * weight_width) for elements in factors if widens]
        gradient = ops.new(elements * weight_width)
        del wide
        return [gradient] * len(weights)

    def _rotated_parts(self, parts: Value) -> tuple[Value, ...]:
        ops, size = self.ops, parts.bytes
        part = (parts.buffer, parts.elements // 3, parts.width)
        return ops.tape.joint_operator(
            "rotation", (part,) * 3, (parts,), lambda _: (ops.new(size),)
        )

    def _fused_feed_forward(self, x: Normed, w1: Value, w3: Value, w2: Value, policy: str) -> Value:
        ops, read = self.ops, x.value
        first, second = self.narrow((w1, w3)), self.narrow((w2,))
        elements, width, hidden = read.elements, read.width, self.shape.tokens * self.shape.d_ff
        gates, gated = ops.new(2 * hidden * width), ops.new(hidden * width)
        out = ops.new(elements * width)
        saved = {ALL: (gates, gated), INPUTS: ()}.get(policy, (gates,))
        recomputes = x.unit is not None

        def rule(_: Buffer) -> list[Buffer | None]:
            recomputed = ops.new(elements * width) if recomputes else None
            grad_gated = ops.new(hidden * width)
            gates = ops.new(2 * hidden * width) if policy == INPUTS else None
            gated = ops.new(hidden * width) if policy != ALL else None
            # Recomputed gates are overwritten by their gradient.
            grad_gates = gates or ops.new(2 * hidden * width)
            grad_x = ops.new(elements * width)
            of_second = self._weight_gradients((w2,), width, elements, hidden)
            of_first = self._weight_gradients((w1, w3), width, 2 * hidden, elements)
            del recomputed, grad_gated, gated, grad_gates
            return [grad_x, *of_first, *of_second]

        return ops.tape.operator(
            "feed-forward",
            out,
            elements,
            width,
            (read, w1, w3, w2),
            rule,
            (read.buffer if x.unit is None else x.unit, *first, *second, *saved),
        )
