"""Options of DistributedDataParallel, and sharding its optimizer."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from msgspec.structs import replace

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rehearsed import other_buckets
from stepscope.analysis.advice.rule import Change, Left, rule

_AS_GOOD = 0.95
"""Share of the exposed communication that the best size has to undercut."""
_GATHERED = 2 / 3
"""Time of gathering parameters over that of all-reducing their gradients."""
_SEARCH_MS = 0.005
"""Time in which a CPU searches the part of the autograd graph that belongs to one parameter: 4 to 6
microseconds for linear layers with an activation."""
_NOT_CONSTRUCTED = "the script wraps no model in DistributedDataParallel"

_ONE_PROCESS = Left("the step runs in one process")
_OTHER = Left("the model is not in DistributedDataParallel")


def _left(facts: Facts) -> Left | None:
    """Return why nothing about DDP applies to the step."""
    if facts.ranks < 2:
        return _ONE_PROCESS
    return None if facts.sharing is None or facts.sharing.kind == "ddp" else _OTHER


@rule("bucket-size", "another size of gradient buckets")
def _buckets(facts: Facts) -> Change | Left | None:
    if (left := _left(facts)) is not None:
        return left
    if not facts.on_gpu:
        return Left("a trace on a CPU does not show how long DDP waits for its buckets")
    if not facts.messages or facts.exposed_ms <= 0:
        return Left("all communication is overlapped with other work")
    if facts.micro_batches > 1:
        # Each backward pass may send all gradients, or only the last one may.
        return Left("with gradient accumulation the messages of a step are not known")
    if not facts.parameters:
        return Left("the size of its messages is not known")
    found = other_buckets(facts)
    if found is None:
        return Left("the size of its buckets does not explain what is not overlapped")
    sweep, share = found
    each, best = 4 * facts.parameters / facts.messages / 2**20, sweep.best
    if share >= _AS_GOOD:
        return Left(f"buckets of {each:.3g} MiB are as good as any")
    gain_ms = (1 - share) * facts.exposed_ms
    return Change(
        after=replace(facts.with_less_communication({"backward": gain_ms}), messages=0.0),
        title=f"{'larger' if best > each else 'smaller'} gradient buckets",
        gain_ms=gain_ms,
        why=f"{facts.exposed_ms:.3g} ms of communication are not overlapped; a step sends"
        f" {facts.messages:.3g} messages of {each:.3g} MiB, and a replay of it with {best:g} MiB"
        f" leaves {share:.0%} of that",
        risk="numerics: none; larger buckets take more memory",
        lines=(f"DistributedDataParallel(model, bucket_cap_mb={best:g})",),
        setting={"bucket_mb": f"{best:g}"},
    )


@rule("static-graph", "a static graph in DDP")
def _static(facts: Facts) -> Change | Left | None:
    if (left := _left(facts)) is not None:
        return left
    if facts.sharing is None:
        return None
    if not facts.sharing.finds_unused:
        return Left("DDP does not search for unused parameters")
    took = _SEARCH_MS * facts.sharing.tensors
    searched = facts.with_work(
        lambda work: (
            replace(work, host_ms=work.host_ms - min(work.host_ms, took))
            if facts.on_gpu
            else work.less(took)
        ),
        ("forward",),
    )
    return Change(
        after=replace(searched, sharing=replace(facts.sharing, finds_unused=False)),
        gain_ms=took,
        why="each forward pass searches the autograd graph for parameters without a gradient,"
        f" among {facts.sharing.tensors}, and all ranks agree on them",
        risk="every step must use the same parameters, or gradients are wrong",
        lines=("DistributedDataParallel(model, static_graph=True)",),
        setting={"static_graph": "yes"},
    )


@rule("gradient-views", "gradients as views of DDP's buckets")
def _views(facts: Facts) -> Change | Left | None:
    if (left := _left(facts)) is not None:
        return left
    if facts.sharing is None:
        return None
    if facts.sharing.gradient_views:
        return Left("gradients are views of the buckets")
    if not facts.bandwidth or not facts.parameters:
        return None
    each = 4 * facts.parameters
    copied = min(2e3 * each / facts.bandwidth, facts.class_ms("copy/cast", among=("backward",)))
    tensors = facts.sharing.tensors
    after = facts.with_work(
        lambda work: replace(
            work.with_more("copy/cast", -copied), launches=max(0.0, work.launches - tensors)
        ),
        ("backward",),
    )
    return Change(
        after=replace(after, sharing=replace(facts.sharing, gradient_views=True)),
        gain_bytes=each,
        why=f"{tensors} gradients, {each / 2**20:.3g} MiB, exist twice, and are copied out of the"
        " buckets when these are reduced",
        risk="numerics: none; `detach_` and replacing `.grad` by another tensor cost the views",
        lines=("DistributedDataParallel(model, gradient_as_bucket_view=True)",),
        setting={"gradient_views": "yes"},
    )


def _construct_with(program: Program, name: str, **options: object) -> None:
    """Add options to every construction of DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    plain = DistributedDataParallel.__init__
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def init(*args: Any, **keywords: Any) -> None:
        bound = signature.bind(*args, **keywords)
        bound.arguments |= options
        plain(*bound.args, **bound.kwargs)
        program.applied[name] += 1

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


@setting("bucket_mb", without=_NOT_CONSTRUCTED)
def _with_buckets(program: Program, value: str) -> None:
    _construct_with(program, "bucket_mb", bucket_cap_mb=float(value))


@setting("static_graph", "yes", without=_NOT_CONSTRUCTED)
def _with_static_graph(program: Program, value: str) -> None:  # noqa: ARG001
    _construct_with(program, "static_graph", static_graph=True)


@setting("gradient_views", "yes", without=_NOT_CONSTRUCTED)
def _with_views(program: Program, value: str) -> None:  # noqa: ARG001
    _construct_with(program, "gradient_views", gradient_as_bucket_view=True)


@rule("sharded-optimizer", "sharded optimizer state (ZeRO stage 1)")
def _sharded(facts: Facts) -> Change | Left | None:
    if (left := _left(facts)) is not None:
        return left
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
        by_author="it is another optimizer, with checkpoints of its own",
    )
