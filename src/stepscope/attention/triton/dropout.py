"""Dropout of probabilities within the kernels: the words of `attention/dropout.py`, of a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_source(seeds, index):
    """Return seed, offset and the index of a head over the batch, for `kept`."""
    return tl.load(seeds), tl.load(seeds + 1).to(tl.int32), index


@triton.jit
def kept(
    source,
    dropout,
    start_m,
    start_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Return where the weights of a tile are kept: (BLOCK_M, BLOCK_N), or (BLOCK_N, BLOCK_M) if
    KEYS_FIRST. Tiles start at multiples of 16."""
    seed, offset, index = source
    # Rows and keys whose bit 3 is zero: one counter has the words of four positions.
    offs_m = tl.arange(0, BLOCK_M // 2)
    offs_m = start_m + offs_m // 8 * 16 + offs_m % 8
    offs_n = tl.arange(0, BLOCK_N // 2)
    offs_n = start_n + offs_n // 8 * 16 + offs_n % 8
    if KEYS_FIRST:
        b_row, b_key = tl.broadcast(offs_m[None, :], offs_n[:, None])
    else:
        b_row, b_key = tl.broadcast(offs_m[:, None], offs_n[None, :])
    b_zero = b_row * 0
    b_0, b_1, b_2, b_3 = tl.philox(seed, b_row, b_key, b_zero + index, b_zero + offset)
    # The last two dimensions: bit 3 of the key, bit 3 of the row.
    b_word = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))
    if KEYS_FIRST:
        b_word = tl.reshape(b_word, (BLOCK_N // 16, 8, BLOCK_M // 16, 8, 2, 2))
        b_word = tl.permute(b_word, (0, 4, 1, 2, 5, 3))
        b_word = tl.reshape(b_word, (BLOCK_N, BLOCK_M))
    else:
        b_word = tl.reshape(b_word, (BLOCK_M // 16, 8, BLOCK_N // 16, 8, 2, 2))
        b_word = tl.permute(b_word, (0, 5, 1, 2, 4, 3))
        b_word = tl.reshape(b_word, (BLOCK_M, BLOCK_N))
    threshold = tl.full([1, 1], dropout, dtype=tl.float32) * 4294967296.0
    return b_word >= threshold.to(tl.uint32)
