"""Report blocks of rehearsals: predictions, and their errors on real ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stepscope.analysis.conclusions import NOTHING, conclude, joined
from stepscope.analysis.rehearsal.replay import Replay
from stepscope.analysis.rehearsal.sweep import BUCKETED
from stepscope.report.blocks import (
    Block,
    Figure,
    Finding,
    LimitLine,
    Table,
    Timeline,
)
from stepscope.report.format import bytes_, count, duration, number, percent, rate
from stepscope.report.tables import Declared, col, failed_table, table
from stepscope.studies.base import Result
from stepscope.studies.rehearsal.cases import RecordingCase
from stepscope.studies.rehearsal.subject import (
    Prediction,
    Question,
    Subject,
    predict,
    preset_network,
    rank_memory,
    scaling,
    subject_of,
)
from stepscope.views.figures import curves, lane


def view(results: Sequence[Result[RecordingCase]]) -> tuple[Block, ...]:
    subjects, question = recorded_question(results)
    blocks = subject_blocks(subjects, question) if subjects else []
    blocks += failed_table("rehearsal", results)
    return tuple(sorted(blocks, key=lambda block: not isinstance(block, Finding)))


def subject_blocks(subjects: Sequence[Subject], question: Question) -> list[Block]:
    """Findings, figures and tables of these recordings for a question."""
    blocks: list[Block] = [*left_out_findings(question)]
    if not question.possible:
        return [*map(recorded_finding, subjects), *blocks]
    predicted = [(subject, predict(subject, question)) for subject in subjects]
    for subject, predictions in predicted:
        blocks += [
            recorded_finding(subject),
            *bucket_findings(subject, predictions),
            *scaling_findings(subject, question),
            overlap_timeline(subject, predictions[len(predictions) // 2]),
            *rank_figures(subject, question),
            bucket_figure(subject, predictions),
        ]
    return [*blocks, prediction_table(predicted)]


def recorded_question(
    results: Sequence[Result[RecordingCase]],
) -> tuple[list[Subject], Question]:
    """The recorded steps, and all clusters that the recordings request."""
    cases = [result.case for result in results]
    links = dict.fromkeys(link for case in cases for link in case.link)
    ranks = {count for case in cases for count in case.ranks}
    subjects = [subject for result in results if (subject := subject_of(*result))]
    networks = tuple(preset_network(link) for link in links)
    return subjects, Question(networks, tuple(sorted(ranks)))


def recorded_finding(subject: Subject) -> Finding:
    recording = subject.recording
    return subject.finding(
        "recorded",
        f"{subject.name}: recorded on {subject.device}, a step computes for"
        f" {duration(recording.compute_ms)} ({duration(recording.backward_ms)} of it"
        f" backward{_at_rate(subject)}) and has {bytes_(recording.gradient_bytes)} of gradients,"
        f" half of which are ready after {percent(recording.half_ready())} of the backward"
        f" pass{'' if subject.gradients_timed else ', assumed to become ready evenly'}.",
        {
            "compute_ms": recording.compute_ms,
            "backward_ms": recording.backward_ms,
            "flops_per_s": subject.flops_per_s,
            "gradient_bytes": recording.gradient_bytes,
            "half_ready": recording.half_ready(),
        },
    )


def _at_rate(subject: Subject) -> str:
    known = subject.flops_per_s > 0
    return f", at {rate(subject.flops_per_s, 'FLOP/s')}" if known else ""


def bucket_findings(subject: Subject, predictions: Sequence[Prediction]) -> Iterator[Finding]:
    """Best bucket size on the largest cluster of each network."""
    for prediction in _largest(predictions):
        sizes, best = prediction.buckets.steps, prediction.buckets.best
        low, high = prediction.buckets.as_good
        every = len(sizes) > 1 and (low, high) == (min(sizes), max(sizes))
        same = "any size" if every else f"{low:g} to {high:g} MiB"
        step = sizes[best]
        others = [
            f"{name} {duration(prediction.steps[name].step_ms)}"
            for name in ("naive", "flat", "overlap", "sharded", "fsdp")
            if name in prediction.steps
        ]
        yield subject.finding(
            "best-bucket",
            f"{subject.name} on {prediction.label}, predicted: {duration(step.step_ms)} per step"
            f" with DDP in buckets of {best:g} MiB, of which {duration(step.exposed_ms)}"
            f" ({percent(step.exposed_share)}) is not compute."
            + (f" Other strategies: {', '.join(others)}." if others else ""),
            {
                "link": prediction.network.name,
                "ranks": prediction.ranks,
                "bucket_mb": best,
                "step_ms": step.step_ms,
                "exposed_ms": step.exposed_ms,
            },
            conclusion=conclude(
                f"The best bucket size is {best:g} MiB ({same} within 1 %).", subject.known
            ),
        )


def left_out_findings(question: Question) -> Iterator[Finding]:
    """Clusters that do not exist and are not predicted."""
    for network in question.networks:
        if gone := [ranks for ranks in question.ranks if ranks > network.max_ranks]:
            yield Finding(
                code="rehearsal.no-such-domain",
                values={"ranks": max(gone), "largest": network.max_ranks},
                text=f"No prediction for {' and '.join(f'{n:,}' for n in gone)} ranks over"
                f" {network.name}: the largest domain has {network.max_ranks:g} GPUs.",
                timed=False,
            )


def scaling_findings(subject: Subject, question: Question) -> Iterator[Finding]:
    for network in question.possible:
        most = max(question.ranks_over(network))
        if most == 1:
            continue
        sweep = scaling(subject, question, network)
        stops, above = sweep.stops_paying(question.above), percent(question.above)
        last = sweep.kept[most].exposed_share
        share = subject.exposed(sweep.kept[stops or most]).against(question.above)
        pays = conclude(
            f"They take at most {above} of the step up to {count(most)} ranks."
            if stops is None
            else f"Scaling stops being worthwhile at {count(stops)} ranks: from there on they take"
            f" more than {above} of the step.",
            share,
        )
        shared = NOTHING
        if len(sweep.divided) > 1:
            gained = sweep.divided[1].step_ms / sweep.divided[sweep.fastest].step_ms
            shared = conclude(
                "The same batch divided among ranks is not faster than on one rank."
                if sweep.fastest == 1
                else f"The same batch divided among ranks is fastest on {count(sweep.fastest)}"
                f" ranks, {number(gained, 3)} times as fast as on one.",
                subject.known,
            )
        yield subject.finding(
            "scaling",
            f"{subject.name} over {network.name}, {_sequences(subject.batch)} per rank, predicted:"
            f" exposed communication and packing take {percent(last)} of the step at"
            f" {count(most)} ranks.",
            {
                "link": network.name,
                "ranks": most,
                "stops_paying_at": stops,
                "exposed_share": last,
                "fastest_shared": sweep.fastest if len(sweep.divided) > 1 else None,
            },
            conclusion=joined(pays, shared),
            tone="warn" if stops is not None and share.above else "info",
        )


def _sequences(batch: float) -> str:
    return "1 sequence" if batch == 1 else f"{batch:g} sequences"


def _largest(predictions: Sequence[Prediction]) -> list[Prediction]:
    by_ranks = sorted(predictions, key=lambda prediction: prediction.ranks)
    largest = {prediction.network.name: prediction for prediction in by_ranks}
    return [
        prediction for prediction in predictions if prediction is largest[prediction.network.name]
    ]


def prediction_table(predicted: Sequence[tuple[Subject, Sequence[Prediction]]]) -> Table:
    """Table of predicted steps; a row is (subject, cluster, strategy, step)."""
    return table(
        "rehearsal-steps",
        "Predicted steps",
        [
            (subject, cluster, strategy, step)
            for subject, predictions in predicted
            for cluster in predictions
            for strategy, step in cluster.steps.items()
        ],
        [
            *_step_of(len(predicted)),
            col("link", lambda r: r[1].network.name),
            col("ranks", lambda r: r[1].ranks, "count"),
            col("strategy", lambda r: r[2]),
            col(
                "bucket",
                lambda r: r[1].bucket_mb[r[2]] if r[2] in BUCKETED else None,
                unit="MiB",
                hint="the best size for the strategy",
            ),
            col("step", lambda r: r[3].step_ms, unit="ms"),
            col(
                "communication",
                lambda r: r[3].communication_ms,
                unit="ms",
                hint="time in which the links are busy",
            ),
            col(
                "beyond compute",
                lambda r: r[3].exposed_ms,
                unit="ms",
                hint="step time minus compute time; with sharding a share of the optimizer",
            ),
            col("share of step", lambda r: r[3].exposed_share, "percent"),
            col("messages", lambda r: len(r[3].messages), "count"),
            *([_memory_column()] if any(subject.memory for subject, _ in predicted) else []),
        ],
        caption="Simulated from the recorded backward; every rank has the recorded batch. Links"
        " have the bandwidth of data sheets. Beyond compute: waiting for the links, packing"
        " gradients into buckets, sending, and the synchronization at the end; for fsdp waiting"
        " only, because its packing was not measured.",
    )


def _memory_column() -> Declared:
    return col(
        "memory per rank",
        lambda r: rank_memory(r[0], r[2], r[1].ranks, r[1].bucket_mb[r[2]]),
        "bytes",
        hint="peak of one rank, from that of the recorded step (built-in models: predicted)",
    )


def _step_of(subjects: int) -> list[Declared]:
    return [col("step of", lambda r: r[0].name)] if subjects > 1 else []


def bucket_figure(subject: Subject, predictions: Sequence[Prediction]) -> Figure:
    """Step time by bucket size on the largest clusters, where the size matters most."""
    return Figure(
        name=f"rehearsal-buckets-{subject.case}",
        title=f"Step time by bucket size: {subject.name}",
        curves=curves(
            {
                prediction.label: {
                    mb: step.step_ms for mb, step in prediction.buckets.steps.items()
                }
                for prediction in _largest(predictions)
            }
        ),
        x_label="bucket size, MiB",
        y_label="step time, ms",
        x_log=True,
        marks=(LimitLine(label="compute only", value=subject.recording.compute_ms),),
        caption="Small buckets pay the latency of many messages; large buckets start late.",
    )


def rank_figures(subject: Subject, question: Question) -> Iterator[Figure]:
    if max(question.ranks) == 1:
        return
    sweeps = {network.name: scaling(subject, question, network) for network in question.possible}
    yield _rank_figure(
        subject,
        "kept",
        "Step time by ranks, each with the recorded batch",
        {name: sweep.kept for name, sweep in sweeps.items()},
        "Bucketed, with the best bucket size for each number of ranks.",
    )
    if subject.batch >= 2:
        yield _rank_figure(
            subject,
            "divided",
            "Step time by ranks, with the recorded batch divided among them",
            {name: sweep.divided for name, sweep in sweeps.items()},
            "Compute time is assumed proportional to the batch per rank, which is optimistic:"
            " small batches use a device less efficiently.",
        )


def _rank_figure(
    subject: Subject, name: str, title: str, steps: Mapping[str, Mapping[int, Replay]], caption: str
) -> Figure:
    return Figure(
        name=f"rehearsal-ranks-{name}-{subject.case}",
        title=f"{title}: {subject.name}",
        curves=curves(
            {
                network: {float(ranks): step.step_ms for ranks, step in by_ranks.items()}
                for network, by_ranks in steps.items()
            }
        ),
        x_label="ranks",
        y_label="step time, ms",
        x_log=True,
        caption=caption,
    )


def overlap_timeline(subject: Subject, prediction: Prediction) -> Timeline:
    lanes = []
    for name, step in prediction.steps.items():
        lanes.append(lane(f"{name}: compute", _compute(subject, step)))
        messages = ((m.start, m.end, bytes_(m.bytes), "messages") for m in step.messages)
        lanes.append(lane(f"{name}: links", messages))
    return Timeline(
        name=f"rehearsal-timeline-{subject.case}",
        title=f"Predicted overlap on {prediction.label}: {subject.name}",
        lanes=tuple(lanes),
        x_label="ms",
        caption="Messages drawn below the backward pass overlap with it.",
    )


def _compute(subject: Subject, step: Replay) -> list[tuple[float, float, str, str]]:
    """Start, end, label and group of the phases of a predicted step."""
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
    return [(start, end, label, label) for start, end, label in parts if end > start]
