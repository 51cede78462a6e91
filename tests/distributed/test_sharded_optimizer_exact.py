"""ShardedOptimizer reproduces the updates of the given optimizer bit for bit, where torch itself
does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranked import LIMITS
from stepscope.parallel import ParallelError, ShardedOptimizer, World, launch

STEPS = 12
SHAPES = ((37, 53), (1, 7), (129,), (3, 5, 7), (), (300, 131), (2,))
"""Odd sizes: not multiples of a vector register, and one matrix above a rank's share."""
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "foreach AdamW": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def trained(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    """Train with gradients that are equal on every rank."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape).to(p.dtype) * 0.1
        optimizer.step()
    return [p.detach().clone() for p in params]


def different_elements(world: World) -> dict[tuple[str, str, torch.dtype], int]:
    # Sums of an odd number of equal gradients are rounded, and "scatter" averages them itself.
    forms = ("broadcast", "scatter") if world.size in (1, 2) else ("broadcast",)
    different = {}
    for dtype in DTYPES:
        for name, (kind, options) in OPTIMIZERS.items():
            plain = parameters(dtype)
            expected = trained(kind(plain, **options), plain)
            for form in forms:
                own = parameters(dtype)
                sharded = ShardedOptimizer(own, kind, form=form, bucket_mb=1e-3, **options)
                pairs = list(zip(trained(sharded, own), expected, strict=True))
                if depends_on_position(kind, options, dtype, expected):
                    pairs = [(a, b) for a, b in pairs if not nearly_equal(a, b)]
                different[name, form, dtype] = sum(int((a != b).sum()) for a, b in pairs)
    return different


def depends_on_position(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    expected: list[Tensor],
) -> bool:
    """Return whether torch's own update of an element depends on where it is in its tensor. On x86
    the vectorized loop rounds differently than the loop for the last elements."""
    moved = [nn.Parameter(nn.functional.pad(p.flatten(), (3, 0))) for p in parameters(dtype)]
    optimizer = kind(moved, **options)
    torch.manual_seed(1)
    for _ in range(STEPS):
        for p, shape in zip(moved, SHAPES, strict=True):
            gradient = torch.randn(shape).to(dtype) * 0.1
            p.grad = nn.functional.pad(gradient.flatten(), (3, 0))
        optimizer.step()
    pairs = zip(moved, expected, strict=True)
    return any(not torch.equal(p.detach()[3:].view(e.shape), e) for p, e in pairs)


def nearly_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether all elements agree within two roundings of the largest one in each step."""
    allowed = 2 * STEPS * torch.finfo(a.dtype).eps * b.abs().max()
    return bool((a - b).abs().max() <= allowed)


@pytest.mark.parametrize("ranks", [1, 3])
def test_updates_equal_the_named_optimizer_bit_for_bit(ranks: int) -> None:
    for different in launch(different_elements, ranks=ranks, limits=LIMITS):
        assert not {case: count for case, count in different.items() if count}


def options_used(_: World) -> dict[str, Any]:
    plain = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer = ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW, lr=0.1)
    (group,), (named,) = optimizer.param_groups, plain.param_groups
    return {key: (group[key], value) for key, value in named.items() if key != "params"}


def test_no_option_is_added_to_those_of_the_caller() -> None:
    (options,) = launch(options_used, ranks=1, limits=LIMITS)
    assert "fused" in options
    assert all(mine == theirs for mine, theirs in options.values()), options


def frozen(_: World) -> dict[str, Any]:
    """A parameter that is frozen, then unfrozen, and one that is added after some steps."""
    results: dict[str, Any] = {}
    for form in ("broadcast", "scatter"):
        for sharded in (False, True):
            params = parameters(torch.float32)
            late, *others = params
            late.requires_grad_(False)
            kind, options = OPTIMIZERS["AdamW"]
            optimizer: torch.optim.Optimizer = kind(others, **options)
            if sharded:
                optimizer = ShardedOptimizer(others, kind, form=form, **options)
            trained(optimizer, others)
            optimizer.add_param_group({"params": [late.requires_grad_()], "lr": 0.05})
            results[form, sharded] = trained(optimizer, params)
        given = parameters(torch.float32)
        given[2].requires_grad_(False)
        named = list(zip("abcdefg", given, strict=True))
        try:
            optimizer = ShardedOptimizer(named, torch.optim.AdamW, lr=0.1, form=form)
            before = given[2].detach().clone()
            for p in given:
                p.grad = torch.ones_like(p) if p.requires_grad else None
            optimizer.step()
            results[form, "frozen"] = torch.equal(before, given[2])
            given[0].grad = given[0].detach().to_sparse()
            optimizer.step()
        except ParallelError as error:
            results[form, "raised"] = str(error)
    own = parameters(torch.float32)
    optimizer = ShardedOptimizer(own, torch.optim.AdamW, form="scatter")
    own[1].requires_grad_(False)
    try:
        optimizer.step()
    except ParallelError as error:
        results["frozen later"] = str(error)
    return results


def test_frozen_unfrozen_and_added_parameters() -> None:
    for results in launch(frozen, ranks=2, limits=LIMITS):
        for form in ("broadcast", "scatter"):
            pairs = zip(results[form, False], results[form, True], strict=True)
            assert all(torch.equal(*pair) for pair in pairs), form
        assert results["broadcast", "frozen"]
        assert results["broadcast", "raised"].startswith("the gradient of a is sparse")
        assert results["scatter", "raised"].startswith("c is frozen, and form='scatter'")
        assert results["frozen later"].startswith("parameter 1 of group 0 is frozen")
