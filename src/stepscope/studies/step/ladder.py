"""The ladder: changes from the baseline step to the fastest step, in order. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from stepscope.analysis.predict.plan import IN_BACKWARD, LOW_PRECISION_GRADS, WITHIN_BACKWARD
from stepscope.errors import unknown_name
from stepscope.model.config import precision
from stepscope.training.workload import Workload

How = Literal["start", "first", "alone", "so far"]
"""`first`: `alone` and `so far` are the same workload, because no earlier change remains in it."""
START = "start"


class Rung(NamedTuple):
    """One change to the step."""

    name: str
    words: str
    changes: dict[str, Any]
    stays: bool = True
    """True if later rungs include this change."""


RUNGS: dict[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung("tf32", "TF32 matmuls", {"dtype": "tf32"}),
        Rung("bf16", "bfloat16 autocast", {"dtype": "bfloat16"}),
        Rung("flash", "flash attention", {"attention": "auto"}),
        Rung("fused-loss", "chunked output head and loss", {"loss": "fused"}),
        # torch.compile fuses the same operations as the rungs that follow, so it does not stay.
        Rung("compile", "torch.compile of each block", {"compile": "block"}, stays=False),
        Rung("fused-pieces", "Stepscope's kernels between the matmuls", {"fused": True}),
        Rung(
            "fused-projections",
            "fused QKV and gate/up projections, cached weight casts",
            {"fused": True, "fused_projections": True},
        ),
        Rung("fused-optimizer", "single-launch AdamW", {"optimizer": "stepscope-fused"}),
        Rung("in-backward", "AdamW overlapped with the backward pass", {"optimizer": IN_BACKWARD}),
        Rung("graph", "CUDA graph of the step", {"graph": True}),
        Rung(
            "autotune-gemms",
            "autotuned cuBLAS kernel for each GEMM",
            {"fused": True, "fused_projections": True, "autotune_gemms": True},
            stays=False,
        ),
        Rung(
            "low-precision-grads",
            "gradients in the dtype of the matmuls",
            {"optimizer": LOW_PRECISION_GRADS},
            stays=False,
        ),
        Rung(
            "narrow-stream",
            "gradients in the dtype of the matmuls, bfloat16 residual stream",
            {"dtype": "bfloat16-stream", "optimizer": LOW_PRECISION_GRADS},
            stays=False,
        ),
        Rung(
            "master",
            "bfloat16 with float32 master weights",
            {"dtype": "bfloat16-master"},
            stays=False,
        ),
        Rung(
            "fp8",
            "linear layers of the blocks in FP8",
            {"dtype": "fp8", "fused": True, "fused_projections": True},
            stays=False,
        ),
        Rung(
            "checkpoint", "activation checkpointing of each block", {"checkpoint": "1"}, stays=False
        ),
    )
}


class LadderStep(NamedTuple):
    """A rung and its workload."""

    rung: str
    how: How
    workload: Workload


def words(rung: str) -> str:
    """Description of a rung for tables and findings."""
    return "eager, float32, naive attention" if rung == START else RUNGS[rung].words


def start(size: str, table: str, context: int, batch: int, overrides: dict[str, int]) -> Workload:
    """The baseline step of the course's write-ups."""
    return Workload(
        size=size,
        table=table,
        context=context,
        batch=batch,
        dtype="float32",
        mode="train-step",
        overrides=overrides,
    )


def ladder(
    first: Workload, rungs: Sequence[str], hows: Sequence[str] = ("alone", "so far")
) -> Iterator[LadderStep]:
    """Yield the baseline, then each change alone and on top of all changes so far."""
    yield LadderStep(START, "start", first)
    so_far: dict[str, Any] = {}
    for rung in _known(rungs):
        on_top = so_far | rung.changes
        alone, combined = replace(first, **rung.changes), replace(first, **on_top)
        if alone == combined and "so far" in hows:
            yield LadderStep(rung.name, "first", alone)
        else:
            workloads: dict[How, Workload] = {"alone": alone, "so far": combined}
            yield from (
                LadderStep(rung.name, how, workloads[how]) for how in workloads if how in hows
            )
        if rung.stays:
            so_far = on_top


def climbed(first: Workload, rungs: Sequence[str]) -> tuple[LadderStep, ...]:
    """The baseline, then each rung on top of those before it, without the single changes."""
    return tuple(ladder(first, rungs, ("so far",)))


def needs_of_kernels(workload: Workload) -> tuple[str, ...]:
    """Requirements of a rung's kernels beyond `Workload.needs`.

    Without them the naive implementation would run under the kernel's name, and emulated bfloat16
    would take longer than all other rungs together.
    """
    own = workload.fused or workload.optimizer in ("stepscope-fused", *WITHIN_BACKWARD)
    return (
        *(["kernels"] if own else []),
        *(["bfloat16-units"] if precision(workload.dtype).compute == "bfloat16" else []),
    )


def applies(rung: str, lacks: Collection[str]) -> bool:
    """Return whether a machine that lacks these features can run the change."""
    changed = replace(start("tiny", "2025", 1, 1, {}), **RUNGS[rung].changes)
    return not {*changed.needs, *needs_of_kernels(changed)} & set(lacks)


def _known(rungs: Sequence[str]) -> list[Rung]:
    for name in rungs:
        if name not in RUNGS:
            raise unknown_name("rung", name, RUNGS)
    # In the order of the ladder, regardless of the order of the flags.
    return [rung for name, rung in RUNGS.items() if name in rungs]
