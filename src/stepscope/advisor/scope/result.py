"""Convert a recording into a record. The trace is a separate file."""

from __future__ import annotations

import gc
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import psutil
import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from stepscope.acceleration.changes import blocks_of
from stepscope.advisor.scope.issue import PHASES
from stepscope.advisor.scope.loading import with_mean_wait
from stepscope.advisor.scope.recorder import Recorder
from stepscope.advisor.scope.sharing import sharing_of
from stepscope.measure.ceilings import known_ceilings
from stepscope.measure.environment import describe
from stepscope.measure.modules import any_compiled
from stepscope.records.memory import SavedTensor
from stepscope.records.plans import ATTACHMENT as PLANS
from stepscope.records.schema import Record, Series, quantities
from stepscope.torch_tools.triton_available import tf32_is_enabled
from stepscope.views.program.cases import STUDY_NAME, InspectedCase
from stepscope.views.program.setting import OptimizerSetting, Setting

_MAX_SAVED = 200
"""Tensors saved for backward listed in a record, the largest first."""


def make_record(recorder: Recorder, name: str, words: Sequence[str], elapsed_s: float) -> Record:
    """Build the record. `name` and `words` are the script and its arguments, or any name of the
    program."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    notes = dict(recorder.notes)
    values: dict[str, tuple[float, str]] = {}
    attachments: dict[str, Any] = {"setting": _setting(recorder)}
    _evaluations(recorder, notes, attachments)
    if recorder.cut_short:
        notes["cut_short"] = recorder.cut_short
    _put(values, "B", resident_bytes=psutil.Process().memory_info().rss)
    _put(values, "B", peak_bytes=recorder.peak_bytes)
    tokens = [recorder.tokens[index] for index in _usual(recorder)]
    if any(tokens):
        _put(values, "tokens", tokens=sum(tokens) / len(tokens))
    parameters = sum(_numbers(parameter) for parameter in recorder.parameters)
    _put(values, "parameters", parameters=parameters)
    dtype = str(next((p.dtype for p in recorder.parameters), "")).removeprefix("torch.")
    ledger = recorder.count.ledger
    if ledger is not None:
        # On a CPU there is no allocator to query: use the counted peak.
        peak = max((p.allocated for p in ledger.peaks), default=0)
        if recorder.peak_bytes is None:
            _put(values, "B", peak_bytes=peak)
        _put(values, "FLOP", flops=ledger.flops.total or None)
        dtype = ledger.flops.main_format() or dtype
        if "memory_missing" not in notes:
            attachments["ledger"] = ledger.peaks
            attachments["saved"] = _largest(ledger.saved)
    if recorder.plans:
        attachments[PLANS] = recorder.plans
    if recorder.trace.steps:
        notes["trace"] = recorder.trace.path.name
        _put(values, "forwards", forwards=recorder.trace.forwards / recorder.trace.steps)
    if recorder.lines.path.exists():
        notes["lines"] = recorder.lines.path.name
    if recorder.count.snapshot.exists():
        notes["snapshot"] = recorder.count.snapshot.name
    environment = describe(recorder.device)
    case = InspectedCase(
        script=name,
        arguments=tuple(words),
        rank=rank,
        ranks=ranks,
        dtype=dtype,
        warmup=recorder.effort.warmup,
        timed=recorder.effort.timed,
        traced=recorder.effort.traced,
    )
    return Record(
        id=secrets.token_hex(6),
        run=datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        study=STUDY_NAME,
        case=case.key,
        config=case.config,
        status="ok",
        environment=environment,
        ceilings=known_ceilings(environment),
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        elapsed_s=elapsed_s,
        series=_series(recorder, notes),
        quantities=quantities(values),
        notes=notes,
        attachments=msgspec.to_builtins(attachments),
        readings=tuple(recorder.readings),
    )


def _series(recorder: Recorder, notes: dict[str, str]) -> tuple[Series, ...]:
    """Step times by the device's clock (if any) and the host's; loading and issue times. Where
    workers deliver batches in bursts, steps have the mean wait for a batch, and the times with
    their own waits are the series `elapsed`."""
    device = recorder.device
    device.synchronize()
    warmup = tuple(1e3 * seconds for seconds in recorder.warmup_s)
    usual = _usual(recorder)
    times = [recorder.times[index] for index in usual]
    on_host = tuple((end.host_s - start.host_s) * 1e3 for start, end in times)
    series = [Series(name="step", unit="ms", values=on_host, warmup=warmup)]
    evaluating = sorted(set(range(len(recorder.times))) - set(usual_steps(recorder.evaluations)))
    if evaluating:
        both = (recorder.times[index] for index in evaluating)
        values = tuple((end.host_s - start.host_s) * 1e3 for start, end in both)
        series.append(Series(name="evaluating", unit="ms", values=values))
    on_device = [device.device_ms(start, end) for start, end in times]
    if on_device and None not in on_device:
        values = tuple(ms for ms in on_device if ms is not None)
        series.insert(0, Series(name="step", unit="ms", values=values, clock="device"))
    if any(recorder.loading_ms):
        loading = tuple(recorder.loading_ms[index] for index in usual)
        if recorder.loader_workers:
            for index, raw in enumerate(tuple(series)):
                if raw.name != "step":
                    continue
                if (even := with_mean_wait(raw.values, loading)) is not None:
                    notes["loader_bursts"] = "yes"
                    series[index] = msgspec.structs.replace(raw, values=even)
                    series.append(msgspec.structs.replace(raw, name="elapsed", warmup=()))
        series.append(Series(name="loading", unit="ms", values=loading))
    issued = recorder.issue.steps
    for phase in PHASES:
        values = tuple(step[phase] for step in issued)
        if any(values):
            series.append(Series(name="issue", phase=phase, unit="ms", values=values))
    return tuple(series)


def usual_steps(evaluations: Sequence[int]) -> list[int]:
    """Return the indices of steps without additional evaluation of the model (no gradients): a
    periodic validation is not part of the step time. Returns all if fewer than half are usual."""
    least = min(evaluations, default=0)
    usual = [index for index, count in enumerate(evaluations) if count == least]
    return usual if len(usual) >= len(evaluations) / 2 else list(range(len(evaluations)))


def _usual(recorder: Recorder) -> list[int]:
    """Indices of the timed steps without a validation and without the start of an epoch."""
    within_epochs = set(usual_steps(recorder.epoch_starts))
    usual = usual_steps(recorder.evaluations)
    return [index for index in usual if index in within_epochs] or usual


def _evaluations(recorder: Recorder, notes: dict[str, str], attachments: dict[str, Any]) -> None:
    """Note how many timed and which traced steps evaluate the model more than the others."""
    usual = usual_steps(recorder.evaluations)
    if len(usual) < len(recorder.evaluations):
        notes["left_out"] = str(len(recorder.evaluations) - len(usual))
    if starts := len(usual) - len(_usual(recorder)):
        notes["epoch_starts"] = str(starts)
    if recorder.trace.steps:
        least = recorder.usual_evaluations
        longer = [i for i, count in enumerate(recorder.trace.evaluations) if count > least]
        if len(longer) == recorder.trace.steps:
            notes["validates_throughout"] = "yes"
        elif longer:
            attachments["traced_validations"] = longer


def _setting(recorder: Recorder) -> Setting:
    dtypes: dict[str, int] = {}
    for model in recorder.models:
        for parameter in model.parameters():
            name = str(parameter.dtype).removeprefix("torch.")
            dtypes[name] = dtypes.get(name, 0) + _numbers(parameter)
    return Setting(
        models=tuple(type(model).__name__ for model in recorder.models),
        optimizers=tuple(_optimizer(one) for one in recorder.optimizers),
        compiled=any_compiled(recorder.models),
        parameter_formats=dtypes,
        matmul_precision="high" if tf32_is_enabled() else "highest",
        blocks=sum(len(blocks_of(model)) for model in recorder.models),
        batch=_batch(),
        loader_workers=recorder.loader_workers,
        distributed=torch.distributed.is_available() and torch.distributed.is_initialized(),
        sharing=sharing_of(recorder.models),
        compiled_by_accelerate=_compiled_by_accelerate(recorder.models),
    )


def _compiled_by_accelerate(models: Sequence[torch.nn.Module]) -> bool:
    from stepscope.acceleration.accelerate import is_compiled_by_default

    return any(map(is_compiled_by_default, models))


def _numbers(parameter: torch.Tensor) -> int:
    """Number of elements; 0 for a lazy parameter before its first forward."""
    return 0 if is_lazy(parameter) else parameter.numel()


def _batch() -> int | None:
    """Batch size of the existing DataLoaders, if they agree. Uses type() because isinstance() would
    trigger code of proxy objects."""
    loaders = [one for one in gc.get_objects() if issubclass(type(one), DataLoader)]
    # A loader that wraps another may have no batch_size.
    sizes = {vars(one)["batch_size"] for one in loaders if "batch_size" in vars(one)}
    return sizes.pop() if len(sizes) == 1 else None


def _optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSetting:
    groups: list[dict[str, Any]] = list(optimizer.param_groups)
    return OptimizerSetting(
        name=type(optimizer).__name__,
        of_torch=type(optimizer).__module__.startswith("torch.optim"),
        tensors=sum(len(group["params"]) for group in groups),
        fused=any(group.get("fused") for group in groups),
        foreach=None if not groups else groups[0].get("foreach"),
        knows_fused="fused" in optimizer.defaults,
    )


def _largest(saved: Sequence[SavedTensor]) -> list[SavedTensor]:
    """Largest saved tensors, identical ones merged: each forward of a step saves them again."""
    alike = [
        msgspec.structs.replace(tensor, times=times) for tensor, times in Counter(saved).items()
    ]
    return sorted(alike, key=lambda tensor: -tensor.bytes)[:_MAX_SAVED]


def _put(target: dict[str, tuple[float, str]], unit: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None:
            target[name] = (value, unit)
