"""An LSTM language model with truncated backpropagation.

With `--plain-sgd` the weights are updated by hand, so that no optimizer ever steps.
"""

from __future__ import annotations

import sys

import torch
from common import log, options
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2)
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight = self.encoder.weight

    def forward(
        self, tokens: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, state = self.rnn(self.drop(self.encoder(tokens)), state)
        return self.decoder(self.drop(output)), state


def main() -> None:
    plain = "--plain-sgd" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--plain-sgd"]
    given = options(__doc__, "--bf16", "--tf32", "--fused", "--compile")
    large = given.scale == "gpu"
    vocab, width, layers, length, batch = (
        (33_000, 1024, 2, 128, 64) if large else (1000, 128, 2, 32, 16)
    )
    batch *= given.batch_factor
    text = torch.randint(vocab, (length * 64 + 1, batch), device=given.device)
    model = Model(vocab, width, layers).to(given.device)
    step_model = torch.compile(model) if given.compile else model
    parameters = list(model.parameters())
    optimizer = None if plain else torch.optim.Adam(parameters, 1e-3, fused=given.fused or None)
    zeros = torch.zeros(layers, batch, width, device=given.device)
    state = (zeros, zeros.clone())
    for step in range(given.steps):
        start = step % 64 * length
        tokens, targets = text[start : start + length], text[start + 1 : start + 1 + length]
        state = (state[0].detach(), state[1].detach())
        model.zero_grad()
        with torch.autocast(given.device, torch.bfloat16, enabled=given.bf16):
            logits, state = step_model(tokens, state)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.25)
        if optimizer is not None:
            optimizer.step()
        else:
            for parameter in parameters:
                parameter.data.add_(parameter.grad, alpha=-1.0)
        log(given, step, loss)


if __name__ == "__main__":
    main()
