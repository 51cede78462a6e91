"""Memory of fused projections in FP8: what the casts create, and what is saved for backward.

A tensor is cast into rows for one GEMM and columns for another, one byte per value each. Layers for
which FP8 does not pay stay as they are. Scales and partial maxima, a few bytes per row, are left
out.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.predict.fused_layers import FusedProjectionLayers, Normed
from stepscope.analysis.predict.memory import Buffer
from stepscope.analysis.predict.tape import Value
from stepscope.kernels.activation_policy import ALL, INPUTS
from stepscope.kernels.fp8 import choice
from stepscope.kernels.fp8.recipe import DEFAULT, shape_refused
from stepscope.records.memory import WEIGHT_COPIES


class Fp8ProjectionLayers(FusedProjectionLayers):
    """Fused projections with FP8 GEMMs by the default recipe, where they are predicted to gain."""

    def matmul(self, x: Normed, weights: Sequence[Value]) -> Value:
        ops, read = self.ops, x.value
        d, width = self.shape.d_model, read.width
        rows = sum(weight.elements for weight in weights) // d
        if not self._takes(d, rows):
            return super().matmul(x, weights)
        copies = self._quantized(weights)
        elements, read_elements = read.elements // d * rows, read.elements
        recomputes = x.unit is not None
        cast_rows = ops.new(read_elements)
        columns = None if recomputes else ops.new(read_elements)
        out = ops.new(elements * width)
        del cast_rows

        def rule(_: Buffer) -> list[Buffer | None]:
            casts = [ops.new(elements) for _ in range(2)]
            grad_x = ops.new(read_elements * width)
            restored = self._restored(recomputes, read_elements, width)
            grads = self._weight_gradients(weights, width)
            del casts, restored
            return [grad_x, *grads]

        kept = x.unit if columns is None else columns
        assert kept is not None
        return ops.tape.operator(
            "matmul", out, elements, width, (read, *weights), rule, (kept, *copies)
        )

    def _fused_feed_forward(self, x: Normed, w1: Value, w3: Value, w2: Value, policy: str) -> Value:
        shape, ops, read = self.shape, self.ops, x.value
        both = self._takes(shape.d_model, 2 * shape.d_ff), self._takes(shape.d_ff, shape.d_model)
        if not all(both):
            return super()._fused_feed_forward(x, w1, w3, w2, policy)
        first, second = self._quantized((w1, w3)), self._quantized((w2,))
        elements, width, hidden = read.elements, read.width, shape.tokens * shape.d_ff
        recomputes = x.unit is not None
        cast_rows = ops.new(elements)
        columns = None if recomputes else ops.new(elements)
        gates, gated = ops.new(2 * hidden * width), ops.new(hidden * width)
        gated_rows = ops.new(hidden)
        gated_columns = ops.new(hidden) if policy == ALL else None
        out = ops.new(elements * width)
        kept = x.unit if columns is None else columns
        assert kept is not None
        of_gates = (cast_rows,) if policy == INPUTS else (gates,)
        saved = (kept, *of_gates, *(() if gated_columns is None else (gated_columns,)))
        del cast_rows, columns, gates, gated, gated_rows, gated_columns, of_gates

        def rule(_: Buffer) -> list[Buffer | None]:
            casts = [ops.new(elements) for _ in range(2)]
            grad_gated = ops.new(hidden * width)
            again = ops.new(2 * hidden * width) if policy == INPUTS else None
            gated = ops.new(hidden * width) if policy != ALL else None
            grad_gates = again or ops.new(2 * hidden * width)
            casts += [ops.new(2 * hidden) for _ in range(2)]
            grad_x = ops.new(elements * width)
            casts += [ops.new(hidden)] if policy != ALL else []
            of_second = self._weight_gradients((w2,), width)
            restored = self._restored(recomputes, elements, width)
            of_first = self._weight_gradients((w1, w3), width)
            del casts, grad_gated, again, gated, grad_gates, restored
            return [grad_x, *of_first, *of_second]

        return ops.tape.operator(
            "feed-forward",
            out,
            elements,
            width,
            (read, w1, w3, w2),
            rule,
            (*saved, *first, *second),
        )

    def _takes(self, d_in: int, d_out: int) -> bool:
        """Return whether a layer of this shape runs in FP8, by the rule of the model."""
        tokens = self.shape.tokens
        refused = shape_refused(tokens, d_in, d_out)
        return refused is None and choice.not_worth_it(tokens, d_in, d_out, DEFAULT) is None

    def _quantized(self, weights: Sequence[Value]) -> tuple[Buffer, ...]:
        """Return the rows and columns of weights in FP8, cached from step to step."""
        key = tuple(map(id, weights))
        if key not in self._copies:
            size = sum(weight.elements for weight in weights)
            memory = self.ops.tape.memory
            self._copies[key] = tuple(memory.buffer(size, WEIGHT_COPIES) for _ in range(2))
        return self._copies[key]

    def _restored(self, recomputes: bool, elements: int, width: int) -> list[Buffer]:
        """Return what a saved norm is restored to: the input, and its columns in FP8."""
        if not recomputes:
            return []
        return [self.ops.new(elements * width), self.ops.new(elements)]
