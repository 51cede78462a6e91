"""Changes of what ranks say to each other. They need a job of several to be tried."""

from __future__ import annotations

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.rule import Advice, Judged, judge

_LARGE = 4 << 20
"""A message above this takes as long as its bytes; below it, as long as any."""
_GATHERED = 2 / 3
"""Time of gathering parameters over that of reducing their gradients, which goes both ways."""

_SEVERAL = "a job of several ranks does not take turns with itself"


@judge
def _buckets(facts: Facts) -> Judged | None:
    if facts.ranks < 2 or not facts.messages or facts.exposed_ms <= 0:
        return None
    if facts.micro_batches > 1:
        # Each backward may send all gradients, or the last alone.
        return None
    each = 4 * facts.parameters / facts.messages
    if each >= _LARGE:
        # The last bucket cannot hide behind a backward that is over: half of it is half as late.
        return _bucket_advice(facts, each, each / 2, facts.exposed_ms / 2)
    if facts.messages < 4:
        return None
    larger = 4 * facts.parameters / max(1, round(4 * facts.parameters / _LARGE))
    return _bucket_advice(facts, each, larger, facts.exposed_ms * (1 - each / larger))


def _bucket_advice(facts: Facts, now: float, then: float, gain_ms: float) -> Judged:
    kind = "larger" if then > now else "smaller"
    advice = Advice(
        code="bucket-size",
        title=f"{kind} buckets of gradients",
        gain_ms=gain_ms,
        why=f"{facts.exposed_ms:.3g} ms of communication are hidden by nothing; a step sends"
        f" {facts.messages:.3g} messages of {now / 2**20:.3g} MiB",
        risk="none to numerics; larger buckets hold more memory",
        lines=(f"DistributedDataParallel(model, bucket_cap_mb={max(1, round(then / 2**20))})",),
        by_author=_SEVERAL,
    )
    return Judged(advice, facts)


@judge
def _sharded(facts: Facts) -> Judged | None:
    if facts.ranks < 2 or not facts.state_bytes:
        return None
    share = 1 - 1 / facts.ranks
    update = facts.phase_ms("optimizer")
    # Each rank updates its part and gathers the others: about what half of a reduction takes.
    gathers = _GATHERED * facts.exposed_ms
    advice = Advice(
        code="sharded-optimizer",
        title="the optimizer's state divided among the ranks",
        gain_ms=update * share - gathers,
        gain_bytes=int(facts.state_bytes * share),
        why=f"each of {facts.ranks} ranks holds the whole state,"
        f" {facts.state_bytes / 2**30:.3g} GiB, and updates every parameter"
        f" ({update:.3g} ms)",
        risk="parameters are gathered after every update; checkpoints are written by all ranks",
        lines=("stepscope.parallel.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=…)",
               "# or torch.distributed.optim.ZeroRedundancyOptimizer"),
        by_author=_SEVERAL,
    )  # fmt: skip
    return Judged(advice, facts)
