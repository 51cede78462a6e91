"""Changes of the loop around a step: values read back, data, gradients, the batch."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.analysis.advice.facts import AT_COPIES, OF_MODEL, Facts, PhaseWork
from stepscope.analysis.advice.rule import Advice, Judged, judge
from stepscope.analysis.advice.timeline import gain_ms, host_limits_ms

_OUTSIDE = ("outside",)
_ROOM = 0.9
_MOST_WORKERS = 8
_PINNED = ("DataLoader(…, pin_memory=True, num_workers=4)",
           "batch = batch.to(device, non_blocking=True)")  # fmt: skip


@judge
def _no_wait(facts: Facts) -> Judged | None:
    """A copy from pageable memory waits as well: without one of the two the other one still does,
    and nothing is gained."""
    if not facts.on_gpu or not facts.waits or not facts.reads_back:
        return None
    after = replace(facts, waits="", reads_back=False)
    setting = {"read_back": "late"}
    lines: tuple[str, ...] = ("total += loss.detach()          # add on the device",
                              "if step % 100 == 0: print(total.item() / 100)")  # fmt: skip
    also = ""
    if facts.pageable_ms:
        after = replace(after, pageable_ms=0.0)
        setting["copies"] = "pinned"
        lines += _PINNED
        also = " Copies from pageable memory would wait in its place, so they go with it."
    advice = Advice(
        code="no-read-back",
        title="no value read back within the step",
        gain_ms=gain_ms(facts, after),
        why="in every step the host waits for the device (.item(), .cpu(), print of a tensor, a"
        f" scaler's check) and then has to fill an empty queue.{also}",
        risk="none: a value is seen some steps later",
        lines=lines,
        setting=setting,
    )
    return Judged(advice, after)


@judge
def _workers(facts: Facts) -> Judged | None:
    if not facts.data_ms:
        return None
    return _workers_beside_gpu(facts) if facts.on_gpu else _workers_beside_cpu(facts)


def _workers_beside_cpu(facts: Facts) -> Judged | None:
    """Workers and the step share the cores: what one core loads in `data_ms` all of them can load
    meanwhile, and no less than that is left of it. Cores that PyTorch leaves free load for nothing.
    """
    if facts.cores < 2:
        return None
    free = max(0, facts.cores - facts.threads)
    workers = min(_MOST_WORKERS, free or facts.cores - 1)
    beside = max(0.0, facts.step_ms - facts.data_ms)
    left = max(0.0, facts.data_ms / workers - beside) if free else facts.data_ms / facts.cores
    hidden = max(0.0, facts.data_ms - left)
    after = facts.with_work(lambda work: work.less(hidden), _OUTSIDE)
    shared = (
        f"{free} of {facts.cores} cores are free to load ahead"
        if free
        else f"PyTorch computes on all {facts.cores} cores, so workers take theirs from the step"
    )
    advice = Advice(
        code="data-ahead",
        title="batches loaded ahead by workers",
        gain_ms=gain_ms(facts, after),
        why=f"the loop is in its DataLoader for {facts.data_ms:.3g} ms of a step; {shared}",
        risk="time: workers compete with the step for cores, and each batch is copied between"
        " processes, so that the step may get slower; memory of the host",
        lines=(f"DataLoader(…, num_workers={workers}, persistent_workers=True)",),
        setting={"data": "workers"},
    )
    return Judged(advice, replace(after, data_ms=0.0))


def _workers_beside_gpu(facts: Facts) -> Judged:
    after = facts.with_work(
        lambda work: replace(work, host_ms=max(0.0, work.host_ms - facts.data_ms)), _OUTSIDE
    )
    advice = Advice(
        code="data-ahead",
        title="batches made ahead by workers",
        gain_ms=gain_ms(facts, after),
        why=f"the host is in its DataLoader for {facts.data_ms:.3g} ms of a step, and the device"
        f" waits for the host for {host_limits_ms(facts):.3g} ms",
        risk="time: workers need cores of the host that are free, and none that the step issues"
        " from; memory of the host",
        lines=("DataLoader(…, num_workers=8, persistent_workers=True, prefetch_factor=4)",),
        setting={"data": "workers"},
    )
    return Judged(advice, replace(after, data_ms=0.0))


@judge
def _pinned(facts: Facts) -> Judged | None:
    """Where values are read back too, that advice has this one with it."""
    if not facts.on_gpu or not facts.pageable_ms or facts.reads_back:
        return None
    after = replace(facts, pageable_ms=0.0, waits="" if facts.waits == AT_COPIES else facts.waits)
    advice = Advice(
        code="pinned-data",
        title="data in pinned memory, copied ahead",
        gain_ms=gain_ms(facts, after),
        why=f"copies from pageable memory take {facts.pageable_ms:.3g} ms and stop the host until"
        " the device has done all before them",
        risk="memory of the host",
        lines=_PINNED,
        setting={"copies": "pinned"},
    )
    return Judged(advice, after)


@judge
def _set_to_none(facts: Facts) -> Judged | None:
    if not facts.cleared_ms:
        return None
    after = facts.with_work(lambda work: work.less(facts.cleared_ms), ("optimizer",))
    advice = Advice(
        code="set-to-none",
        title="gradients dropped instead of zeroed",
        gain_ms=gain_ms(facts, after),
        why=f"filling gradients with zeros takes {facts.cleared_ms:.3g} ms",
        risk="none, unless code reads .grad between steps",
        lines=("optimizer.zero_grad(set_to_none=True)",),
        setting={"gradients": "none"},
    )
    return Judged(advice, replace(after, cleared_ms=0.0))


def with_batch_times(facts: Facts, times: int) -> Facts:
    """That many times the samples in a step: as many launches, one update, weights cast once. What
    products take beyond their rate is that of tiles and waves that are not full: it stays."""
    over = facts.products_over_rate
    products = (times + over - 1) / over
    once = facts.casts_ms if facts.dtype in ("bfloat16", "float16") else 0.0

    def more(work: PhaseWork) -> PhaseWork:
        found = work.scaled(dict.fromkeys(work.classes, float(times)) | {"matmul": products})
        if work.name in ("forward", "backward"):
            found = found.with_more("copy/cast", -(times - 1) * once)
        return replace(found, host_ms=times * work.host_ms)

    found = facts.with_work(more, (*OF_MODEL, *_OUTSIDE))
    return replace(found, samples=times * facts.samples)


@judge
def _larger_batch(facts: Facts) -> Judged | None:
    if not facts.on_gpu or not facts.memory_bytes:
        return None
    room = facts.memory_bytes * _ROOM - facts.peak_bytes
    if facts.saved_bytes > room:
        return None
    after = with_batch_times(facts, 2)
    larger = None if facts.batch is None else 2 * facts.batch
    advice = Advice(
        code="larger-batch",
        title="twice the batch",
        gain_ms=gain_ms(facts, after),
        gain_bytes=-facts.saved_bytes,
        why="for each sample the launches and the update cost half; the gain is for as many"
        f" samples as now, and {room / 2**30:.3g} GiB are free",
        risk="optimisation: another batch needs another learning rate; memory",
        lines=(f"batch_size = {larger}" if larger else "batch_size = …  # twice what it is",),
        setting={"batch": str(larger)} if larger else {},
        by_author="" if larger else "no DataLoader says where the samples of a step come from",
    )
    return Judged(advice, replace(after, batch=larger))
