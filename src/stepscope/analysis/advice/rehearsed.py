"""The step of a rank as a recording, with which other messages between the ranks are predicted.

The collectives of the step show what its links take per byte; what the rank computes is the rest of
its phases. The replay of `stepscope rehearse` then tells how much of the communication other
buckets or units would leave without anything to overlap it with.
"""

from __future__ import annotations

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.rehearsal.links import MeasuredLinks, measured
from stepscope.analysis.rehearsal.recording import ELEMENT_BYTES, Recording, even_recording
from stepscope.analysis.rehearsal.replay import Replay, replay
from stepscope.analysis.rehearsal.sharded import replay_fsdp
from stepscope.analysis.rehearsal.sweep import BUCKETS_MB, BucketSweep
from stepscope.parallel.buckets import MEGABYTE

_COMMUNICATION = "communication"


def computed(facts: Facts) -> Recording:
    """Return what a rank computes in the step, with gradients that become ready evenly."""

    def computed_ms(phase: str) -> float:
        waits = facts.class_ms(_COMMUNICATION, among=(phase,))
        return max(0.0, facts.phase_ms(phase) - waits)

    sharing = facts.sharing
    tensors = {} if sharing is None or not sharing.tensors else {"gradients": sharing.tensors}
    return even_recording(
        computed_ms("forward"),
        computed_ms("loss") + computed_ms("backward"),
        computed_ms("optimizer"),
        facts.parameters,
        **tensors,
    )


def other_buckets(facts: Facts) -> tuple[BucketSweep, float] | None:
    """Return the step with each size of DDP's buckets, and the share of the exposed communication
    that is left with the best one; None if buckets do not explain what is exposed."""
    recording, bytes_sent = computed(facts), ELEMENT_BYTES * facts.parameters
    # All of it is exposed in a record without its own time.
    took = sum(facts.collectives_ms.values()) or facts.exposed_ms
    if not took or recording.backward_ms <= 0:
        return None
    link = measured("all-reduce", facts.ranks, took, facts.messages, bytes_sent)
    present = bytes_sent / facts.messages / MEGABYTE
    sweep = BucketSweep({size: replay(recording, "bucketed", link, size) for size in BUCKETS_MB})
    now = _exposed(replay(recording, "bucketed", link, present))
    return (sweep, _exposed(sweep.steps[sweep.best]) / now) if now > 0 else None


def _exposed(step: Replay) -> float:
    return step.synchronized - step.backward_end


def exposed_with_units(facts: Facts, units: int) -> float | None:
    """Return the exposed communication of the step with as many units of FSDP2; None if the trace
    does not show its gathers and reductions."""
    sharing, recording = facts.sharing, computed(facts)
    gathers = sum(facts.gathers_ms.values())
    reductions = sum(facts.collectives_ms.values()) - gathers
    if sharing is None or gathers <= 0 or reductions <= 0 or recording.backward_ms <= 0:
        return None
    size = ELEMENT_BYTES * facts.parameters
    passes = sum(ms > 0 for ms in facts.gathers_ms.values())
    links = MeasuredLinks(
        facts.ranks,
        {
            "all-gather": measured(
                "all-gather", facts.ranks, gathers, passes * sharing.units, passes * size
            ),
            "reduce-scatter": measured(
                "reduce-scatter", facts.ranks, reductions, sharing.units, size
            ),
        },
    )
    return replay_fsdp(recording, links, size / units / MEGABYTE).exposed_ms
