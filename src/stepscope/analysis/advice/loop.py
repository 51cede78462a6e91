"""Changes of the loop around a step: values read back, data, gradients, the batch."""

from __future__ import annotations

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.rule import Advice, judge


@judge
def _no_wait(facts: Facts) -> Advice | None:
    return Advice(
        code="no-read-back",
        title="no value read back within the step",
        gain_ms=facts.wait_idle_ms,
        why=f"the device is idle for {facts.wait_idle_ms:.3g} ms while the host waits for it"
        " (.item(), .cpu(), print of a tensor, a scaler's check)",
        risk="none: a value is seen some steps later",
        lines=("total += loss.detach()          # add on the device",
               "if step % 100 == 0: print(total.item() / 100)"),
        setting={"read_back": "late"},
    )  # fmt: skip


@judge
def _workers(facts: Facts) -> Advice | None:
    if not facts.on_gpu:
        return None
    return Advice(
        code="data-ahead",
        title="batches made ahead by workers",
        # While the device still works on the step before, loading costs nothing.
        gain_ms=min(facts.data_ms, facts.host_idle_ms),
        why=f"the host is in its DataLoader for {facts.data_ms:.3g} ms of a step, and the device"
        f" waits for the host for {facts.host_idle_ms:.3g} ms",
        risk="memory and cores of the host",
        lines=("DataLoader(…, num_workers=8, persistent_workers=True, prefetch_factor=4)",),
        setting={"data": "workers"},
    )


@judge
def _pinned(facts: Facts) -> Advice | None:
    if not facts.on_gpu:
        return None
    return Advice(
        code="pinned-data",
        title="data in pinned memory, copied ahead",
        gain_ms=facts.pageable_ms,
        why=f"copies from pageable memory take {facts.pageable_ms:.3g} ms and stop the host",
        risk="memory of the host",
        lines=("DataLoader(…, pin_memory=True, num_workers=4)",
               "batch = batch.to(device, non_blocking=True)"),
        setting={"copies": "pinned"},
    )  # fmt: skip


@judge
def _set_to_none(facts: Facts) -> Advice | None:
    return Advice(
        code="set-to-none",
        title="gradients dropped instead of zeroed",
        gain_ms=facts.cleared_ms,
        why=f"filling gradients with zeros takes {facts.cleared_ms:.3g} ms",
        risk="none, unless code reads .grad between steps",
        lines=("optimizer.zero_grad(set_to_none=True)",),
        setting={"gradients": "none"},
    )


@judge
def _larger_batch(facts: Facts) -> Advice | None:
    if not facts.on_gpu or facts.batch is None or not facts.memory_bytes:
        return None
    room = facts.memory_bytes * 0.9 - facts.peak_bytes
    if facts.saved_bytes > room:
        return None
    # Twice the samples launch as many kernels: what the device waited for launches is halved for
    # each sample, and so is the update.
    saved = 0.5 * (facts.host_idle_ms + facts.optimizer_ms)
    return Advice(
        code="larger-batch",
        title="twice the batch",
        gain_ms=saved,
        gain_bytes=-facts.saved_bytes,
        why="for each sample the launches and the update cost half; the gain is for as many"
        f" samples as now, and {room / 2**30:.3g} GiB are free",
        risk="optimisation: another batch needs another learning rate; memory",
        lines=(f"batch_size = {2 * facts.batch}",),
        setting={"batch": str(2 * facts.batch)},
    )
