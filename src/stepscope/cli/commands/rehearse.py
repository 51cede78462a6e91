"""`stepscope rehearse`: replay a recorded step on clusters that are not at hand."""

from __future__ import annotations

import math
import shlex
from typing import Annotated

import tyro

from stepscope.analysis.plausibility import plausible
from stepscope.analysis.rehearsal.cluster import LINKS, custom_cluster, make_cluster
from stepscope.analysis.rehearsal.replay import Replay
from stepscope.analysis.rehearsal.sweep import ALL, BUCKETS_MB
from stepscope.cli.answer import Answer, AnswerOptions, for_shell, print_answer
from stepscope.cli.common import (
    existing_store,
    json_line,
    load_run_or_record,
    parse,
    write_text,
)
from stepscope.cli.messages import say
from stepscope.errors import UsageError, unknown_name
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Finding, Page, Section, Table
from stepscope.report.verdict import verdict_facts
from stepscope.studies.page import explained
from stepscope.studies.rehearsal import STUDY
from stepscope.studies.rehearsal.inspected import STUDIES, inspected_subject
from stepscope.studies.rehearsal.subject import (
    Network,
    Prediction,
    Question,
    Subject,
    predict,
    preset_network,
    rank_memory,
    scaling,
    subject_of,
)
from stepscope.studies.rehearsal.verdict import rehearsal_verdict
from stepscope.studies.rehearsal.view import subject_blocks
from stepscope.studies.trusted import temper
from stepscope.views.program.rows import programs, slowest

_FIX = (
    "record your own with `stepscope inspect train.py`, or one of this library's model with"
    " `stepscope run rehearsal --size small --context 512`"
)
_QUESTION = "How long would this step take on a cluster?"


class RehearseOptions(AnswerOptions, frozen=True, kw_only=True):
    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """A run, a record or a .jsonl file with a step that `run rehearsal` or `inspect` recorded;
    default: the newest in the store."""
    ranks: tuple[int, ...] = (8, 64, 1024)
    """Numbers of ranks (devices) to predict for."""
    link: tuple[str, ...] = ()
    """Interconnects: nvlink, infiniband, ethernet; default: all."""
    latency_us: float | None = None
    """Custom interconnect: latency of one hop in µs. Requires --bandwidth-gbs."""
    bandwidth_gbs: float | None = None
    """Custom interconnect: bandwidth per rank in GB/s (10^9 bytes). Requires --latency-us."""
    per_node: int = 1
    """Custom interconnect: ranks per node; ranks of a node communicate over NVLink."""
    strategy: tuple[str, ...] = ALL
    """Strategies: naive (one all-reduce per parameter after backward), flat (one for all
    parameters), overlap (one per parameter, during backward), bucketed (as DDP), sharded (ZeRO-1),
    fsdp."""
    bucket_mb: tuple[float, ...] = BUCKETS_MB
    """Bucket sizes to try, in MiB; the fastest is reported."""
    batch: float | None = None
    """Batch size per rank; default: as recorded. Forward and backward are scaled in proportion."""
    faster: float = 1.0
    """Predict for a device that is this many times as fast as the recorded one."""
    exposed_above: float = 20.0
    """Largest share of exposed communication, in percent of the step, at which scaling still
    pays."""

    def __post_init__(self) -> None:
        for ranks in self.ranks:
            make_cluster("infiniband", ranks)
        # A number of ranks that only some of the links can connect is left out for the others.
        for name in self.link:
            make_cluster(name, min(self.ranks, default=1))
        for name in self.strategy:
            if name not in ALL:
                raise unknown_name("strategy", name, ALL)
        if (self.latency_us is None) != (self.bandwidth_gbs is None):
            raise UsageError(
                "a custom interconnect needs two numbers", "give --latency-us and --bandwidth-gbs"
            )
        if not self.ranks or not self.strategy:
            raise UsageError("there is nothing to predict", "give --ranks and --strategy a value")
        for size in self.bucket_mb or (0.0,):
            _require_above_zero("bucket_mb", size)
        for name in ("batch", "faster", "exposed_above"):
            if (value := getattr(self, name)) is not None:
                _require_above_zero(name, value)

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
        )

    @property
    def words(self) -> list[str]:
        """The words of a command line for other clusters and batch sizes."""
        source = [] if self.source is None else [self.source]
        device = [] if self.faster == 1 else ["--faster", f"{self.faster:g}"]
        strategies = [] if self.strategy == ALL else ["--strategy", *self.strategy]
        return [*source, *device, *strategies]


def main(words: list[str]) -> int:
    options = parse(
        RehearseOptions,
        words,
        "rehearse",
        "Predict the time of a training step on a cluster, from a step recorded on one device.\n"
        "For each number of ranks, interconnect and strategy it reports the step time, the\n"
        "communication that computation does not hide (exposed), and the best bucket size; then\n"
        "the number of ranks up to which scaling pays. Writes rehearsal.html.",
        (
            "stepscope inspect train.py; stepscope rehearse",
            "stepscope run rehearsal --size small --context 512 --dtype bfloat16",
            "stepscope rehearse",
            "stepscope rehearse --ranks 64 --link infiniband --strategy bucketed fsdp",
            "stepscope rehearse --ranks 16 --latency-us 50 --bandwidth-gbs 1.25 --per-node 4",
            "stepscope rehearse results.jsonl --ranks 1024 --faster 2 --batch 1",
        ),
    )
    with explained("rehearsal"):
        subjects = [_adjusted(options, subject) for subject in _subjects(options)]
        page = _page(subjects, options)
    html = options.out / "rehearsal.html"
    from stepscope.report.html import html_page

    write_text(html, html_page(page))
    if options.json:
        facts = [_facts(subject, options.question) for subject in subjects]
        verdict = verdict_facts(page.verdict)
        print(json_line({"rehearsals": facts, "report": html, "verdict": verdict}))
        return 0
    more = shlex.join(["stepscope", "rehearse", "--full", *words])
    print_answer(Answer(page.verdict, page.sections, more), options)
    say(f"page: {html.resolve()}")
    return 0


def _subjects(options: RehearseOptions) -> list[Subject]:
    if options.source is None:
        with existing_store(options) as store:
            records = store.records()
        where = str(options.store)
    else:
        loaded = load_run_or_record(options.source, options)
        records, where = ((loaded,) if isinstance(loaded, Record) else loaded), options.source
    if options.source is None:
        # The newest recording, whichever command made it.
        made = [one.study for one in records if one.study in (STUDY.name, *STUDIES)]
        records = tuple(one for one in records if one.study in made[-1:])
    ours = STUDY.results([plausible(record) for record in records if record.study == STUDY.name])
    subjects = [subject for result in ours if (subject := subject_of(*result))]
    if not subjects:
        inspected = [plausible(record) for record in records if record.study in STUDIES]
        # Of several ranks the one that the others wait for.
        last = [slowest(ranks) or ranks[0] for ranks in programs(inspected)]
        subjects = [one for watched in last if (one := inspected_subject(watched.record))]
    if not subjects:
        raise UsageError(f"{where} has no recorded step", _FIX)
    return subjects[-1:] if options.source is None else subjects


def _adjusted(options: RehearseOptions, subject: Subject) -> Subject:
    """Apply the options (speed, batch size, rate) to the recorded step."""
    recording = subject.recording.on_faster_device(options.faster)
    batch = options.batch or subject.batch
    rate = subject.flops_per_s * options.faster
    changes = [
        *([f"{options.faster:g} times as fast"] if options.faster != 1 else []),
        *([f"with {batch:g} sequences per rank"] if batch != subject.batch else []),
    ]
    return subject._replace(
        name=f"{subject.name}, assumed {' and '.join(changes)}" if changes else subject.name,
        recording=recording.with_batch(batch / subject.batch),
        memory=subject.memory and subject.memory.with_batch(batch / subject.batch),
        batch=batch,
        flops_per_s=rate,
    )


def _page(subjects: list[Subject], options: RehearseOptions) -> Page:
    question = options.question
    trusts = {subject.record: subject.trust for subject in subjects}
    blocks: list[Block] = [
        temper(block, trusts) if isinstance(block, Finding) else block
        for block in subject_blocks(subjects, question)
    ]
    steps = next(b for b in blocks if isinstance(b, Table) and b.name == "rehearsal-steps")
    networks = ", ".join(network.name for network in question.networks)
    return Page(
        title="Rehearsal on a cluster",
        subtitle=f"{', '.join(s.name for s in subjects)}, recorded on {subjects[0].device};"
        f" {', '.join(f'{n:,}' for n in question.ranks)} ranks over {networks}",
        headline=steps,
        verdict=for_shell(rehearsal_verdict(subjects, question, options.words), options),
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
    scalings = {network.name: scaling(subject, question, network) for network in question.possible}
    return {
        "case": subject.case,
        "device": subject.device,
        "batch": subject.batch,
        "flops_per_s": subject.flops_per_s,
        "compute_ms": subject.recording.compute_ms,
        "gradient_bytes": subject.recording.gradient_bytes,
        "predictions": [_prediction_facts(subject, one) for one in predict(subject, question)],
        "scaling": {
            name: {
                "step_ms": {n: step.step_ms for n, step in curve.kept.items()},
                "exposed_share": {n: step.exposed_share for n, step in curve.kept.items()},
                "stops_paying_at": curve.stops_paying(question.above),
                "shared_batch_step_ms": {n: step.step_ms for n, step in curve.divided.items()},
            }
            for name, curve in scalings.items()
        },
    }


def _prediction_facts(subject: Subject, prediction: Prediction) -> dict[str, object]:
    def facts(strategy: str, step: Replay) -> dict[str, object]:
        best = prediction.bucket_mb[strategy]
        return {
            "memory_bytes": rank_memory(subject, strategy, prediction.ranks, best),
            "step_ms": step.step_ms,
            "exposed_ms": step.exposed_ms,
            "communication_ms": step.communication_ms,
            "messages": len(step.messages),
        }

    return {
        "link": prediction.network.name,
        "ranks": prediction.ranks,
        "best_bucket_mb": prediction.buckets.best,
        "bucket_step_ms": {f"{size:g}": s.step_ms for size, s in prediction.buckets.steps.items()},
        "strategies": {name: facts(name, step) for name, step in prediction.steps.items()},
    }


def _require_above_zero(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{name} is {value:g}", "it must be above 0")
