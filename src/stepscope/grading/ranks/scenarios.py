"""Models and data on which wrappers of several ranks are graded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

RANKS = 2
STEPS = 3
LR = 0.5
_VOCAB, _WIDTH, _HIDDEN = 24, 8, 16
_SAMPLES = (12, 8, 16)
"""Samples of the concatenated batch of each step: shapes change."""


class Scenario(NamedTuple):
    """What one criterion trains. Flags name the parts of the model that it adds."""

    flags: frozenset[str] = frozenset()
    seeds_differ: bool = False
    """The ranks start with different values, and the wrapper must take those of rank 0."""
    adamw: bool = False
    bucket_mb: float | None = 0.001
    compute_dtype: torch.dtype | None = None
    groups: bool = False
    schedule: bool = False
    few: bool = False


def scenario_of(kind: str, criterion: str) -> Scenario:
    base = Scenario(adamw=kind == "ShardedOptimizer")
    changes: dict[str, dict[str, Any]] = {
        "start": {"flags": frozenset({"frozen"}), "seeds_differ": True},
        "tied": {"flags": frozenset({"tied"})},
        "frozen": {"flags": frozenset({"frozen"})},
        "unused": {"flags": frozenset({"unused"})},
        "buffers": {"flags": frozenset({"buffer"}), "seeds_differ": True},
        "uneven": {"flags": frozenset({"uneven"})},
        "small-buckets": {"bucket_mb": 1e-6},
        "one-bucket": {"flags": frozenset({"unused"}), "bucket_mb": 1000.0},
        "dtypes": {"flags": frozenset({"double"}), "bucket_mb": 1000.0},
        "compute-dtype": {"compute_dtype": torch.float16},
        "groups": {"groups": True},
        "schedule": {"schedule": True},
        "few": {"few": True},
    }
    return base._replace(**changes.get(criterion, {}))


class Net(nn.Module):
    """A small classifier of token pairs."""

    def __init__(self, flags: frozenset[str], layers: Mapping[str, Any]) -> None:
        super().__init__()
        self.flags = flags
        linear = layers["Linear"]
        more = {"bias": False} if linear is nn.Linear else {}
        self.embedding = layers["Embedding"](_VOCAB, _WIDTH)
        self.scale = nn.Parameter(1.0 + 0.1 * torch.randn(_WIDTH))
        self.fc1 = linear(_WIDTH, _HIDDEN, **more)
        self.fc2 = linear(_HIDDEN, _HIDDEN, **more)
        self.fc3 = linear(_HIDDEN, _HIDDEN, **more)
        self.head = linear(_HIDDEN, _VOCAB, **more)
        self.extra_used = True
        if "tied" in flags:
            self.fc3.weight = self.fc2.weight
        if "frozen" in flags:
            self.fc2.weight.requires_grad_(False)
            self.offset = nn.Parameter(torch.randn(_WIDTH), requires_grad=False)
        if "buffer" in flags:
            self.register_buffer("shift", torch.randn(_WIDTH))
        if flags & {"unused", "uneven"}:
            self.extra = linear(_WIDTH, _WIDTH, **more)
        if "double" in flags:
            self.wide = nn.Parameter(torch.ones(_WIDTH, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).mean(1)
        x = x * self.scale.to(x.dtype)
        for name in ("offset", "shift", "wide"):
            if hasattr(self, name):
                x = x + getattr(self, name).to(x.dtype)
        if "uneven" in self.flags and self.extra_used:
            x = x + self.extra(x)
        x = torch.tanh(self.fc1(x))
        x = torch.tanh(self.fc3(torch.tanh(self.fc2(x))))
        logits: Tensor = self.head(x)
        return logits


def build(scenario: Scenario, layers: Mapping[str, Any], seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(scenario.flags, layers)


def batch(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """The batch of all ranks, or the part of one."""
    generator = torch.Generator().manual_seed(100 + step)
    samples = _SAMPLES[step % len(_SAMPLES)]
    tokens = torch.randint(_VOCAB, (samples, 2), generator=generator)
    targets = torch.randint(_VOCAB, (samples,), generator=generator)
    if rank is None:
        return tokens, targets
    part = slice(rank * samples // RANKS, (rank + 1) * samples // RANKS)
    return tokens[part], targets[part]


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    tokens, targets = batch(step, rank)
    logits = model(tokens)
    return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


def optimizer_of(scenario: Scenario) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if scenario.adamw:
        return torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    return torch.optim.SGD, {"lr": LR}


def optimized(model: nn.Module, scenario: Scenario) -> list[Any]:
    """What the optimizer is given: parameters or groups."""
    if scenario.few:
        return [dict(model.named_parameters())["head.weight"]]
    parameters = list(model.parameters())
    if not scenario.groups:
        return parameters
    half = len(parameters) // 2
    return [
        {"params": parameters[:half], "lr": 0.05, "weight_decay": 0.0},
        {"params": parameters[half:], "lr": 0.01},
    ]


def rate(step: int) -> float:
    """The learning rate of a schedule."""
    return 0.02 / (1 + step)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def gradients(
    model: nn.Module, state: Mapping[str, Tensor], step: int, rank: int | None = None
) -> dict[str, Tensor | None]:
    """Gradients of one rank's part of a batch, or of all, at these weights."""
    model = copy.deepcopy(model)
    model.load_state_dict(dict(state), strict=False)
    model.zero_grad()
    if rank is not None and isinstance(model, Net):
        model.extra_used = rank == 0
    loss_of(model, step, rank).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters()}
