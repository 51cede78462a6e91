"""What a rehearsal says in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.rehearsal.closed_forms import Way
from stepscope.analysis.rehearsal.cluster import LARGEST_NVLINK
from stepscope.report.blocks import Finding
from stepscope.report.format import bytes_, count, duration, number, percent, rate
from stepscope.studies.rehearsal.subject import (
    Prediction,
    Question,
    Subject,
    closed_forms,
    scaling,
)


def recorded_finding(subject: Subject) -> Finding:
    recording = subject.recording
    return Finding(
        text=f"{subject.name}: recorded on {subject.device}, a step computes for"
        f" {duration(recording.compute_ms)} ({duration(recording.backward_ms)} of it backward, at"
        f" {rate(subject.flops_per_s, 'FLOP/s')}) and makes {bytes_(recording.gradient_bytes)} of"
        f" gradients, half of which are ready after {percent(recording.half_ready())} of the"
        " backward."
    )


def bucket_findings(subject: Subject, predictions: Sequence[Prediction]) -> Iterator[Finding]:
    """For each network, at its largest cluster."""
    for told in _largest(predictions):
        best = told.buckets.best
        low, high = told.buckets.as_good
        step = told.buckets.steps[best]
        same = "any size" if len(told.buckets.steps) > 1 and (low, high) == (
            min(told.buckets.steps), max(told.buckets.steps)
        ) else f"{low:g} to {high:g} MiB"  # fmt: skip
        text = (
            f"{subject.name} on {told.place}: the best bucket size is {best:g} MiB ({same} within"
            f" 1 %), {duration(step.step_ms)} a step with {duration(step.exposed_ms)}"
            f" ({percent(step.exposed_share)}) beyond what it computes."
        )
        others = [
            f"{name} {duration(told.steps[name].step_ms)}"
            for name in ("naive", "flat", "overlap", "sharded", "fsdp")
            if name in told.steps
        ]
        if others:
            text += f" Other ways: {', '.join(others)}."
        yield Finding(text=text)
        if told.network.name == "nvlink" and told.ranks > LARGEST_NVLINK:
            yield Finding(
                text=f"No NVLink domain has {told.ranks:,} GPUs ({LARGEST_NVLINK} is the most):"
                " that row is one ring of such links, which nobody builds.",
                tone="warn",
            )


def scaling_findings(subject: Subject, question: Question) -> Iterator[Finding]:
    most = max(question.ranks)
    for network in question.networks if most > 1 else ():
        held = scaling(subject, question, network)
        stops, above = held.stops_paying(question.above), percent(question.above)
        last = percent(held.kept[most].exposed_share)
        if stops is None:
            text = (
                f"communication that is exposed, with packing for it, is at most {above} of the"
                f" step up to {count(most)} ranks ({last} there)."
            )
        else:
            text = (
                f"scaling stops paying at {count(stops)} ranks: from there on more than {above} of"
                f" the step is exposed communication and packing ({last} at {count(most)})."
            )
        if len(held.divided) > 1:
            gained = held.divided[1].step_ms / held.divided[held.fastest].step_ms
            text += (
                " The same batch shared out among ranks is done no sooner than on one."
                if held.fastest == 1
                else f" The same batch shared out is done soonest on {count(held.fastest)} ranks,"
                f" {number(gained, 3)} times as fast as on one."
            )
        yield Finding(
            text=f"{subject.name} over {network.name}, {_sequences(subject.batch)} a rank: {text}",
            tone="info" if stops is None else "warn",
        )


def closed_form_findings(subject: Subject, question: Question) -> Iterator[Finding]:
    for network in question.networks:
        ranks = max(question.ranks)
        if ranks == 1:
            continue
        told = [
            f"{way.name} {_bound(way, subject.model.context)}"
            for way in closed_forms(subject, question, network, ranks)
        ]
        yield Finding(
            text=f"{subject.name} on {ranks:,} ranks over {network.name} at"
            f" {rate(subject.flops_per_s, 'FLOP/s')} is communication-bound: {'; '.join(told)}."
        )


def _sequences(batch: float) -> str:
    return "1 sequence" if batch == 1 else f"{batch:g} sequences"


def _bound(way: Way, context: int) -> str:
    below = way.bound_below
    if below is not None and below <= 1:
        return "at no batch"
    if below is None:
        return f"at every batch ({number(way.ratio(1e6), 3)}× the compute)"
    tokens = count(round(below * context))
    return f"below {number(below, 3)} sequences ({tokens} tokens) for {way.unit}"


def _largest(predictions: Sequence[Prediction]) -> list[Prediction]:
    networks: dict[str, Prediction] = {}
    for told in predictions:
        held = networks.get(told.network.name)
        if held is None or told.ranks > held.ranks:
            networks[told.network.name] = told
    return list(networks.values())
