"""FlashAttention-2 forward in Triton: one pass over the keys, the softmax made online in base 2.

B batch, H query heads, G query heads to a key head, M query rows, N key rows, D head dimension.
A program computes one tile of query rows of one head. A row sees key j iff j <= row + shift.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepscope.attention.triton.memory import (
    add_dot,
    in_registers,
    keys_of,
    load_tile,
    outer_dot,
    store_tile,
    tile_of_program,
    zeros,
)
from stepscope.attention.triton.softmax import base_of, exponential, shared_by


@triton.jit
def _advance(
    acc, acc_e, top, total, query, k, k_e, v, v_e, k_strides, v_strides,
    batch, key_head, row, start, stop, factor, B, N, D, shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Take the keys from start to stop into the running softmax of a query tile.

    `top` is the highest raw score of each row so far. EXACT takes the difference to it before the
    factor: one more operation for each score, no rounding at the size of the scores.
    """
    for n in tl.range(start, stop, BLOCK_N):
        key = load_tile(
            k, k_e, k_strides, batch, key_head, n, N, D, B,
            BLOCK_N, BLOCK_D, BLOCK_E, PLANES, MASKED, TMA,
        )  # fmt: skip
        scores = outer_dot(query, key, BLOCK_E, PLANES, PRECISION)
        if MASKED:
            j = n + tl.arange(0, BLOCK_N)
            seen = (j < N)[None, :]
            if CAUSAL:
                i = row + tl.arange(0, BLOCK_M)
                seen = seen & (j[None, :] <= i[:, None] + shift)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = higher
        if MASKED:
            # A row that has seen no key yet: any finite base keeps -inf - base from being NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        if EXACT:
            p = exponential((scores - base[:, None]) * factor, EXACT)
        else:
            p = exponential(scores * factor - (base * factor)[:, None], EXACT)
        shrink = exponential((top - base) * factor, EXACT)
        total = total * shrink + tl.sum(p, 1)
        value = load_tile(
            v, v_e, v_strides, batch, key_head, n, N, D, B,
            BLOCK_N, BLOCK_D, BLOCK_E, PLANES, MASKED, TMA,
        )  # fmt: skip
        acc = acc * shrink[:, None]
        if BLOCK_E > 0:
            acc_e = acc_e * shrink[:, None]
        acc, acc_e = add_dot(acc, acc_e, p, value, BLOCK_E, PLANES, PRECISION)
        top = higher
    return acc, acc_e, top, total


@triton.jit
def forward_kernel(
    q, k, v, q_e, k_e, v_e, o, lse, scale,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, o_stride_b, o_stride_h, o_stride_m,
    B, H, G, M, N, D, shift, n_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    HOLD: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, bh = tile_of_program(n_tiles, GROUP, CAUSAL)
    batch, head = bh // H, bh % H
    key_head = head // G
    row = tile * BLOCK_M
    k_strides = (k_stride_b, k_stride_h, k_stride_n)
    v_strides = (v_stride_b, v_stride_h, v_stride_n)
    query = load_tile(
        q, q_e, (q_stride_b, q_stride_h, q_stride_m), batch, head, row, M, D, B,
        BLOCK_M, BLOCK_D, BLOCK_E, PLANES, True, TMA,
    )  # fmt: skip
    query = in_registers(query, o, HOLD)
    factor = base_of(scale, EXACT)
    full, stop = keys_of(row, N, shift, BLOCK_M, BLOCK_N, CAUSAL)

    acc, acc_e = zeros(BLOCK_M, BLOCK_D, BLOCK_E)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # The masked loop comes second: first, it makes the compiler serialise the matrix products.
    acc, acc_e, top, total = _advance(
        acc, acc_e, top, total, query, k, k_e, v, v_e, k_strides, v_strides,
        batch, key_head, row, 0, full, factor, B, N, D, shift,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, CAUSAL, False, TMA, PRECISION, EXACT,
    )  # fmt: skip
    acc, acc_e, top, total = _advance(
        acc, acc_e, top, total, query, k, k_e, v, v_e, k_strides, v_strides,
        batch, key_head, row, full, stop, factor, B, N, D, shift,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, CAUSAL, True, TMA, PRECISION, EXACT,
    )  # fmt: skip

    # A row that sees no key has total 0: its output is zero, its log-sum-exp minus infinity.
    store_tile(
        o, shared_by(acc, total[:, None], EXACT), shared_by(acc_e, total[:, None], EXACT),
        (o_stride_b, o_stride_h, o_stride_m),
        batch, head, row, M, D, BLOCK_M, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    i = row + tl.arange(0, BLOCK_M)
    tl.store(lse + bh.to(tl.int64) * M + i, top * scale + tl.math.log(total), mask=i < M)
