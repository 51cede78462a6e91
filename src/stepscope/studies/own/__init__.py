"""How does a model of your own train: time, memory, rate, and what changes with a setting?

    stepscope run own --model lab.net:build --batch 8 32 --dtype float32 bfloat16

`build` is a function without arguments. It returns an `nn.Module` and a function that makes a
batch: `make_batch(size, device)` gives what the model is called with, a dictionary for keywords, a
tuple for several arguments. The loss is what the model returns: a scalar, something with a `loss`,
or `(loss, …)`; a third function, `loss(output, batch)`, makes one of anything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stepscope.errors import UsageError, unknown_name
from stepscope.model.config import precision
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block, Table
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.model_names import check_dtype, check_name

STUDY_NAME = "own"
COMPILE = ("no", "block", "model", "graphs")
OPTIMIZERS = ("adamw", "adamw-loop", "adamw-fused", "sgd", "sgd-fused")
ATTENTION = ("as-is", "fused")
CHECKPOINT = ("as-is", "blocks")


class OwnFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Your model and its settings: every combination of the values is a case."""

    model: str = ""
    """package.module:function, importable from here (see PYTHONPATH). It is called without
    arguments and returns an nn.Module, a function make_batch(size, device), and, where the model
    does not give the loss itself, a function loss(outputs, batch). A batch that is a tuple is
    several arguments of the model, a dictionary its keywords."""
    batch: tuple[int, ...] = (8,)
    """The size that make_batch is asked for."""
    dtype: tuple[str, ...] = ("float32",)
    """Number formats: float32, tf32, bfloat16 and float16 (autocast), bfloat16-pure."""
    compile: tuple[str, ...] = ("no",)
    """torch.compile: no (eager), block (each entry of its ModuleLists alone), model (whole),
    graphs (whole, replayed as CUDA graphs)."""
    optimizer: tuple[str, ...] = ("adamw",)
    """adamw (torch's default), adamw-loop (tensor by tensor), adamw-fused, sgd, sgd-fused."""
    attention: tuple[str, ...] = ("as-is",)
    """as-is, or fused: attention that the model writes out is done as one kernel."""
    checkpoint: tuple[str, ...] = ("as-is",)
    """as-is, or blocks: each entry of its ModuleLists runs again in the backward."""
    warmup: int = 5
    """Steps before the first sample."""
    steps: int = 10
    """Samples without the profiler."""
    traced: int = 3
    """Steps under the profiler."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.traced < 1 or self.warmup < 0 or min(self.batch, default=1) < 1:
            raise UsageError(
                f"batch {self.batch}, steps {self.steps}, traced {self.traced}, warmup"
                f" {self.warmup}",
                "warmup cannot be negative, the others must be at least 1",
            )


class OwnCase(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of one's own model, fully named."""

    model: str
    batch: int
    dtype: str
    compile: str
    optimizer: str
    attention: str = "as-is"
    checkpoint: str = "as-is"

    def __post_init__(self) -> None:
        check_name(self.model)
        for kind, value, known in (
            ("compile", self.compile, COMPILE),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("attention", self.attention, ATTENTION),
            ("checkpoint", self.checkpoint, CHECKPOINT),
        ):
            if value not in known:
                raise unknown_name(kind, value, known)
        check_dtype(self.model, self.dtype)

    @property
    def key(self) -> str:
        extras = [] if self.compile == "no" else [f"compile={self.compile}"]
        extras += [] if self.attention == "as-is" else [f"attention={self.attention}"]
        extras += [] if self.checkpoint == "as-is" else [f"checkpoint={self.checkpoint}"]
        name = check_name(self.model)
        return "_".join((name, f"b{self.batch}", self.dtype, *extras, self.optimizer))

    @property
    def name(self) -> str:
        compiled = "" if self.compile == "no" else f", compiled by {self.compile}"
        fused = "" if self.attention == "as-is" else ", attention fused"
        again = "" if self.checkpoint == "as-is" else ", blocks checkpointed"
        words = f"{self.model} in {self.dtype} at batch {self.batch}, {self.optimizer}"
        return f"{words}{compiled}{fused}{again}"


class Own(Study[OwnFlags, Any]):
    name = STUDY_NAME
    title = "Your own model"
    question = (
        "How fast does this model train with each setting, what limits it,"
        " and where do its time and memory go?"
    )
    examples = (
        "stepscope run own --model lab.net:build --batch 8 32",
        "stepscope run own --model lab.net:build --dtype float32 tf32 bfloat16",
        "stepscope run own --model lab.net:build --compile no model --optimizer adamw adamw-fused",
    )
    flags = OwnFlags
    fresh_process = True

    def cases(self, flags: OwnFlags) -> tuple[PlannedCase, ...]:
        if not flags.model:
            raise UsageError("there is no model", "name it: --model package.module:function")
        effort = {"warmup": flags.warmup, "steps": flags.steps, "traced": flags.traced}
        made = (
            OwnCase(
                model=flags.model, batch=batch, dtype=precision(dtype).name, compile=compiled,
                optimizer=optimizer, attention=attention, checkpoint=checkpoint,
            )
            for batch, dtype, compiled, optimizer, attention, checkpoint in itertools.product(
                flags.batch, flags.dtype, flags.compile, flags.optimizer, flags.attention,
                flags.checkpoint,
            )
        )  # fmt: skip
        return tuple(
            PlannedCase(
                study=self.name,
                key=case.key,
                config=msgspec.to_builtins(case) | effort,
                needs=(
                    precision(case.dtype).compute,
                    *([] if case.compile == "no" else ["compiler"]),
                    *(["graph"] if case.compile == "graphs" else []),
                ),
            )
            for case in made
        )

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.studies.own.measuring import measure_own

        return measure_own(config, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.own.view import own_blocks

        return own_blocks(records)

    def headline(self, records: Sequence[Record]) -> Table | None:
        from stepscope.studies.own.view import settings_table

        return settings_table(records) if records else None

    def presets(self, environment: Environment) -> Mapping[str, Sequence[OwnFlags]]:  # noqa: ARG002
        """A model of one's own is in no preset."""
        return {}


STUDY = Own()
