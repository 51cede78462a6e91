"""Ranks whose parameters differ raise within `verify_every` steps; norms of complex gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranked import LIMITS
from stepscope.parallel import DDP, FSDP, ParallelError, World, launch

Make = Callable[[nn.Module, Any], Any]
MAKERS: dict[str, Make] = {
    "DDP": lambda module, every: DDP(module, verify_every=every),
    "FSDP": lambda module, every: FSDP(module, verify_every=every),
}
DIVERGES_AFTER = 1
"""The step whose update differs on one rank."""


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except ParallelError as error:
        return str(error)
    return "fine"


def step(model: Any) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    model.finish_gradient_synchronization()
    model.zero_grad()


def diverging(world: World, kind: str, every: int | None) -> str:
    """Change one bit of a bias of the last rank after a step; return the first error."""
    model = MAKERS[kind](nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), every)
    for number in range(6):
        error = error_of(lambda: step(model))
        if error != "fine":
            return f"step {number}: {error}"
        if number == DIVERGES_AFTER and world.rank == world.size - 1:
            bits = model.module[0].bias.detach().view(torch.int32)
            bits[1] ^= 1
    return error_of(model.verify_parameters)


class Mixed(nn.Module):
    """Complex and real parameters, of one dimension and of two."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))

        self.real = parameter(5, 3, dtype=torch.float32)
        self.matrix = parameter(5, 3, dtype=torch.complex128)
        self.row = parameter(1, 2, dtype=torch.complex64)
        self.bias = parameter(3, dtype=torch.complex64)
        self.scale = parameter(2, dtype=torch.float32)

    def forward(self) -> Tensor:
        named = (self.real, self.matrix, self.row, self.bias, self.scale)
        return torch.stack([(p.abs() ** 3).sum().double() for p in named]).sum()


NORM_TYPES = (2.0, 1.0, 3.0, 0.5, -1.0, float("inf"), float("-inf"))


def clipped(world: World) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Norm and parameters after one step with clipped gradients, by type of norm."""
    results = []
    for number, norm_type in enumerate(NORM_TYPES):
        world.step(number)
        model = FSDP(Mixed())
        model().backward()
        model.finish_gradient_synchronization()
        norm = model.clip_grad_norm_(0.5, norm_type)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        results.append((norm, model.gather_full_params()))
    return results


def with_nan(world: World) -> Tensor:
    model = FSDP(Mixed())
    model().backward()
    model.finish_gradient_synchronization()
    if world.rank == world.size - 1:
        model.module.real.grad[0, 0] = float("nan")
    return model.clip_grad_norm_(0.5, float("inf"))


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.ones(4, 2), 2 * torch.ones(4, 2)))

    def forward(self) -> Tensor:
        return (self.weight * torch.tensor(1j)).real.sum() + (self.weight.abs() ** 2).sum()


def low_precision(_: World) -> tuple[Tensor, Tensor]:
    """Value and gradient of a complex weight in a model that computes in bfloat16."""
    model = FSDP(Rotation(), torch.bfloat16, reduce_dtype=torch.bfloat16)
    value = model()
    value.backward()
    model.finish_gradient_synchronization()
    return value.detach(), model.module.weight.grad


def settings(world: World) -> list[str]:
    return [
        error_of(lambda: DDP(nn.Linear(2, 2), verify_every=2 - world.rank % 2)),
        error_of(lambda: FSDP(nn.Linear(2, 2), verify_every=0)),
        error_of(lambda: FSDP(nn.Linear(2, 2)).clip_grad_norm_(1.0, 0.0)),
    ]


def facts(world: World) -> dict[str, Any]:
    every = {f"{kind} {n}": diverging(world, kind, n) for kind in MAKERS for n in (1, 3, None)}
    return {
        "diverging": every,
        "clipped": clipped(world),
        "nan": with_nan(world),
        "low precision": low_precision(world),
        "settings": settings(world),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(facts, ranks=3, limits=LIMITS)


@pytest.mark.parametrize("kind", MAKERS)
def test_ranks_that_differ_in_one_bit_raise_within_the_stated_steps(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    for result in ranks:
        errors = result["diverging"]
        for every, noticed in ((1, 2), (3, 3)):
            expected = (
                f"step {noticed}: the ranks have diverged before step {noticed}: rank 2 and rank 0"
                " have different values of 0.bias"
            )
            assert errors[f"{kind} {every}"].startswith(expected), errors
        # Not compared between steps, but on request.
        assert errors[f"{kind} None"].startswith("the ranks have diverged before step 6"), errors


def test_settings_of_verification_and_norms_are_checked(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        different, zero, norm = result["settings"]
        assert different.startswith("rank 1 verifies parameters every 1 steps, rank 0 every 2")
        assert zero.startswith("verify_every is 0")
        assert norm.startswith("gradients cannot be clipped by norm_type=0")


def test_complex_gradients_are_clipped_as_in_one_process(ranks: list[dict[str, Any]]) -> None:
    for number, norm_type in enumerate(NORM_TYPES):
        model = Mixed()
        model().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for result in ranks:
            own_norm, parameters = result["clipped"][number]
            assert not own_norm.is_complex()
            torch.testing.assert_close(own_norm, norm, msg=str(norm_type))
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameters[name], parameter.detach())


def test_a_nan_of_one_rank_is_in_the_norm_of_all(ranks: list[dict[str, Any]]) -> None:
    assert all(torch.isnan(result["nan"]) for result in ranks)


def test_a_low_compute_dtype_keeps_the_imaginary_part(ranks: list[dict[str, Any]]) -> None:
    module = Rotation()
    value = module()
    value.backward()
    gradients = [result["low precision"][1] for result in ranks]
    torch.testing.assert_close(torch.cat(gradients), module.weight.grad)
    for result in ranks:
        torch.testing.assert_close(result["low precision"][0], value.detach())
