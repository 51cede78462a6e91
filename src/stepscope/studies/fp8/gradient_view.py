"""Finding and tables on gradients in FP8, and the layers to keep in bfloat16. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.report.blocks import Cell, Finding, Table
from stepscope.report.format import percent
from stepscope.report.tables import col, cols, table
from stepscope.studies.fp8.cases import ONLY, WITHOUT, GradientError, GradientPass, LayerGroup
from stepscope.studies.fp8.rows import Examined, Gradients, Subject
from stepscope.views.builders import finding

_NOT_FINITE = "not finite"


def keeping(examined: Examined, *, needed: bool) -> str:
    """Say which group of layers to keep in bfloat16, and by which line; empty if it is unknown.
    `needed`: FP8 changes the training already."""
    gradients = examined.gradients
    group = gradients.to_keep if gradients is not None else None
    if gradients is None or group is None:
        return ""
    when = "Keep" if needed else "If a longer training differs, keep"
    return (
        f"{when} {group.name} in bfloat16 first: `{override_line(group)}`, with `report ="
        ' stepscope.accelerate(model, optimizer, dtype="fp8")`,'
        f" {_lowers(gradients, group)}."
    )


def override_line(group: LayerGroup) -> str:
    """Return the statement that keeps these layers in bfloat16."""
    if len(group.patterns) == 1:
        return f'report.fp8.override("{group.patterns[0]}", None)'
    names = ", ".join(f'"{pattern}"' for pattern in group.patterns)
    return f"for name in ({names}): report.fp8.override(name, None)"


def _lowers(gradients: Gradients, group: LayerGroup) -> str:
    before, after = gradients.error("all"), gradients.error(WITHOUT, group.name)
    return f"lowers the error of the gradient from {_percent(before)} to {_percent(after)}"


def _percent(error: float | None) -> str:
    return _NOT_FINITE if error is None else percent(error)


def gradient_finding(subject: Subject, examined: Examined) -> Iterator[Finding]:
    gradients = examined.gradients
    if gradients is None or gradients.fp8 is None or gradients.bf16 is None:
        return
    fp8, bf16 = gradients.fp8.total, gradients.bf16.total
    text = (
        f"With the same weights and batch (step {gradients.probe.step}), the gradient of all"
        f" parameters of {subject.name} differs from float32's by {_percent(fp8.error)} with FP8 in"
        f" every eligible layer, and by {_percent(bf16.error)} in bfloat16"
    )
    if fp8.slope is not None:
        text += f"; along float32's gradient it has {fp8.slope:.3f} times the length"
    group = gradients.to_keep
    alone = kept = None
    if group is not None:
        alone = gradients.error(ONLY, group.name)
        kept = gradients.error(WITHOUT, group.name)
        text += (
            f". {group.name}, {percent(gradients.share_of(group))} of the eligible weights, should"
            f" stay in bfloat16 first: this {_lowers(gradients, group)} (with FP8 in these layers"
            f" alone it is {_percent(alone)})"
        )
    yield finding(
        "fp8.gradient",
        f"{text}.",
        examined,
        {
            "model": subject.name,
            "step": gradients.probe.step,
            "fp8": fp8.error,
            "bf16": bf16.error,
            "slope": fp8.slope,
            "group": group.name if group is not None else None,
            "alone": alone,
            "kept": kept,
            "line": override_line(group) if group is not None else None,
            "emulated": gradients.probe.arithmetic != "kernels",
        },
        tone="warn" if fp8.error is None else "info",
        timed=False,
    )


def gradient_tables(subject: Subject, examined: Examined, at: str) -> Iterator[Table]:
    gradients = examined.gradients
    if gradients is None:
        return
    probe = gradients.probe
    yield table(
        f"fp8-gradient{at}",
        f"Gradient of all parameters of {subject.name} against float32",
        probe.passes,
        [
            col("layers in FP8", _title),
            col("weights in FP8", gradients.share, "percent", hint="share of the eligible weights"),
            col("error", lambda one: _cell(one.total), "percent"),
            col("slope", lambda one: _slope(one.total), "number"),
            col("loss", lambda one: _change(one.loss, probe.loss), "percent", hint="change of it"),
        ],
        caption=f"Step {probe.step}, the same weights and batch; the other layers compute in"
        " bfloat16. Error: norm of the difference over the norm of float32's gradient. Slope:"
        " product with it over its squared norm, 1 without a bias. e4m3, one scale per tensor,"
        f" {'FP8 kernels' if probe.arithmetic == 'kernels' else 'rounding emulated'}.",
    )
    shown = {_title(one): one for one in probe.passes if one.fp8 != WITHOUT}
    kinds = list(dict.fromkeys(kind for one in probe.passes for kind in one.kinds))

    def error(kind: str, title: str) -> Cell:
        found = shown[title].kinds.get(kind)
        return None if found is None else _cell(found)

    yield table(
        f"fp8-gradient-kinds{at}",
        f"Gradients by parameter of {subject.name}, error against float32",
        kinds,
        [
            col("parameters", lambda kind: kind, "code"),
            *cols(shown, error, "percent", hint="error with FP8 in these layers"),
        ],
        caption="Parameters of the same name in all blocks together, with FP8 in the layers of the"
        " column.",
    )


def _title(one: GradientPass) -> str:
    of = {
        "none": "none (bf16)",
        "all": "all",
        ONLY: f"only {one.layers}",
        WITHOUT: f"all without {one.layers}",
    }
    return of[one.fp8]


def _cell(error: GradientError) -> Cell:
    return _NOT_FINITE if error.error is None else error.error


def _slope(error: GradientError) -> Cell:
    return error.slope


def _change(loss: float | None, exact: float) -> Cell:
    return _NOT_FINITE if loss is None else (loss - exact) / abs(exact) if exact else None
