"""Apply `stepscope.accelerate` to the models and optimizers of a running program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from stepscope.acceleration.accelerate import (
    accelerate,
    is_compiled_by_default,
    replaceable,
)
from stepscope.acceleration.choice import PASSES
from stepscope.acceleration.report import FP8, Report
from stepscope.analysis.advice.pieces import (
    OPTIMIZER,
    excluded_pieces,
    group_of,
)


class Acceleration:
    """The wanted pieces of `accelerate`, in every model of a program."""

    def __init__(self) -> None:
        self._groups: list[str] = []
        self._dtype: str | None = None
        self._reports: list[Report] = []
        self._fused: list[Any] = []

    def add(self, groups: Sequence[str], dtype: str | None = None) -> None:
        self._groups += groups
        self._dtype = dtype or self._dtype

    def apply(self, model: torch.nn.Module, optimizers: Iterable[Any]) -> None:
        exclude = excluded_pieces(replaceable(model), self._groups)
        optimizer = self._optimizer_of(model, optimizers) if OPTIMIZER in self._groups else None
        # What `compile` chooses by default, without a trial of forms within the timed steps.
        parts = bool(exclude) or not is_compiled_by_default(model)
        compile = False if parts else {"form": PASSES}
        self._reports.append(
            accelerate(model, optimizer, exclude=exclude, dtype=self._dtype, compile=compile)
        )

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
        """Return why nothing was replaced, or runs in FP8; None if something does."""
        if self._dtype == FP8:
            layers = [one.fp8.decisions for one in self._reports if one.fp8 is not None]
            reasons = [reason for decisions in layers for reason in decisions.values()]
            if None in reasons:
                return None
            return f"no layer runs in FP8: {reasons[0] if reasons else 'none was called'}"
        if any(one.replaced or one.notes or one.compilation for one in self._reports):
            return None
        left = [
            f"{one.name or one.piece}: {one.reason}"
            for report in self._reports
            for one in report.left
            if group_of(one.piece) in self._groups and one.reason != "excluded"
        ]
        return (
            "; ".join(dict.fromkeys(left)) or "stepscope.accelerate replaces no part of the model"
        )
