"""FlashAttention-2 forward in Triton: one pass over the keys with an online softmax in base 2.

B batch, H query heads, G query heads per key head, M query rows, N key rows, D head dimension.
A program computes one tile of query rows of one head. Row i sees key j iff j <= i + shift, or as
`intervals` says. Arguments of rules that are not in use are None, and then compile to nothing.

Names: `pid_*` program indices, `offs_*` offsets, `mask_*` masks, `b_*` blocks in registers. A block
with the suffix `_e` has the columns beyond BLOCK_D (see `memory.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepscope.attention.triton.dropout import kept, random_source
from stepscope.attention.triton.memory import (
    add_dot,
    in_registers,
    key_range,
    load_tile,
    outer_dot,
    program_tile,
    store_tile,
    zeros,
)
from stepscope.attention.triton.rules import (
    add_sink,
    past_full_tiles,
    row_bounds,
    softcapped,
    tile_ranges,
    within,
)
from stepscope.attention.triton.softmax import divide_by_sums, exponent_factor, exponential


@triton.jit
def _update_softmax(
    b_acc, b_acc_e, b_top, b_total, b_q, k, k_e, v, v_e, keys, values, batch, key_head,
    start_m, start, stop, factor, shift, bounds, scale, softcap, slope, source, dropout,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Update the online softmax of a query tile with the keys from start to stop.

    `b_top` is the maximum raw score of each row so far, `b_total` the running sum; both (BLOCK_M,).
    EXACT subtracts the maximum before multiplying by the factor: one more operation per score, but
    no rounding error in proportion to the scores. `bounds`, `softcap`, `slope`, `source` and
    `dropout` are rules, or None (see `rules.py` and `dropout.py`); with `softcap` or `slope` the
    scores are scaled here.
    """
    for position in tl.range(start, stop, BLOCK_N):
        start_n = position
        if MASKED and bounds is not None:
            start_n = past_full_tiles(position, bounds)
        # (BLOCK_N, BLOCK_D)
        at = (batch, key_head, start_n)
        b_k = load_tile(k, k_e, keys, at, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, MASKED, TMA)
        b_s = outer_dot(b_q, b_k, BLOCK_E, PLANES, PRECISION)  # (BLOCK_M, BLOCK_N)
        if softcap is not None:
            b_s = softcapped(b_s * scale, softcap, EXACT)
        elif slope is not None:
            b_s = b_s * scale
        if slope is not None:
            offs_m = start_m + shift + tl.arange(0, BLOCK_M)
            offs_n = start_n + tl.arange(0, BLOCK_N)
            b_s -= slope * tl.abs(offs_m[:, None] - offs_n[None, :]).to(tl.float32)
        if MASKED:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            if bounds is not None:
                mask_s = within(offs_n[None, :], bounds, 1)
            else:
                mask_s = (offs_n < keys[2])[None, :]
                if CAUSAL:
                    offs_m = start_m + tl.arange(0, BLOCK_M)
                    mask_s = mask_s & (offs_n[None, :] <= offs_m[:, None] + shift)
            b_s = tl.where(mask_s, b_s, float("-inf"))
        b_max = tl.maximum(b_top, tl.max(b_s, 1))
        b_base = b_max
        if MASKED:
            # A row without a visible key so far: any finite base keeps -inf - base from being NaN.
            b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
        if EXACT:
            b_p = exponential((b_s - b_base[:, None]) * factor, EXACT)
        else:
            b_p = exponential(b_s * factor - (b_base * factor)[:, None], EXACT)
        b_rescale = exponential((b_top - b_base) * factor, EXACT)
        b_total = b_total * b_rescale + tl.sum(b_p, 1)
        if dropout is not None:
            b_kept = kept(source, dropout, start_m, start_n, BLOCK_M, BLOCK_N, False)
            b_p = tl.where(b_kept, b_p, 0.0)
        # (BLOCK_N, BLOCK_D)
        b_v = load_tile(v, v_e, values, at, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, MASKED, TMA)
        b_acc = b_acc * b_rescale[:, None]
        if BLOCK_E > 0:
            b_acc_e = b_acc_e * b_rescale[:, None]
        b_acc, b_acc_e = add_dot(b_acc, b_acc_e, b_p, b_v, BLOCK_E, PLANES, PRECISION)
        b_top = b_max
    return b_acc, b_acc_e, b_top, b_total


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    q_e,
    k_e,
    v_e,
    o,
    lse,
    intervals,
    slopes,
    sinks,
    seeds,
    scale,
    q_stride_b,
    q_stride_h,
    q_stride_m,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    o_stride_b,
    o_stride_h,
    o_stride_m,
    B,
    H,
    G,
    M,
    N,
    D,
    shift,
    n_tiles,
    intervals_stride,
    softcap,
    dropout,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    HOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Output (BLOCK_M, D) and log-sum-exp (BLOCK_M,) of one query tile of one head."""
    pid_m, pid_bh = program_tile(n_tiles, GROUP, CAUSAL)
    batch, head = pid_bh // H, pid_bh % H
    key_head = head // G
    start_m = pid_m * BLOCK_M
    keys = ((k_stride_b, k_stride_h, k_stride_n), B, N, D)
    values = ((v_stride_b, v_stride_h, v_stride_n), B, N, D)
    queries = ((q_stride_b, q_stride_h, q_stride_m), B, M, D)
    # (BLOCK_M, BLOCK_D), and (BLOCK_M, BLOCK_E) for the second part
    at = (batch, head, start_m)
    b_q = load_tile(q, q_e, queries, at, BLOCK_M, BLOCK_D, BLOCK_E, PLANES, True, TMA)
    b_q = in_registers(b_q, o, HOLD)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head)
    source = None
    if seeds is not None:
        source = random_source(seeds, pid_bh)
    # Scores that rules change are scaled before.
    unit = scale
    if softcap is not None or slopes is not None:
        unit = 1.0
    factor = exponent_factor(unit, EXACT)
    bounds = None
    n_start = 0
    if intervals is None:
        n_full, n_end = key_range(start_m, N, shift, BLOCK_M, BLOCK_N, CAUSAL)
        n_masked = n_full
    else:
        bounds = row_bounds(intervals, intervals_stride, batch, start_m, M, BLOCK_M, BLOCK_N)
        n_start, n_full, n_masked, n_end = tile_ranges(bounds)

    b_acc, b_acc_e = zeros(BLOCK_M, BLOCK_D, BLOCK_E)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    # The loop with a mask comes second: as the first it makes the compiler serialize the matmuls.
    for MASKED in tl.static_range(2):
        start, stop = (n_masked, n_end) if MASKED else (n_start, n_full)
        b_acc, b_acc_e, b_max, b_sum = _update_softmax(
            b_acc, b_acc_e, b_max, b_sum, b_q, k, k_e, v, v_e, keys, values, batch, key_head,
            start_m, start, stop, factor, shift, bounds, scale, softcap, slope, source, dropout,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, PLANES, CAUSAL, MASKED, TMA, PRECISION, EXACT,
        )  # fmt: skip

    b_max = b_max * unit
    if sinks is not None:
        b_base, b_rescale, b_sum = add_sink(b_max, b_sum, tl.load(sinks + head), EXACT)
        b_max = b_base
        b_acc *= b_rescale[:, None]
        if BLOCK_E > 0:
            b_acc_e *= b_rescale[:, None]
    b_divisor = b_sum
    if dropout is not None:
        b_divisor = b_sum * (1.0 - dropout)
    # A row without a visible key has the sum 0: its output is zero, its log-sum-exp -inf.
    outputs = (o, (o_stride_b, o_stride_h, o_stride_m), M, D)
    store_tile(
        outputs,
        (batch, head, start_m),
        divide_by_sums(b_acc, b_divisor[:, None], EXACT),
        divide_by_sums(b_acc_e, b_divisor[:, None], EXACT),
        BLOCK_M,
        BLOCK_D,
        BLOCK_E,
    )
    offs_m = start_m + tl.arange(0, BLOCK_M)
    # (BLOCK_M,)
    tl.store(
        lse + pid_bh.to(tl.int64) * M + offs_m,
        b_max + tl.math.log(b_sum),
        mask=offs_m < M,
    )
