"""FlashAttention-2 backward in Triton: two kernels, no atomics, bitwise deterministic.

P is recomputed from the log-sum-exp. With delta = rowsum(dO∘O), dS = P∘(dO Vᵀ - delta). Dropout
with the mask Z, scaled, is computed again: dV = (P∘Z)ᵀ dO, dS = P∘((dO Vᵀ)∘Z - delta). The first
kernel iterates over the keys for a tile of queries (dQ) and stores delta; the second iterates over
the queries for a tile of keys (dK, dV). Sizes and names as in `forward.py`.

EXACT (float32): a log-sum-exp in float32 has an error of half a unit in the last place, which
scales the entire row of P. The first kernel sees entire rows, so it stores the `factor` that makes
them sum to one. A row of dS must sum to zero: its actual sum (`ds_sum`) is the error of delta
relative to dP as computed here. It matters where few keys have most of a row's probability, because
dP and delta then nearly cancel.
WHOLE: all visible keys of every row are in one tile. Rows are then normalized within the tile, and
delta is computed there as rowsum(P∘dP): with few keys nearly all of dP - delta cancels, and the
difference is accurate only if both terms come from the same dP.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepscope.attention.triton.dropout import kept, random_source
from stepscope.attention.triton.memory import (
    add_dot,
    add_dot_low_precision,
    in_registers,
    key_range,
    load_tile,
    outer_dot,
    program_tile,
    store_tile,
    sum_planes,
    zeros,
)
from stepscope.attention.triton.rules import (
    past_full_tiles,
    row_bounds,
    softcap_derivative,
    softcapped,
    tile_ranges,
    within,
)
from stepscope.attention.triton.softmax import divide_by_sums, exponential, probabilities, row_sums


@triton.jit
def _accumulate_dq(
    b_dq, b_dq_e, b_p_sum, b_ds_sum, b_mean_k, b_mean_k_e, b_q, b_do, b_lse, b_delta,
    k, k_e, v, v_e, keys, values, batch, key_head, start_m, start, stop, scale, shift,
    bounds, softcap, slope, source, dropout,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Accumulate dQ and the row sums of a query tile over the keys from start to stop.

    Per row (BLOCK_M,): `b_p_sum` is the sum of P, `b_ds_sum` the sum of dS. `b_mean_k` is P K,
    (BLOCK_M, BLOCK_D).
    """
    for position in tl.range(start, stop, BLOCK_N):
        start_n = position
        if MASKED and bounds is not None:
            start_n = past_full_tiles(position, bounds)
        # b_k and b_v: (BLOCK_N, BLOCK_D) and (BLOCK_N, BLOCK_E)
        at = (batch, key_head, start_n)
        b_k = load_tile(k, k_e, keys, at, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, MASKED, TMA)
        b_v = load_tile(v, v_e, values, at, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, MASKED, TMA)
        b_s = outer_dot(b_q, b_k, BLOCK_E, PLANES, PRECISION)  # (BLOCK_M, BLOCK_N)
        if softcap is not None:
            b_s = softcapped(b_s * scale, softcap, EXACT)
            b_slope_s = softcap_derivative(b_s, softcap)
        elif slope is not None:
            b_s = b_s * scale
        if slope is not None:
            offs_m = start_m + shift + tl.arange(0, BLOCK_M)
            offs_n = start_n + tl.arange(0, BLOCK_N)
            b_s -= slope * tl.abs(offs_m[:, None] - offs_n[None, :]).to(tl.float32)
        unit = scale
        if softcap is not None or slope is not None:
            unit = 1.0
        b_p = probabilities(b_s, b_lse[:, None], unit, EXACT)
        if MASKED:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            if bounds is not None:
                mask_s = within(offs_n[None, :], bounds, 1)
            else:
                mask_s = (offs_n < keys[2])[None, :]
                if CAUSAL:
                    offs_m = start_m + tl.arange(0, BLOCK_M)
                    mask_s = mask_s & (offs_n[None, :] <= offs_m[:, None] + shift)
            b_p = tl.where(mask_s, b_p, 0.0)
        b_dp = outer_dot(b_do, b_v, BLOCK_E, PLANES, PRECISION)  # (BLOCK_M, BLOCK_N)
        if dropout is not None:
            b_kept = kept(source, dropout, start_m, start_n, BLOCK_M, BLOCK_N, False)
            b_dp = tl.where(b_kept, b_dp / (1.0 - dropout), 0.0)
        if WHOLE:
            b_p = divide_by_sums(b_p, tl.sum(b_p, 1)[:, None], EXACT)
            b_delta = tl.sum(b_p * b_dp, 1)
        b_ds = b_p * (b_dp - b_delta[:, None])
        if EXACT and not WHOLE:
            b_p_sum += tl.sum(b_p, 1)
            b_ds_sum += tl.sum(b_ds, 1)
            if softcap is not None:
                b_p *= b_slope_s
            b_mean_k, b_mean_k_e = add_dot_low_precision(
                b_mean_k, b_mean_k_e, b_p, b_k, BLOCK_E, PLANES
            )
        if softcap is not None:
            b_ds *= b_slope_s
        b_dq, b_dq_e = add_dot(b_dq, b_dq_e, b_ds, b_k, BLOCK_E, PLANES, PRECISION, SEPARATE=True)
    return b_dq, b_dq_e, b_p_sum, b_ds_sum, b_mean_k, b_mean_k_e


@triton.jit
def query_kernel(
    q, k, v, grad, q_e, k_e, v_e, grad_e, o, lse, delta, factor, ds_sum, dq,
    intervals, slopes, sinks, seeds, scale,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, g_stride_b, g_stride_h, g_stride_m,
    o_stride_b, o_stride_h, o_stride_m, dq_stride_b, dq_stride_h, dq_stride_m,
    B, H, G, M, N, D, shift, n_tiles, intervals_stride, softcap, dropout,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    HOLD: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dQ (BLOCK_M, D) of one query tile; delta, factor and ds_sum (BLOCK_M,) for the next one."""
    pid_m, pid_bh = program_tile(n_tiles, GROUP, CAUSAL)
    batch, head = pid_bh // H, pid_bh % H
    key_head = head // G
    start_m = pid_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    keys = ((k_stride_b, k_stride_h, k_stride_n), B, N, D)
    values = ((v_stride_b, v_stride_h, v_stride_n), B, N, D)
    # b_do, b_o and b_q: (BLOCK_M, BLOCK_D) and (BLOCK_M, BLOCK_E)
    grads = ((g_stride_b, g_stride_h, g_stride_m), B, M, D)
    at = (batch, head, start_m)
    b_do = load_tile(grad, grad_e, grads, at, BLOCK_M, BLOCK_D, BLOCK_E, PLANES, True, TMA)
    b_do = in_registers(b_do, dq, HOLD)
    outputs = ((o_stride_b, o_stride_h, o_stride_m), B, M, D)
    b_o = load_tile(o, o, outputs, at, BLOCK_M, BLOCK_D, BLOCK_E, 1, True, False)
    offs_bh = pid_bh.to(tl.int64) * M
    b_delta = row_sums(b_o[0], sum_planes(b_do, PLANES), EXACT)
    if BLOCK_E > 0:
        b_delta += row_sums(b_o[3], b_do[3], EXACT)
    tl.store(delta + offs_bh + offs_m, b_delta, mask=offs_m < M)
    queries = ((q_stride_b, q_stride_h, q_stride_m), B, M, D)
    b_q = load_tile(q, q_e, queries, at, BLOCK_M, BLOCK_D, BLOCK_E, PLANES, True, TMA)
    b_q = in_registers(b_q, dq, HOLD)
    b_lse = tl.load(lse + offs_bh + offs_m, mask=offs_m < M, other=0.0)  # (BLOCK_M,)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head)
    source = None
    if seeds is not None:
        source = random_source(seeds, pid_bh)
    bounds = None
    n_start = 0
    if intervals is None:
        n_full, n_end = key_range(start_m, N, shift, BLOCK_M, BLOCK_N, CAUSAL)
        n_masked = n_full
    else:
        bounds = row_bounds(intervals, intervals_stride, batch, start_m, M, BLOCK_M, BLOCK_N)
        n_start, n_full, n_masked, n_end = tile_ranges(bounds)
    b_dq, b_dq_e = zeros(BLOCK_M, BLOCK_D, BLOCK_E)
    b_mean_k, b_mean_k_e = zeros(BLOCK_M if EXACT else 1, BLOCK_D if EXACT else 1, BLOCK_E)
    b_p_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_ds_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if EXACT and sinks is not None:
        # The sink is one more score of the row, with a value of zero.
        b_p_sum = exponential(tl.load(sinks + head) - b_lse, EXACT)
        b_p_sum = tl.where(b_lse == float("-inf"), 0.0, b_p_sum)
        b_ds_sum = -b_p_sum * b_delta
    for MASKED in tl.static_range(2):
        start, stop = (n_masked, n_end) if MASKED else (n_start, n_full)
        b_dq, b_dq_e, b_p_sum, b_ds_sum, b_mean_k, b_mean_k_e = _accumulate_dq(
            b_dq, b_dq_e, b_p_sum, b_ds_sum, b_mean_k, b_mean_k_e, b_q, b_do, b_lse, b_delta,
            k, k_e, v, v_e, keys, values, batch, key_head, start_m, start, stop, scale, shift,
            bounds, softcap, slope, source, dropout,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, CAUSAL, MASKED, WHOLE,
            TMA, PRECISION, EXACT,
        )  # fmt: skip
    if EXACT and not WHOLE:
        b_factor = divide_by_sums(tl.full([BLOCK_M], 1.0, dtype=tl.float32), b_p_sum, EXACT)
        b_ds_sum *= b_factor
        tl.store(factor + offs_bh + offs_m, b_factor, mask=offs_m < M)
        tl.store(ds_sum + offs_bh + offs_m, b_ds_sum, mask=offs_m < M)
        b_dq = (b_dq - b_ds_sum[:, None] * b_mean_k) * b_factor[:, None]
        if BLOCK_E > 0:
            b_dq_e = (b_dq_e - b_ds_sum[:, None] * b_mean_k_e) * b_factor[:, None]
    grads_q = (dq, (dq_stride_b, dq_stride_h, dq_stride_m), M, D)
    store_tile(
        grads_q, (batch, head, start_m), b_dq * scale, b_dq_e * scale, BLOCK_M, BLOCK_D, BLOCK_E
    )


@triton.jit
def _accumulate_dk_dv(
    b_dk, b_dk_e, b_dv, b_dv_e, b_k, b_v, q, q_e, grad, grad_e, queries, grads,
    lse, delta, factor, ds_sum,
    batch, head, start_n, start, stop, scale, M, N, shift,
    bounds, softcap, slope, source, dropout,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Accumulate dK and dV of a key tile over the query rows from start to stop.

    Scores are computed transposed, [keys, queries], so that the matmuls read them without a
    transpose. Query rows past M read as zero in q and dO and so add nothing.
    """
    for position in tl.range(start, stop, BLOCK_M):
        start_m = position
        if MASKED and bounds is not None:
            start_m = past_full_tiles(position, bounds)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        # b_q and b_do: (BLOCK_M, BLOCK_D) and (BLOCK_M, BLOCK_E)
        at = (batch, head, start_m)
        b_q = load_tile(q, q_e, queries, at, BLOCK_M, BLOCK_D, BLOCK_E, PLANES, True, TMA)
        # Rows past M have probability 0, whatever a rule makes of their scores.
        b_lse = tl.load(lse + offs_m, mask=offs_m < M, other=float("inf"))  # (BLOCK_M,)
        b_s = outer_dot(b_k, b_q, BLOCK_E, PLANES, PRECISION)  # (BLOCK_N, BLOCK_M)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        if softcap is not None:
            b_s = softcapped(b_s * scale, softcap, EXACT)
            b_slope_s = softcap_derivative(b_s, softcap)
        elif slope is not None:
            b_s = b_s * scale
        if slope is not None:
            distance = offs_m[None, :] + shift - offs_n[:, None]
            b_s -= slope * tl.abs(distance).to(tl.float32)
        unit = scale
        if softcap is not None or slope is not None:
            unit = 1.0
        b_p = probabilities(b_s, b_lse[None, :], unit, EXACT)
        if MASKED:
            if bounds is not None:
                b_p = tl.where(within(offs_m[None, :], bounds, 1), b_p, 0.0)
            else:
                b_p = tl.where(offs_n[:, None] <= offs_m[None, :] + shift, b_p, 0.0)
        if WHOLE:
            b_p = tl.where((offs_n < N)[:, None], b_p, 0.0)
            b_p = divide_by_sums(b_p, tl.sum(b_p, 0)[None, :], EXACT)
        elif EXACT:
            b_p *= tl.load(factor + offs_m, mask=offs_m < M, other=0.0)[None, :]
        b_do = load_tile(grad, grad_e, grads, at, BLOCK_M, BLOCK_D, BLOCK_E, PLANES, True, TMA)
        b_weights = b_p
        if dropout is not None:
            b_kept = kept(source, dropout, start_m, start_n, BLOCK_M, BLOCK_N, True)
            b_weights = tl.where(b_kept, b_p / (1.0 - dropout), 0.0)
        b_dv, b_dv_e = add_dot(
            b_dv, b_dv_e, b_weights, b_do, BLOCK_E, PLANES, PRECISION, SEPARATE=WHOLE
        )
        b_dp = outer_dot(b_v, b_do, BLOCK_E, PLANES, PRECISION)  # (BLOCK_N, BLOCK_M)
        if dropout is not None:
            b_dp = tl.where(b_kept, b_dp / (1.0 - dropout), 0.0)
        # (BLOCK_M,)
        b_delta = (
            tl.sum(b_p * b_dp, 0) if WHOLE else tl.load(delta + offs_m, mask=offs_m < M, other=0.0)
        )
        b_dp = b_dp - b_delta[None, :]
        if EXACT and not WHOLE:
            b_dp -= tl.load(ds_sum + offs_m, mask=offs_m < M, other=0.0)[None, :]
        b_ds = b_p * b_dp
        if softcap is not None:
            b_ds *= b_slope_s
        b_dk, b_dk_e = add_dot(b_dk, b_dk_e, b_ds, b_q, BLOCK_E, PLANES, PRECISION, SEPARATE=WHOLE)
    return b_dk, b_dk_e, b_dv, b_dv_e


@triton.jit
def key_value_kernel(
    q, k, v, grad, q_e, k_e, v_e, grad_e, lse, delta, factor, ds_sum, dk, dv,
    intervals, slopes, seeds, scale,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, g_stride_b, g_stride_h, g_stride_m,
    dk_stride_b, dk_stride_h, dk_stride_n, dv_stride_b, dv_stride_h, dv_stride_n,
    B, H, G, M, N, D, shift, n_tiles, intervals_stride, softcap, dropout,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    HOLD: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dK and dV (BLOCK_N, D) of one key tile, over all query heads of its group in fixed order."""
    pid_n, pid_bk = program_tile(n_tiles, GROUP, False)
    key_heads = H // G
    batch, key_head = pid_bk // key_heads, pid_bk % key_heads
    start_n = pid_n * BLOCK_N
    queries = ((q_stride_b, q_stride_h, q_stride_m), B, M, D)
    grads = ((g_stride_b, g_stride_h, g_stride_m), B, M, D)
    # b_k and b_v: (BLOCK_N, BLOCK_D) and (BLOCK_N, BLOCK_E)
    keys = ((k_stride_b, k_stride_h, k_stride_n), B, N, D)
    at = (batch, key_head, start_n)
    b_k = load_tile(k, k_e, keys, at, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, True, TMA)
    values = ((v_stride_b, v_stride_h, v_stride_n), B, N, D)
    b_v = load_tile(v, v_e, values, at, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, True, TMA)
    b_k, b_v = in_registers(b_k, dk, HOLD), in_registers(b_v, dv, HOLD)
    b_dk, b_dk_e = zeros(BLOCK_N, BLOCK_D, BLOCK_E)
    b_dv, b_dv_e = zeros(BLOCK_N, BLOCK_D, BLOCK_E)
    # Query rows from `m_full` to `m_stop` see the entire tile; those from `m_start` to `m_end` see
    # a part of it.
    m_full = 0
    m_stop = M
    bounds = None
    m_start = 0
    if intervals is not None:
        bounds = row_bounds(intervals, intervals_stride, batch, start_n, N, BLOCK_N, BLOCK_M)
        m_full, m_stop, m_start, m_end = tile_ranges(bounds)
    elif CAUSAL:
        m_start = tl.minimum(M, tl.maximum(0, start_n - shift)) // BLOCK_M * BLOCK_M
        first_full = tl.maximum(0, start_n + BLOCK_N - 1 - shift)
        m_full = tl.maximum(m_start, (first_full + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    for head_in_group in range(G):
        head = key_head * G + head_in_group
        offs_bh = (batch * H + head).to(tl.int64) * M
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head)
        source = None
        if seeds is not None:
            source = random_source(seeds, batch * H + head)
        for MASKED in tl.static_range(2 if CAUSAL or intervals is not None else 1):
            start, stop = m_full, m_stop
            if MASKED:
                if intervals is None:
                    m_end = tl.minimum(m_full, M)
                start, stop = m_start, m_end
            b_dk, b_dk_e, b_dv, b_dv_e = _accumulate_dk_dv(
                b_dk, b_dk_e, b_dv, b_dv_e, b_k, b_v,
                q, q_e, grad, grad_e, queries, grads,
                lse + offs_bh, delta + offs_bh, factor + offs_bh, ds_sum + offs_bh,
                batch, head, start_n, start, stop, scale, M, N, shift,
                bounds, softcap, slope, source, dropout,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, MASKED, WHOLE, TMA, PRECISION, EXACT,
            )  # fmt: skip
    grads_k = (dk, (dk_stride_b, dk_stride_h, dk_stride_n), N, D)
    store_tile(
        grads_k, (batch, key_head, start_n), b_dk * scale, b_dk_e * scale, BLOCK_N, BLOCK_D, BLOCK_E
    )
    grads_v = (dv, (dv_stride_b, dv_stride_h, dv_stride_n), N, D)
    store_tile(grads_v, (batch, key_head, start_n), b_dv, b_dv_e, BLOCK_N, BLOCK_D, BLOCK_E)
