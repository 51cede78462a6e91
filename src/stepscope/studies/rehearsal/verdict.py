"""The verdict on a rehearsal: the step on the largest cluster, what it loses, what would help."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.advice.rule import WORTH
from stepscope.analysis.parts import COMMUNICATION
from stepscope.analysis.rehearsal.cluster import LINKS, max_ranks
from stepscope.analysis.rehearsal.replay import Replay
from stepscope.analysis.rehearsal.sweep import AS_GOOD
from stepscope.analysis.verdict import (
    BreakdownPart,
    Estimate,
    Gain,
    OnCluster,
    RankedChange,
    Verdict,
    ranked,
)
from stepscope.studies.rehearsal.subject import (
    Network,
    Prediction,
    Question,
    Subject,
    predict,
    preset_network,
    rank_memory,
    scaling,
)

PREDICTED = "predicted from one recorded step, not measured"
COMPUTE = "compute"
PACKING = "packing gradients"
_STRATEGIES = {
    "bucketed": "DDP in buckets of {:g} MiB",
    "sharded": "a sharded optimizer (ZeRO stage 1) and buckets of {:g} MiB",
    "fsdp": "FSDP in units of {:g} MiB",
    "overlap": "one all-reduce per parameter during the backward pass",
    "flat": "one all-reduce of all gradients",
    "naive": "one all-reduce per parameter after the backward pass",
}
"""In words, the usual ones first."""
_CODE = {
    "bucketed": ("DistributedDataParallel(model, bucket_cap_mb={:g})",),
    "sharded": (
        "stepscope.parallel.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=…)",
    ),
    "fsdp": ("for block in …:", "    fully_shard(block)", "fully_shard(model)"),
}
"""The strategies that are suggested instead of others, and how to use each."""


class _Chosen(NamedTuple):
    """A strategy on a cluster, with what a rank of it needs."""

    strategy: str
    bucket_mb: float
    step: Replay
    memory: float | None

    @property
    def words(self) -> str:
        return _STRATEGIES[self.strategy].format(self.bucket_mb)


def rehearsal_verdict(
    subjects: Sequence[Subject], question: Question, words: Sequence[str] = ()
) -> Verdict | None:
    """The verdict on the longest of these steps, on the most ranks, over the first network that can
    have so many. `words` of the command line are part of the next command."""
    if not subjects or not question.possible:
        return None
    subject = max(subjects, key=lambda one: one.recording.compute_ms)
    network = _network(question)
    question = question._replace(ranks=question.ranks_over(network))
    ranks = max(question.ranks)
    chosen = _best(subject, question, network, ranks)
    step, alone_ms = chosen.step, subject.recording.compute_ms
    sweep = scaling(subject, question, network)
    is_good = subject.trust.level == "good"
    changes = list(_changes(subject, question, network, chosen)) if is_good else []
    return Verdict(
        subject=subject.name,
        device=f"{ranks:,} × {subject.device}",
        step=_exactly(step.step_ms),
        parts=tuple(_parts(subject, chosen)),
        cluster=OnCluster(
            ranks=ranks,
            link=network.name,
            strategy=chosen.words,
            alone_ms=alone_ms,
            efficiency=alone_ms / step.step_ms,
            exposed_above=question.above,
            stops_paying_at=sweep.stops_paying(question.above) if is_good else None,
            memory_bytes=chosen.memory,
            device_bytes=subject.device_bytes,
        ),
        changes=ranked([one for one in changes if one.gain.value >= WORTH * step.step_ms]),
        trust=subject.trust.level,
        trust_reason=PREDICTED if is_good else subject.trust.reason,
        next_command=_next(subject, question, network, step, words),
    )


def _network(question: Question) -> Network:
    """The first network that connects the most ranks; otherwise the first that connects any."""
    possible = (one for one in question.networks if max(question.ranks) <= one.max_ranks)
    return next(possible, question.possible[0])


def _best(subject: Subject, question: Question, network: Network, ranks: int) -> _Chosen:
    """The most usual strategy as fast as the fastest of those whose memory fits, if one does."""
    asked = question._replace(networks=(network,), ranks=(ranks,))
    (prediction,) = predict(subject, asked)
    every = [_chosen(subject, prediction, name) for name in prediction.steps]
    possible = [one for one in every if _fits(subject, one.memory)] or every
    least = min(one.step.step_ms for one in possible)
    as_fast = [one for one in possible if one.step.step_ms <= AS_GOOD * least]
    return min(as_fast, key=lambda one: list(_STRATEGIES).index(one.strategy))


def _chosen(subject: Subject, prediction: Prediction, strategy: str) -> _Chosen:
    bucket_mb = prediction.bucket_mb[strategy]
    memory = rank_memory(subject, strategy, prediction.ranks, bucket_mb)
    return _Chosen(strategy, bucket_mb, prediction.steps[strategy], memory)


def _fits(subject: Subject, memory: float | None) -> bool:
    return memory is None or subject.device_bytes is None or memory <= subject.device_bytes


def _parts(subject: Subject, chosen: _Chosen) -> Iterator[BreakdownPart]:
    """What a rank computes, and the rest of its step: the packing of FSDP is not known."""
    exposed = max(0.0, chosen.step.exposed_ms)
    packing = 0.0
    if chosen.strategy != "fsdp":
        packing = min(exposed, subject.recording.gradient_bytes * subject.upkeep.pack_byte)
    parts = (
        BreakdownPart(label=COMPUTE, ms=chosen.step.step_ms - exposed, meaning="ideal"),
        BreakdownPart(label=COMMUNICATION, ms=exposed - packing, meaning="communication"),
        BreakdownPart(label=PACKING, ms=packing, meaning="lost"),
    )
    return (part for part in parts if part.ms > 0)


def _changes(
    subject: Subject, question: Question, network: Network, chosen: _Chosen
) -> Iterator[RankedChange]:
    """Another strategy, a faster network and a larger batch, each alone, per step of the same
    samples. Of the batch only the time beyond compute counts, since compute is taken to grow with
    it."""
    ranks, step_ms = max(question.ranks), chosen.step.step_ms
    others = tuple(name for name in _CODE if name not in question.strategies)
    if others:
        other = _best(subject, question._replace(strategies=others), network, ranks)
        if _fits(subject, other.memory):
            code = tuple(line.format(other.bucket_mb) for line in _CODE[other.strategy])
            yield _change("strategy", other.words, step_ms - other.step.step_ms, code)
    only = question._replace(strategies=(chosen.strategy,))
    for link in LINKS:
        if link != network.name and ranks <= max_ranks(link):
            faster = _best(subject, only, preset_network(link), ranks).step.step_ms
            yield _change(f"link-{link}", f"{link} instead of {network.name}", step_ms - faster)
    larger = subject._replace(
        recording=subject.recording.with_batch(2),
        batch=2 * subject.batch,
        memory=None if subject.memory is None else subject.memory.with_batch(2),
    )
    twice = _best(larger, only, network, ranks)
    if _fits(subject, twice.memory):
        # The batch of a program is not always known.
        size = "…  # twice the current one" if subject.program else f"{larger.batch:g}"
        gain = chosen.step.exposed_ms - twice.step.exposed_ms / 2
        yield _change("batch", "twice the batch per rank", gain, (f"batch_size = {size}",))


def _change(code: str, title: str, gain_ms: float, lines: tuple[str, ...] = ()) -> RankedChange:
    return RankedChange(
        code=code, title=title, gain=Gain(value=gain_ms, low=gain_ms, high=gain_ms), risk="",
        lines=lines,
        setting="link" if code.startswith("link") else code,
    )  # fmt: skip


def _exactly(ms: float) -> Estimate:
    """A prediction without a range."""
    return Estimate(value=ms, low=ms, high=ms)


def _next(
    subject: Subject, question: Question, network: Network, step: Replay, words: Sequence[str]
) -> str:
    """Rehearse the largest remedy if scaling does not pay; otherwise improve what a rank of the
    program computes. A network without a preset has no name in a command."""
    if step.exposed_share > question.above and network.name in LINKS:
        cluster = ["--ranks", str(max(question.ranks)), "--link", network.name]
        batch = ["--batch", f"{2 * subject.batch:g}"]
        return shlex.join(["stepscope", "rehearse", *words, *cluster, *batch])
    program = subject.program
    return f"stepscope advise --verify {program}" if program else ""
