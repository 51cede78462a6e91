"""A text that can be learnt, from a generator: the same for every model, machine and library.

Each word is followed by one of eight others, the first of them far more often than the last. A
model that has seen enough of it predicts a word as well as the chain itself is known, at about 1.8
nats; one that knows nothing is at the logarithm of the vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

FOLLOWERS = 8
WORDS = 256
_WEIGHTS = 1.0 / np.arange(1, FOLLOWERS + 1)
_CUMULATIVE = np.cumsum(_WEIGHTS / _WEIGHTS.sum())


def entropy() -> float:
    """Nats for each word that no model can save."""
    shares = _WEIGHTS / _WEIGHTS.sum()
    return -float(sum(share * math.log(share) for share in shares))


def sequences(
    count: int, length: int, vocab: int, seed: int, words: int = WORDS
) -> NDArray[np.int64]:
    """So many rows of the same chain; `seed` decides the rows and not the chain."""
    words = min(words, vocab)
    chain = np.random.default_rng(0)
    followers = chain.integers(words, size=(words, FOLLOWERS))
    # Spread over the vocabulary, so that the embedding's rows are not neighbours.
    spelling = chain.permutation(vocab)[:words]
    drawn = np.random.default_rng(seed)
    word = drawn.integers(words, size=count)
    rows = np.empty((count, length), np.int64)
    for place in range(length):
        rows[:, place] = spelling[word]
        which = np.searchsorted(_CUMULATIVE, drawn.random(count), side="right")
        word = followers[word, np.minimum(which, FOLLOWERS - 1)]
    return rows
