"""Communication between ranks. Trying them needs a job with several ranks."""

from __future__ import annotations

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.rule import Change, Left, rule

_LARGE = 4 << 20
"""Message size from which the bytes determine the time; below it, latency does."""
_GATHERED = 2 / 3
"""Time of gathering parameters over that of all-reducing their gradients."""

_ONE_PROCESS = Left("the step runs in one process")
_SEVERAL = "a job of several ranks cannot run interleaved with itself"


@rule("bucket-size", "another size of gradient buckets")
def _buckets(facts: Facts) -> Change | Left | None:
    if facts.ranks < 2:
        return _ONE_PROCESS
    if not facts.messages or facts.exposed_ms <= 0:
        return Left("all communication is overlapped with other work")
    if facts.micro_batches > 1:
        # Each backward pass may send all gradients, or only the last one may.
        return Left("with gradient accumulation the messages of a step are not known")
    if not facts.parameters:
        return Left("the size of its messages is not known")
    each = 4 * facts.parameters / facts.messages
    if each >= _LARGE:
        # The last bucket has no backward left to overlap with: half its size ends half as late.
        return _bucket_advice(facts, each, each / 2, facts.exposed_ms / 2)
    if facts.messages < 4:
        return Left("a step sends fewer than four messages")
    larger = 4 * facts.parameters / max(1, round(4 * facts.parameters / _LARGE))
    return _bucket_advice(facts, each, larger, facts.exposed_ms * (1 - each / larger))


def _bucket_advice(facts: Facts, now: float, then: float, gain_ms: float) -> Change:
    return Change(
        after=facts,
        title=f"{'larger' if then > now else 'smaller'} gradient buckets",
        gain_ms=gain_ms,
        why=f"{facts.exposed_ms:.3g} ms of communication are not overlapped; a step sends"
        f" {facts.messages:.3g} messages of {now / 2**20:.3g} MiB",
        risk="numerics: none; larger buckets take more memory",
        lines=(f"DistributedDataParallel(model, bucket_cap_mb={max(1, round(then / 2**20))})",),
        by_author=_SEVERAL,
    )


@rule("sharded-optimizer", "sharded optimizer state (ZeRO stage 1)")
def _sharded(facts: Facts) -> Change | Left | None:
    if facts.ranks < 2:
        return _ONE_PROCESS
    if not facts.state_bytes:
        return Left("the optimizer has no state")
    share = 1 - 1 / facts.ranks
    update = facts.phase_ms("optimizer")
    # Each rank updates its part and gathers the others: about half the cost of an all-reduce.
    gathers = _GATHERED * facts.exposed_ms
    return Change(
        after=facts,
        gain_ms=update * share - gathers,
        gain_bytes=int(facts.state_bytes * share),
        why=f"each of {facts.ranks} ranks stores the full optimizer state,"
        f" {facts.state_bytes / 2**30:.3g} GiB, and updates every parameter"
        f" ({update:.3g} ms)",
        risk="parameters are gathered after every update; checkpoints are written by all ranks",
        lines=(
            "stepscope.parallel.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=…)",
            "# or torch.distributed.optim.ZeroRedundancyOptimizer",
        ),
        by_author=_SEVERAL,
    )
