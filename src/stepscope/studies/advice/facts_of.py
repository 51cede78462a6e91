"""The facts that advice needs, from a record of `inspect` or of a model of one's own."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.trace.summary import Summary, Use
from stepscope.errors import StepscopeError
from stepscope.records.schema import Ceiling, Record
from stepscope.studies.inspected.rows import Watched
from stepscope.studies.memory.rows import Account
from stepscope.studies.trace_findings import host_idle

_FORMATS = ("float32", "tf32", "float16", "bfloat16")
_PAGEABLE = "pageable"
_CLEARING = ("zero_", "fill_", "Fill", "Memset")


def facts_of(
    record: Record, ceilings: Sequence[Ceiling] = (), lacks: Sequence[str] = ()
) -> Facts:  # fmt: skip
    """`ceilings` stand in where the record has none: a program that was only watched."""
    watched = Watched(record)
    summary, step_ms = watched.summary, watched.step_ms
    if summary is None or step_ms is None:
        why = record.notes.get("trace_missing", record.reason or "it has no trace")
        raise StepscopeError(f"{record.case} gives no advice: {why}", "record it again")
    held = {c.name: c.value for c in ceilings if c.source == "measured"}
    held |= {c.name: c.value for c in record.ceilings if c.source == "measured"}
    core = _attention(summary)
    account, setting = watched.account, watched.setting
    compiled = setting.compiled if setting else record.config.get("compile", "no") != "no"
    fused = (
        any(one.fused for one in setting.optimizers)
        if setting
        else record.config.get("optimizer") == "adamw-fused"
    )
    return Facts(
        on_gpu=summary.on_device,
        step_ms=step_ms,
        dtype=str(record.config.get("dtype", "")),
        classes=_classes(summary),
        optimizer_ms=summary.phases.get("optimizer", summary.phase_ms("optimizer")),
        host_idle_ms=host_idle(summary, step_ms) * step_ms if summary.on_device else 0.0,
        # In a step of ours the host waits at the end, on purpose; in a program, where it waits.
        wait_idle_ms=summary.idle_of("synchronisation") if record.study == "inspect" else 0.0,
        issue_ms=summary.wall_ms - summary.waited_ms if record.study == "own" else None,
        attention_ms=sum(use.ms for use in core),
        attention_matmul_ms=sum(use.ms for use in core if use.kind == "matmul"),
        score_bytes=_scores(account),
        data_ms=summary.data_ms,
        pageable_ms=sum(row.ms for row in summary.kernels if _PAGEABLE in row.kernel),
        cleared_ms=_cleared(summary),
        parameters=int(record.quantity("parameters") or 0),
        peak_bytes=int(record.quantity("peak_bytes") or 0),
        saved_bytes=account.kept if account else 0,
        memory_bytes=record.environment.device_memory_bytes,
        compiled=compiled,
        fused_optimizer=fused,
        batch=record.config.get("batch"),
        rates={name: held[f"matmul.{name}"] for name in _FORMATS if f"matmul.{name}" in held},
        bandwidth=held.get("memory.copy"),
        lacks=tuple(lacks),
    )


def _classes(summary: Summary) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in summary.lines:
        if line.phase not in ("idle", "optimizer", ""):
            found[line.kind] = found.get(line.kind, 0.0) + line.ms
    return found


def _attention(summary: Summary) -> list[Use]:
    """What runs beside a softmax that has products beside it: attention that is written out.

    Linear layers are modules of their own, so they are not counted in.
    """
    by_module: dict[str, list[Use]] = {}
    for use in summary.uses:
        if use.module and use.phase in ("forward", "backward"):
            by_module.setdefault(use.module, []).append(use)
    return [
        use
        for uses in by_module.values()
        if {"softmax", "matmul"} <= {one.kind for one in uses}
        for use in uses
    ]


def _scores(account: Account | None) -> int:
    """Bytes kept for backward of tensors that have a row and a column for each position."""
    if account is None:
        return 0
    return sum(
        tensor.bytes
        for tensor in account.saved
        if len(tensor.shape) >= 3 and tensor.shape[-1] == tensor.shape[-2] > 1
    )


def _cleared(summary: Summary) -> float:
    """Gradients that are set to zero in place."""
    return sum(
        row.ms
        for row in summary.kernels
        if row.phase == "optimizer" and any(word in row.kernel for word in _CLEARING)
    )
