"""Memory of fused projections in FP8: what the casts create, and what is saved for backward.

A tensor is cast into rows for one GEMM and columns for another, one byte per value each; weights
are transposed in the backward pass. Layers for which FP8 does not pay stay as they are. Scales and
partial maxima, a few bytes per row, are left out.
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
        copy = self._quantized(weights)
        elements, read_elements = read.elements // d * rows, read.elements
        cast_rows = ops.new(read_elements)
        # Unit rows of a norm are saved anyway, and so is the output of attention.
        source = x.unit or (read.buffer if x.is_saved else None)
        kept = source or ops.new(read_elements)
        out = ops.new(elements * width)
        del cast_rows
        from_unit, from_source = x.unit is not None, source is not None

        def rule(_: Buffer) -> list[Buffer | None]:
            casts = [ops.new(elements) for _ in range(2)]
            transposed = ops.new(copy.requested)
            grad_x = ops.new(read_elements * width)
            del transposed
            columns = self._cast_again(from_unit, read_elements, width) if from_source else None
            grads = self._weight_gradients(weights, width)
            del casts, columns
            return [grad_x, *grads]

        return ops.tape.operator(
            "matmul", out, elements, width, (read, *weights), rule, (kept, copy)
        )

    def _fused_feed_forward(self, x: Normed, w1: Value, w3: Value, w2: Value, policy: str) -> Value:
        shape, ops, read = self.shape, self.ops, x.value
        both = self._takes(shape.d_model, 2 * shape.d_ff), self._takes(shape.d_ff, shape.d_model)
        if not all(both):
            return super()._fused_feed_forward(x, w1, w3, w2, policy)
        first, second = self._quantized((w1, w3)), self._quantized((w2,))
        elements, width, hidden = read.elements, read.width, shape.tokens * shape.d_ff
        recomputes = policy == INPUTS
        from_unit = x.unit is not None
        cast_rows = ops.new(elements)
        # Rows serve the recomputed matmul, and transposed the gradient of the weights.
        kept = x.unit or (cast_rows if recomputes else ops.new(elements))
        gates, gated = ops.new(2 * hidden * width), ops.new(hidden * width)
        gated_rows = ops.new(hidden)
        gated_columns = ops.new(hidden) if policy == ALL else None
        out = ops.new(elements * width)
        saved = [kept, first, second]
        saved += [] if recomputes else [gates]
        saved += [] if gated_columns is None else [gated_columns]
        del cast_rows, kept, gates, gated, gated_rows, gated_columns

        def rule(_: Buffer) -> list[Buffer | None]:
            casts = [ops.new(elements) for _ in range(2)]
            transposed = ops.new(second.requested)
            grad_gated = ops.new(hidden * width)
            del transposed
            columns = again = None
            if recomputes:
                # The rows, and the columns for the gradient of the weights.
                rows = self._cast_again(from_unit, elements, width) if from_unit else None
                columns = ops.new(elements)
                again = ops.new(2 * hidden * width)
                del rows
            gated = ops.new(hidden * width) if policy != ALL else None
            grad_gates = again or ops.new(2 * hidden * width)
            del again, grad_gated
            gated_columns = ops.new(hidden) if policy != ALL else None
            del gated
            of_second = self._weight_gradients((w2,), width)
            del casts, gated_columns
            rows, casts = ops.new(2 * hidden), [ops.new(2 * hidden)]
            del grad_gates
            transposed = ops.new(first.requested)
            grad_x = ops.new(elements * width)
            del rows, transposed
            if columns is None and from_unit:
                columns = self._cast_again(from_unit, elements, width)
            of_first = self._weight_gradients((w1, w3), width)
            del casts, columns
            return [grad_x, *of_first, *of_second]

        return ops.tape.operator(
            "feed-forward", out, elements, width, (read, w1, w3, w2), rule, saved
        )

    def _takes(self, d_in: int, d_out: int) -> bool:
        """Return whether a layer of this shape runs in FP8, by the rule of the model."""
        tokens = self.shape.tokens
        refused = shape_refused(tokens, d_in, d_out)
        return refused is None and choice.not_worth_it(tokens, d_in, d_out, DEFAULT) is None

    def _quantized(self, weights: Sequence[Value]) -> Buffer:
        """Return the rows of weights in FP8, cached from step to step."""
        key = tuple(map(id, weights))
        if key not in self._copies:
            size = sum(weight.elements for weight in weights)
            self._copies[key] = (self.ops.tape.memory.buffer(size, WEIGHT_COPIES),)
        return self._copies[key][0]

    def _cast_again(self, from_unit: bool, elements: int, width: int) -> Buffer:
        """Return an input in FP8, cast from what another operation has saved: unit rows, which are
        multiplied by the norm's weight first, or the input itself."""
        restored = self.ops.new(elements * width) if from_unit else None
        out = self.ops.new(elements)
        del restored
        return out
