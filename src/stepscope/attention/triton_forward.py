"""FlashAttention-2 forward in Triton: one pass over the keys, the softmax made online in base 2.

B batch, H query heads, G query heads to a key head, M query rows, N key rows, D head dimension.
A program computes one tile of query rows of one head. A row sees key j iff j <= row + SHIFT.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    source, batch, head, row, stride_b, stride_h, stride_r, rows, d,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows of one head as [BLOCK, BLOCK_D]; what lies outside of the tensor reads as zero."""
    if TMA:
        tile = source.load([batch, head, row, 0]).reshape([BLOCK, BLOCK_D])
    else:
        i = row + tl.arange(0, BLOCK)
        j = tl.arange(0, BLOCK_D)
        # 64-bit from the first product on: a head or a single row may lie past 2^31 elements.
        start = source + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        at = start + i.to(tl.int64)[:, None] * stride_r + j[None, :]
        inside = (j < d)[None, :]
        if CHECK_ROWS:
            inside = inside & (i < rows)[:, None]
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    target, tile, batch, head, row, stride_b, stride_h, stride_r, rows, d,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = row + tl.arange(0, BLOCK)
    j = tl.arange(0, BLOCK_D)
    start = target + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    at = start + i.to(tl.int64)[:, None] * stride_r + j[None, :]
    inside = (i < rows)[:, None] & (j < d)[None, :]
    tl.store(at, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def place(n_tiles, GROUP: tl.constexpr, LONGEST_LAST: tl.constexpr):
    """Which tile of which head a program works on.

    GROUP heads advance together, so that their keys stay in the cache. Under a causal mask the
    longest tiles come first: short ones then fill the gaps at the end.
    """
    pid = tl.program_id(0)
    per_group = n_tiles * GROUP
    within = pid % per_group
    head = pid // per_group * GROUP + within % GROUP
    tile = within // GROUP
    if LONGEST_LAST:
        tile = n_tiles - 1 - tile
    return tile, head


@triton.jit
def _advance(
    acc, top, total, q, k, v, batch, key_head, row, start, stop, base2,
    k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, N, D, shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Take the keys from start to stop into the running softmax of a query tile.

    `top` is the highest raw score of each row so far. EXACT takes the difference to it before the
    scale: one more operation for each score, no rounding at the size of the scores.
    """
    for n in tl.range(start, stop, BLOCK_N):
        key = load_tile(
            k, batch, key_head, n, k_stride_b, k_stride_h, k_stride_n, N, D,
            BLOCK_N, BLOCK_D, MASKED, TMA,
        )  # fmt: skip
        scores = tl.dot(q, key.T, input_precision=PRECISION)
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
            p = tl.math.exp2((scores - base[:, None]) * base2)
        else:
            p = tl.math.exp2(scores * base2 - (base * base2)[:, None])
        shrink = tl.math.exp2((top - base) * base2)
        total = total * shrink + tl.sum(p, 1)
        value = load_tile(
            v, batch, key_head, n, v_stride_b, v_stride_h, v_stride_n, N, D,
            BLOCK_N, BLOCK_D, MASKED, TMA,
        )  # fmt: skip
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
        top = higher
    return acc, top, total


@triton.jit
def forward_kernel(
    q, k, v, o, lse, scale,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, o_stride_b, o_stride_h, o_stride_m,
    H, G, M, N, D, shift, n_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, bh = place(n_tiles, GROUP, CAUSAL)
    batch, head = bh // H, bh % H
    key_head = head // G
    row = tile * BLOCK_M
    query = load_tile(
        q, batch, head, row, q_stride_b, q_stride_h, q_stride_m, M, D,
        BLOCK_M, BLOCK_D, True, TMA,
    )  # fmt: skip
    base2 = scale * LOG2_E
    # Key tiles before `full` are seen whole by every row; those up to `stop` in part.
    full = N // BLOCK_N * BLOCK_N
    stop = N
    if CAUSAL:
        full = tl.maximum(0, tl.minimum(full, (row + shift + 1) // BLOCK_N * BLOCK_N))
        stop = tl.maximum(full, tl.minimum(N, row + BLOCK_M + shift))

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # The masked loop comes second: first, it makes the compiler serialise the matrix products.
    acc, top, total = _advance(
        acc, top, total, query, k, v, batch, key_head, row, 0, full, base2,
        k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, N, D, shift,
        BLOCK_M, BLOCK_N, BLOCK_D, CAUSAL, False, TMA, PRECISION, EXACT,
    )  # fmt: skip
    acc, top, total = _advance(
        acc, top, total, query, k, v, batch, key_head, row, full, stop, base2,
        k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, N, D, shift,
        BLOCK_M, BLOCK_N, BLOCK_D, CAUSAL, True, TMA, PRECISION, EXACT,
    )  # fmt: skip

    # A row that sees no key has total 0: its output is zero, its log-sum-exp minus infinity.
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_tile(o, out, batch, head, row, o_stride_b, o_stride_h, o_stride_m, M, D, BLOCK_M, BLOCK_D)
    i = row + tl.arange(0, BLOCK_M)
    tl.store(lse + bh.to(tl.int64) * M + i, top * scale + tl.math.log(total), mask=i < M)
