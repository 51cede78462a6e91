"""Memory of the layers of `stepscope.model`: the same operators in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.analysis.predict.memory import Buffer
from stepscope.analysis.predict.operators import FLOAT32, Operators
from stepscope.analysis.predict.tape import Value
from stepscope.attention.registry import implementation


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one layer over one batch."""

    batch: int
    context: int
    d_model: int
    d_ff: int
    heads: int

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def scores(self) -> int:
        return self.batch * self.heads * self.context**2


class Layers:
    """Norm, attention and feed-forward; `device` and `written_out` change the operators."""

    def __init__(
        self, ops: Operators, shape: Shape, attention: str, device: str, written_out: bool
    ) -> None:
        self.ops = ops
        self.shape = shape
        self.attention_name = attention
        self.saves_scores = implementation(attention).saves_scores
        self.on_cuda = device == "cuda"
        self.written_out = written_out
        """Softmax and SiLU as elementary operators, as in the course's reference model."""

    def block(self, x: Value, weights: Sequence[Value]) -> Value:
        tape = self.ops.tape
        first_norm, query, key, value, output, second_norm, w1, w2, w3 = weights
        with tape.inside("norm"):
            read = self.norm(x, first_norm)
        x = self.ops.add(x, self.attention(read, query, key, value, output))
        with tape.inside("norm"):
            read = self.norm(x, second_norm)
        with tape.inside("feed-forward"):
            return self.ops.add(x, self.feed_forward(read, w1, w2, w3))

    def norm(self, x: Value, weight: Value) -> Value:
        ops = self.ops
        wide = ops.cast(x, FLOAT32)
        inverse = ops.inverse_root(ops.mean_square(wide, self.shape.tokens))
        return ops.cast(ops.multiply(ops.multiply(wide, inverse), weight), x.width)

    def feed_forward(self, x: Value, w1: Value, w2: Value, w3: Value) -> Value:
        ops, d_ff = self.ops, self.shape.d_ff
        hidden = ops.multiply(self._gate(x, w1), ops.linear(x, w3, d_ff))
        return ops.linear(hidden, w2, self.shape.d_model)

    def _gate(self, x: Value, w1: Value) -> Value:
        gate = self.ops.linear(x, w1, self.shape.d_ff)
        if self.written_out:
            return self.ops.multiply(gate, self.ops.saves_output(gate, "sigmoid"))
        return self.ops.saves_input(gate, "SiLU")

    def attention(self, x: Value, query: Value, key: Value, value: Value, output: Value) -> Value:
        ops, d_model = self.ops, self.shape.d_model
        with ops.tape.inside("projections"):
            q, k, v = (ops.linear(x, weight, d_model) for weight in (query, key, value))
        with ops.tape.inside("rotary"):
            q, k = self._rotate(q), self._rotate(k)
        with ops.tape.inside("attention"):
            attend = self._naive_attention if self.saves_scores else self._flash_attention
            heads = attend(q, k, v)
        with ops.tape.inside("projections"):
            merged = heads if self._output_needs_no_copy(heads) else ops.scaled(heads, "copy")
            return ops.linear(merged, output, d_model)

    def _rotate(self, x: Value) -> Value:
        ops = self.ops
        wide = ops.cast(x, FLOAT32)
        half = wide.bytes // 2

        def rotated_pair() -> Buffer:
            first, second = ops.new(half), ops.new(half)
            out = ops.new(half)
            del first, second
            return out

        size = wide.bytes

        def rule(_: Buffer) -> tuple[Buffer]:
            parts = [ops.new(half) for _ in range(3)]
            out = ops.new(size)
            second = ops.new(size)
            del parts, second
            return (out,)

        left, right = rotated_pair(), rotated_pair()
        rotated = ops.tape.operator(
            "rotation", ops.new(size), wide.elements, FLOAT32, (wide,), rule
        )
        del left, right
        return ops.cast(rotated, x.width)

    def _naive_attention(self, q: Value, k: Value, v: Value) -> Value:
        ops, shape = self.ops, self.shape
        scores = ops.batched_matmul(q, k, shape.scores)
        scores = ops.scaled(scores, "scale")
        everything = ops.new(shape.context**2)
        mask = ops.new(shape.context**2)
        del everything
        scores = ops.scaled(scores, "mask", (mask,))
        weights = self._softmax(scores)
        narrow = ops.cast(weights, q.width) if weights.width != q.width else weights
        return ops.batched_matmul(narrow, ops.scaled(v, "copy"), q.elements)

    def _softmax(self, scores: Value) -> Value:
        ops = self.ops
        # Autocast on CUDA runs softmax in float32; autocast on the CPU does not.
        in_float32 = ops.autocast is not None and self.on_cuda
        if not self.written_out:
            return self._fused_softmax(ops.cast(scores, FLOAT32) if in_float32 else scores)
        shifted = ops.scaled(scores, "shift")
        raised = ops.saves_output(
            ops.cast(shifted, FLOAT32) if in_float32 else shifted, "exponential"
        )
        del shifted
        rows = scores.elements // self.shape.context
        total = ops.tape.operator(
            "row sums",
            ops.new(rows * raised.width),
            rows,
            raised.width,
            (raised,),
            lambda _: (None,),
        )
        return ops.multiply(raised, total)

    def _fused_softmax(self, scores: Value) -> Value:
        ops, size = self.ops, scores.bytes

        def rule(_: Buffer) -> tuple[Buffer]:
            # The CUDA kernel multiplies gradient and output before it starts.
            product = ops.new(size) if self.on_cuda else None
            out = ops.new(size)
            del product
            return (out,)

        out = ops.new(size)
        return ops.tape.operator(
            "softmax", out, scores.elements, scores.width, (scores,), rule, (out,)
        )

    def _flash_attention(self, q: Value, k: Value, v: Value) -> Value:
        """Saves q, k, v, the output and the log-sum-exp of each row."""
        ops, size = self.ops, q.bytes
        out = ops.new(size)
        log_sum_exp = ops.new(self.shape.scores // self.shape.context * FLOAT32)
        rows = log_sum_exp.requested

        def rule(_: Buffer) -> list[Buffer]:
            delta, accumulated = ops.new(rows), ops.new(size // q_width * FLOAT32)
            grads = [ops.new(size) for _ in range(3)]
            del delta, accumulated
            return grads

        q_width = q.width
        return ops.tape.operator(
            "flash",
            out,
            q.elements,
            q.width,
            (q, k, v),
            rule,
            (q.buffer, k.buffer, v.buffer, out, log_sum_exp),
        )

    def _output_needs_no_copy(self, heads: Value) -> bool:
        """PyTorch's memory-efficient kernel, its choice for float32 on CUDA, writes the layout that
        the output projection reads."""
        if not self.on_cuda:
            return False
        name = self.attention_name
        return name == "sdpa_efficient" or (name in ("sdpa", "auto") and heads.width == FLOAT32)
