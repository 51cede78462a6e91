"""`stepscope predict`: the memory a training step will need, without running it."""

from __future__ import annotations

import itertools
from typing import Literal

import msgspec

from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import Prediction, predict
from stepscope.cli.common import json_line, parse
from stepscope.errors import UsageError
from stepscope.kernels.activation_policy import ALL
from stepscope.model.checkpointing import NONE
from stepscope.model.config import precision
from stepscope.model.sizes import find_size, with_overrides


class PredictOptions(msgspec.Struct, frozen=True, kw_only=True):
    size: tuple[str, ...] = ("small",)
    """Sizes: small, medium, large, xl, 2.7b (2025); 8b, 10b (2026); tiny, mini, midi."""
    table: Literal["2025", "2026"] = "2025"
    """Which year's size table: xl differs between them."""
    context: tuple[int, ...] = (512,)
    """Sequence lengths in tokens."""
    batch: int = 4
    """Sequences per step and rank."""
    dtype: tuple[str, ...] = ("float32",)
    """Number formats: float32, tf32, bfloat16 and float16 (autocast), bfloat16-stream (autocast,
    and the residual stream in bfloat16 too), bfloat16-pure, bfloat16-master (bfloat16 with float32
    master weights)."""
    attention: str = "reference"
    """Attention implementation (`list attentions`)."""
    mode: Literal["forward", "forward-backward", "train-step"] = "train-step"
    """How much of the step."""
    optimizer: Literal[
        "torch", "torch-fused", "stepscope", "stepscope-fused", "stepscope-in-backward", "course"
    ] = "torch"
    """AdamW: torch (its default), torch-fused, stepscope (the update rule written out),
    stepscope-fused (the same in one launch), stepscope-in-backward (each as soon as its gradient is
    there), course."""
    loss: Literal["plain", "fused"] = "plain"
    """plain (from all logits), fused (head and loss by chunks of rows)."""
    fused: bool = False
    """Our kernels between the products."""
    joined: bool = False
    """With --fused: one product where several read the same input, from kept copies of weights."""
    keep: str = ALL
    """With --joined, for the backward: all, norms (what is gated is made again), gates (norms too),
    inputs (gates too), or inputs-12 (inputs in the first twelve blocks)."""
    graph: bool = False
    """The whole step as CUDA graphs."""
    checkpoint: str = NONE
    """Blocks that run again in the backward: no, stretches of 1, 2, 4, …, levels (8-1), nested."""
    ranks: int = 1
    """Processes that share the work, each with its own batch."""
    sharding: Literal["none", "optimizer", "full"] = "none"
    """What the ranks divide: nothing, the optimizer state, or parameters and gradients too."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Whose operators and allocator: CUDA rounds requests up, a CPU does not."""
    written_out: bool = False
    """Softmax and SiLU out of elementary operators, as in the course's reference model."""
    budget: float | None = None
    """GiB that it must fit into; where it does not, the smallest changes with which it does."""
    json: bool = False
    """Print one line of JSON: every phase with its lines, in bytes."""

    def __post_init__(self) -> None:
        if self.budget is not None and not 0 < self.budget < 2**40:
            raise UsageError(f"budget is {self.budget}", "give GiB, such as 80")
        if self.sharding != "none" and self.ranks == 1:
            raise UsageError(f"sharding {self.sharding} with one rank", "say how many with --ranks")


def main(words: list[str]) -> int:
    options = parse(
        PredictOptions,
        words,
        "predict",
        "Peak memory of each phase of a training step that no compiler saw, from its\n"
        "configuration alone: operator by operator, through the allocator's own rounding.\n"
        "Needs no GPU.",
        (
            "stepscope predict --size 2.7b --context 2048",
            "stepscope predict --size 2.7b --context 128 256 512 --dtype float32 bfloat16",
            "stepscope predict --size xl --table 2026 --context 2048 --budget 80",
            "stepscope predict --size 10b --table 2026 --ranks 8 --sharding full --checkpoint 1",
            "stepscope predict --size 2.7b --context 2048 --dtype bf16 --attention auto"
            " --loss fused --fused --joined --keep gates --optimizer stepscope-in-backward",
        ),
    )
    told = [
        (name, predict(_plan(options, name, context, dtype)))
        for name, context, dtype in itertools.product(options.size, options.context, options.dtype)
    ]
    if options.json:
        print(json_line({"predictions": [_facts(name, held) for name, held in told]}))
        return 0
    _print(options, told)
    return 0


def _plan(options: PredictOptions, name: str, context: int, dtype: str) -> StepPlan:
    return StepPlan(
        model=with_overrides(find_size(name, options.table), context=context),
        batch=options.batch,
        context=context,
        dtype=precision(dtype).name,
        attention=options.attention,
        mode=options.mode,
        optimizer=options.optimizer,
        checkpoint=options.checkpoint,
        loss=options.loss,
        fused=options.fused,
        joined=options.joined,
        keep=options.keep,
        graph=options.graph,
        ranks=options.ranks,
        sharding=options.sharding,
        device=options.device,
        written_out=options.written_out,
    )


def _facts(name: str, told: Prediction) -> dict[str, object]:
    return {
        "size": name,
        "plan": told.plan,
        "peak_bytes": told.peak.allocated,
        "phases": told.phases,
        "ends": told.ends,
    }


def _print(options: PredictOptions, told: list[tuple[str, Prediction]]) -> None:
    from stepscope.report.terminal import print_findings, print_table
    from stepscope.studies.views import prediction as view

    findings = []
    for name, held in told:
        words = view.plan_name(name, held.plan)
        findings.append(view.peak_finding(words, held))
        if options.budget is not None:
            findings.append(view.budget_finding(words, held, int(options.budget * 2**30)))
    print_findings(findings)
    print()
    print_table(view.phases_table(told))
    if len(told) == 1:
        print()
        print_table(view.ledger_table(told[0][1]))
