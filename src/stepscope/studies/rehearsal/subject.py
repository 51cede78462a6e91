"""The recorded step of a rehearsal, the clusters to predict and the predictions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from stepscope.analysis.conclusions import NOTHING, Conclusion
from stepscope.analysis.effects import Effect, exact, level
from stepscope.analysis.limits import median_ms, step_ms
from stepscope.analysis.rehearsal.cluster import Cluster, make_cluster, max_ranks
from stepscope.analysis.rehearsal.memory import StepMemory, memory_per_rank
from stepscope.analysis.rehearsal.recording import Recording, recording_of
from stepscope.analysis.rehearsal.replay import Replay, Upkeep
from stepscope.analysis.rehearsal.sweep import (
    ALL,
    BUCKETS_MB,
    BucketSweep,
    Scaling,
    doublings,
    sweep_ranks,
    sweep_sizes,
)
from stepscope.analysis.trust import trust_of
from stepscope.parallel.buckets import MEGABYTE
from stepscope.records.memory import GRADIENTS, OPTIMIZER, PARAMETERS
from stepscope.records.schema import Record
from stepscope.records.trust import Trust
from stepscope.report.blocks import Finding, Tone, Value
from stepscope.training.plans import prediction_for
from stepscope.training.workload import Workload

ABOVE = 0.2
"""Share of exposed communication above which scaling is reported as not worthwhile."""


class Subject(NamedTuple):
    """A recorded step with everything that predictions need."""

    name: str
    record: str
    """Id of its record."""
    case: str
    device: str
    recording: Recording
    gradients_timed: bool
    """False for a program of the user: its gradients are assumed to become ready evenly."""
    batch: float
    """Sequences per rank."""
    upkeep: Upkeep
    flops_per_s: float
    """Rate of the recorded forward and backward."""
    trust: Trust
    """Of the record."""
    known: Effect = exact(1.0)
    """The time of its step relative to the median, with its interval."""
    memory: StepMemory | None = None
    """None if its peak is not known."""
    device_bytes: int | None = None
    """Memory of the recorded device; None on a CPU, which ranks would share."""
    program: str = ""
    """The user's program or model, as in a command line; empty for the model of the studies."""

    def exposed(self, step: Replay) -> Effect:
        """Share of a predicted step that is not compute, for either end of the interval of the
        recorded step."""
        if not step.exposed_ms:
            return exact(0.0, ABOVE)
        compute = step.step_ms - step.exposed_ms
        low, high = (
            step.exposed_ms / (step.exposed_ms + compute * end) if math.isfinite(end) else 0.0
            for end in (self.known.high, max(0.0, self.known.low))
        )
        return Effect(step.exposed_share, low, high, ABOVE, self.known.sampled)

    def finding(
        self,
        what: str,
        text: str,
        values: dict[str, Value],
        conclusion: Conclusion = NOTHING,
        tone: Tone = "info",
    ) -> Finding:
        """Finding based on the recording."""
        return Finding(
            code=f"rehearsal.{what}",
            values=values,
            records=(self.record,),
            text=text,
            conclusion=conclusion,
            tone=tone,
        )


def relative_step(record: Record) -> Effect:
    """Return the step time of a record relative to its median, with its interval."""
    step = step_ms(record)
    if step is None or not step.median:
        return exact(1.0)
    return level(step).times(1 / step.median)


def subject_of(record: Record, workload: Workload) -> Subject | None:
    recording = recording_of(record)
    if recording is None:
        return None
    passes_ms = (median_ms(record, "forward") or 0.0) + (median_ms(record, "backward") or 0.0)
    copied = record.ceiling("memory.copy")
    return Subject(
        name=workload.name,
        record=record.id,
        case=record.case,
        device=record.environment.device_name,
        recording=recording,
        gradients_timed=True,
        batch=float(workload.batch),
        # Scaling a gradient into its bucket reads and writes it.
        upkeep=Upkeep(pack_byte=2e3 / copied.value) if copied else Upkeep(),
        flops_per_s=(record.quantity("flops") or 0.0) / passes_ms * 1e3,
        trust=trust_of(record),
        known=relative_step(record),
        memory=_predicted_memory(workload, record.environment.device_kind),
        device_bytes=device_bytes(record),
    )


def device_bytes(record: Record) -> int | None:
    """Return the memory of the recorded device; None on a CPU."""
    where = record.environment
    return None if where.device_kind == "cpu" else where.device_memory_bytes


def _predicted_memory(workload: Workload, device_kind: str) -> StepMemory | None:
    """Return the memory of a step of the built-in model; None where no peak can be predicted."""
    prediction = prediction_for(workload, device_kind)
    if prediction is None:
        return None
    peak = prediction.peak
    kept = (float(peak.lines.get(name, 0)) for name in (PARAMETERS, GRADIENTS, OPTIMIZER))
    return StepMemory(float(peak.allocated), *kept)


class Network(NamedTuple):
    """A kind of link and the clusters that it connects, by number of ranks."""

    name: str
    cluster_of: Callable[[int], Cluster]
    max_ranks: float = math.inf
    """Most ranks that it can connect."""


def preset_network(link: str) -> Network:
    return Network(link, lambda ranks: make_cluster(link, ranks), max_ranks(link))


class Question(NamedTuple):
    """The clusters, strategies and bucket sizes to predict."""

    networks: tuple[Network, ...]
    ranks: tuple[int, ...]
    bucket_mb: tuple[float, ...] = BUCKETS_MB
    strategies: tuple[str, ...] = ALL
    above: float = ABOVE

    def ranks_over(self, network: Network) -> tuple[int, ...]:
        """Numbers of ranks that the network can connect."""
        return tuple(ranks for ranks in self.ranks if ranks <= network.max_ranks)

    @property
    def possible(self) -> tuple[Network, ...]:
        """Networks that can connect at least one of the numbers of ranks."""
        return tuple(network for network in self.networks if self.ranks_over(network))


def rank_memory(subject: Subject, strategy: str, ranks: int, bucket_mb: float) -> float | None:
    """Return the peak memory of a rank in bytes; None if it is not known."""
    if subject.memory is None:
        return None
    largest = max(gradient.bytes for gradient in subject.recording.gradients)
    return memory_per_rank(subject.memory, strategy, ranks, max(largest, bucket_mb * MEGABYTE))


class Prediction(NamedTuple):
    """Predictions for one cluster: all strategies, each at its best bucket size."""

    network: Network
    ranks: int
    buckets: BucketSweep
    """DDP at every bucket size."""
    steps: dict[str, Replay]
    bucket_mb: dict[str, float]
    """Bucket size of each strategy, or size of its units."""

    @property
    def label(self) -> str:
        return f"{self.ranks:,} ranks over {self.network.name}"


def predict(subject: Subject, question: Question) -> list[Prediction]:
    recording, upkeep = subject.recording, subject.upkeep
    predictions = []
    clusters = ((one, ranks) for one in question.networks for ranks in question.ranks_over(one))
    for network, ranks in clusters:
        cluster = network.cluster_of(ranks)
        sweeps = {
            strategy: sweep_sizes(recording, strategy, cluster, question.bucket_mb, upkeep)
            for strategy in dict.fromkeys((*question.strategies, "bucketed"))
        }
        best = {strategy: sweeps[strategy].best for strategy in question.strategies}
        steps = {strategy: sweeps[strategy].steps[size] for strategy, size in best.items()}
        predictions.append(Prediction(network, ranks, sweeps["bucketed"], steps, best))
    return predictions


def scaling(subject: Subject, question: Question, network: Network) -> Scaling:
    return sweep_ranks(
        subject.recording,
        network.cluster_of,
        doublings(max(question.ranks_over(network))),
        subject.batch,
        question.bucket_mb,
        subject.upkeep,
    )
