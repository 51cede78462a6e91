"""What number format does every tensor really have under autocast?

    stepscope run autocast

Nothing is assumed: one forward and backward runs, and the dispatcher says what each operator reads
and writes. The subjects are the small net that the course asks about and the model under study.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stepscope.attention.registry import implementation
from stepscope.errors import UsageError, unknown_name
from stepscope.model.sizes import find_size
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study

FORMATS = ("float16", "bfloat16")


class AutocastFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at: every combination of subject and format is a case."""

    subject: tuple[str, ...] = ("toy", "tiny")
    """`toy` (linear, ReLU, norm, linear), or a size of the model: tiny, mini, small, …"""
    dtype: tuple[str, ...] = FORMATS
    """Formats of autocast: float16, bfloat16."""
    context: int = 64
    """Sequence length of the model."""
    attention: str = "reference"
    """Attention implementation of the model."""

    def __post_init__(self) -> None:
        if self.context < 1:
            raise UsageError(f"context is {self.context}", "it must be at least 1")
        for name in self.dtype:
            if name not in FORMATS:
                raise unknown_name("autocast format", name, FORMATS)
        for name in self.subject:
            if name != "toy":
                find_size(name)
        implementation(self.attention)


class Autocast(Study[AutocastFlags, Any]):
    name = "autocast"
    title = "Autocast"
    question = (
        "Which format do parameters, activations, logits, loss and gradients have under autocast,"
        " which operators stay in float32, and what do the casts cost?"
    )
    examples = (
        "stepscope run autocast",
        "stepscope run autocast --subject small --dtype bfloat16 --attention sdpa",
    )
    flags = AutocastFlags
    no_model = "it names what each layer of its model does"

    def cases(self, flags: AutocastFlags) -> tuple[PlannedCase, ...]:
        return tuple(
            PlannedCase(
                study=self.name,
                key=f"{subject}_{dtype}"
                + ("" if subject == "toy" else f"_c{flags.context}_{flags.attention}"),
                config={
                    "subject": subject, "dtype": dtype, "context": flags.context,
                    "attention": flags.attention,
                },
                needs=(dtype,),
            )
            for subject in flags.subject
            for dtype in flags.dtype
        )  # fmt: skip

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.studies.autocast.measuring import measure_autocast

        return measure_autocast(config, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.autocast.view import autocast_blocks

        return autocast_blocks(records)

    def presets(self, environment: Environment) -> Mapping[str, Sequence[AutocastFlags]]:
        if environment.device_kind == "cpu":
            quick = AutocastFlags(context=16)
        else:
            quick = AutocastFlags(subject=("toy", "small"), context=256)
        large = AutocastFlags(subject=("toy", "small", "large"), context=256)
        return {"quick": (quick,)} | dict.fromkeys(
            ("seeds", "cs336-2026", "h200", "full"), (large,)
        )


STUDY = Autocast()
