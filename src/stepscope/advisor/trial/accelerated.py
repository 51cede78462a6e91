"""Apply `stepscope.accelerate` to the models and optimizers of a running program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from stepscope.acceleration.accelerate import accelerate, is_compiled_by_default
from stepscope.acceleration.choice import PASSES
from stepscope.acceleration.report import FP8, Report

_OPTIONS = {"form": PASSES}
"""Compiled with passes from the start: the timed steps of a trial choose no form."""


class Acceleration:
    """`accelerate` for every model of a program."""

    def __init__(self, dtype: str | None = None) -> None:
        self._dtype = dtype
        self._reports: list[Report] = []
        self._fused: list[Any] = []

    def apply(self, model: torch.nn.Module, optimizers: Iterable[Any]) -> None:
        optimizer = self._optimizer_of(model, optimizers)
        compile: Any = _OPTIONS if is_compiled_by_default(model) else "auto"
        self._reports.append(accelerate(model, optimizer, dtype=self._dtype, compile=compile))

    def _optimizer_of(self, model: torch.nn.Module, optimizers: Iterable[Any]) -> Any:
        """Return the first optimizer of the model's parameters that is not fused yet."""
        own = {id(parameter) for parameter in model.parameters()}
        for optimizer in optimizers:
            updated = (p for group in optimizer.param_groups for p in group["params"])
            known = any(optimizer is one for one in self._fused)
            if not known and any(id(parameter) in own for parameter in updated):
                self._fused.append(optimizer)
                return optimizer
        return None

    def without_effect(self) -> str | None:
        """Return why no model runs compiled, or no layer in FP8; None if one does."""
        if self._dtype == FP8:
            layers = [one.fp8.decisions for one in self._reports if one.fp8 is not None]
            reasons = [reason for decisions in layers for reason in decisions.values()]
            if None in reasons:
                return None
            return f"no layer runs in FP8: {reasons[0] if reasons else 'none was called'}"
        if any(one.is_compiled for one in self._reports):
            return None
        left = [one.reason for report in self._reports for one in report.left]
        return "; ".join(dict.fromkeys(left)) or "no model was called"
