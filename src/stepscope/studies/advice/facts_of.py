"""The facts that advice needs, from a record of `inspect` or of a model of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.trace.summary import Summary, Use
from stepscope.errors import StepscopeError
from stepscope.records.memory import KEPT_INPUT, OPTIMIZER, RECOMPUTED
from stepscope.records.schema import Ceiling, Record
from stepscope.records.stats import summarize
from stepscope.studies.inspected.rows import Watched
from stepscope.studies.inspected.setting import Setting
from stepscope.studies.memory.rows import Account
from stepscope.studies.trace_findings import host_idle

_FORMATS = ("float32", "tf32", "float16", "bfloat16")
_WAITS = 0.05
"""From this share of a step on, the host's waits show that no full queue holds it up."""
_PAGEABLE = "pageable"
_OF_LOSS = ("logsoftmax", "nllloss", "crossentropy")
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
    exposed = summary.class_ms("communication")
    return Facts(
        on_gpu=summary.on_device,
        step_ms=step_ms,
        dtype=str(record.config.get("dtype", "")),
        classes=_classes(summary),
        optimizer_ms=summary.phases.get("optimizer", summary.phase_ms("optimizer")),
        host_idle_ms=host_idle(summary, step_ms) * step_ms if summary.on_device else 0.0,
        # In a step of ours the host waits at the end, on purpose; in a program, where it waits.
        wait_idle_ms=summary.idle_of("synchronisation") if record.study == "inspect" else 0.0,
        issue_ms=_issue_ms(record, summary),
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
        **_optimizer(record, setting),
        blocks=setting.blocks if setting else int(record.quantity("blocks") or 0),
        loss_ms=_loss_ms(summary),
        logit_bytes=_logits(account),
        forward_ms=summary.phases.get("forward", summary.phase_ms("forward")),
        recomputed_bytes=_recomputed(account),
        state_bytes=account.line(OPTIMIZER) if account else 0,
        ranks=int(record.config.get("ranks", 1)),
        exposed_ms=exposed,
        messages=sum(row.count for row in summary.kernels if row.kind == "communication"),
        batch=record.config.get("batch"),
        rates={name: held[f"matmul.{name}"] for name in _FORMATS if f"matmul.{name}" in held},
        bandwidth=held.get("memory.copy"),
        lacks=tuple(lacks),
    )


def _issue_ms(record: Record, summary: Summary) -> float | None:
    """Host time of a step. Where the host never waits, a full queue holds it up instead, and
    nothing says how long it would take by itself."""
    alone = summary.wall_ms - summary.waited_ms
    if record.study == "own":
        on_host = record.find("step", "host")
        held = [alone, summarize(on_host.values).median] if on_host else [alone]
        return min(held)
    return alone if summary.waited_ms > _WAITS * summary.wall_ms else None


def _optimizer(record: Record, setting: Setting | None) -> dict[str, Any]:
    if setting is None:
        name = str(record.config.get("optimizer", ""))
        return {"optimizer": "sgd" if name.startswith("sgd") else "adam",
                "fused_optimizer": name.endswith("-fused")}  # fmt: skip
    names = {one.name.lower() for one in setting.optimizers}
    family = "adam" if any("adam" in name for name in names) else ""
    return {
        "optimizer": family or ("sgd" if names == {"sgd"} else ""),
        "optimizer_of_torch": all(one.of_torch for one in setting.optimizers),
        "fused_optimizer": any(one.fused for one in setting.optimizers),
        "loops_over_tensors": any(
            one.of_torch and one.foreach is False and not one.fused for one in setting.optimizers
        ),
    }


def _loss_ms(summary: Summary) -> float:
    return sum(
        row.ms
        for row in summary.kernels
        if any(word in row.kernel.lower().replace("_", "") for word in _OF_LOSS)
    )


def _logits(account: Account | None) -> int:
    """What the loss keeps, at most as much as the logits."""
    if account is None:
        return 0
    kept = [
        tensor.bytes
        for tensor in account.saved
        if any(word in tensor.operator.lower().replace("_", "") for word in _OF_LOSS)
    ]
    return max(kept, default=0)


def _recomputed(account: Account | None) -> int:
    """What one stretch makes again, for every stretch that keeps its input."""
    if account is None or not account.line(RECOMPUTED):
        return 0
    stretches = sum(KEPT_INPUT in tensor.operator for tensor in account.saved)
    return account.line(RECOMPUTED) * max(1, stretches)


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
