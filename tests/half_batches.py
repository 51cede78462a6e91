"""A small language model in a low-precision dtype: FSDP on half batches against one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear

from stepscope.parallel import FSDP, World

VOCAB, WIDTH, INNER = 100, 64, 128
BATCH, CONTEXT, STEPS, LR = 20, 8, 3, 0.01
TOLERANCE = 1e-4
"""Absolute and relative tolerance."""
Trained = list[dict[str, Tensor]]
"""Parameters after each step."""


class RMSNorm(nn.Module):
    """Computes in float32 and returns the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (self.weight * (wide * scale)).to(x.dtype)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.first_norm = RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.second_norm = RMSNorm(INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for layer in (self.up, self.down, self.head):
            nn.init.normal_(layer.weight, std=(2 / sum(layer.weight.shape)) ** 0.5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.first_norm(self.table(words))
        x = self.second_norm(torch.relu(self.up(x)))
        out: Tensor = self.head(self.down(x))
        return out


def with_casts(model: Toy, words: Tensor, dtype: torch.dtype) -> Tensor:
    """The forward in one process, with only the matrices in `dtype`."""
    x = model.first_norm(embedding(words, model.table.weight.to(dtype)))
    x = model.second_norm(torch.relu(linear(x, model.up.weight.to(dtype))))
    return linear(linear(x, model.down.weight.to(dtype)), model.head.weight.to(dtype))


def batches(seed: int, device: torch.device | str = "cpu") -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCAB, (BATCH, CONTEXT), generator=generator)
    labels = torch.randint(VOCAB, (BATCH,), generator=generator)
    orders = [torch.randperm(BATCH, generator=generator) for _ in range(STEPS)]
    return [(words[order].to(device), labels[order].to(device)) for order in orders]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, -1, :].float(), labels)


def copied(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().float().cpu().clone() for name, value in named.items()}


def alone(
    seed: int, dtype: torch.dtype, device: torch.device | str = "cpu", parts: int = 1
) -> Trained:
    """Train one process on the full batch, or on the averaged gradients of its parts."""
    model = Toy().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    states = []
    for words, labels in batches(seed, device):
        for inputs, targets in zip(words.chunk(parts), labels.chunk(parts), strict=True):
            (loss_of(with_casts(model, inputs, dtype), targets) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(copied(dict(model.named_parameters())))
    return states


def sharded(
    world: World,
    seeds: Sequence[int],
    dtype: torch.dtype,
    make: Callable[[Toy], FSDP] | None = None,
) -> list[Trained]:
    """Train with FSDP, each rank on its share of the batch, once per data seed."""
    results = []
    for number, seed in enumerate(seeds):
        world.step(number)
        module = Toy().to(world.device)
        model = FSDP(module, dtype, verify_every=1) if make is None else make(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        states = []
        for words, labels in batches(seed, world.device):
            own = words.chunk(world.size)[world.rank], labels.chunk(world.size)[world.rank]
            loss_of(model(own[0]), own[1]).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
            states.append(copied(model.gather_full_params()))
        results.append(states)
    return results


def worst(states: Trained, expected: Trained) -> float:
    """The largest deviation in units of the tolerance."""
    return max(
        float(((own[name] - value).abs() / (TOLERANCE + TOLERANCE * value.abs())).max())
        for own, right in zip(states, expected, strict=True)
        for name, value in right.items()
    )
