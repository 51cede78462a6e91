"""Finding, figures and table of loss curves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from step_loss.cases import LossCase
from step_loss.rows import AGREES_WITHIN, FALLS_BY, LossCurve, loss_curves
from stepscope.analysis.conclusions import deduced
from stepscope.report.blocks import Block, Curve, Figure, Finding, Table, Value
from stepscope.report.format import percent
from stepscope.report.tables import STATUS, col, table
from stepscope.studies.base import Result
from stepscope.studies.step.ladder import START, words
from stepscope.views.builders import curve, finding

_POINTS, _WINDOWS = 60, 20
"""Points of a loss curve and windows of its deviation; each point is the mean of its steps."""


def view(results: Sequence[Result[LossCase]]) -> tuple[Block, ...]:
    curves = loss_curves(results)
    return (*_finding(curves), *_loss_blocks(curves))


def _finding(curves: dict[str, LossCurve]) -> Iterator[Finding]:
    start = curves.get(START)
    decrease = start.fell_by() if start is not None else None
    if start is None or decrease is None:
        return
    steps = max(len(values) for values in start.by_seed.values())
    text = f"In {steps} steps the loss of the float32 step falls by {percent(decrease)}."
    values: dict[str, Value] = {"steps": steps, "fell_by": decrease}
    if decrease < FALLS_BY:
        yield finding(
            "step.not-learnt",
            text,
            start.records,
            values,
            conclusion=deduced(
                "That is too little to compare the other rungs: train for more steps."
            ),
            tone="warn",
            timed=False,
        )
        return
    deviations = {
        rung: deviation
        for rung, curve in curves.items()
        if rung != START and (deviation := curve.apart(start)) is not None
    }
    records = [record for rung in (START, *deviations) for record in curves[rung].records]
    wrong = {rung: share for rung, share in deviations.items() if abs(share) > AGREES_WITHIN}
    if wrong:
        listed = ", ".join(f"{words(rung)} ({percent(share)})" for rung, share in wrong.items())
        yield finding(
            "step.loss-apart",
            f"{text} The final loss deviates by more than {percent(AGREES_WITHIN)}: {listed}.",
            records,
            {**values, **wrong},
            tone="warn",
            timed=False,
        )
    elif deviations:
        farthest = max(deviations, key=lambda rung: abs(deviations[rung]))
        largest = abs(deviations[farthest])
        yield finding(
            "step.loss-same",
            f"{text} The other rungs ({len(deviations)}) end within {percent(AGREES_WITHIN)} of"
            f" it; the largest deviation is {percent(largest)} ({words(farthest)}).",
            records,
            values | {"rungs": len(deviations), "farthest": farthest, "apart": largest},
            tone="good",
            timed=False,
        )


def _loss_blocks(curves: dict[str, LossCurve]) -> Iterator[Block]:
    shown = {rung: curve for rung, curve in curves.items() if curve.by_seed}
    if shown:
        yield Figure(
            name="step-loss-curves",
            title="Training loss",
            curves=tuple(map(_thinned, shown.values())),
            x_label="training step",
            y_label="loss, nats",
            caption="Mean of the seeds. The text is a Markov chain: each word is followed by one of"
            " eight others. All rungs train on the same text.",
        )
    if START in shown:
        yield from _deviations(shown)
    if curves:
        yield _loss_table(curves)


def _thinned(losses: LossCurve) -> Curve:
    mean = losses.mean()
    stride = max(1, len(mean) // _POINTS)
    parts = ((at, mean[at : at + stride]) for at in range(0, len(mean), stride))
    return curve(losses.rung, ((1.0 + at, sum(part) / len(part)) for at, part in parts))


def _deviations(shown: dict[str, LossCurve]) -> Iterator[Figure]:
    """Figure of deviations from the baseline, which overlapping loss curves do not show."""
    steps = max(1, len(shown[START].mean()) // _WINDOWS)
    curves = tuple(
        curve(rung, ((steps * (at + 0.5), 100 * share) for at, share in enumerate(shares)))
        for rung, losses in shown.items()
        if rung != START and (shares := losses.apart_in_windows(shown[START], steps))
    )
    if curves:
        yield Figure(
            name="step-loss-apart",
            title="Deviation of the loss from the baseline",
            curves=curves,
            x_label="training step",
            y_label="deviation from the baseline's loss, %",
            caption=f"Each seed against the baseline with the same seed, in windows of {steps}"
            f" steps; mean of the seeds. The final loss may deviate by {percent(AGREES_WITHIN)}.",
        )


def _loss_table(curves: dict[str, LossCurve]) -> Table:
    start = curves.get(START)
    decrease = start.fell_by() if start is not None else None

    def deviation(curve: LossCurve) -> float | None:
        return None if start is None or curve.rung == START else curve.apart(start)

    def outcome(curve: LossCurve) -> str | None:
        if not curve.by_seed:
            failed = curve.records[0]
            return f"{STATUS.get(failed.status, failed.status)}: {failed.reason}"
        if (deviates := deviation(curve)) is None:
            return None
        if decrease is None or decrease < FALLS_BY:
            return "too few steps"
        return "same" if abs(deviates) <= AGREES_WITHIN else "deviates"

    return table(
        "step-loss",
        "Final loss of each rung",
        curves.values(),
        [
            col("rung (cumulative)", lambda c: words(c.rung)),
            col("seeds", lambda c: len(c.by_seed), "count"),
            col("first loss", lambda c: _mean([v[0] for v in c.by_seed.values()]), unit="nats"),
            col(
                "final loss",
                lambda c: _mean(c.ends().values()),
                unit="nats",
                hint="mean of the last tenth of the steps",
            ),
            col("decrease", lambda c: c.fell_by(), "percent", hint="smallest over the seeds"),
            col("vs float32", deviation, "percent", hint="largest deviation over the seeds"),
            col("outcome", outcome),
        ],
        caption=f"Same: the final loss is within {percent(AGREES_WITHIN)} of the float32 curve with"
        f" the same seed. Learning requires that the loss falls by at least {percent(FALLS_BY)}.",
    )


def _mean(values: Collection[float]) -> float | None:
    return sum(values) / len(values) if values else None
