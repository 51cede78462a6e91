"""Inputs of the advice rules: from a record of `inspect` or of a user's model, or from a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from stepscope.advisor.advise.attention_facts import attention_work, is_called, score_bytes
from stepscope.analysis.advice.facts import (
    AT_COPIES,
    AT_END,
    BETWEEN,
    CONVOLUTION,
    DEPTHWISE,
    QUEUE,
    Facts,
    PhaseWork,
    Runs,
    Siblings,
)
from stepscope.analysis.advice.timeline import with_launch_time
from stepscope.analysis.kernels.matmuls import FP8
from stepscope.analysis.kernels.names import FILL
from stepscope.analysis.limits import measured_ceilings
from stepscope.analysis.lines.facts import Lines
from stepscope.analysis.lines.rules import attends, module_loops
from stepscope.analysis.trace.summary import KernelRow, Summary
from stepscope.analysis.trust import trust_of
from stepscope.errors import StepscopeError
from stepscope.measure.datasheet import datasheet_ceilings
from stepscope.records.memory import KEPT_INPUT, OPTIMIZER, RECOMPUTED, SAVED
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.views.memory import Account
from stepscope.views.program.cases import STUDY_NAME as INSPECTED
from stepscope.views.program.rows import ProgramRecord
from stepscope.views.program.setting import Setting

_DTYPES = ("float32", "tf32", "float16", "bfloat16", "fp8")
_UNITS = {
    "FP32 cores": "float32",
    "TF32 tensor cores": "tf32",
    "BF16 tensor cores": "bfloat16",
    "FP16 tensor cores": "float16",
    "FP16/BF16 tensor cores": "bfloat16",
}
_OUTSIDE, _DATA, _GRAPH = "outside", "data", "graph"
_ORDER = (_OUTSIDE, "forward", "loss", "backward", "optimizer")
_PAGEABLE, _TO_DEVICE, _TO_HOST = "pageable", "HtoD", "DtoH"
"""Substrings of the names of copies in a trace."""
_EVERY_STEP = 0.9
"""Copies per step from which on every step is assumed to have one."""
_LOSS_OPERATORS = ("logsoftmax", "nllloss", "crossentropy")
_ENTRY = ".*"
"""Suffix in a trace that stands for the index of a ModuleList entry."""
_COMPILED = "triton_"
"""Prefix of the kernels that torch.compile generates."""
_CAPTURED = 0.5
"""Share of the kernels launched by CUDA graphs from which a step counts as captured."""
_LAUNCH_RATE = 1.5e5
"""Bare launches per second on an H200, for a trace whose step does not show its own rate."""
_DEPTHWISE = ("grouped_direct", "c1_k1", "depthwise")
"""Substrings of the names of depthwise convolutions. No dtype makes these faster: they do not run
on tensor cores and are memory-bound."""
_CLEARING = ("zero_", "fill_", "Fill", "Memset")


def facts_of(record: Record, lacks: Sequence[str] = ()) -> Facts:
    """Collect the facts of a recorded step."""
    watched = ProgramRecord(record)
    summary, step_ms = watched.summary, watched.step_ms
    if summary is None or step_ms is None:
        raise StepscopeError(f"no advice for {record.case}: {watched.missing}", "record it again")
    ceilings = measured_ceilings(record)
    ceiling_values = {name: ceiling.value for name, ceiling in ceilings.items()}
    account, setting = watched.account, watched.setting
    compiled = setting.compiled if setting else watched.case.compile != "no"
    ranks = watched.case.ranks
    copied, phases = _pageable(summary), _phases(summary, ranks)
    # The names of compiled kernels do not show their purpose.
    attention = () if compiled else attention_work(summary, phases, account)
    facts = Facts(
        on_gpu=summary.on_device,
        step_ms=step_ms,
        noise_ms=_noise_ms(record),
        dtype=(dtype := _matmul_dtype(watched.case.dtype, summary, setting)),
        autocast=_by_autocast(watched.case.dtype, setting, dtype),
        phases=phases,
        kernels=sum(row.count for row in summary.kernels),
        attention=attention,
        attention_called=is_called(summary, account),
        waits=_waits(record, summary, copied > 0),
        reads_back=record.study == INSPECTED and _reads_back(summary),
        data_ms=summary.data_ms,
        loader_workers=watched.loader_workers,
        pageable_ms=copied,
        cleared_ms=_cleared(summary),
        parameters=int(record.quantity("parameters") or 0),
        flops=record.quantity("flops") or 0.0,
        peak_bytes=int(record.quantity("peak_bytes") or 0),
        plans=watched.plans,
        **(account_facts(account) if account else {}),
        memory_bytes=record.environment.device_memory_bytes,
        compiled=compiled,
        **_optimizer(watched.case.optimizer, setting),
        blocks=setting.blocks if setting else int(record.quantity("blocks") or 0),
        block_list=block_list(summary),
        **_linear_layers(summary),
        compiled_by_accelerate=_is_compiled_by_accelerate(setting),
        siblings=() if watched.lines is None else _siblings(watched.lines),
        loss_ms=_loss_ms(summary),
        ranks=ranks,
        **_communication(summary),
        sharing=None if setting is None else setting.sharing,
        micro_batches=max(1, watched.micro_batches),
        batch=setting.batch if setting else watched.case.batch,
        rates={
            name: ceiling_values[f"matmul.{name}"]
            for name in _DTYPES
            if f"matmul.{name}" in ceiling_values
        },
        bandwidth=ceiling_values.get("memory.copy"),
        ceiling_doubts={name: one.doubt for name, one in ceilings.items() if one.doubt},
        cores=record.environment.cpu_cores,
        threads=record.environment.threads,
        lacks=tuple(lacks),
        doubt=(trust := trust_of(record)).reason,
        ordered=trust.level != "invalid",
    )
    facts = _as_timed(facts, summary, ranks, watched.loading_ms)
    if not facts.on_gpu and watched.loading_ms is not None:
        facts = replace(facts, data_ms=watched.loading_ms)
    if facts.on_gpu and watched.issue_ms:
        return _with_issue_times(facts, watched.issue_ms, watched.loading_ms)
    issued = record.find("issue", "host")
    return with_launch_time(
        facts,
        ceiling_values.get("launch.rate"),
        summarize(issued.values).median if issued else None,
    )


def _communication(summary: Summary) -> dict[str, Any]:
    rows = [row for row in summary.kernels if row.kind == "communication"]
    gathers = [row for row in rows if "gather" in row.kernel.lower()]
    return {
        "exposed_ms": summary.class_ms("communication"),
        "messages": sum(row.count for row in rows),
        "gathers_ms": _by_phase(gathers),
        "collectives_ms": _by_phase(rows),
    }


def _by_phase(rows: Sequence[KernelRow]) -> dict[str, float]:
    spent: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        spent[row.phase] += row.ms
    return dict(spent)


def _siblings(lines: Lines) -> tuple[Siblings, ...]:
    return tuple(
        Siblings(
            where=lines.places[loop.place].where,
            modules=loop.iterations // loop.entries,
            operators={"forward": float(loop.operators), "backward": float(backward)},
            heads=attends(loop),
        )
        for loop, backward in module_loops(lines)
    )


def facts_of_trace(summary: Summary, host: float = 1.0, ranks: int = 1, sent: int = 0) -> Facts:
    """Collect what a trace alone shows of a step. Rates are those of the data sheet.

    `host` is the share of the traced idle time caused by the CPU that remains without the profiler.
    `sent` are the bytes that a rank all-reduces in a step.
    """
    rates = {one.name: one.value for one in datasheet_ceilings(summary.device)}
    copied, phases = _pageable(summary), _without_graphs(_phases(summary, ranks))
    compiled = any(row.kernel.startswith(_COMPILED) for row in summary.kernels)
    reads_back = summary.on_device and _reads_back(summary)
    step_ms = summary.wall_ms - (1 - host) * summary.idle_of("CPU")
    names = {name.lower() for name in summary.optimizers}
    spread = summarize(summary.steps)
    facts = Facts(
        on_gpu=summary.on_device,
        step_ms=step_ms,
        noise_ms=(spread.high - spread.low) / 2,
        dtype=_matmul_dtype("", summary, None),
        phases=phases,
        attention=() if compiled else attention_work(summary, phases),
        attention_called=is_called(summary, None),
        waits=AT_END if reads_back else AT_COPIES if copied and summary.waited_ms > 0 else "",
        reads_back=reads_back,
        data_ms=summary.data_ms,
        pageable_ms=copied,
        cleared_ms=_cleared(summary),
        parameters=sent // 4,
        compiled=compiled,
        captured=summary.replayed > _CAPTURED,
        optimizer="adam" if names and names <= {"adam", "adamw"} else "",
        optimizer_name=summary.optimizers[0] if len(summary.optimizers) == 1 else "",
        fused_optimizer=summary.fused_update,
        block_list=block_list(summary),
        **_linear_layers(summary),
        loss_ms=_loss_ms(summary),
        ranks=ranks,
        **_communication(summary),
        rates={name: rates[f"matmul.{name}"] for name in _DTYPES if f"matmul.{name}" in rates},
        rates_basis="by the data sheet",
        bandwidth=rates.get("memory.copy"),
        doubt=summary.doubt,
    )
    return with_launch_time(_as_timed(facts, summary, ranks), _LAUNCH_RATE)


def _without_graphs(phases: Sequence[PhaseWork]) -> tuple[PhaseWork, ...]:
    """Count the kernels of a CUDA graph, which have no phase, as forward; the host launches none of
    them."""
    return tuple(
        replace(work, name="forward", launches=0.0) if work.name == _GRAPH else work
        for work in phases
    )


def _noise_ms(record: Record) -> float:
    """Half the width of the interval of the step time."""
    series = record.find("step")
    if series is None or not series.values:
        return 0.0
    spread = summarize(series.values)
    return (spread.high - spread.low) / 2


def _as_timed(facts: Facts, summary: Summary, ranks: int, loading_ms: float | None = None) -> Facts:
    """Scale the traced times to the timed step, so that every gain refers to that step.

    CPU operators take longer under the profiler, and even longer if the machine was busy. GPU
    kernels do not, but their sum is at most the step. The part of a CPU step outside of operators
    is Python, assigned to the time between phases. The wait for DataLoader workers is not scaled:
    they load ahead while tracing is prepared, so the traced steps wait less.
    """
    if facts.on_gpu:
        longest = max(facts.device_ms, 1e-9)
        return facts.with_device_times(min(1.0, facts.step_ms / longest))
    factor = facts.step_ms / summary.wall_ms
    if loading_ms is not None and facts.loader_workers:
        computed, traced = facts.step_ms - loading_ms, summary.wall_ms - summary.data_ms
        factor = computed / traced if computed > 0 and traced > 0 else factor
    scaled = replace(facts.with_device_times(factor), data_ms=factor * facts.data_ms)
    left = facts.step_ms - scaled.device_ms
    if ranks > 1 or left <= 0:
        return scaled
    return _with_outside(scaled).with_work(lambda work: work.with_more(BETWEEN, left), (_OUTSIDE,))


def _with_outside(facts: Facts) -> Facts:
    if any(work.name == _OUTSIDE for work in facts.phases):
        return facts
    return replace(facts, phases=(PhaseWork(name=_OUTSIDE, classes={}), *facts.phases))


def block_list(summary: Summary) -> str:
    """Return the path of the ModuleList whose entries take the most time, if it can be written as
    attributes of the model. A trace names the entries `layers.*`; nested modules are separated by
    slashes. The path is not one of attributes below an entry of an nn.Sequential or in one of
    several models."""
    spent: defaultdict[str, float] = defaultdict(float)
    for use in summary.uses:
        path, entry, _ = use.module.partition(_ENTRY)
        if entry and path:
            spent[path.replace("/", ".")] += use.ms
    path = max(spent, key=lambda path: spent[path], default="")
    return path if all(name.isidentifier() for name in path.split(".")) else ""


def _with_issue_times(
    facts: Facts, issue_ms: Mapping[str, float], loading_ms: float | None
) -> Facts:
    """Add the host's issue time to each phase; the loss is issued with the backward. Time outside
    of the phases is not spent on launches. The loading time is that of normally timed steps: while
    the device is made idle, loader workers catch up."""
    facts = _with_outside(facts)
    data = issue_ms.get(_DATA, 0.0) if loading_ms is None else loading_ms
    outside = issue_ms.get(_OUTSIDE, 0.0) + data
    launches = {work.name: work.launches for work in facts.phases}
    launches["backward"] = launches.get("backward", 0.0) + launches.pop("loss", 0.0)
    each = {phase: issue_ms.get(phase, 0.0) / count for phase, count in launches.items() if count}
    each["loss"] = each.get("backward", 0.0)

    def with_issue_time(work: PhaseWork) -> PhaseWork:
        if work.name == _OUTSIDE:
            return replace(work, launch_ms=0.0, host_ms=outside)
        return replace(work, launch_ms=each.get(work.name, 0.0))

    total = sum(launches.values())
    timed_facts = facts.with_work(with_issue_time, [work.name for work in facts.phases])
    timed_facts = replace(timed_facts, launch_ms=timed_facts.host_ms / total if total else 0.0)
    return replace(timed_facts, data_ms=data)


def _matmul_dtype(reported: str, summary: Summary, setting: Setting | None) -> str:
    """Dtype of the matmuls. Kernel names show it if they name the hardware unit; operators do not
    in a compiled program, and never distinguish float32 from TF32."""
    by_dtype: defaultdict[str, float] = defaultdict(float)
    for row in summary.kernels:
        if row.kind == "matmul" and row.unit in _UNITS:
            by_dtype[_UNITS[row.unit]] += row.ms
    known = sum(by_dtype.values())
    if known > 0.5 * sum(row.ms for row in summary.kernels if row.kind == "matmul"):
        return max(by_dtype, key=lambda name: by_dtype[name])
    short = setting is not None and setting.matmul_precision != "highest" and summary.on_device
    return "tf32" if reported == "float32" and short else reported


def _linear_layers(summary: Summary) -> dict[str, Any]:
    """Time and number of the matmuls of linear layers in repeated blocks, in the forward pass."""
    found = [
        use
        for use in summary.uses
        if use.kind == "matmul" and use.role == "forward" and "*" in use.module
    ]
    return {
        "linear_ms": sum(use.ms for use in found),
        "linear_matmuls": sum(use.count for use in found),
        "uses_fp8": any(row.unit == FP8 for row in summary.kernels),
    }


def _by_autocast(reported: str, setting: Setting | None, dtype: str) -> bool:
    """True if the matmuls are 16-bit while most weights are float32."""
    if dtype not in ("bfloat16", "float16"):
        return False
    if setting is None:
        return reported == dtype
    dtypes = setting.parameter_formats
    return 2 * dtypes.get("float32", 0) > sum(dtypes.values())


def _phases(summary: Summary, ranks: int) -> tuple[PhaseWork, ...]:
    """Device work of each phase. On a CPU the time between operators counts as work, unless it may
    be a wait for other ranks."""
    classes: dict[str, dict[str, float]] = {}
    for line in summary.lines:
        if line.phase not in ("idle", ""):
            classes.setdefault(line.phase, defaultdict(float))[line.kind] += line.ms
    for row in summary.kernels if summary.on_device else ():
        if row.kind == "matmul" and (kind := _convolution(row)) and row.phase in classes:
            classes[row.phase]["matmul"] -= row.ms
            classes[row.phase][kind] += row.ms
    launches: defaultdict[str, float] = defaultdict(float)
    for row in summary.kernels if summary.on_device else ():
        # A fill belongs to the GEMM whose workspace it clears, or is as short as that.
        if row.kernel != FILL:
            launches[row.phase] += row.count
    total = sum(launches.values())
    for phase, work in classes.items():
        if summary.on_device:
            share = launches.get(phase, 0.0) / total if total else 0.0
            work[QUEUE] = share * summary.idle_of("queue")
        elif ranks == 1:
            work[BETWEEN] = max(0.0, summary.phases.get(phase, 0.0) - sum(work.values()))
    if summary.data_ms:
        classes.setdefault(_OUTSIDE, {})
    phases = [
        PhaseWork(
            name=phase,
            classes=dict(work),
            launches=launches.get(phase, 0.0),
            host_ms=summary.data_ms if phase == _OUTSIDE and summary.on_device else 0.0,
            runs=_runs(summary, phase, launches.get(phase, 0.0)),
        )
        for phase, work in classes.items()
    ]
    order = {name: number for number, name in enumerate(_ORDER)}
    return tuple(sorted(phases, key=lambda work: order.get(work.name, len(order))))


def _convolution(row: KernelRow) -> str:
    """Return the class of a convolution, empty for other matmuls. Torch allows TF32 in convolutions
    by default; the setting for matmuls does not affect them."""
    if any(word in row.kernel for word in _DEPTHWISE):
        return DEPTHWISE
    return CONVOLUTION if row.library == "cuDNN" else ""


def _runs(summary: Summary, phase: str, launches: float) -> Runs | None:
    for own in summary.runs:
        if own.phase == phase and own.ms:
            return Runs(
                kernels=own.kernels / launches if launches else 0.0,
                runs=own.runs / launches if launches else 0.0,
                longest=own.longest_ms / own.ms,
            )
    return None


def _waits(record: Record, summary: Summary, copies: bool) -> str:
    """Return where the host waits for the device. A step measured by a study starts and ends on an
    idle device; a watched program waits at copies or where it reads values back."""
    if not summary.on_device:
        return ""
    if record.study != INSPECTED or _reads_back(summary):
        return AT_END
    return AT_COPIES if copies and summary.waited_ms > 0 else ""


def _reads_back(summary: Summary) -> bool:
    return any(_TO_HOST in row.kernel and row.count >= _EVERY_STEP for row in summary.kernels)


def _pageable(summary: Summary) -> float:
    """Time of host-to-device copies from memory that is not pinned."""
    return sum(
        row.ms for row in summary.kernels if _TO_DEVICE in row.kernel and _PAGEABLE in row.kernel
    )


def _optimizer(name: str, setting: Setting | None) -> dict[str, Any]:
    if setting is None:
        return {
            "optimizer": "sgd" if name.startswith("sgd") else "adam",
            "fused_optimizer": name.endswith("-fused"),
        }
    classes = {one.name for one in setting.optimizers}
    names = {name.lower() for name in classes}
    of_torch = all(one.of_torch for one in setting.optimizers)
    # Of torch's optimizers only these have a fused variant; a custom one is judged by its name.
    like_adam = names <= {"adam", "adamw"} if of_torch else any("adam" in name for name in names)
    family = "adam" if names and like_adam else ""
    return {
        "optimizer": family or ("sgd" if names == {"sgd"} else ""),
        "optimizer_name": classes.pop() if of_torch and len(classes) == 1 else "",
        "optimizer_of_torch": of_torch,
        "fused_optimizer": any(one.fused for one in setting.optimizers),
        "loops_over_tensors": any(
            one.of_torch and one.foreach is False and not one.fused for one in setting.optimizers
        ),
    }


def account_facts(account: Account) -> dict[str, Any]:
    """Facts from the memory ledger of a step."""
    update = [peak.allocated for peak in account.phases if peak.phase == "optimizer"]
    others = [peak.allocated for peak in account.phases if peak.phase != "optimizer"]
    return {
        "model_peak_bytes": max(others, default=0),
        "floor_bytes": max(update, default=0),
        "saved_bytes": account.kept,
        "score_bytes": score_bytes(account),
        "logit_bytes": _logits(account),
        "recomputed_bytes": _recomputed(account),
        "state_bytes": account.line(OPTIMIZER),
    }


def _is_compiled_by_accelerate(setting: Setting | None) -> bool:
    """Return whether `accelerate` compiles the model; when it replaced modules, these were
    recorded."""
    return setting is not None and (setting.compiled_by_accelerate or setting.pieces is not None)


def _loss_ms(summary: Summary) -> float:
    """Time of the loss, forward and backward. A GPU kernel's name does not show that its softmax
    belongs to the loss; if the phase is known, the backward is assumed to take as long as the
    forward."""
    named = sum(
        row.ms
        for row in summary.kernels
        if any(word in row.kernel.lower().replace("_", "") for word in _LOSS_OPERATORS)
    )
    forward = sum(row.ms for row in summary.kernels if row.phase == "loss" and row.kind != "matmul")
    return max(named, 2 * forward)


def _logits(account: Account) -> int:
    """Largest tensor saved for backward by the loss, at most the logits."""
    saved = [
        tensor.bytes
        for tensor in account.saved
        if any(word in tensor.operator.lower().replace("_", "") for word in _LOSS_OPERATORS)
    ]
    return max(saved, default=0)


def _recomputed(account: Account) -> int:
    """Bytes that one checkpointed segment recomputes, times the number of segments."""
    inputs = [s.bytes for s in account.saved if f"{s.module}, {s.operator}" == KEPT_INPUT]
    segments = account.line(f"{SAVED}{KEPT_INPUT}") / max(inputs) if inputs else 1
    return round(account.line(RECOMPUTED) * segments)


def _cleared(summary: Summary) -> float:
    """Time of setting gradients to zero in place."""
    return sum(
        row.ms
        for row in summary.kernels
        if row.phase == "optimizer" and any(word in row.kernel for word in _CLEARING)
    )
