"""The ladder: from the plainest step to the fastest, one change after the other. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from stepscope.errors import unknown_name
from stepscope.model.config import precision
from stepscope.studies.training.flags import AS_MADE, IN_BACKWARD, WITHIN_BACKWARD
from stepscope.studies.training.workload import Workload

How = Literal["start", "first", "alone", "so far"]
"""`first`: alone and so far are the same, because nothing of what is below is left."""
START = "start"


class Rung(NamedTuple):
    """One change of the step."""

    name: str
    words: str
    changes: dict[str, Any]
    stays: bool = True
    """The rungs after it keep it; otherwise it is tried alone and on top of those before it."""


RUNGS: dict[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung("tf32", "tf32 matrix products", {"dtype": "tf32"}),
        Rung("bf16", "bfloat16 autocast", {"dtype": "bfloat16"}),
        Rung("flash", "flash attention", {"attention": "auto"}),
        Rung("fused-loss", "head and loss by chunks", {"loss": "fused"}),
        # It fuses what lies between the products itself, and has no part in what follows.
        Rung("compile", "torch.compile of each block", {"compile": "block"}, stays=False),
        Rung("fused-pieces", "our kernels between the products", {"fused": True}),
        Rung("joined", "one product for each input, kept casts", {"fused": True, "joined": True}),
        Rung("fused-optimizer", "AdamW in one launch", {"optimizer": "stepscope-fused"}),
        Rung("in-backward", "AdamW beside the backward", {"optimizer": IN_BACKWARD}),
        Rung("graph", "the step as a CUDA graph", {"graph": True}),
        Rung(
            "searched",
            "the fastest kernel that cuBLAS has for each product",
            {"fused": True, "joined": True, "searched": True},
            stays=False,
        ),
        Rung("as-made", "gradients as products make them", {"optimizer": AS_MADE}, stays=False),
        Rung(
            "narrow-stream",
            "gradients as made, bfloat16 residual stream",
            {"dtype": "bfloat16-stream", "optimizer": AS_MADE},
            stays=False,
        ),
        Rung(
            "master",
            "bfloat16 with float32 master weights",
            {"dtype": "bfloat16-master"},
            stays=False,
        ),
        Rung("checkpoint", "each block run again in backward", {"checkpoint": "1"}, stays=False),
    )
}


class LadderStep(NamedTuple):
    """A step on the ladder."""

    rung: str
    how: How
    workload: Workload


def words(rung: str) -> str:
    return "eager, float32, attention written out" if rung == START else RUNGS[rung].words


def start(size: str, table: str, context: int, batch: int, overrides: dict[str, int]) -> Workload:
    """The step of the write-ups."""
    return Workload(
        size=size,
        table=table,
        context=context,
        batch=batch,
        dtype="float32",
        attention="reference",
        compile="no",
        optimizer="torch",
        mode="train-step",
        overrides=overrides,
    )


def ladder(
    first: Workload, rungs: Sequence[str], hows: Sequence[str] = ("alone", "so far")
) -> Iterator[LadderStep]:
    """The start, each change alone, and all changes so far."""
    yield LadderStep(START, "start", first)
    so_far: dict[str, Any] = {}
    for rung in _known(rungs):
        on_top = so_far | rung.changes
        alone, below = replace(first, **rung.changes), replace(first, **on_top)
        if alone == below and "so far" in hows:
            yield LadderStep(rung.name, "first", alone)
        else:
            held: dict[How, Workload] = {"alone": alone, "so far": below}
            yield from (LadderStep(rung.name, how, held[how]) for how in held if how in hows)
        if rung.stays:
            so_far = on_top


def climbed(first: Workload, rungs: Sequence[str]) -> tuple[LadderStep, ...]:
    """The start and each rung with all below it, without what is tried alone."""
    return tuple(ladder(first, rungs, ("so far",)))


def needs_of_kernels(workload: Workload) -> tuple[str, ...]:
    """What the kernels of a rung need beyond `Workload.needs`.

    Without them the naive form would run under the kernel's name, and emulated bfloat16 would take
    longer than all other rungs together.
    """
    ours = workload.fused or workload.optimizer in ("stepscope-fused", *WITHIN_BACKWARD)
    return (
        *(["kernels"] if ours else []),
        *(["bfloat16-units"] if precision(workload.dtype).compute == "bfloat16" else []),
    )


def applies(rung: str, lacks: Collection[str]) -> bool:
    """Whether a machine without those can take that change."""
    changed = replace(start("tiny", "2025", 1, 1, {}), **RUNGS[rung].changes)
    return not {*changed.needs, *needs_of_kernels(changed)} & set(lacks)


def _known(rungs: Sequence[str]) -> list[Rung]:
    for name in rungs:
        if name not in RUNGS:
            raise unknown_name("rung", name, RUNGS)
    # In the ladder's order, whatever the order of the request.
    return [rung for name, rung in RUNGS.items() if name in rungs]
