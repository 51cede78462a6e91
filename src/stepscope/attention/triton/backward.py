"""FlashAttention-2 backward in Triton: two kernels, no atomics, the same bits every time.

P is made again from the log-sum-exp. With delta = rowsum(dO∘O), dS = P∘(dO Vᵀ - delta). The first
kernel walks the keys for a tile of queries (dQ) and leaves delta; the second walks the queries for
a tile of keys (dK, dV). Letters as in the forward.

EXACT (float32): a log-sum-exp in float32 is off by half a unit in its last place, and all of a row
with it; the first kernel sees whole rows, so it leaves the factor that makes them sum to one. And a
row of dS sums to zero: what it sums to (`lean`) is by how much delta is off beside dP as it is made
here. Where few keys have most of a row's weight, dP and delta nearly cancel, and it matters.
WHOLE: all keys that any row sees are in one tile. Then rows are normalised, and delta is summed as
rowsum(P∘dP), within the tile: with few keys nearly all of dP - delta cancels, and only terms made
from the same dP leave what is right.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepscope.attention.triton.memory import (
    add_dot,
    add_roughly,
    in_registers,
    keys_of,
    load_tile,
    outer_dot,
    store_tile,
    sum_planes,
    tile_of_program,
    zeros,
)
from stepscope.attention.triton.softmax import probabilities, row_sums, shared_by


@triton.jit
def _gather_keys(
    grad_q, grad_q_e, mass, lean, mean_k, mean_k_e, query, g, level, drop, k, k_e, v, v_e,
    k_strides, v_strides, batch, key_head, row, start, stop, scale, B, N, D, shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add to dQ of a query tile, and to its rows' sums, what the keys from start to stop give."""
    for n in tl.range(start, stop, BLOCK_N):
        key = load_tile(
            k, k_e, k_strides, batch, key_head, n, N, D, B,
            BLOCK_N, BLOCK_D, BLOCK_E, PLANES, MASKED, TMA,
        )  # fmt: skip
        value = load_tile(
            v, v_e, v_strides, batch, key_head, n, N, D, B,
            BLOCK_N, BLOCK_D, BLOCK_E, PLANES, MASKED, TMA,
        )  # fmt: skip
        scores = outer_dot(query, key, BLOCK_E, PLANES, PRECISION)
        p = probabilities(scores, level[:, None], scale, EXACT)
        if MASKED:
            j = n + tl.arange(0, BLOCK_N)
            seen = (j < N)[None, :]
            if CAUSAL:
                i = row + tl.arange(0, BLOCK_M)
                seen = seen & (j[None, :] <= i[:, None] + shift)
            p = tl.where(seen, p, 0.0)
        grad_p = outer_dot(g, value, BLOCK_E, PLANES, PRECISION)
        if WHOLE:
            p = shared_by(p, tl.sum(p, 1)[:, None], EXACT)
            drop = tl.sum(p * grad_p, 1)
        grad_s = p * (grad_p - drop[:, None])
        if EXACT and not WHOLE:
            mass += tl.sum(p, 1)
            lean += tl.sum(grad_s, 1)
            mean_k, mean_k_e = add_roughly(mean_k, mean_k_e, p, key, BLOCK_E, PLANES)
        grad_q, grad_q_e = add_dot(
            grad_q, grad_q_e, grad_s, key, BLOCK_E, PLANES, PRECISION, APART=True
        )
    return grad_q, grad_q_e, mass, lean, mean_k, mean_k_e


@triton.jit
def query_kernel(
    q, k, v, grad, q_e, k_e, v_e, grad_e, o, lse, delta, factor, lean, dq, scale,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, g_stride_b, g_stride_h, g_stride_m,
    o_stride_b, o_stride_h, o_stride_m, dq_stride_b, dq_stride_h, dq_stride_m,
    B, H, G, M, N, D, shift, n_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    HOLD: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile; delta, factor and lean of its rows for the kernel that comes after."""
    tile, bh = tile_of_program(n_tiles, GROUP, CAUSAL)
    batch, head = bh // H, bh % H
    key_head = head // G
    row = tile * BLOCK_M
    i = row + tl.arange(0, BLOCK_M)
    k_strides = (k_stride_b, k_stride_h, k_stride_n)
    v_strides = (v_stride_b, v_stride_h, v_stride_n)
    g = load_tile(
        grad, grad_e, (g_stride_b, g_stride_h, g_stride_m), batch, head, row, M, D, B,
        BLOCK_M, BLOCK_D, BLOCK_E, PLANES, True, TMA,
    )  # fmt: skip
    g = in_registers(g, dq, HOLD)
    out = load_tile(
        o, o, (o_stride_b, o_stride_h, o_stride_m), batch, head, row, M, D, B,
        BLOCK_M, BLOCK_D, BLOCK_E, 1, True, False,
    )  # fmt: skip
    rows_before = bh.to(tl.int64) * M
    drop = row_sums(out[0], sum_planes(g, PLANES), EXACT)
    if BLOCK_E > 0:
        drop += row_sums(out[3], g[3], EXACT)
    tl.store(delta + rows_before + i, drop, mask=i < M)
    query = load_tile(
        q, q_e, (q_stride_b, q_stride_h, q_stride_m), batch, head, row, M, D, B,
        BLOCK_M, BLOCK_D, BLOCK_E, PLANES, True, TMA,
    )  # fmt: skip
    query = in_registers(query, dq, HOLD)
    level = tl.load(lse + rows_before + i, mask=i < M, other=0.0)
    full, stop = keys_of(row, N, shift, BLOCK_M, BLOCK_N, CAUSAL)
    grad_q, grad_q_e = zeros(BLOCK_M, BLOCK_D, BLOCK_E)
    mean_k, mean_k_e = zeros(BLOCK_M if EXACT else 1, BLOCK_D if EXACT else 1, BLOCK_E)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    off = tl.zeros([BLOCK_M], dtype=tl.float32)
    grad_q, grad_q_e, mass, off, mean_k, mean_k_e = _gather_keys(
        grad_q, grad_q_e, mass, off, mean_k, mean_k_e, query, g, level, drop, k, k_e, v, v_e,
        k_strides, v_strides, batch, key_head, row, 0, full, scale, B, N, D, shift,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, CAUSAL, False, WHOLE, TMA, PRECISION, EXACT,
    )  # fmt: skip
    grad_q, grad_q_e, mass, off, mean_k, mean_k_e = _gather_keys(
        grad_q, grad_q_e, mass, off, mean_k, mean_k_e, query, g, level, drop, k, k_e, v, v_e,
        k_strides, v_strides, batch, key_head, row, full, stop, scale, B, N, D, shift,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, CAUSAL, True, WHOLE, TMA, PRECISION, EXACT,
    )  # fmt: skip
    if EXACT and not WHOLE:
        share = shared_by(tl.full([BLOCK_M], 1.0, dtype=tl.float32), mass, EXACT)
        off *= share
        tl.store(factor + rows_before + i, share, mask=i < M)
        tl.store(lean + rows_before + i, off, mask=i < M)
        grad_q = (grad_q - off[:, None] * mean_k) * share[:, None]
        if BLOCK_E > 0:
            grad_q_e = (grad_q_e - off[:, None] * mean_k_e) * share[:, None]
    store_tile(
        dq, grad_q * scale, grad_q_e * scale, (dq_stride_b, dq_stride_h, dq_stride_m),
        batch, head, row, M, D, BLOCK_M, BLOCK_D, BLOCK_E,
    )  # fmt: skip


@triton.jit
def _gather_queries(
    grad_k, grad_k_e, grad_v, grad_v_e, key, value, q, q_e, grad, grad_e,
    lse, delta, factor, lean, q_strides, g_strides,
    batch, head, col, start, stop, scale, B, M, N, D, shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add to dK and dV of a key tile what the query rows from start to stop give.

    Scores are made transposed, [keys, queries], so that they enter the products as they are.
    Query rows past M read as zero in q and dO and so add nothing.
    """
    for m in tl.range(start, stop, BLOCK_M):
        i = m + tl.arange(0, BLOCK_M)
        query = load_tile(
            q, q_e, q_strides, batch, head, m, M, D, B,
            BLOCK_M, BLOCK_D, BLOCK_E, PLANES, True, TMA,
        )  # fmt: skip
        level = tl.load(lse + i, mask=i < M, other=0.0)
        scores = outer_dot(key, query, BLOCK_E, PLANES, PRECISION)
        p = probabilities(scores, level[None, :], scale, EXACT)
        j = col + tl.arange(0, BLOCK_N)
        if MASKED:
            p = tl.where(j[:, None] <= i[None, :] + shift, p, 0.0)
        if WHOLE:
            p = tl.where((j < N)[:, None], p, 0.0)
            p = shared_by(p, tl.sum(p, 0)[None, :], EXACT)
        elif EXACT:
            p *= tl.load(factor + i, mask=i < M, other=0.0)[None, :]
        g = load_tile(
            grad, grad_e, g_strides, batch, head, m, M, D, B,
            BLOCK_M, BLOCK_D, BLOCK_E, PLANES, True, TMA,
        )  # fmt: skip
        grad_v, grad_v_e = add_dot(grad_v, grad_v_e, p, g, BLOCK_E, PLANES, PRECISION, APART=WHOLE)
        grad_p = outer_dot(value, g, BLOCK_E, PLANES, PRECISION)
        drop = tl.sum(p * grad_p, 0) if WHOLE else tl.load(delta + i, mask=i < M, other=0.0)
        grad_p = grad_p - drop[None, :]
        if EXACT and not WHOLE:
            grad_p -= tl.load(lean + i, mask=i < M, other=0.0)[None, :]
        grad_s = p * grad_p
        grad_k, grad_k_e = add_dot(
            grad_k, grad_k_e, grad_s, query, BLOCK_E, PLANES, PRECISION, APART=WHOLE
        )
    return grad_k, grad_k_e, grad_v, grad_v_e


@triton.jit
def key_value_kernel(
    q, k, v, grad, q_e, k_e, v_e, grad_e, lse, delta, factor, lean, dk, dv, scale,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, g_stride_b, g_stride_h, g_stride_m,
    dk_stride_b, dk_stride_h, dk_stride_n, dv_stride_b, dv_stride_h, dv_stride_n,
    B, H, G, M, N, D, shift, n_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    HOLD: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile: all query heads that share the key head, in a fixed order."""
    tile, bk = tile_of_program(n_tiles, GROUP, False)
    key_heads = H // G
    batch, key_head = bk // key_heads, bk % key_heads
    col = tile * BLOCK_N
    q_strides = (q_stride_b, q_stride_h, q_stride_m)
    g_strides = (g_stride_b, g_stride_h, g_stride_m)
    key = load_tile(
        k, k_e, (k_stride_b, k_stride_h, k_stride_n), batch, key_head, col, N, D, B,
        BLOCK_N, BLOCK_D, BLOCK_E, PLANES, True, TMA,
    )  # fmt: skip
    value = load_tile(
        v, v_e, (v_stride_b, v_stride_h, v_stride_n), batch, key_head, col, N, D, B,
        BLOCK_N, BLOCK_D, BLOCK_E, PLANES, True, TMA,
    )  # fmt: skip
    key, value = in_registers(key, dk, HOLD), in_registers(value, dv, HOLD)
    grad_k, grad_k_e = zeros(BLOCK_N, BLOCK_D, BLOCK_E)
    grad_v, grad_v_e = zeros(BLOCK_N, BLOCK_D, BLOCK_E)
    # Query rows from `full` on see the whole tile; those from `start` on see a part of it.
    start = 0
    full = 0
    if CAUSAL:
        start = tl.minimum(M, tl.maximum(0, col - shift)) // BLOCK_M * BLOCK_M
        seeing_all = tl.maximum(0, col + BLOCK_N - 1 - shift)
        full = tl.maximum(start, (seeing_all + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    for within in range(G):
        head = key_head * G + within
        rows_before = (batch * H + head).to(tl.int64) * M
        grad_k, grad_k_e, grad_v, grad_v_e = _gather_queries(
            grad_k, grad_k_e, grad_v, grad_v_e, key, value, q, q_e, grad, grad_e,
            lse + rows_before, delta + rows_before, factor + rows_before, lean + rows_before,
            q_strides, g_strides, batch, head, col, full, M, scale, B, M, N, D, shift,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, False, WHOLE, TMA, PRECISION, EXACT,
        )  # fmt: skip
        if CAUSAL:
            grad_k, grad_k_e, grad_v, grad_v_e = _gather_queries(
                grad_k, grad_k_e, grad_v, grad_v_e, key, value,
                q, q_e, grad, grad_e, lse + rows_before, delta + rows_before, factor + rows_before,
                lean + rows_before, q_strides, g_strides,
                batch, head, col, start, tl.minimum(full, M), scale, B, M, N, D, shift,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, True, WHOLE, TMA, PRECISION, EXACT,
            )  # fmt: skip
    store_tile(
        dk, grad_k * scale, grad_k_e * scale, (dk_stride_b, dk_stride_h, dk_stride_n),
        batch, key_head, col, N, D, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    store_tile(
        dv, grad_v, grad_v_e, (dv_stride_b, dv_stride_h, dv_stride_n),
        batch, key_head, col, N, D, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
