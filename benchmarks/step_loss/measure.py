"""Train a rung of the ladder on a learnable text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from step_loss.cases import LossCase
from stepscope.records.schema import Quantity, Series
from stepscope.studies.base import Bench, Measurement
from stepscope.training.transformer import TransformerStep

if TYPE_CHECKING:
    from torch import Tensor

LEARNING_RATE = 3e-4
FOLLOWERS = 8
_WEIGHTS = 1.0 / np.arange(1, FOLLOWERS + 1)
_SHARES = _WEIGHTS / _WEIGHTS.sum()


def measure(case: LossCase, bench: Bench) -> Measurement:
    """Train for a few hundred steps to check that a faster step computes the same result."""
    import torch

    step = TransformerStep(case, bench.device, seed=case.seed)
    for group in step.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    rows = sequences(
        case.steps * case.batch, case.context + 1, case.model().vocab, case.seed, case.words
    )
    text = torch.from_numpy(rows).view(case.steps, case.batch, -1)
    if case.graph:
        # The capture runs real steps; undo them.
        before = [parameter.detach().clone() for parameter in step.model.parameters()]
        step.phases()
        begin_again(step, before)
    losses = torch.empty(case.steps, device=bench.device.torch_device)
    for index, batch in enumerate(text):
        step.reset()
        step.tokens.copy_(batch[:, :-1])
        step.targets.copy_(batch[:, 1:])
        step.run_phases()
        assert step.loss is not None
        losses[index].copy_(step.loss.detach())
        if index % 10 == 9:
            bench.progress(index + 1, case.steps, "steps of training")
    return Measurement(
        series=(Series(name="loss", unit="nats", values=tuple(losses.tolist())),),
        quantities=(*case.quantities(), Quantity(name="entropy", value=entropy(), unit="nats")),
    )


def begin_again(step: TransformerStep, weights: Sequence[Tensor]) -> None:
    """Reset weights and optimizer state in place: a CUDA graph has fixed tensor addresses."""
    import torch

    from stepscope.optim.fused import MASTER

    with torch.no_grad():
        for parameter, before in zip(step.model.parameters(), weights, strict=True):
            parameter.copy_(before)
        for owner, state in step.optimizer.state.items():
            for name, tensor in state.items():
                if name == MASTER:
                    tensor.copy_(owner)
                else:
                    tensor.zero_()
    step.follow_weights()


def entropy() -> float:
    """Entropy of the text in nats per word: the lowest reachable loss."""
    return -float(sum(share * math.log(share) for share in _SHARES))


def sequences(
    count: int, length: int, vocab: int, seed: int, words: int = 256
) -> NDArray[np.int64]:
    """Generate rows of a learnable text, the same on every machine.

    The text is a Markov chain: each word is followed by one of eight others, with probabilities
    proportional to 1, 1/2, … 1/8. A trained model reaches `entropy`, about 1.8 nats; an untrained
    one starts at the logarithm of the vocabulary size. `seed` selects the rows, not the chain.
    """
    words = min(words, vocab)
    chain = np.random.default_rng(0)
    followers = chain.integers(words, size=(words, FOLLOWERS))
    # Spread over the vocabulary, so that the rows of the embedding are not adjacent.
    spelling = chain.permutation(vocab)[:words]
    generator = np.random.default_rng(seed)
    word = generator.integers(words, size=count)
    rows = np.empty((count, length), np.int64)
    cumulative = np.cumsum(_SHARES)
    for index in range(length):
        rows[:, index] = spelling[word]
        choice = np.searchsorted(cumulative, generator.random(count), side="right")
        word = followers[word, np.minimum(choice, FOLLOWERS - 1)]
    return rows
