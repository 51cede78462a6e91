"""Settings of the update rule on the device, computed there from the step count.

A captured step is replayed without running Python, so nothing that changes from step to step may
come from the host: step counts are device tensors, and the bias corrections are computed from them
on the device.
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
    """A row of settings for every tensor of a table; each has its own step count."""

    def __init__(
        self, counts: Sequence[float | Tensor], rules: tuple[Rule, ...], device: torch.device
    ) -> None:
        """Create the rows. A step count that is a device tensor is shared: a captured step advances
        it too."""
        host_counts = [0.0 if isinstance(count, Tensor) else count for count in counts]
        self._steps = sent(torch.tensor(host_counts, dtype=torch.float32), device)
        shared = [count if isinstance(count, Tensor) else None for count in counts]
        self._shared = any(count is not None for count in shared)
        self.steps: tuple[Tensor, ...] = tuple(
            own if other is None else other
            for own, other in zip(self._steps.unbind(), shared, strict=True)
        )
        """Step count of each tensor, for the optimizer's state."""
        self.rows = torch.zeros(len(rules), len(Settings._fields), device=device)
        self._lr, self._betas = torch.empty(0), torch.empty(0)
        self.rules: tuple[Rule, ...] = ()
        self.set_rules(rules)

    def set_rules(self, rules: tuple[Rule, ...]) -> None:
        """Set new hyperparameters in the same buffers, so that a captured step uses them too."""
        if rules == self.rules:
            return
        device = self.rows.device
        # The last two columns are computed on the device from the step count.
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

    def advance(self, skip: Tensor | None = None) -> None:
        """Count a step and update the bias corrections, in float64: 1 - 0.999 has four digits less
        than 0.999. If the device tensor `skip` is not zero, no step is counted."""
        one = 1 if skip is None else (skip == 0).to(self._steps.dtype).reshape(())
        if self._shared:
            torch._foreach_add_(self.steps, one)
            steps = torch.stack(self.steps)
        else:
            steps = self._steps.add_(one)
        powers = self._betas ** steps.double()[:, None]
        self.rows[:, _COUNTED] = self._lr / (1 - powers[:, 0])
        self.rows[:, _COUNTED + 1] = (1 - powers[:, 1]).sqrt()

    def revert(self, rows: list[int]) -> None:
        """Revert the step count of rows that had no gradient in this step."""
        torch._foreach_sub_([self.steps[row] for row in rows], 1)
