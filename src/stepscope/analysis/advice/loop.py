"""Changes of the training loop: values read back, data loading, gradients, batch size."""

from __future__ import annotations

import math

from msgspec.structs import replace

from stepscope.analysis.advice.facts import AT_COPIES, MODEL_PHASES, Facts, PhaseWork
from stepscope.analysis.advice.rule import Change, rule
from stepscope.analysis.advice.timeline import host_limits_ms

_OUTSIDE = ("outside",)
_MEMORY_SHARE = 0.9
_MAX_WORKERS = 8
_PINNED = (
    "DataLoader(…, pin_memory=True, num_workers=4)",
    "batch = batch.to(device, non_blocking=True)",
)


@rule("no-read-back", "no device value read within the step")
def _no_wait(facts: Facts) -> Change | str:
    """No device value read within the step.

    A copy from pageable memory also synchronises: with only one of the two removed, the other
    still waits and nothing is gained.
    """
    if not facts.on_gpu:
        return "the step runs on a CPU"
    if not facts.waits or not facts.reads_back:
        return "no value is read from the device within the step"
    after = replace(facts, waits="", reads_back=False)
    setting = {"read_back": "late"}
    lines: tuple[str, ...] = (
        "total += loss.detach()          # add on the device",
        "if step % 100 == 0: print(total.item() / 100)",
    )
    also = ""
    if facts.pageable_ms:
        after = replace(after, pageable_ms=0.0)
        setting["copies"] = "pinned"
        lines += _PINNED
        also = " Copies from pageable memory synchronise as well, so pin the batches too."
    return Change(
        after=after,
        why="in every step the CPU waits for the device (.item(), .cpu(), print of a tensor, a"
        f" GradScaler's check) and then has to refill an empty launch queue.{also}",
        risk="none; values are printed some steps later",
        lines=lines,
        setting=setting,
    )


@rule("data-ahead", "DataLoader workers that load batches ahead")
def _workers(facts: Facts) -> Change | str:
    if not facts.data_ms:
        return "no time is spent in a DataLoader"
    if facts.loader_workers:
        return _more_workers(facts)
    return _workers_on_gpu(facts) if facts.on_gpu else _workers_on_cpu(facts)


def _workers_on_cpu(facts: Facts) -> Change | str:
    """DataLoader workers for a step on the CPU.

    With all cores busy, loading still costs `data_ms / cores` of the step. On cores that PyTorch
    leaves idle, loading overlaps with the step.
    """
    if facts.cores < 2:
        return "there is no second core for a worker"
    free = max(0, facts.cores - facts.threads)
    workers = min(_MAX_WORKERS, free or facts.cores - 1)
    overlappable = max(0.0, facts.step_ms - facts.data_ms)
    left = max(0.0, facts.data_ms / workers - overlappable) if free else facts.data_ms / facts.cores
    hidden = max(0.0, facts.data_ms - left)
    after = facts.with_work(lambda work: work.less(hidden), _OUTSIDE)
    shared = (
        f"{free} of {facts.cores} cores are free to load ahead"
        if free
        else f"PyTorch computes on all {facts.cores} cores, so workers take theirs from the step"
    )
    return Change(
        after=replace(after, data_ms=0.0),
        why=f"the loop spends {facts.data_ms:.3g} ms of a step in its DataLoader; {shared}",
        risk="time: workers compete with the step for cores and each batch is copied between"
        " processes, so the step may get slower; CPU memory",
        lines=(f"DataLoader(…, num_workers={workers}, persistent_workers=True)",),
        setting={"data": "workers"},
    )


def _more_workers(facts: Facts) -> Change | str:
    """More workers for a DataLoader that has some. The loop waits for them in every step, so a step
    takes as long as they take for a batch, which is in proportion to their number."""
    now = facts.loader_workers
    step_ms = max(facts.step_ms - facts.data_ms, 1e-3 * facts.step_ms)
    workers = min(facts.cores, math.ceil(now * facts.step_ms / step_ms))
    if workers <= now:
        return (
            f"the loop waits {facts.data_ms:.3g} ms for its {now} workers on {facts.cores} cores:"
            " more of them help only if they wait for files or a network; otherwise less work for"
            " each sample does"
        )
    left = max(0.0, facts.step_ms * now / workers - step_ms)
    hidden = max(0.0, facts.data_ms - left)

    def waits_less(work: PhaseWork) -> PhaseWork:
        if facts.on_gpu:
            return replace(work, host_ms=max(0.0, work.host_ms - hidden))
        return work.less(hidden)

    return Change(
        after=replace(facts.with_work(waits_less, _OUTSIDE), data_ms=left),
        title="more DataLoader workers",
        why=f"the loop waits {facts.data_ms:.3g} ms of a step for the {now} workers of its"
        f" DataLoader; there are {facts.cores} cores",
        risk="time: workers need idle cores; CPU memory",
        lines=(f"DataLoader(…, num_workers={workers}, persistent_workers=True)",),
        by_author="the DataLoader sets its number of workers itself",
    )


def _workers_on_gpu(facts: Facts) -> Change:
    after = facts.with_work(
        lambda work: replace(work, host_ms=max(0.0, work.host_ms - facts.data_ms)), _OUTSIDE
    )
    return Change(
        after=replace(after, data_ms=0.0),
        title="DataLoader workers that prepare batches ahead",
        why=f"the CPU spends {facts.data_ms:.3g} ms of a step in its DataLoader, and the device"
        f" waits {host_limits_ms(facts):.3g} ms for the host",
        risk="time: workers need idle cores, other than the one that launches the step's kernels;"
        " CPU memory",
        lines=("DataLoader(…, num_workers=8, persistent_workers=True, prefetch_factor=4)",),
        setting={"data": "workers"},
    )


@rule("pinned-data", "batches in pinned memory, copied asynchronously")
def _pinned(facts: Facts) -> Change | str:
    """Pinned batches. If values are read back too, that advice includes this one."""
    if not facts.on_gpu:
        return "the step runs on a CPU"
    if not facts.pageable_ms:
        return "no batch is copied from pageable memory"
    if facts.reads_back:
        return "values are read from the device in every step: see the change that avoids it"
    after = replace(facts, pageable_ms=0.0, waits="" if facts.waits == AT_COPIES else facts.waits)
    return Change(
        after=after,
        why=f"copies from pageable memory take {facts.pageable_ms:.3g} ms and block the CPU until"
        " the device has finished all earlier work",
        risk="CPU memory",
        lines=_PINNED,
        setting={"copies": "pinned"},
    )


@rule("set-to-none", "gradients set to None instead of zeroed")
def _set_to_none(facts: Facts) -> Change | str:
    if not facts.cleared_ms:
        return "no gradient is filled with zeros"
    after = facts.with_work(lambda work: work.less(facts.cleared_ms), ("optimizer",))
    return Change(
        after=replace(after, cleared_ms=0.0),
        why=f"filling gradients with zeros takes {facts.cleared_ms:.3g} ms",
        risk="none, unless code reads .grad between steps",
        lines=("optimizer.zero_grad(set_to_none=True)",),
        setting={"gradients": "none"},
    )


def with_batch_times(facts: Facts, times: int) -> Facts:
    """Return the step with `times` as many samples.

    Launches, the update and the weight casts stay. Matmul time beyond the measured rate comes
    from partial tiles and waves, and stays too.
    """
    over = facts.matmuls_over_rate
    matmuls = (times + over - 1) / over
    once = facts.casts_ms if facts.dtype in ("bfloat16", "float16") else 0.0

    def more(work: PhaseWork) -> PhaseWork:
        scaled = work.scaled(dict.fromkeys(work.classes, float(times)) | {"matmul": matmuls})
        if work.name in ("forward", "backward"):
            scaled = scaled.with_more("copy/cast", -(times - 1) * once)
        return replace(scaled, host_ms=times * work.host_ms)

    larger = facts.with_work(more, (*MODEL_PHASES, *_OUTSIDE))
    return replace(larger, samples=times * facts.samples)


@rule("larger-batch", "twice the batch size")
def _larger_batch(facts: Facts) -> Change | str:
    if not facts.on_gpu:
        return "the step runs on a CPU"
    if not facts.memory_bytes:
        return ""
    free_bytes = facts.memory_bytes * _MEMORY_SHARE - facts.peak_bytes
    if facts.saved_bytes > free_bytes:
        return "the memory has no room for twice the activations"
    after = with_batch_times(facts, 2)
    larger = None if facts.batch is None else 2 * facts.batch
    return Change(
        after=replace(after, batch=larger),
        gain_bytes=-facts.saved_bytes,
        why="launches and the update cost half as much per sample; the gain is stated for the"
        f" current number of samples, and {free_bytes / 2**30:.3g} GiB are free",
        risk="optimization: another batch size needs another learning rate; memory",
        lines=(f"batch_size = {larger}" if larger else "batch_size = …  # twice the current one",),
        setting={"batch": str(larger)} if larger else {},
        by_author="" if larger else "no DataLoader was found that sets the batch size",
    )
