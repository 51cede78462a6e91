"""The choice of a form by ranks that share their weights: all follow the first one.

Every rank runs as many steps as the others, so the candidates end in the same step on all of them.
There the ranks wait for the decision of the first: two or three small reductions in a training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from stepscope.acceleration.choice import AS_IT_IS, PASSES, PLAIN, Choice, Form, form
from stepscope.acceleration.sharded.units import agreed, is_first


class SharedChoice(Choice):
    """A choice that all ranks of some process groups make alike."""

    def __init__(self, *arguments: Any, groups: Sequence[Any], device: torch.device) -> None:
        super().__init__(*arguments)
        self._groups, self._device = groups, device

    def _of_first(self, value: int) -> int:
        """Return the value, which is not negative, that the first rank has."""
        return agreed([value if is_first(self._groups) else 0], self._groups, self._device)[0]

    def _gains_little(self) -> bool:
        return bool(self._of_first(super()._gains_little()))

    def _follow(self) -> None:
        if self._digest:
            return
        self._began, self._digest = time.perf_counter(), self._key()
        stored = self._load() if is_first(self._groups) else None
        self.chosen = self._form_of_first(stored)
        self.is_stored = self.chosen is not None

    def _decided(self) -> Form:
        self.chosen = self._form_of_first(self._fastest())
        self.seconds = time.perf_counter() - self._began
        assert self.chosen is not None
        if is_first(self._groups):
            self._save()
        return self.chosen

    def _form_of_first(self, own: Form | None) -> Form | None:
        forms = [None, *(form(x, one) for x in (AS_IT_IS, PLAIN, PASSES) for one in self.graphs)]
        return forms[self._of_first(forms.index(own))]
