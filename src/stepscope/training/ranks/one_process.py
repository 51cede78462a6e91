"""A few steps of one process on the full batch, with which the ranks' parameters are compared.

The process adds up the gradients of all shares and updates once per step: training on several ranks
has to give the same parameters up to rounding. Imports torch lazily.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from stepscope.records.schema import Quantity
from stepscope.training.ranks.cases import CHECK_STEPS
from stepscope.training.ranks.steps import free, progress
from stepscope.training.ranks.subject import Fed, RankedStep, make_subject

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stepscope.parallel import World
    from stepscope.training.workload import Workload

CHECK_EPS = 1e-3
"""AdamW's epsilon in these steps. With its default, updates hardly depend on the size of gradients,
so that a sum instead of an average would go unnoticed, and rounding decides the sign of updates
with a gradient near 0."""


class Subject(NamedTuple):
    """What every wrapper of a case trains."""

    model: Callable[[], nn.Module]
    """Builds the model, with the same weights each time."""
    fed: Fed
    share_of: Callable[[int], Fed]

    def copied(self, world: World) -> Subject:
        """The same for many turns: on a CPU copying weights is faster than initializing them, and
        by then the parameters of one process are no longer in memory."""
        if world.device.type != "cpu":
            return self
        template = self.model()
        return self._replace(model=lambda: copy.deepcopy(template))


class OneProcess(NamedTuple):
    """Parameters after the steps, on the CPU."""

    parameters: dict[str, Tensor]
    change: float
    """Largest change of a parameter by the steps."""
    rounding: float
    """Distance of neighboring numbers at the largest parameter, in the dtype of the parameters."""

    def quantities(self) -> tuple[Quantity, ...]:
        return (
            Quantity(name="change", value=self.change, unit="1"),
            Quantity(name="rounding", value=self.rounding, unit="1"),
        )

    def difference(self, module: nn.Module) -> float:
        """Largest difference of a parameter of the module; collective if it is sharded."""
        return _difference(module, self.parameters)


def subject_of(
    world: World, case: RankedStep | Workload, share: int, dtype: str = "float32"
) -> tuple[Subject, nn.Module]:
    """The subject of a case whose ranks have `share` sequences, and its model as first built."""
    model, share_of = make_subject(world, case, share, dtype)

    def build() -> nn.Module:
        return make_subject(world, case, share, dtype).model

    return Subject(build, share_of(world.rank), share_of), model


def train_alone(
    world: World,
    module: nn.Module,
    subject: Subject,
    *,
    fused: bool | None = None,
    autocast: bool = False,
) -> OneProcess:
    """Train the module on the batches of all ranks, and compare it with its start."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), eps=CHECK_EPS, fused=fused)
    for step in range(CHECK_STEPS):
        for rank in range(world.size):
            progress()
            seed_of(step, rank)
            with torch.autocast(world.device.type, torch.bfloat16, enabled=autocast):
                loss = subject.share_of(rank).loss_of(module) / world.size
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    del loss, optimizer
    after = {name: p.detach().cpu() for name, p in module.named_parameters()}
    rounding = max((float(p.abs().max()) * _resolution(p) for p in after.values()), default=0.0)
    del module
    free(world)
    change = _difference(subject.model(), after)
    free(world)
    return OneProcess(after, change, rounding)


def seed_of(step: int, rank: int) -> None:
    """Seed the random numbers of a share's step, such as those of dropout."""
    import torch

    torch.manual_seed(1000 * step + rank)


def _difference(module: nn.Module, parameters: dict[str, Tensor]) -> float:
    import torch

    largest = 0.0
    with torch.no_grad():
        for name, value in _full(module):
            difference = value.float() - parameters[name].to(value.device).float()
            if difference.numel():
                largest = max(largest, float(difference.abs().max()))
    return largest


def _full(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name; those of which this rank has a part are gathered one by one."""
    entries = module.state_dict()
    for name, parameter in module.named_parameters():
        value = entries.get(name, parameter)
        yield name, value.full_tensor() if hasattr(value, "full_tensor") else value.detach()


def _resolution(parameter: Tensor) -> float:
    import torch

    return torch.finfo(parameter.dtype).eps if parameter.is_floating_point() else 0.0
