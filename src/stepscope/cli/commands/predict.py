"""`stepscope predict`: predict the memory of a training step without running it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from stepscope.analysis.predict.plan import Mode, StepPlan
from stepscope.analysis.predict.sizes import bytes_of
from stepscope.analysis.predict.step import Prediction, predict
from stepscope.cli.common import json_line, parse
from stepscope.errors import UsageError
from stepscope.model.checkpointing import NONE
from stepscope.model.config import precision
from stepscope.training.flags import StepFlags
from stepscope.training.plans import settings_of
from stepscope.training.shape import model_shape, size_name

if TYPE_CHECKING:
    from stepscope.studies.own.prediction import ModelPlan

_OF_MODELS = {
    "model", "batch", "dtype", "optimizer", "checkpoint", "compile", "budget", "json", "ranks",
    "sharding", "frontier",
}  # fmt: skip
"""Options that apply to a model of a user."""
_OPTIMIZERS = {"torch": "adamw", "torch-fused": "adamw-fused"}
"""Optimizers of a user's model, by their names in this command."""
_SWEPT = ("size", "context", "dtype", "batch", "attention", "optimizer", "loss", "checkpoint")


class PredictOptions(StepFlags, frozen=True, kw_only=True):
    mode: Mode = "train-step"
    """Part of the step to predict."""
    optimizer: tuple[str, ...] = ("torch",)
    """AdamW: torch (its default), torch-fused, stepscope (plain PyTorch), stepscope-fused (one
    launch), stepscope-in-backward (each parameter is updated as soon as its gradient is computed),
    stepscope-low-precision-grads (the same, with gradients in the dtype of the fused projections),
    course (the AdamW of the CS336 assignment)."""
    model: str = ""
    """A model of your own: package.module:function, as in `stepscope run own`. It is built and run
    on fake tensors; --batch, --dtype, --optimizer (torch, torch-fused), --checkpoint (no, blocks),
    --compile, --budget, --frontier, --ranks, --sharding (none: DDP, full: FSDP2) and --json
    apply."""
    compile: tuple[str, ...] = ("no",)
    """With --model: no (eager), block (each repeated block compiled by itself), model (compiled as
    one), accelerate (`stepscope.accelerate` and `TrainStep` as a CUDA graph; --dtype fp8 too). The
    memory of compiled code is an estimate."""
    ranks: int = 1
    """Data-parallel ranks, each with its own batch."""
    sharding: Literal["none", "optimizer", "full"] = "none"
    """State that is sharded over the ranks: none, optimizer (its state), full (parameters and
    gradients too, as in FSDP)."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device to predict for. On cuda the rounding of the caching allocator is included."""
    written_out: bool = False
    """Softmax and SiLU as separate elementwise operators, as in the CS336 reference model."""
    budget: str = ""
    """Memory budget, such as 80 (GiB) or 900MiB. If the step exceeds it, list the smallest changes
    that make it fit; with --model, the largest batches that fit."""
    frontier: str = ""
    """With --model: write a figure of time against memory of all plans (save, recompute, copy to
    host memory) to this SVG file, and print them."""
    json: bool = False
    """Print one line of JSON: the memory of every phase by kind of tensor, in bytes."""

    def __post_init__(self) -> None:
        _ = self.budget_bytes
        if self.model:
            _check_applies(self)
        elif self.frontier or self.compile != ("no",):
            flag = "frontier" if self.frontier else "compile"
            raise UsageError(f"--{flag} applies to a model of your own", "give --model")
        if self.sharding != "none" and self.ranks == 1:
            raise UsageError(
                f"--sharding {self.sharding} with one rank", "give the number of ranks with --ranks"
            )

    @property
    def budget_bytes(self) -> int | None:
        return bytes_of(self.budget, "GiB") if self.budget else None


def main(words: list[str]) -> int:
    options = parse(
        PredictOptions,
        words,
        "predict",
        "Predict the peak memory of each phase of a training step, from the configuration alone.\n"
        "The step is simulated operator by operator, in eager mode, with the rounding of CUDA's\n"
        "caching allocator. No GPU is needed. With --budget, the answer includes which changes\n"
        "make the step fit. With --model, the step is that of your own model.",
        (
            "stepscope predict --model my_model:build --batch 8 --dtype bfloat16 --budget 80",
            "stepscope predict --model my_model:build --ranks 64 --sharding full --budget 80"
            " --frontier plans.svg",
            "stepscope predict --model my_model:build --compile no block model accelerate",
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
    if options.model:
        return _predict_models(options)
    predictions = [
        (size_name(size, options.overrides), predict(plan)) for size, plan in _plans(options)
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


def _check_applies(options: PredictOptions) -> None:
    """Raise an error for a flag that describes a built-in model."""
    from stepscope.studies.own.prediction import COMPILE

    for field in msgspec.structs.fields(options):
        if field.name in _OF_MODELS or getattr(options, field.name) == field.default:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        raise UsageError(f"{flag} describes a built-in model", "leave it out with --model")
    for flag, values, known in (
        ("optimizer", options.optimizer, (*_OPTIMIZERS,)),
        ("checkpoint", options.checkpoint, (NONE, "blocks")),
        ("compile", options.compile, (*COMPILE,)),
        ("sharding", (options.sharding,), ("none", "full")),
    ):
        for value in values:
            if value not in known:
                raise UsageError(f"--{flag} {value} with --model", f"one of: {', '.join(known)}")


def _predict_models(options: PredictOptions) -> int:
    from stepscope.studies.own.prediction import ModelPlan

    assert options.sharding != "optimizer"
    plans = [
        ModelPlan(
            options.model, batch, precision(dtype).name, _OPTIMIZERS[optimizer], how != NONE,
            compiled, options.ranks, options.sharding,
        )
        for batch, dtype, optimizer, how, compiled in itertools.product(
            options.batch, options.dtype, options.optimizer, options.checkpoint, options.compile
        )
    ]  # fmt: skip
    show = _show_frontier if options.frontier else _show_model
    facts = [show(options, plan) for plan in plans]
    if options.json:
        print(json_line({"predictions": facts}))
    return 0


def _show_model(options: PredictOptions, plan: ModelPlan) -> dict[str, object]:
    """Print the peak of a step and what fits; return both."""
    from stepscope.report.terminal import print_findings, print_table
    from stepscope.studies.own.prediction import batches_that_fit, predict_model
    from stepscope.views import prediction as view

    budget, prediction = options.budget_bytes, predict_model(plan)
    fitting = [] if budget is None else [*batches_that_fit(plan, budget)]
    if not options.json:
        print_findings(view.model_findings(str(plan), prediction, budget, fitting))
        print()
        print_table(view.ledger_table(prediction.phases, view.SECOND_STEP))
    return {
        **plan._asdict(),
        "peak_bytes": prediction.peak.allocated,
        "reserved_bytes": prediction.reserved,
        "graph_pool_bytes": prediction.graph_pool,
        "is_estimate": prediction.is_estimate,
        "phases": prediction.phases,
        "assumed": prediction.assumed,
        "fitting": fitting,
    }


def _show_frontier(options: PredictOptions, plan: ModelPlan) -> dict[str, object]:
    """Print the plans of a step, and write them as a figure."""
    from stepscope.analysis.predict.fit import within
    from stepscope.files import replace_file
    from stepscope.report.plots import svg
    from stepscope.report.svg import standalone_svg
    from stepscope.report.terminal import print_findings, print_table
    from stepscope.studies.own.prediction import frontier_of
    from stepscope.views import prediction as view

    budget, found = options.budget_bytes, frontier_of(plan)
    figure = view.frontier_figure(found.plans, None if budget is None else within(found, budget))
    replace_file(Path(options.frontier), [standalone_svg(svg(figure)).encode()])
    if not options.json:
        print_findings(view.frontier_findings(str(plan), found, budget))
        print()
        print_table(view.frontier_table(found))
    return {**plan._asdict(), **view.frontier_facts(found)}


def _plans(options: PredictOptions) -> Iterator[tuple[str, StepPlan]]:
    """Every combination, by size."""
    for values in itertools.product(*(getattr(options, name) for name in _SWEPT)):
        chosen = dict(zip(_SWEPT, values, strict=True))
        size, chosen["dtype"] = chosen.pop("size"), precision(chosen["dtype"]).name
        shape = model_shape(size, options.table, chosen["context"], options.overrides)
        yield size, StepPlan(model=shape, **settings_of(options, PredictOptions) | chosen)


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
    from stepscope.views import prediction as view

    findings = []
    for name, prediction in predictions:
        words = view.plan_name(name, prediction.plan)
        findings.append(view.peak_finding(words, prediction))
        if (budget := options.budget_bytes) is not None:
            findings.append(view.budget_finding(words, prediction, budget))
    print_findings(findings)
    print()
    print_table(view.phases_table(predictions))
    if len(predictions) == 1:
        print()
        (_, prediction), *_ = predictions
        what = view.BLOCKS if prediction.plan.device == "cuda" else "Tensors."
        print_table(view.ledger_table(prediction.phases, what))
