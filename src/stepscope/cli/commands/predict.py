"""`stepscope predict`: predict the memory of a training step without running it."""

from __future__ import annotations

import itertools
from typing import Literal

from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import Prediction, predict
from stepscope.cli.common import json_line, parse
from stepscope.errors import UsageError
from stepscope.kernels.activation_policy import ALL
from stepscope.model.checkpointing import NONE
from stepscope.model.config import precision
from stepscope.studies.training.shape import ShapeFlags, model_shape, size_name


class PredictOptions(ShapeFlags, frozen=True, kw_only=True):
    context: tuple[int, ...] = (512,)
    """Sequence lengths in tokens."""
    batch: int = 4
    """Batch size: sequences per step on each rank."""
    dtype: tuple[str, ...] = ("float32",)
    """Dtypes: float32, tf32, bfloat16 and float16 (autocast), bfloat16-stream (autocast, and the
    residual stream in bfloat16), bfloat16-pure (weights in bfloat16), bfloat16-master (bfloat16
    weights with float32 master weights); with --fused-projections also fp8, fp8-stream and fp8-pure
    (the same with the linear layers of the blocks in FP8)."""
    attention: str = "reference"
    """Attention implementation (`stepscope list attentions`)."""
    mode: Literal["forward", "forward-backward", "train-step"] = "train-step"
    """Part of the step to predict."""
    optimizer: Literal[
        "torch", "torch-fused", "stepscope", "stepscope-fused", "stepscope-in-backward", "course"
    ] = "torch"
    """AdamW: torch (its default), torch-fused, stepscope (plain PyTorch), stepscope-fused (one
    launch), stepscope-in-backward (each parameter is updated as soon as its gradient is computed),
    course (the AdamW of the CS336 assignment)."""
    loss: Literal["plain", "fused"] = "plain"
    """Loss: plain (all logits in memory), fused (LM head and cross-entropy in chunks of rows)."""
    fused: bool = False
    """Fused kernels for norms, SwiGLU and rotary embeddings."""
    fused_projections: bool = False
    """With --fused: fused QKV and fused gate/up projections."""
    activation_policy: str = ALL
    """With --fused-projections, what is saved for backward: all; norms (recompute the gated
    product); gates (recompute the norms too); inputs (recompute the gates too); inputs-12 (inputs
    for the first 12 blocks, all for the others)."""
    graph: bool = False
    """Capture the full step as CUDA graphs."""
    checkpoint: str = NONE
    """Activation checkpointing: no; segments of 1, 2, 4, … blocks; nested segments such as 8-1 (8
    blocks, recomputed one by one); nested (halved recursively)."""
    ranks: int = 1
    """Data-parallel ranks, each with its own batch."""
    sharding: Literal["none", "optimizer", "full"] = "none"
    """State that is sharded over the ranks: none, optimizer (its state), full (parameters and
    gradients too, as in FSDP)."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device to predict for. On cuda the rounding of the caching allocator is included."""
    written_out: bool = False
    """Softmax and SiLU as separate elementwise operators, as in the CS336 reference model."""
    budget: float | None = None
    """Memory budget in GiB; if the step exceeds it, list the smallest changes that make it fit."""
    json: bool = False
    """Print one line of JSON: the memory of every phase by kind of tensor, in bytes."""

    def __post_init__(self) -> None:
        if self.budget is not None and not 0 < self.budget < 2**40:
            raise UsageError(f"--budget is {self.budget}", "give GiB, such as 80")
        if self.sharding != "none" and self.ranks == 1:
            raise UsageError(
                f"--sharding {self.sharding} with one rank", "give the number of ranks with --ranks"
            )


def main(words: list[str]) -> int:
    options = parse(
        PredictOptions,
        words,
        "predict",
        "Predict the peak memory of each phase of a training step, from the configuration alone.\n"
        "The step is simulated operator by operator, in eager mode, with the rounding of CUDA's\n"
        "caching allocator. No GPU is needed. With --budget, the answer includes which changes\n"
        "make the step fit.",
        (
            "stepscope predict --size 2.7b --context 2048",
            "stepscope predict --size 2.7b --context 128 256 512 --dtype float32 bfloat16",
            "stepscope predict --size xl --table 2026 --context 2048 --budget 80",
            "stepscope predict --size small --layers 24 --d-model 1024 --d-ff 4096 --heads 16",
            "stepscope predict --size 10b --table 2026 --ranks 8 --sharding full --checkpoint 1",
            "stepscope predict --size 2.7b --context 2048 --dtype bf16 --attention auto"
            " --loss fused --fused --fused-projections --activation-policy gates"
            " --optimizer stepscope-in-backward",
        ),
    )
    predictions = [
        (size_name(name, options.overrides), predict(_plan(options, name, context, dtype)))
        for name, context, dtype in itertools.product(options.size, options.context, options.dtype)
    ]
    if options.json:
        print(
            json_line(
                {"predictions": [_facts(name, prediction) for name, prediction in predictions]}
            )
        )
        return 0
    _print(options, predictions)
    return 0


def _plan(options: PredictOptions, name: str, context: int, dtype: str) -> StepPlan:
    return StepPlan(
        model=model_shape(name, options.table, context, options.overrides),
        batch=options.batch,
        context=context,
        dtype=precision(dtype).name,
        attention=options.attention,
        mode=options.mode,
        optimizer=options.optimizer,
        checkpoint=options.checkpoint,
        loss=options.loss,
        fused=options.fused,
        fused_projections=options.fused_projections,
        activation_policy=options.activation_policy,
        graph=options.graph,
        ranks=options.ranks,
        sharding=options.sharding,
        device=options.device,
        written_out=options.written_out,
    )


def _facts(name: str, prediction: Prediction) -> dict[str, object]:
    return {
        "size": name,
        "plan": prediction.plan,
        "peak_bytes": prediction.peak.allocated,
        "phases": prediction.phases,
        "ends": prediction.ends,
    }


def _print(options: PredictOptions, predictions: list[tuple[str, Prediction]]) -> None:
    from stepscope.report.terminal import print_findings, print_table
    from stepscope.studies.views import prediction as view

    findings = []
    for name, prediction in predictions:
        words = view.plan_name(name, prediction.plan)
        findings.append(view.peak_finding(words, prediction))
        if options.budget is not None:
            findings.append(view.budget_finding(words, prediction, int(options.budget * 2**30)))
    print_findings(findings)
    print()
    print_table(view.phases_table(predictions))
    if len(predictions) == 1:
        print()
        print_table(view.ledger_table(predictions[0][1]))
