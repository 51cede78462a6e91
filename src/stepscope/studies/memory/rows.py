"""Rows of the memory study: records with their decoded ledger."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from stepscope.model import cost
from stepscope.model.checkpointing import NONE
from stepscope.model.config import PRECISIONS, ModelConfig, precision
from stepscope.model.sizes import find_size
from stepscope.records.memory import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Course,
    GradientMoments,
    Point,
    SavedTensor,
)
from stepscope.records.schema import Record
from stepscope.studies.base import Result
from stepscope.studies.memory.cases import MemoryCase
from stepscope.views.identity import OfStep
from stepscope.views.memory import Account


class Planned(NamedTuple):
    """A case of the memory study that did not run."""

    record: Record
    workload: MemoryCase


class Accounted(Account):
    """A case of the memory study that ran."""

    def __init__(self, result: Result[MemoryCase]) -> None:
        mode = "" if result.case.mode == "train-step" else f", {result.case.mode}"
        super().__init__(result.record, f"{result.case.name}{mode}")
        self.workload = result.case

    @cached_property
    def course(self) -> tuple[Point, ...]:
        """Memory over the recorded step; empty in records of older versions."""
        return self.record.attachment("course", Course) or ()

    @property
    def driver_unattributed(self) -> float | None:
        """Bytes of the driver beyond the allocator's and those from before the model existed."""
        driver = self.bytes("driver_bytes")
        if driver is None:
            return None
        return driver - (self.bytes("reserved_bytes") or 0) - (self.bytes("context_bytes") or 0)

    @property
    def driver_unattributed_share(self) -> float | None:
        left = self.driver_unattributed
        return None if left is None or not self.peak else abs(left) / self.peak

    @property
    def prediction_off(self) -> float | None:
        """Predicted over measured peak, minus one."""
        predicted = self.bytes("predicted_bytes")
        return None if predicted is None or not self.peak else predicted / self.peak - 1

    @property
    def per_parameter(self) -> float:
        """Bytes of parameters, gradients and optimizer state per parameter."""
        total = sum(self.line(name) for name in (PARAMETERS, GRADIENTS, OPTIMIZER))
        counted = self.record.quantity("parameters")
        return total / (counted or cost.parameters(self.workload.model()).total)


def accounted(results: Sequence[Result[MemoryCase]]) -> list[Accounted]:
    return [
        Accounted(result)
        for result in results
        if result.record.status == "ok" and {"ledger", "saved"} <= result.record.attachments.keys()
    ]


def leading(cases: Sequence[Accounted]) -> tuple[Accounted, Accounted | None]:
    """The case that figures and ledgers show, and the forward pass alone of the same step.

    It is the train step with the highest forward, so that activations are visible; without
    forwards the highest train step.
    """
    steps = [case for case in cases if case.workload.mode == "train-step"]
    forwards = {
        msgspec.structs.replace(case.workload, mode="train-step").key: case
        for case in cases
        if case.workload.mode == "forward"
    }
    paired = [case for case in steps if case.workload.key in forwards]
    if paired:
        lead = max(paired, key=lambda case: forwards[case.workload.key].peak)
        return lead, forwards[lead.workload.key]
    return max(steps or cases, key=lambda case: (len(case.phases), case.peak)), None


def but_for_context(first: OfStep, second: OfStep) -> bool:
    """True if both are the same step at any context."""
    alike = msgspec.structs.replace(first.workload, context=second.workload.context)
    return alike.key == second.workload.key


class Regime:
    """Bytes per parameter by the closed forms."""

    def __init__(self, name: str) -> None:
        # The same for any model: all three are proportional to the number of parameters.
        model = find_size("tiny")
        count = cost.parameters(model).total
        self.name, self.policy = name, PRECISIONS[name]
        self.weights = cost.weight_bytes(model, self.policy) // count
        self.gradients = cost.weight_bytes(model, self.policy) // count
        self.state = cost.optimizer_bytes(model, self.policy) // count
        self.copies = 2 if self.policy.autocast else 0
        self.total = self.weights + self.gradients + self.state


REGIMES = ("float32", "bfloat16", "bfloat16-pure", "bfloat16-master")


def highest_steps(cases: Sequence[Accounted]) -> dict[str, Accounted]:
    """For each dtype the train step with the highest peak, the first if several are equal."""
    highest: dict[str, Accounted] = {}
    for case in cases:
        dtype = case.workload.dtype
        if case.workload.mode == "train-step" and (
            dtype not in highest or case.peak > highest[dtype].peak
        ):
            highest[dtype] = case
    return highest


class Block:
    """What one block of a step saves for backward, and the gradients that it produces."""

    def __init__(self, case: Accounted, saved: Sequence[SavedTensor], model: ModelConfig) -> None:
        self.case, self.count = case, model.n_layers
        self.saved = sorted(saved, key=lambda one: -one.times * one.bytes)
        self.saved_bytes = sum(one.times * one.bytes for one in saved)
        counted = cost.parameters(model)
        # The norm at the end belongs to no block.
        in_blocks = counted.attention + counted.feed_forward + counted.norms - model.d_model
        self.parameters, self.model_parameters = in_blocks // model.n_layers, counted.total
        self.gradient_width = (
            cost.weight_bytes(model, precision(case.workload.dtype)) // counted.total
        )

    @classmethod
    def of(cls, case: Accounted) -> Block | None:
        """None for a user's model, and for a step that recomputes or saves nothing by block."""
        saved = [one for one in case.saved if one.module.startswith("blocks.0.")]
        model = case.workload.shape
        if model is None or not saved or not case.kept or case.workload.checkpoint != NONE:
            return None
        return cls(case, saved, model)

    @property
    def all_saved(self) -> int:
        """Bytes that the whole step saves for backward."""
        outside = sum(
            one.times * one.bytes
            for one in self.case.saved
            if not one.module.startswith("blocks.0.")
        )
        return self.saved_bytes * self.count + outside

    @property
    def change(self) -> int | None:
        """Growth of the memory in use over one block of the backward pass; None where it was not
        recorded."""
        moments = self.case.record.attachment("gradients", GradientMoments) or ()
        live = {one.parameter: one.live for one in moments}
        for name, after in live.items():
            before = live.get(name.replace("blocks.0.", "blocks.1.", 1))
            if name.startswith("blocks.0.") and before is not None:
                return after - before
        return None

    @property
    def all_gradients(self) -> int | None:
        """Bytes of all gradients at the end of the backward pass."""
        end = next((end for end in self.case.ends if end.phase == "backward"), None)
        return None if end is None else end.lines.get(GRADIENTS)
