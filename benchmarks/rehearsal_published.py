"""Predicted against published throughput and memory of jobs under FSDP.

    python benchmarks/rehearsal_published.py

The first job of each pair is the recorded step: its compute time is the published step time without
the communication that the rehearsal predicts for it. The other job is predicted from it; compute
follows the number of tokens. Messages are float32. `scripts/make_docs.py` makes the table in
docs/own-step.md from these rows. Sources:

- github.com/pytorch/torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md` (tables 1 and 3) and
  `benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md`: Llama 3.1 8B, 400 Gb/s per GPU.
- github.com/mosaicml/llm-foundry, `scripts/train/benchmarking/README.md` (H100 80GB BF16; A100 40GB
  with 1600 Gb/s per node): MPT, one micro-batch per step. The network of the H100 is not stated
  there; 400 Gb/s per GPU are assumed.

All have 8 GPUs per node over NVLink.
"""

from __future__ import annotations

from typing import NamedTuple

from stepscope.analysis.rehearsal.cluster import Cluster, Wire, make_cluster
from stepscope.analysis.rehearsal.memory import StepMemory, memory_per_rank
from stepscope.analysis.rehearsal.recording import Recording, even_recording
from stepscope.analysis.rehearsal.sharded import replay_fsdp

UPDATE_BYTES, BANDWIDTH = 28, 2.4e9
"""Bytes that an update moves per parameter, and bytes per millisecond."""
MIB, GIB = 2**20, 2**30
A100_NVLINK, A100_NETWORK = Wire(3.4e-3, 300e6), Wire(14e-3, 25e6)


class Model(NamedTuple):
    parameters: int
    blocks: int
    forward: float
    """Share of the passes; recomputed activations lengthen the backward pass."""

    @property
    def update_ms(self) -> float:
        """Update of all parameters."""
        return UPDATE_BYTES * self.parameters / BANDWIDTH

    @property
    def unit_mb(self) -> float:
        return self.parameters / self.blocks * 4 / MIB

    def recording(self, passes_ms: float) -> Recording:
        forward = self.forward * passes_ms
        return even_recording(
            forward, passes_ms - forward, self.update_ms, self.parameters, self.blocks
        )


LLAMA_8B = Model(8_030_261_248, 32, 0.3)
MPT_13B = Model(12_853_954_560, 40, 1 / 3)
MPT_70B = Model(64_862_437_376, 80, 1 / 4)


class Job(NamedTuple):
    ranks: int
    tokens: int
    """Per rank and step."""
    rate: float
    """Published tokens per second and GPU."""
    gib: float | None = None


class Pair(NamedTuple):
    """Two sizes of one job: the recorded and the predicted one."""

    name: str
    model: Model
    recorded: Job
    predicted: Job
    a100: bool = False

    def cluster(self, ranks: int) -> Cluster:
        cluster = make_cluster("infiniband", ranks)
        return cluster._replace(inside=A100_NVLINK, between=A100_NETWORK) if self.a100 else cluster


class Row(NamedTuple):
    pair: Pair
    rate: float
    """Predicted tokens per second and GPU."""
    gib: float | None
    communication: float
    """Share of the predicted step in which messages are sent."""
    exposed: float
    """Share of the predicted step in which only messages are sent."""


_LLAMA = 2 * 8192
_MPT = 2 * 2048
PAIRS = (
    Pair("Llama 8B, H100", LLAMA_8B, Job(8, _LLAMA, 5762, 82.4), Job(128, _LLAMA, 5605, 67.0)),
    Pair(
        "Llama 8B, H100, torch.compile",
        LLAMA_8B,
        Job(8, _LLAMA, 6667, 77.0),
        Job(128, _LLAMA, 6514, 62.0),
    ),
    Pair(
        "Llama 8B, H100, torch.compile, float8",
        LLAMA_8B,
        Job(8, _LLAMA, 8532, 76.8),
        Job(128, _LLAMA, 8380, 61.8),
    ),
    Pair(
        "Llama 8B, H200, torch.compile, float8",
        LLAMA_8B,
        Job(32, _LLAMA, 10938, 47.96),
        Job(64, _LLAMA, 10753, 46.97),
    ),
    Pair("MPT 13B, H100", MPT_13B, Job(8, _MPT, 4792), Job(16, _MPT, 4767)),
    Pair("MPT 13B, H100", MPT_13B, Job(8, _MPT, 4792), Job(32, _MPT, 4811)),
    Pair("MPT 13B, H100", MPT_13B, Job(8, _MPT, 4792), Job(64, _MPT, 4800)),
    Pair(
        "MPT 70B, A100 40 GB, half the batch",
        MPT_70B,
        Job(128, 2 * _MPT, 376),
        Job(64, _MPT, 276),
        a100=True,
    ),
)


def passes_ms(pair: Pair) -> float:
    """Return the compute time without the update, such that the recorded job takes its time."""
    job = pair.recorded
    step_ms, cluster = 1e3 * job.tokens / job.rate, pair.cluster(job.ranks)
    passes = step_ms - pair.model.update_ms / job.ranks
    for _ in range(20):
        replayed = replay_fsdp(pair.model.recording(passes), cluster, pair.model.unit_mb)
        passes += step_ms - replayed.step_ms
    return passes


def row(pair: Pair) -> Row:
    """Predict the other job of a pair."""
    job, model = pair.predicted, pair.model
    passes = passes_ms(pair) * job.tokens / pair.recorded.tokens
    step = replay_fsdp(model.recording(passes), pair.cluster(job.ranks), model.unit_mb)
    sent = sum(message.end - message.start for message in step.messages)
    return Row(
        pair,
        1e3 * job.tokens / step.step_ms,
        _gib(pair),
        sent / step.step_ms,
        step.exposed_ms / step.step_ms,
    )


def _gib(pair: Pair) -> float | None:
    """Return GiB of a rank of the predicted job; weights, gradients and moments are float32."""
    if pair.recorded.gib is None:
        return None
    each = 4.0 * pair.model.parameters
    step, unit = StepMemory(0.0, each, each, 2 * each), each / pair.model.blocks
    now, before = (
        memory_per_rank(step, "fsdp", job.ranks, unit) for job in (pair.predicted, pair.recorded)
    )
    return pair.recorded.gib + (now - before) / GIB


def main() -> None:
    for one in map(row, PAIRS):
        pair, job = one.pair, one.pair.predicted
        print(
            f"{pair.name:<38} {pair.recorded.ranks} to {job.ranks} ranks:"
            f" {one.rate:,.0f} tokens/s, published {job.rate:,.0f}"
            f" ({one.rate / job.rate - 1:+.1%});"
            f" communication {one.communication:.0%} of the step, exposed {one.exposed:.1%}"
        )
        if one.gib is not None and job.gib is not None:
            print(f"{'':<38} {one.gib:.1f} GiB, published {job.gib:.1f}")


if __name__ == "__main__":
    main()
