"""FlashAttention-2 backward in Triton: two kernels, no atomics, the same bits every time.

P is made again from the log-sum-exp. With delta = rowsum(dO∘O), dS = P∘(dO Vᵀ - delta). One kernel
walks the queries for a tile of keys (dK, dV), one walks the keys for a tile of queries (dQ).
Letters as in the forward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepscope.attention.triton_forward import LOG2_E, load_tile, place, store_tile


@triton.jit
def delta_kernel(
    o, grad, delta, o_stride_b, o_stride_h, o_stride_m, g_stride_b, g_stride_h, g_stride_m,
    H, M, D, n_tiles, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO∘O) in float32."""
    tile, bh = place(n_tiles, 1, False)
    batch, head = bh // H, bh % H
    row = tile * BLOCK_M
    out = load_tile(
        o, batch, head, row, o_stride_b, o_stride_h, o_stride_m, M, D, BLOCK_M, BLOCK_D, True, False
    )
    g = load_tile(
        grad, batch, head, row, g_stride_b, g_stride_h, g_stride_m, M, D,
        BLOCK_M, BLOCK_D, True, False,
    )  # fmt: skip
    i = row + tl.arange(0, BLOCK_M)
    summed = tl.sum(out.to(tl.float64) * g.to(tl.float64), 1)
    tl.store(delta + bh.to(tl.int64) * M + i, summed, mask=i < M)


@triton.jit
def _gather_queries(
    grad_k, grad_v, key, value, q, grad, lse, delta, batch, head, bh, col, start, stop, scale,
    q_stride_b, q_stride_h, q_stride_m, g_stride_b, g_stride_h, g_stride_m, M, D, shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add to dK and dV of a key tile what the query rows from start to stop give.

    Scores are made transposed, [keys, queries], so that they enter the products as they are.
    Query rows past M read as zero in q and dO and so add nothing.
    """
    for m in tl.range(start, stop, BLOCK_M):
        i = m + tl.arange(0, BLOCK_M)
        query = load_tile(
            q, batch, head, m, q_stride_b, q_stride_h, q_stride_m, M, D,
            BLOCK_M, BLOCK_D, True, TMA,
        )  # fmt: skip
        level = tl.load(lse + bh.to(tl.int64) * M + i, mask=i < M, other=0.0)
        scores = tl.dot(key, query.T, input_precision=PRECISION)
        if EXACT:
            p = tl.math.exp2((scores * scale - level[None, :]) * LOG2_E)
        else:
            p = tl.math.exp2(scores * (scale * LOG2_E) - (level * LOG2_E)[None, :])
        if MASKED:
            j = col + tl.arange(0, BLOCK_N)
            p = tl.where(j[:, None] <= i[None, :] + shift, p, 0.0)
        g = load_tile(
            grad, batch, head, m, g_stride_b, g_stride_h, g_stride_m, M, D,
            BLOCK_M, BLOCK_D, True, TMA,
        )  # fmt: skip
        grad_v = tl.dot(p.to(g.dtype), g, grad_v, input_precision=PRECISION)
        grad_p = tl.dot(value, g.T, input_precision=PRECISION)
        drop = tl.load(delta + bh.to(tl.int64) * M + i, mask=i < M, other=0.0)
        grad_s = p * (grad_p - drop[None, :])
        grad_k = tl.dot(grad_s.to(query.dtype), query, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def key_value_kernel(
    q, k, v, grad, lse, delta, dk, dv, scale,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, g_stride_b, g_stride_h, g_stride_m,
    dk_stride_b, dk_stride_h, dk_stride_n, dv_stride_b, dv_stride_h, dv_stride_n,
    H, G, M, N, D, shift, n_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile: all query heads that share the key head, in a fixed order."""
    tile, bk = place(n_tiles, GROUP, False)
    key_heads = H // G
    batch, key_head = bk // key_heads, bk % key_heads
    col = tile * BLOCK_N
    key = load_tile(
        k, batch, key_head, col, k_stride_b, k_stride_h, k_stride_n, N, D,
        BLOCK_N, BLOCK_D, True, TMA,
    )  # fmt: skip
    value = load_tile(
        v, batch, key_head, col, v_stride_b, v_stride_h, v_stride_n, N, D,
        BLOCK_N, BLOCK_D, True, TMA,
    )  # fmt: skip
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    # Query rows from `full` on see the whole tile; those from `start` on see a part of it.
    start = 0
    full = 0
    if CAUSAL:
        start = tl.minimum(M, tl.maximum(0, col - shift)) // BLOCK_M * BLOCK_M
        whole = tl.maximum(0, col + BLOCK_N - 1 - shift)
        full = tl.maximum(start, (whole + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    for within in range(G):
        head = key_head * G + within
        bh = batch * H + head
        grad_k, grad_v = _gather_queries(
            grad_k, grad_v, key, value, q, grad, lse, delta, batch, head, bh, col, full, M, scale,
            q_stride_b, q_stride_h, q_stride_m, g_stride_b, g_stride_h, g_stride_m, M, D, shift,
            BLOCK_M, BLOCK_N, BLOCK_D, False, TMA, PRECISION, EXACT,
        )  # fmt: skip
        if CAUSAL:
            grad_k, grad_v = _gather_queries(
                grad_k, grad_v, key, value, q, grad, lse, delta, batch, head, bh, col, start,
                tl.minimum(full, M), scale,
                q_stride_b, q_stride_h, q_stride_m, g_stride_b, g_stride_h, g_stride_m, M, D, shift,
                BLOCK_M, BLOCK_N, BLOCK_D, True, TMA, PRECISION, EXACT,
            )  # fmt: skip
    store_tile(
        dk, grad_k * scale, batch, key_head, col, dk_stride_b, dk_stride_h, dk_stride_n, N, D,
        BLOCK_N, BLOCK_D,
    )  # fmt: skip
    store_tile(
        dv, grad_v, batch, key_head, col, dv_stride_b, dv_stride_h, dv_stride_n, N, D,
        BLOCK_N, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _gather_keys(
    grad_q, query, g, level, drop, k, v, batch, key_head, row, start, stop, scale,
    k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, N, D, shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add to dQ of a query tile what the keys from start to stop give."""
    for n in tl.range(start, stop, BLOCK_N):
        key = load_tile(
            k, batch, key_head, n, k_stride_b, k_stride_h, k_stride_n, N, D,
            BLOCK_N, BLOCK_D, MASKED, TMA,
        )  # fmt: skip
        value = load_tile(
            v, batch, key_head, n, v_stride_b, v_stride_h, v_stride_n, N, D,
            BLOCK_N, BLOCK_D, MASKED, TMA,
        )  # fmt: skip
        scores = tl.dot(query, key.T, input_precision=PRECISION)
        if EXACT:
            p = tl.math.exp2((scores * scale - level[:, None]) * LOG2_E)
        else:
            p = tl.math.exp2(scores * (scale * LOG2_E) - (level * LOG2_E)[:, None])
        if MASKED:
            j = n + tl.arange(0, BLOCK_N)
            seen = (j < N)[None, :]
            if CAUSAL:
                i = row + tl.arange(0, BLOCK_M)
                seen = seen & (j[None, :] <= i[:, None] + shift)
            p = tl.where(seen, p, 0.0)
        grad_p = tl.dot(g, value.T, input_precision=PRECISION)
        grad_s = p * (grad_p - drop[:, None])
        grad_q = tl.dot(grad_s.to(key.dtype), key, grad_q, input_precision=PRECISION)
    return grad_q


@triton.jit
def query_kernel(
    q, k, v, grad, lse, delta, dq, scale,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, g_stride_b, g_stride_h, g_stride_m,
    dq_stride_b, dq_stride_h, dq_stride_m,
    H, G, M, N, D, shift, n_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile."""
    tile, bh = place(n_tiles, GROUP, CAUSAL)
    batch, head = bh // H, bh % H
    key_head = head // G
    row = tile * BLOCK_M
    i = row + tl.arange(0, BLOCK_M)
    query = load_tile(
        q, batch, head, row, q_stride_b, q_stride_h, q_stride_m, M, D,
        BLOCK_M, BLOCK_D, True, TMA,
    )  # fmt: skip
    g = load_tile(
        grad, batch, head, row, g_stride_b, g_stride_h, g_stride_m, M, D,
        BLOCK_M, BLOCK_D, True, TMA,
    )  # fmt: skip
    level = tl.load(lse + bh.to(tl.int64) * M + i, mask=i < M, other=0.0)
    drop = tl.load(delta + bh.to(tl.int64) * M + i, mask=i < M, other=0.0)
    full = N // BLOCK_N * BLOCK_N
    stop = N
    if CAUSAL:
        full = tl.maximum(0, tl.minimum(full, (row + shift + 1) // BLOCK_N * BLOCK_N))
        stop = tl.maximum(full, tl.minimum(N, row + BLOCK_M + shift))
    grad_q = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    grad_q = _gather_keys(
        grad_q, query, g, level, drop, k, v, batch, key_head, row, 0, full, scale,
        k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, N, D, shift,
        BLOCK_M, BLOCK_N, BLOCK_D, CAUSAL, False, TMA, PRECISION, EXACT,
    )  # fmt: skip
    grad_q = _gather_keys(
        grad_q, query, g, level, drop, k, v, batch, key_head, row, full, stop, scale,
        k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, N, D, shift,
        BLOCK_M, BLOCK_N, BLOCK_D, CAUSAL, True, TMA, PRECISION, EXACT,
    )  # fmt: skip
    store_tile(
        dq, grad_q * scale, batch, head, row, dq_stride_b, dq_stride_h, dq_stride_m, M, D,
        BLOCK_M, BLOCK_D,
    )  # fmt: skip
