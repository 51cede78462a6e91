"""What does it save to run blocks again in the backward, and what does it cost?

    stepscope run checkpointing --size xl --table 2026 --context 2048 --dtype bfloat16

The same training step with all activations kept, with stretches of 1, 2, 4, … blocks that keep
their input only, with single blocks inside of stretches, and halved all the way down. Each peak is
held against the one predicted before. A budget adds a case of its own: the strategy that is
predicted to fit with the least running again, run under that limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stepscope.errors import UsageError
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.checkpointing.strategies import refuse_what_fits_nowhere, worth_running
from stepscope.studies.post_mortem import step_post_mortem
from stepscope.studies.workload import WorkloadFlags, workloads


class CheckpointingFlags(WorkloadFlags, frozen=True, kw_only=True):
    """Which steps: each is run with every strategy."""

    checkpoint: tuple[str, ...] = ()
    """Strategies: no, stretches of 1, 2, 4, …, levels (8-1), nested. All, if none is named."""
    budget_gib: float | None = None
    """Memory that the step must fit into, in GiB: adds the best strategy under this limit."""
    steps: int = 6
    """Steps, at least 2: the first makes the optimizer state."""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise UsageError(f"steps is {self.steps}", "it must be at least 2")
        if self.budget_gib is not None and not 0 < self.budget_gib < float("inf"):
            raise UsageError(f"budget-gib is {self.budget_gib}", "give GiB, such as 80")


class Checkpointing(Study[CheckpointingFlags, Any]):
    name = "checkpointing"
    title = "Activation checkpointing"
    question = (
        "How much memory does it save to keep only the input of some blocks and run them again in"
        " the backward, what does it cost in time, and which strategy is the best under a budget?"
    )
    examples = (
        "stepscope run checkpointing --size xl --table 2026 --context 2048 --dtype bfloat16",
        "stepscope run checkpointing --size large --checkpoint no 1 nested --budget-gib 24",
        "stepscope run checkpointing --size tiny --layers 8 --context 64 --device cpu",
    )
    flags = CheckpointingFlags

    def cases(self, flags: CheckpointingFlags) -> tuple[PlannedCase, ...]:
        found: dict[str, PlannedCase] = {}
        plain = msgspec.structs.replace(flags, checkpoint=("no",))
        for workload in workloads(plain, ("train-step",)):
            config = {"steps": flags.steps}
            for strategy in flags.checkpoint or worth_running(workload.layers):
                one = msgspec.structs.replace(workload, checkpoint=strategy)
                found[one.key] = self._case(one.key, msgspec.to_builtins(one) | config, one.needs)
            if flags.budget_gib is not None:
                budget = int(flags.budget_gib * 2**30)
                # Refused here if it fits nowhere; the strategy is chosen on the device, which
                # knows how its allocator rounds.
                refuse_what_fits_nowhere(workload, budget)
                key = f"{workload.key}_budget={flags.budget_gib:g}"
                limited = msgspec.to_builtins(workload) | config | {"budget_bytes": budget}
                found[key] = self._case(key, limited, workload.needs)
        return tuple(found.values())

    def _case(self, key: str, config: dict[str, Any], needs: tuple[str, ...]) -> PlannedCase:
        return PlannedCase(study=self.name, key=key, config=config, needs=needs)

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.studies.checkpointing.measuring import measure_checkpointing

        return measure_checkpointing(config, bench)

    def post_mortem(self, config: dict[str, Any], bench: Bench, said: str) -> dict[str, Any]:
        return step_post_mortem(config, bench, said)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.checkpointing.view import checkpointing_blocks

        return checkpointing_blocks(records)

    def presets(self, environment: Environment) -> Mapping[str, Sequence[CheckpointingFlags]]:
        xl = CheckpointingFlags(
            size=("xl",), table="2026", context=(2048,), dtype=("bfloat16",),
            attention=("sdpa",), optimizer=("torch-fused",), budget_gib=60.0, steps=6,
        )  # fmt: skip
        xl_naive = CheckpointingFlags(
            size=("xl",), table="2026", context=(2048,), dtype=("bfloat16",),
            checkpoint=("no", "1", "4", "nested"), optimizer=("torch-fused",), steps=6,
        )  # fmt: skip
        if environment.device_kind == "cpu":
            # Narrow and long, so that activations outweigh the weights as they do in the large.
            quick = CheckpointingFlags(
                size=("tiny",), layers=8, d_model=64, d_ff=128, heads=2, vocab=128,
                context=(128,), batch=(2,), steps=4, budget_gib=0.0125,
            )  # fmt: skip
        else:
            quick = CheckpointingFlags(size=("small",), context=(512,), budget_gib=4.0)
        return {
            "quick": (quick,),
            "seeds": (CheckpointingFlags(size=("small", "large"), context=(512,)),),
            "cs336-2026": (xl, xl_naive),
            "h200": (xl, xl_naive),
            "full": (xl, xl_naive, CheckpointingFlags(size=("small", "large"), context=(512,))),
        }


STUDY = Checkpointing()
