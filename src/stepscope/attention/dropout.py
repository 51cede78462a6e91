"""Dropout of attention probabilities: which weights are kept, by a seed and their position alone.

A weight is kept if a random 32-bit word is at least `dropout` · 2³². The words are those of Philox
4×32 with 10 rounds (Salmon et al., 2011): the key is the seed, the counter is (row, key, head,
offset). One counter serves the four positions that differ in bit 3 of the row or of the key, which
one thread of either backward kernel has. No tile enters into it, so that every implementation drops
the same weights, and a backward pass computes them again. This is the naive form;
`triton/dropout.py` has the same words.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stepscope.attention.rules import ScoreRules

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BIT = 3
"""Bit of a row and of a key that selects one of the four words of a counter."""


def seeds_of(rules: ScoreRules, device: torch.device) -> Tensor | None:
    """Return seed and offset, int64 (2,), of the dropout of one call; drawn from torch's generator
    of the device if the rules have none. Does not wait for the device: a CUDA graph draws new ones
    in every replay, and a checkpointed segment the same ones in its recomputation."""
    if rules.dropout is None:
        return None
    if rules.dropout_seed is not None:
        return rules.dropout_seed
    return torch.randint(torch.iinfo(torch.int64).max, (2,), device=device, dtype=torch.int64)


def kept(dropout: float, seeds: Tensor, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return where weights are kept, (heads, rows, keys). `heads` are indices over all leading
    dimensions of q; all three are int64 vectors."""
    row, key = rows[:, None], keys[None, :]
    counter = [row & ~(1 << _BIT), key & ~(1 << _BIT), heads[:, None, None], seeds[1] & _WORD]
    words = _philox(counter, seeds[0])
    of_row, of_key = ((index >> _BIT & 1).bool() for index in (row, key))
    word = torch.where(
        of_key, torch.where(of_row, words[3], words[2]), torch.where(of_row, words[1], words[0])
    )
    return word >= _threshold(dropout)


def _threshold(dropout: float) -> int:
    """Return the first word that keeps a weight: of the probability in float32, as in a kernel."""
    rounded: float = struct.unpack("f", struct.pack("f", dropout))[0]
    return int(rounded * 2**32)


def _philox(counter: list[Tensor], seed: Tensor) -> list[Tensor]:
    """Return the four words of each counter, all in int64 tensors of 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        # The product overflows as a signed number; its bits are those of the unsigned one.
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (b >> 32 & _WORD) ^ c1 ^ k0, b & _WORD
        c2, c3 = (a >> 32 & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = k0 + _INCREMENTS[0] & _WORD, k1 + _INCREMENTS[1] & _WORD
    return [c0, c1, c2, c3]
