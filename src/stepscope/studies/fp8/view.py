"""Findings, figures and tables of the FP8 study. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from stepscope.analysis.conclusions import deduced
from stepscope.errors import some
from stepscope.kernels.fp8.recipe import E5M2, TENSORWISE
from stepscope.report.blocks import Block, Cell, Figure, Finding, Table, Value
from stepscope.report.format import counted, percent
from stepscope.report.tables import col, cols, failed_table, table
from stepscope.studies.base import Result
from stepscope.studies.fp8.cases import CURRENT, DTYPES, GEMMS, ROLES, Fp8Case
from stepscope.studies.fp8.rows import (
    SAME_LOSS,
    TOO_MUCH,
    Examined,
    Layer,
    Pair,
    Subject,
    subjects,
)
from stepscope.views.builders import Source, curve, finding, suffix

_DRAWN = 12
"""Layers in a figure."""
_LISTED = 40
"""Layers in a table."""
_SCALES = {"tensorwise": "per tensor", "rowwise": "per row", "blockwise": "per 1×128 values"}
_ROLES = {"input": "inputs", "weight": "weights", "gradient": "output gradients"}


def view(results: Sequence[Result[Fp8Case]]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for index, subject in enumerate(subjects(results)):
        at = suffix(index)
        blocks += _verdict(subject)
        if subject.examined is not None:
            blocks += _examined_findings(subject, subject.examined)
        if subject.trained:
            blocks += [_loss_figure(subject, at), _training_table(subject, at)]
        if subject.examined is not None:
            blocks += _examined_blocks(subject, subject.examined, at)
    return (*blocks, *failed_table("fp8", [result.record for result in results]))


def _verdict(subject: Subject) -> Iterator[Finding]:
    """Answer the question for the first recipe that was trained."""
    if not subject.trained:
        if subject.examined is not None:
            yield finding(
                "fp8.unknown",
                f"Whether {subject.name} can be trained in FP8 is unknown: no pair of trainings was"
                " run.",
                subject.examined,
                {"model": subject.name},
                timed=False,
            )
        return
    trained = subject.trained[0]
    recipe = trained.recipe
    flagged = (
        subject.examined.flagged(
            recipe.scaling if recipe.scaling in CURRENT else TENSORWISE, recipe.gradient_dtype
        )
        if subject.examined is not None
        else []
    )
    rows: list[Source] = [*trained.pairs]
    rows += [subject.examined] if subject.examined is not None else []
    values: dict[str, Value] = {
        "model": subject.name,
        "recipe": str(recipe),
        "change": trained.change,
        "spread": trained.spread,
        "diverged": len(trained.diverged),
        "layers": ", ".join(layer.name for layer in flagged),
        "emulated": trained.pairs[0].emulated,
    }
    how = (
        f" ({recipe} scaling, {counted(len(trained.pairs), 'seed')};"
        f" {'rounding emulated: numerics, not speed' * trained.pairs[0].emulated}"
        f"{'with the FP8 kernels of this device' * (not trained.pairs[0].emulated)})"
    )
    change = trained.change
    if trained.diverged:
        text = f"{subject.name} cannot be trained in FP8 as it is: the loss diverges"
        answer = "no"
    elif trained.same:
        text = (
            f"{subject.name} can be trained in FP8, as far as"
            f" {counted(trained.case.steps, 'step')} show: the final loss is the same"
        )
        answer = "yes"
    elif change is None:
        text = f"{subject.name} diverges in bfloat16 already, so FP8 cannot be compared with it"
        answer = "unknown"
    else:
        text = (
            f"{subject.name} trains in FP8, but not to the same loss: it ends"
            f" {percent(abs(change))} {'above' if change > 0 else 'below'} bfloat16's"
        )
        answer = "differs"
    names = some([layer.name for layer in flagged], 8)
    conclusion = (
        f"Keep in bfloat16: {names} (a GEMM loses more than {percent(TOO_MUCH)})."
        if flagged
        else "Every eligible layer loses what rounding costs and no more."
        if subject.examined is not None
        else ""
    )
    yield finding(
        "fp8.verdict",
        f"{text}{how}.",
        rows,
        values | {"answer": answer},
        conclusion=deduced(conclusion),
        tone="good" if answer == "yes" and not flagged else "warn",
        timed=False,
    )


def _examined_findings(subject: Subject, examined: Examined) -> Iterator[Finding]:
    yield _gemm_finding(subject, examined)
    if examined.left_out:
        listed = some([f"{name} ({why})" for name, why in examined.left_out.items()])
        yield finding(
            "fp8.left-out",
            f"{counted(len(examined.left_out), 'linear layer')} of {subject.name}"
            f" {'has' if len(examined.left_out) == 1 else 'have'} no FP8 GEMMs: {listed}.",
            examined,
            {"model": subject.name, "layers": len(examined.left_out)},
            timed=False,
        )


def _cast_error(examined: Examined, role: str, dtype: str, scaling: str) -> float:
    """Median over layers at the last probe."""
    return examined.typical(lambda layer: layer.last.casts[role][dtype][scaling].error)


def _typical_error(examined: Examined, gemm: str) -> float:
    return examined.typical(lambda layer: layer.gemm_error(gemm))


def _typical_bf16_error(examined: Examined, gemm: str) -> float:
    return examined.typical(lambda layer: layer.bf16_error(gemm))


def _gemm_finding(subject: Subject, examined: Examined) -> Finding:
    worst = examined.ranked[0]
    gemm = worst.worst_gemm()
    typical = {name: _typical_error(examined, name) for name in GEMMS}
    bf16 = max(_typical_bf16_error(examined, name) for name in GEMMS)
    listed = ", ".join(f"{percent(error)} of the {GEMMS[name]}" for name, error in typical.items())
    noise = worst.noise
    text = (
        f"Against float64 the FP8 GEMMs of {subject.name} lose (median over layers, e4m3, one scale"
        f" per tensor) {listed}; bfloat16 loses at most {percent(bf16)}. {worst.name} loses most:"
        f" {percent(worst.error())} of its {GEMMS[gemm]}"
    )
    if noise is not None:
        text += (
            f"; the choice of the batch alone changes the gradient of its weight by"
            f" {percent(noise)}"
        )
    return finding(
        "fp8.gemms",
        f"{text}.",
        examined,
        {
            "model": subject.name,
            "worst": worst.name,
            "worst_gemm": gemm,
            "worst_error": worst.error(),
            "bf16": bf16,
            "noise": noise,
            **typical,
        },
        tone="warn" if worst.error() > TOO_MUCH else "info",
        timed=False,
    )


def _loss_figure(subject: Subject, at: str) -> Figure:
    curves = []
    for number_, trained in enumerate(subject.trained):
        for pair in trained.pairs:
            first = pair is trained.pairs[0]
            variants = ("bf16", "fp8") if number_ == 0 else ("fp8",)
            for variant in variants:
                label = "bf16" if variant == "bf16" else f"FP8 {trained.recipe}"
                label = label if first else f"{label}, seed {pair.case.seed}"
                style = 0 if variant == "bf16" else 1 + number_
                points = (
                    (float(step), loss) for step, loss in enumerate(_smoothed(pair, variant), 1)
                )
                curves.append(curve(label, points, style))
    return Figure(
        name=f"fp8-loss{at}",
        title=f"Training loss of {subject.name} in bfloat16 and FP8",
        curves=tuple(each for each in curves if each.x),
        x_label="step",
        y_label="loss, nats",
        caption="Pairs with the same weights and data; running mean of a tenth of the steps.",
    )


def _smoothed(pair: Pair, variant: str) -> Iterator[float]:
    losses = pair.losses(variant)
    width = max(1, len(losses) // 10)
    for end in range(1, len(losses) + 1):
        yield fmean(losses[max(0, end - width) : end])


def _training_table(subject: Subject, at: str) -> Table:
    return table(
        f"fp8-training{at}",
        f"Pairs of trainings of {subject.name}",
        [pair for trained in subject.trained for pair in trained.pairs],
        [
            col("recipe", lambda pair: str(pair.case.recipe())),
            col("seed", lambda pair: pair.case.seed, "count"),
            col("steps", lambda pair: pair.case.steps, "count"),
            col("loss in bf16", lambda pair: pair.final("bf16"), unit="nats"),
            col("loss in FP8", lambda pair: pair.final("fp8"), unit="nats"),
            col("change", lambda pair: pair.change, "percent"),
            col("diverged", lambda pair: "yes" if pair.diverged else "no"),
            col("arithmetic", lambda pair: "emulated" if pair.emulated else "FP8 kernels"),
        ],
        caption="Mean loss of the last tenth of the steps. Within"
        f" {percent(SAME_LOSS)}, or within the spread of bfloat16 over seeds, counts as the same.",
    )


def _examined_blocks(subject: Subject, examined: Examined, at: str) -> Iterator[Block]:
    yield _gemm_figure(subject, examined, at)
    yield _casts_table(subject, examined, at)
    yield _layers_table(subject, examined, at)


def _gemm_figure(subject: Subject, examined: Examined, at: str) -> Figure:
    shown = examined.ranked[:_DRAWN]
    return Figure(
        name=f"fp8-gemms{at}",
        title=f"Error of the FP8 GEMMs of {subject.name}, by layer",
        kind="bars",
        curves=tuple(
            curve(name, ((layer.name, layer.gemm_error(name)) for layer in shown)) for name in GEMMS
        ),
        x_label=f"the {len(shown)} layers with the largest error",
        y_label="error against float64, relative",
        caption="e4m3 with one scale per tensor; the largest of all probes.",
    )


def _casts_table(subject: Subject, examined: Examined, at: str) -> Table:
    rows = [(role, dtype) for role in ROLES for dtype in DTYPES]

    def error(row: tuple[str, str], scaling: str) -> Cell:
        return _cast_error(examined, *row, _of_title(scaling))

    def underflow(row: tuple[str, str], scaling: str) -> Cell:
        role, dtype = row
        name = _of_title(scaling.removeprefix("underflow, "))
        return max(layer.underflow(role, name, dtype) for layer in examined.layers)

    return table(
        f"fp8-casts{at}",
        f"What a cast loses, {subject.name}",
        rows,
        [
            col("tensor", lambda row: _ROLES[row[0]]),
            col("dtype", lambda row: row[1]),
            *cols(_SCALES.values(), error, "percent", hint="error, median over layers"),
            *cols(
                [f"underflow, {title}" for title in _SCALES.values()],
                underflow,
                "percent",
                hint="nonzero values that become zero, largest of all layers and probes",
            ),
        ],
        caption="Scales from the current values, along the dimension that the first GEMM of the"
        " tensor contracts.",
    )


def _of_title(title: str) -> str:
    return next(name for name, words in _SCALES.items() if words == title)


def _layers_table(subject: Subject, examined: Examined, at: str) -> Table:
    shown = examined.ranked[:_LISTED]
    of = f"{len(shown)} of {len(examined.layers)}" if len(shown) < len(examined.layers) else "All"
    return table(
        f"fp8-layers{at}",
        f"Linear layers of {subject.name}, largest error first",
        shown,
        [
            col("layer", lambda layer: layer.name, "code"),
            *cols(GEMMS, lambda layer, name: layer.gemm_error(name), "percent"),
            *(
                [col("FP8 kernels", Layer.kernel_error, "percent", hint="the largest of the three")]
                if any(layer.kernel_error() is not None for layer in shown)
                else []
            ),
            col("bf16", lambda layer: max(map(layer.bf16_error, GEMMS)), "percent"),
            col(
                "dW of a half batch",
                lambda layer: layer.noise,
                "percent",
                hint="difference of the weight gradients of two half batches over their sum",
            ),
            col("per row", lambda layer: layer.error("rowwise"), "percent"),
            col("per 1×128", lambda layer: layer.error("blockwise"), "percent"),
            col("e5m2 gradients", lambda layer: layer.error(TENSORWISE, E5M2), "percent"),
            col("gradient underflow", lambda layer: layer.underflow("gradient"), "percent"),
            col("saturated", Layer.saturated, "percent", hint="under delayed scaling"),
            col("keep in", lambda layer: "bf16" if layer.error() > TOO_MUCH else "FP8"),
        ],
        caption=f"{of} layers: errors of the three GEMMs against float64, the largest of all"
        " probes, with one scale per tensor and e4m3; then the largest error of the three with"
        " other scalings and with e5m2 gradients.",
    )
