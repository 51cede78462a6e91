"""Predicted against published throughput and memory of Llama 3.1 8B under FSDP.

    python benchmarks/rehearsal_published.py

The smaller job of each pair is the recorded step: its compute time is the published step time
without the communication that the rehearsal predicts for it. The larger job is predicted from it.
Sources: github.com/pytorch/torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md` (tables 1 and
3) and `benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md`. Both clusters have 8 GPUs per node
over NVLink and 400 Gb/s per GPU between nodes.
"""

from __future__ import annotations

from typing import NamedTuple

from stepscope.analysis.rehearsal.cluster import make_cluster
from stepscope.analysis.rehearsal.memory import StepMemory, memory_per_rank
from stepscope.analysis.rehearsal.recording import Recording
from stepscope.analysis.rehearsal.sharded import replay_fsdp
from stepscope.studies.rehearsal.inspected import even_recording

PARAMETERS = 8_030_261_248
BLOCKS = 32
TOKENS = 2 * 8192
"""Tokens of a rank: a local batch of 2 sequences."""
FORWARD = 0.3
"""Share of the step; selective checkpointing lengthens the backward pass."""
UPDATE_MS_OF_ALL = 28 * PARAMETERS / 2.4e9
UNIT_MB = PARAMETERS / BLOCKS * 4 / 2**20
GIB = 2**30


class Pair(NamedTuple):
    """Published tokens per second and GPU, and GiB, of two sizes of one job."""

    name: str
    ranks: tuple[int, int]
    rates: tuple[float, float]
    memory: tuple[float, float]


PAIRS = (
    Pair("H100, FSDP", (8, 128), (5762, 5605), (82.4, 67.0)),
    Pair("H100, FSDP + torch.compile", (8, 128), (6667, 6514), (77.0, 62.0)),
    Pair("H100, FSDP + torch.compile + float8", (8, 128), (8532, 8380), (76.8, 61.8)),
    Pair("H200, FSDP + torch.compile + float8", (32, 64), (10938, 10753), (47.96, 46.97)),
)


def recorded(step_ms: float, ranks: int) -> Recording:
    """Return a step that takes `step_ms` on that many ranks, communication included."""
    cluster = make_cluster("infiniband", ranks)
    compute = step_ms
    for _ in range(20):
        passes = compute - UPDATE_MS_OF_ALL / ranks
        recording = even_recording(
            FORWARD * passes,
            (1 - FORWARD) * passes,
            UPDATE_MS_OF_ALL,
            PARAMETERS,
            BLOCKS,
        )
        compute += step_ms - replay_fsdp(recording, cluster, UNIT_MB).step_ms
    return recording


def predicted(pair: Pair) -> float:
    """Return tokens per second and GPU of the larger job."""
    smaller, larger = pair.ranks
    recording = recorded(1e3 * TOKENS / pair.rates[0], smaller)
    step = replay_fsdp(recording, make_cluster("infiniband", larger), UNIT_MB)
    return 1e3 * TOKENS / step.step_ms


def predicted_memory(pair: Pair) -> float:
    """Return GiB of a rank of the larger job; weights, gradients and moments are float32."""
    smaller, larger = pair.ranks
    each = 4.0 * PARAMETERS
    whole = StepMemory(0.0, each, each, 2 * each)
    unit = each / BLOCKS
    change = memory_per_rank(whole, "fsdp", larger, unit) - memory_per_rank(
        whole, "fsdp", smaller, unit
    )
    return pair.memory[0] + change / GIB


def main() -> None:
    for pair in PAIRS:
        rate, memory = predicted(pair), predicted_memory(pair)
        print(
            f"{pair.name:<36} {pair.ranks[0]} to {pair.ranks[1]} ranks:"
            f" {rate:,.0f} tokens/s, published {pair.rates[1]:,.0f}"
            f" ({rate / pair.rates[1] - 1:+.1%});"
            f" {memory:.1f} GiB, published {pair.memory[1]:.1f}"
            f" ({memory / pair.memory[1] - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
