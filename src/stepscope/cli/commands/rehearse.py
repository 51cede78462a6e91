"""`stepscope rehearse`: a recorded step on clusters that one does not have."""

from __future__ import annotations

import math
from typing import Annotated

import tyro

from stepscope.analysis.plausibility import plausible
from stepscope.analysis.rehearsal.closed_forms import ParallelStrategy
from stepscope.analysis.rehearsal.cluster import LINKS, custom_cluster, make_cluster
from stepscope.analysis.rehearsal.replay import Replay
from stepscope.analysis.rehearsal.sweep import ALL, BUCKETS_MB
from stepscope.cli.common import (
    StoreOptions,
    existing_store,
    json_line,
    load_run_or_record,
    parse,
    write_text,
)
from stepscope.errors import UsageError, unknown_name
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Page, Section, Table
from stepscope.studies.base import results_of
from stepscope.studies.page import explained
from stepscope.studies.rehearsal import STUDY
from stepscope.studies.rehearsal.cases import RecordingCase
from stepscope.studies.rehearsal.subject import (
    Network,
    Prediction,
    Question,
    Subject,
    closed_forms,
    predict,
    preset_network,
    scaling,
    subject_of,
)
from stepscope.studies.rehearsal.view import subject_blocks

_MEND = "record one with `stepscope run rehearsal --size small --context 512`"
_QUESTION = "What would this step take on ranks that one does not have?"


class RehearseOptions(StoreOptions, frozen=True, kw_only=True):
    source: Annotated[str | None, tyro.conf.Positional] = None
    """A run, a record or a .jsonl file with a recorded step; by default the newest in the store."""
    ranks: tuple[int, ...] = (8, 64, 1024)
    """Numbers of ranks."""
    link: tuple[str, ...] = ()
    """Links: nvlink, infiniband, ethernet; all of them by default."""
    latency_us: float | None = None
    """Links of your own: what a hop costs, in µs. Give --bandwidth-gbs with it."""
    bandwidth_gbs: float | None = None
    """Links of your own: what a rank can send, in GB/s (10^9 bytes)."""
    per_node: int = 1
    """With links of your own: ranks of a node, which NVLink joins."""
    strategy: tuple[str, ...] = ALL
    """Strategies: naive, flat, overlap, bucketed, sharded (the optimizer's state), fsdp."""
    bucket_mb: tuple[float, ...] = BUCKETS_MB
    """Bucket sizes to choose the best of, in MiB."""
    batch: float | None = None
    """Sequences of each rank, if not as recorded; the passes are taken to take as much longer."""
    faster: float = 1.0
    """As if the device computed so many times as fast as the recorded one."""
    tflops: float | None = None
    """The device's rate for the closed forms, if not as recorded."""
    tensor: int = 0
    """Ranks of a tensor-parallel group in 2-D; 0 takes a node."""
    exposed_above: float = 20.0
    """Percent of the step from which on exposed communication does not pay."""
    json: bool = False
    """Print one line of JSON: every prediction, the sweeps and the closed forms."""

    def __post_init__(self) -> None:
        for ranks in self.ranks:
            make_cluster("nvlink", ranks)
        for name in self.link:
            if name not in LINKS:
                raise unknown_name("link", name, LINKS)
        for name in self.strategy:
            if name not in ALL:
                raise unknown_name("strategy", name, ALL)
        if (self.latency_us is None) != (self.bandwidth_gbs is None):
            raise UsageError(
                "a link of your own needs two numbers", "give --latency-us and --bandwidth-gbs"
            )
        if not self.ranks or not self.strategy:
            raise UsageError("there is nothing to predict", "give --ranks and --strategy a value")
        for size in self.bucket_mb or (0.0,):
            _require_above_zero("bucket_mb", size)
        for name in ("batch", "faster", "tflops", "exposed_above"):
            if (value := getattr(self, name)) is not None:
                _require_above_zero(name, value)
        if self.tensor < 0:
            raise UsageError(f"tensor is {self.tensor}", "it must be 0 or above")

    @property
    def networks(self) -> tuple[Network, ...]:
        own: tuple[Network, ...] = ()
        if self.latency_us is not None and self.bandwidth_gbs is not None:
            latency, bandwidth, node = self.latency_us, self.bandwidth_gbs, self.per_node
            name = custom_cluster(1, latency, bandwidth, node).name
            own = (Network(name, lambda n: custom_cluster(n, latency, bandwidth, node)),)
        named = self.link or (() if own else tuple(LINKS))
        return (*own, *(preset_network(link) for link in named))

    @property
    def question(self) -> Question:
        return Question(
            self.networks,
            tuple(sorted(set(self.ranks))),
            tuple(sorted(set(self.bucket_mb))),
            tuple(dict.fromkeys(self.strategy)),
            self.exposed_above / 100,
            self.tensor,
        )


def main(words: list[str]) -> int:
    options = parse(
        RehearseOptions,
        words,
        "rehearse",
        "Play a recorded step on a cluster: step time and exposed communication of each strategy,\n"
        "the best bucket size, where scaling stops paying, and the batch at which data, tensor,\n"
        "FSDP and 2-D parallelism become communication-bound. Writes rehearsal.html.",
        (
            "stepscope run rehearsal --size small --context 512 --dtype bfloat16",
            "stepscope rehearse",
            "stepscope rehearse --ranks 64 --link infiniband --strategy bucketed fsdp",
            "stepscope rehearse --ranks 16 --latency-us 50 --bandwidth-gbs 1.25 --per-node 4",
            "stepscope rehearse results.jsonl --ranks 1024 --faster 2 --batch 1",
        ),
    )
    with explained("rehearsal"):
        subjects = [_asked(options, subject) for subject in _subjects(options)]
        page = _page(subjects, options.question)
    html = options.out / "rehearsal.html"
    from stepscope.report.html import html_page

    write_text(html, html_page(page))
    if options.json:
        told = [_facts(subject, options.question) for subject in subjects]
        print(json_line({"rehearsals": told, "report": html}))
        return 0
    from stepscope.report.terminal import print_sections

    print_sections(page.sections)
    print(f"page: {html.resolve()}")
    return 0


def _subjects(options: RehearseOptions) -> list[Subject]:
    if options.source is None:
        with existing_store(options) as store:
            held = store.records(study="rehearsal")
        where = str(options.store)
    else:
        meant = load_run_or_record(options.source, options)
        held, where = ((meant,) if isinstance(meant, Record) else meant), options.source
    # A check has a recording of its own, made with fewer threads: only where there is no other.
    ours = STUDY.results([plausible(record) for record in held if record.study == STUDY.name])
    found = [
        subject
        for result in results_of(ours, RecordingCase) or ours
        if (subject := subject_of(*result))
    ]
    if not found:
        raise UsageError(f"{where} has no recorded step", _MEND)
    return found[-1:] if options.source is None else found


def _asked(options: RehearseOptions, subject: Subject) -> Subject:
    """The recorded step as the options change it."""
    recording = subject.recording.on_faster_device(options.faster)
    batch = options.batch or subject.batch
    rate = subject.flops_per_s * options.faster
    changes = [
        *([f"{options.faster:g} times as fast"] if options.faster != 1 else []),
        *([f"with {batch:g} sequences a rank"] if batch != subject.batch else []),
    ]
    return subject._replace(
        name=f"{subject.name} as if {' and '.join(changes)}" if changes else subject.name,
        recording=recording.with_batch(batch / subject.batch),
        batch=batch,
        flops_per_s=rate if options.tflops is None else options.tflops * 1e12,
    )


def _page(subjects: list[Subject], question: Question) -> Page:
    blocks: list[Block] = subject_blocks(subjects, question)
    steps = next(b for b in blocks if isinstance(b, Table) and b.name == "rehearsal-steps")
    networks = ", ".join(network.name for network in question.networks)
    return Page(
        title="Rehearsal for a cluster",
        subtitle=f"{', '.join(s.name for s in subjects)}, recorded on {subjects[0].device};"
        f" {', '.join(f'{n:,}' for n in question.ranks)} ranks over {networks}",
        headline=steps,
        sections=(
            Section(
                name="rehearsal",
                title="Rehearsal",
                question=_QUESTION,
                blocks=tuple(block for block in blocks if block is not steps),
            ),
        ),
    )


def _facts(subject: Subject, question: Question) -> dict[str, object]:
    scalings = {network.name: scaling(subject, question, network) for network in question.networks}
    return {
        "case": subject.case,
        "device": subject.device,
        "batch": subject.batch,
        "flops_per_s": subject.flops_per_s,
        "compute_ms": subject.recording.compute_ms,
        "gradient_bytes": subject.recording.gradient_bytes,
        "predictions": [_prediction_facts(told) for told in predict(subject, question)],
        "scaling": {
            name: {
                "step_ms": {n: step.step_ms for n, step in held.kept.items()},
                "exposed_share": {n: step.exposed_share for n, step in held.kept.items()},
                "stops_paying_at": held.stops_paying(question.above),
                "shared_batch_step_ms": {n: step.step_ms for n, step in held.divided.items()},
            }
            for name, held in scalings.items()
        },
        "closed_forms": [
            {"link": network.name, "ranks": ranks, **_way_facts(way, subject.batch)}
            for network in question.networks
            for ranks in question.ranks
            if ranks > 1
            for way in closed_forms(subject, question, network, ranks)
        ],
    }


def _prediction_facts(told: Prediction) -> dict[str, object]:
    def facts(step: Replay) -> dict[str, object]:
        return {
            "step_ms": step.step_ms,
            "exposed_ms": step.exposed_ms,
            "communication_ms": step.communication_ms,
            "messages": len(step.messages),
        }

    return {
        "link": told.network.name,
        "ranks": told.ranks,
        "best_bucket_mb": told.buckets.best,
        "bucket_step_ms": {f"{size:g}": s.step_ms for size, s in told.buckets.steps.items()},
        "strategies": {name: facts(step) for name, step in told.steps.items()},
    }


def _way_facts(way: ParallelStrategy, batch: float) -> dict[str, object]:
    return {
        "parallelism": way.name,
        "bound_below_sequences": way.bound_below,
        "unit": way.unit,
        "ratio": way.ratio(batch),
    }


def _require_above_zero(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{name} is {value:g}", "it must be above 0")
