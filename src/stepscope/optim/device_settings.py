"""The settings of the update rule on the device, worked out there from a count of steps.

A captured step is replayed without its Python, so nothing that changes from step to step may come
from the host: the counts are tensors, and what follows from them is computed beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepscope.optim.adamw import Rule
from stepscope.optim.triton_adamw import Settings, sent

_COUNTED = 5
"""The first column of the settings that depends on the step."""


class DeviceSettings:
    """A row of settings for every tensor of a table; each has its own count of steps."""

    def __init__(
        self, counts: Sequence[float | Tensor], rules: tuple[Rule, ...], device: torch.device
    ) -> None:
        """A count that is a tensor of the device is shared: a captured step advances it too."""
        hosted = [0.0 if isinstance(count, Tensor) else count for count in counts]
        self._steps = sent(torch.tensor(hosted, dtype=torch.float32), device)
        shared = [count if isinstance(count, Tensor) else None for count in counts]
        self._shared = any(count is not None for count in shared)
        self.steps: tuple[Tensor, ...] = tuple(
            own if other is None else other
            for own, other in zip(self._steps.unbind(), shared, strict=True)
        )
        """The count of each tensor, for the optimizer's state."""
        self.rows = torch.zeros(len(rules), len(Settings._fields), device=device)
        self._lr, self._betas = torch.empty(0), torch.empty(0)
        self.rules: tuple[Rule, ...] = ()
        self.follow(rules)

    def follow(self, rules: tuple[Rule, ...]) -> None:
        """Take new hyperparameters; the buffers stay, so a captured step follows too."""
        if rules == self.rules:
            return
        device = self.rows.device
        # The last two are worked out here, from the count.
        settings = [Settings.of(rule, 0.0, 0.0) for rule in rules]
        fixed = torch.tensor(settings, dtype=torch.float32)
        lr = torch.tensor([rule.lr for rule in rules], dtype=torch.float64)
        betas = torch.tensor([(r.beta1, r.beta2) for r in rules], dtype=torch.float64)
        self.rows[:, :_COUNTED].copy_(sent(fixed, device)[:, :_COUNTED])
        if self.rules:
            self._lr.copy_(sent(lr, device))
            self._betas.copy_(sent(betas, device))
        else:
            self._lr, self._betas = sent(lr, device), sent(betas, device)
        self.rules = rules

    def advance(self) -> None:
        """Count a step. In double precision: 1 - 0.999 has four digits less than 0.999."""
        if self._shared:
            torch._foreach_add_(self.steps, 1)
            steps = torch.stack(self.steps)
        else:
            steps = self._steps.add_(1)
        kept = self._betas ** steps.double()[:, None]
        self.rows[:, _COUNTED] = self._lr / (1 - kept[:, 0])
        self.rows[:, _COUNTED + 1] = (1 - kept[:, 1]).sqrt()

    def uncount(self, rows: list[int]) -> None:
        """Those had no gradient: the step was none of theirs."""
        torch._foreach_sub_([self.steps[row] for row in rows], 1)
