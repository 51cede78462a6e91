"""Figures and tables of a rehearsal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stepscope.analysis.rehearsal.replay import Replay
from stepscope.report.blocks import (
    Cell,
    Column,
    Curve,
    Figure,
    Lane,
    Mark,
    Stretch,
    Table,
    Timeline,
)
from stepscope.report.format import bytes_
from stepscope.studies.rehearsal.subject import (
    Prediction,
    Question,
    Subject,
    closed_forms,
    scaling,
)


def prediction_table(told: Sequence[tuple[Subject, Sequence[Prediction]]]) -> Table:
    named = len(told) > 1
    rows: list[tuple[Cell, ...]] = []
    for subject, predictions in told:
        for held in predictions:
            for name, step in held.steps.items():
                bucket = held.buckets.best if name in ("bucketed", "sharded", "fsdp") else None
                rows.append(
                    (
                        *([subject.name] if named else []), held.network.name, held.ranks, name,
                        bucket, step.step_ms, step.communication_ms, step.exposed_ms,
                        step.exposed_share, len(step.messages),
                    )
                )  # fmt: skip
    return Table(
        name="rehearsal-steps",
        title="Predicted steps",
        columns=(
            *([Column(title="step of")] if named else []),
            Column(title="link"),
            Column(title="ranks", kind="count"),
            Column(title="strategy"),
            Column(title="bucket", kind="number", unit="MiB", hint="the best for bucketed"),
            Column(title="step", kind="number", unit="ms"),
            Column(title="communication", kind="number", unit="ms", hint="the links are busy"),
            Column(
                title="beyond computing", kind="number", unit="ms",
                hint="the step minus what a rank computes in it; sharded, a share of the update",
            ),
            Column(title="of the step", kind="percent"),
            Column(title="messages", kind="count"),
        ),
        rows=tuple(rows),
        caption="Played from the recorded backward; every rank has the recorded batch. Links are"
        " those of data sheets, not measured. Beyond computing are waiting for the links, packing"
        " gradients into buckets, sending, and agreeing at the end; of fsdp waiting alone, since"
        " what it packs was not measured.",
    )  # fmt: skip


def closed_form_table(subjects: Sequence[Subject], question: Question) -> Table:
    named = len(subjects) > 1
    rows: list[tuple[Cell, ...]] = []
    for subject in subjects:
        for network in question.networks:
            for ranks in question.ranks:
                for way in closed_forms(subject, question, network, ranks) if ranks > 1 else ():
                    below = way.bound_below
                    rows.append(
                        (
                            *([subject.name] if named else []), network.name, ranks, way.name,
                            way.formula,
                            "every batch" if below is None else below,
                            None if below is None else round(below * subject.model.context),
                            way.unit, way.ratio(subject.batch),
                        )
                    )  # fmt: skip
    return Table(
        name="rehearsal-closed-forms",
        title="Where each parallelism becomes communication-bound",
        columns=(
            *([Column(title="step of")] if named else []),
            Column(title="link"),
            Column(title="ranks", kind="count"),
            Column(title="parallelism"),
            Column(title="hidden where"),
            Column(title="bound below", kind="number", unit="sequences"),
            Column(title="tokens", kind="count"),
            Column(title="of each"),
            Column(
                title="ratio", kind="number",
                hint="communication over the compute it can hide behind, at the recorded batch",
            ),
        ),
        rows=tuple(rows),
        caption="P parameters, g bytes a gradient, a bytes an activation, F FLOP/s, B bytes/s,"
        " L layers, width d, T ranks of a tensor group. The numbers count the attention's FLOPs"
        " and the latency of every hop as well.",
    )  # fmt: skip


def bucket_figure(subject: Subject, predictions: Sequence[Prediction]) -> Figure:
    """On the largest cluster of each link, where the size matters most."""
    most = max(told.ranks for told in predictions)
    return Figure(
        name=f"rehearsal-buckets-{subject.case}",
        title=f"Step time by bucket size: {subject.name}",
        kind="lines",
        curves=tuple(
            Curve(
                label=told.place,
                x=tuple(told.buckets.steps),
                y=tuple(step.step_ms for step in told.buckets.steps.values()),
            )
            for told in predictions
            if told.ranks == most
        ),
        x_label="bucket size, MiB",
        y_label="step, ms",
        x_log=True,
        marks=(Mark(label="computing alone", value=subject.recording.compute_ms),),
        caption="Small buckets pay for messages, large ones leave late.",
    )


def rank_figures(subject: Subject, question: Question) -> Iterator[Figure]:
    if max(question.ranks) == 1:
        return
    told = {network.name: scaling(subject, question, network) for network in question.networks}
    yield _rank_figure(
        subject,
        "kept",
        "Step time by ranks, each with the recorded batch",
        {name: held.kept for name, held in told.items()},
        "Bucketed, at the best size for each number of ranks.",
    )
    if subject.batch >= 2:
        yield _rank_figure(
            subject,
            "divided",
            "Step time by ranks that share the recorded batch",
            {name: held.divided for name, held in told.items()},
            "A share of the batch is taken to take its share of the time, which flatters: small"
            " batches use a device less well.",
        )


def _rank_figure(
    subject: Subject,
    name: str,
    title: str,
    steps: Mapping[str, Mapping[int, Replay]],
    caption: str,
) -> Figure:
    return Figure(
        name=f"rehearsal-ranks-{name}-{subject.case}",
        title=f"{title}: {subject.name}",
        kind="lines",
        curves=tuple(
            Curve(
                label=network,
                x=tuple(float(ranks) for ranks in held),
                y=tuple(step.step_ms for step in held.values()),
            )
            for network, held in steps.items()
        ),
        x_label="ranks",
        y_label="step, ms",
        x_log=True,
        caption=caption,
    )


def overlap_timeline(subject: Subject, told: Prediction) -> Timeline:
    lanes = []
    for name, step in told.steps.items():
        lanes.append(Lane(label=f"{name}: compute", stretches=_compute(subject, step)))
        lanes.append(
            Lane(
                label=f"{name}: links",
                stretches=tuple(
                    Stretch(start=m.start, end=m.end, label=bytes_(m.bytes), group="messages")
                    for m in step.messages
                ),
            )
        )
    return Timeline(
        name=f"rehearsal-timeline-{subject.case}",
        title=f"Predicted overlap on {told.place}: {subject.name}",
        lanes=tuple(lanes),
        x_label="ms",
        caption="Where messages lie beside the backward, they are hidden.",
    )


def _compute(subject: Subject, step: Replay) -> tuple[Stretch, ...]:
    optimizer = subject.recording.optimizer_ms
    gathers = [m for m in step.messages if m.ready > step.synchronized]
    ended = min((m.ready for m in gathers), default=step.step_ms)
    parts = (
        (0.0, step.forward_end, "forward"),
        (step.forward_end, step.backward_end, "backward"),
        (step.backward_end, step.synchronized, "waiting"),
        (step.synchronized, min(ended, step.synchronized + optimizer), "optimizer"),
        (ended, step.step_ms, "waiting"),
    )
    return tuple(
        Stretch(start=start, end=end, label=label, group=label)
        for start, end, label in parts
        if end > start
    )
