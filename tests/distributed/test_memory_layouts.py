"""Random models of every memory layout train as one process does, whichever gradients are missing.

A model has a few parameters: contiguous, transposed, channels_last, strided or with a lazy bit of
`conj()` or `imag`, of any shape, complex, tied, frozen or without elements. The layouts may differ
between ranks. Ranks without samples or without some gradients average zeros.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ranked import LIMITS, max_difference
from stepscope.parallel import DDP, FSDP, ShardedOptimizer, World, launch
from stepscope.parallel.reducer import STRATEGIES

RANKS = 3
CASES = 84
STEPS = 2
TOLERANCE = 1e-12
SHAPES = ((4, 3), (5, 2, 3), (4, 2, 3, 3), (7, 1), (6,), (0, 3), (3, 0), (0,))
LAYOUTS = ("contiguous", "transposed", "channels_last", "permuted", "sliced", "lazy")
WRAPPERS = (*STRATEGIES, "FSDP", "broadcast", "scatter")


class Kind(NamedTuple):
    """One parameter of a model."""

    shape: tuple[int, ...]
    layouts: tuple[str, ...]
    """Memory layout on each rank; the first one in one process."""
    is_complex: bool
    frozen: bool
    tied: bool
    """True if two modules use it."""


class Case(NamedTuple):
    """One model and how it is trained."""

    seed: int
    wrapper: str
    optimizer: str
    kinds: tuple[Kind, ...]
    missing: str
    """Which ranks have no gradient: none, those without samples, or each for some parameters."""
    used: tuple[tuple[bool, ...], ...]
    """Whether a rank has samples, by step and rank; or uses a parameter, by rank and parameter."""


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Equal values in another memory layout."""
    if layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last" and values.dim() == 4:
        return values.to(memory_format=torch.channels_last)
    if layout == "permuted":
        order = [*range(1, values.dim()), 0]
        back = [order.index(dim) for dim in range(values.dim())]
        return values.permute(order).contiguous().permute(back)
    if layout == "sliced":
        return torch.stack([values, values], dim=-1)[..., 0]
    if layout == "lazy":
        if values.is_complex():
            return values.conj().resolve_conj().conj()
        # The imaginary part of a conjugate is negated lazily.
        return torch.complex(torch.zeros_like(values), -values).conj().imag
    return values.contiguous()


class Piece(nn.Module):
    """A parameter whose gradient differs in every element and depends on its value."""

    def __init__(self, weight: nn.Parameter, number: int) -> None:
        super().__init__()
        self.weight = weight
        self.number = number

    def forward(self, sample: int) -> Tensor:
        weight = self.weight
        generator = torch.Generator().manual_seed(1000 * sample + self.number)
        linear, square = (
            torch.randn(weight.shape, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        if not weight.is_complex():
            return (weight * linear).sum() + (weight.square() * square).sum()
        # Saves the weight for backward: conjugated, and as pairs of real numbers.
        product = (weight.conj() * (weight * torch.complex(linear, square))).sum()
        pairs = torch.view_as_real(weight.resolve_conj())
        return product.real + (weight * linear).sum().imag + (pairs.square() * pairs).sum()


class Pieces(nn.Module):
    def __init__(self, case: Case, rank: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(case.seed + seed)
        self.pieces = nn.ModuleList()
        for kind in case.kinds:
            dtype = torch.complex128 if kind.is_complex else torch.float64
            values = torch.randn(kind.shape, generator=generator, dtype=dtype)
            weight = nn.Parameter(laid_out(values, kind.layouts[rank]))
            weight.requires_grad_(not kind.frozen)
            for _ in range(2 if kind.tied else 1):
                self.pieces.append(Piece(weight, len(self.pieces)))

    def forward(self, samples: list[int], used: tuple[bool, ...] | None = None) -> Tensor:
        terms = [
            piece(sample)
            for sample in samples
            for index, piece in enumerate(self.pieces)
            if used is None or used[index]
        ]
        return torch.stack(terms).sum() / len(samples)


def random_case(seed: int) -> Case:
    chance = random.Random(seed)
    wrapper = WRAPPERS[seed % len(WRAPPERS)]
    missing = ("none", "samples", "parameters")[seed // len(WRAPPERS) % 3]
    if wrapper == "FSDP":
        # Its ranks take the same path.
        missing = "none"
    if wrapper == "scatter" and missing == "samples":
        missing = "parameters"
    optimizer = chance.choice(("sgd", "sgd fused", "adamw", "adamw fused"))
    # The fused optimizers of torch read memory in the order of addresses, also in one process.
    layouts = LAYOUTS[:4] if "fused" in optimizer else LAYOUTS
    kinds = []
    for _ in range(chance.randint(2, 4)):
        same = chance.random() < 0.6
        own = [chance.choice(layouts) for _ in range(RANKS)]
        is_complex = "fused" not in optimizer and chance.random() < 0.4
        if is_complex and optimizer == "adamw":
            # It views complex parameters as real, which torch does not allow with a lazy bit.
            own = [layout if layout != "lazy" else "transposed" for layout in own]
        kinds.append(
            Kind(
                chance.choice(SHAPES),
                tuple(own[:1] * RANKS if same else own),
                is_complex,
                frozen=wrapper != "scatter" and chance.random() < 0.15,
                tied=chance.random() < 0.25,
            )
        )
    # At least one parameter is trained, and the first rank with samples uses it.
    kinds[0] = kinds[0]._replace(frozen=False, shape=chance.choice(SHAPES[:5]))
    pieces = sum(2 if kind.tied else 1 for kind in kinds)
    if missing == "samples":
        used = [[chance.random() < 0.5 for _ in range(RANKS)] for _ in range(STEPS)]
        for step in used:
            step[chance.randrange(RANKS)] = True
    else:
        used = [[chance.random() < 0.5 for _ in range(pieces)] for _ in range(RANKS)]
        for rank in used:
            rank[0] = True
    return Case(seed, wrapper, optimizer, tuple(kinds), missing, tuple(map(tuple, used)))


CASE_LIST = tuple(random_case(seed) for seed in range(CASES))


def share(case: Case, step: int, rank: int) -> tuple[list[int], tuple[bool, ...] | None, float]:
    """Samples of a rank, the parameters it uses, and the weight of its loss."""
    count = 1 if case.wrapper == "FSDP" else 1 + rank % 2
    samples = [100 * step + 10 * rank + index for index in range(count)]
    if case.missing == "samples":
        counts = [(1 + r % 2) * case.used[step][r] for r in range(RANKS)]
        return samples[: counts[rank]], None, counts[rank] / sum(counts)
    return samples, case.used[rank] if case.missing == "parameters" else None, 1 / RANKS


def optimizer_options(case: Case) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    fused = True if "fused" in case.optimizer else None
    if case.optimizer.startswith("sgd"):
        return torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "fused": fused}
    return torch.optim.AdamW, {"lr": 0.01, "fused": fused}


def single(case: Case) -> dict[str, Tensor]:
    """Train in one process on the weighted losses of all ranks."""
    model = Pieces(case, 0, 0)
    kind, options = optimizer_options(case)
    optimizer = kind(model.parameters(), **options)
    for step in range(STEPS):
        for rank in range(RANKS):
            samples, used, weight = share(case, step, rank)
            if samples:
                (weight * model(samples, used)).backward()
        for parameter in model.parameters():
            if case.wrapper == "scatter" and parameter.grad is None:
                # Documented: a missing gradient counts as zero.
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return values_of(dict(model.named_parameters()))


def train(world: World, case: Case) -> dict[str, Tensor]:
    """Train as one rank. Wrappers take the values of rank 0, so the others start from their own."""
    wrapped = case.wrapper != "scatter"
    module = Pieces(case, world.rank, world.rank if wrapped else 0)
    kind, options = optimizer_options(case)
    model: Any = module
    if case.wrapper == "FSDP":
        model = FSDP(module, verify_every=1)
    elif wrapped:
        strategy: Any = case.wrapper if case.wrapper in STRATEGIES else "overlap"
        missing: Any = "zero" if case.missing == "parameters" else "raise"
        model = DDP(module, strategy, 1e-4, missing_gradients=missing, verify_every=1)
    if case.wrapper in ("broadcast", "scatter"):
        sharded: Any = ShardedOptimizer
        optimizer = sharded(model.parameters(), kind, form=case.wrapper, **options)
    else:
        optimizer = kind(model.parameters(), **options)
    for step in range(STEPS):
        samples, used, _ = share(case, step, world.rank)
        if case.missing == "samples":
            model.batch_of(len(samples))
        if samples:
            model(samples, used).backward()
        if wrapped:
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    if wrapped:
        model.verify_parameters()
    if case.wrapper == "FSDP":
        return values_of(model.gather_full_params())
    return values_of(dict(module.named_parameters()))


def values_of(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.view_as_real(p.detach().to(torch.complex128).resolve_conj()).clone()
        for name, p in named.items()
    }


def train_all(world: World, numbers: list[int]) -> dict[int, dict[str, Tensor]]:
    results = {}
    for number in numbers:
        world.step(number)
        results[number] = train(world, CASE_LIST[number])
    return results


def test_every_layout_trains_as_one_process() -> None:
    # One launch for all: starting ranks takes longer than training.
    trained = launch(train_all, (list(range(CASES)),), ranks=RANKS, limits=LIMITS)
    for case in CASE_LIST:
        ranks = [result[case.seed] for result in trained]
        for name, value in ranks[0].items():
            assert all(torch.equal(value, other[name]) for other in ranks), (name, case)
        filled = {name: value for name, value in single(case).items() if value.numel()}
        mine = {name: ranks[0][name] for name in filled}
        assert max_difference(mine, filled) <= TOLERANCE, case
