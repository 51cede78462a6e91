"""A recording as a record, with everything that a page needs but the trace, which has a file."""

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
from stepscope.advisor.scope.energy import ENERGY_MOVES_S
from stepscope.advisor.scope.issue import PHASES
from stepscope.advisor.scope.recorder import Recorder
from stepscope.measure.ceilings import known_ceilings
from stepscope.measure.environment import describe
from stepscope.measure.modules import any_compiled
from stepscope.records.memory import SavedTensor
from stepscope.records.schema import Record, Series, quantities
from stepscope.studies.program.cases import STUDY_NAME, InspectedCase
from stepscope.studies.program.setting import OptimizerSetting, Setting
from stepscope.torch_tools.triton_available import tf32_is_enabled

_MOST_SAVED = 200
"""Tensors kept for backward that a record lists, the largest first."""


def make_record(recorder: Recorder, name: str, words: Sequence[str], elapsed_s: float) -> Record:
    """`name` and `words` are the script and its arguments, or whatever names the program."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    notes = dict(recorder.notes)
    found: dict[str, tuple[float, str]] = {}
    attachments: dict[str, Any] = {"setting": _setting(recorder)}
    _evaluations(recorder, notes, attachments)
    if recorder.cut_short:
        notes["cut_short"] = recorder.cut_short
    _put(found, "B", resident_bytes=psutil.Process().memory_info().rss)
    _put(found, "B", peak_bytes=recorder.peak_bytes)
    if recorder.energy.joules is not None and "left_out" in notes:
        notes["no_energy"] = (
            f"{notes['left_out']} of the timed steps do more than the others, and the counter ran"
            " through them"
        )
    elif recorder.energy.joules is not None:
        took = recorder.times[-1][1].host_s - recorder.times[0][0].host_s
        _put(found, "J", joules=recorder.energy.joules)
        _put(found, "J", joules_resolution=recorder.energy.joules * ENERGY_MOVES_S / took)
    parameters = sum(_numbers(parameter) for parameter in recorder.parameters)
    _put(found, "parameters", parameters=parameters)
    dtype = str(next((p.dtype for p in recorder.parameters), "")).removeprefix("torch.")
    ledger = recorder.count.ledger
    if ledger is not None:
        # Counted on a CPU, where no allocator could be asked; then also what the page shows.
        peak = max((p.allocated for p in ledger.peaks), default=0)
        if recorder.peak_bytes is None:
            _put(found, "B", peak_bytes=peak)
        _put(found, "FLOP", flops=ledger.flops.total or None)
        dtype = ledger.flops.main_format() or dtype
        if "memory_missing" not in notes:
            attachments["ledger"] = ledger.peaks
            attachments["saved"] = _largest(ledger.saved)
    if recorder.trace.steps:
        notes["trace"] = recorder.trace.path.name
        _put(found, "forwards", forwards=recorder.trace.forwards / recorder.trace.steps)
    if recorder.count.snapshot.exists():
        notes["snapshot"] = recorder.count.snapshot.name
    environment = describe(recorder.device)
    case = InspectedCase(
        script=name, arguments=tuple(words), rank=rank, ranks=ranks, dtype=dtype,
        warmup=recorder.effort.warmup, timed=recorder.effort.timed, traced=recorder.effort.traced,
    )  # fmt: skip
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
        series=_series(recorder),
        quantities=quantities(found),
        notes=notes,
        attachments=msgspec.to_builtins(attachments),
        readings=tuple(recorder.readings),
    )


def _series(recorder: Recorder) -> tuple[Series, ...]:
    """Steps as the device's queue saw them where there is one, and as the host did."""
    device = recorder.device
    device.synchronize()
    warmup = tuple(1e3 * seconds for seconds in recorder.warmup_s)
    usual = usual_steps(recorder.evaluations)
    times = [recorder.times[place] for place in usual]
    on_host = tuple((end.host_s - start.host_s) * 1e3 for start, end in times)
    found = [Series(name="step", unit="ms", values=on_host, warmup=warmup)]
    on_device = [device.device_ms(start, end) for start, end in times]
    if on_device and None not in on_device:
        values = tuple(ms for ms in on_device if ms is not None)
        found.insert(0, Series(name="step", unit="ms", values=values, clock="device"))
    if any(recorder.loading_ms):
        loading = tuple(recorder.loading_ms[place] for place in usual)
        found.append(Series(name="loading", unit="ms", values=loading))
    issued = recorder.issue.steps
    for phase in PHASES:
        values = tuple(step[phase] for step in issued)
        if any(values):
            found.append(Series(name="issue", phase=phase, unit="ms", values=values))
    return tuple(found)


def usual_steps(evaluations: Sequence[int]) -> list[int]:
    """Places of steps that ran the model without gradients no oftener than the others: a
    validation every so many steps is not what a step takes. All of them, where few are alike."""
    least = min(evaluations, default=0)
    found = [place for place, count in enumerate(evaluations) if count == least]
    return found if len(found) >= len(evaluations) / 2 else list(range(len(evaluations)))


def _evaluations(recorder: Recorder, notes: dict[str, str], attachments: dict[str, Any]) -> None:
    """Note how many timed steps evaluate more often than the others, and which of the traced."""
    odd = len(recorder.evaluations) - len(usual_steps(recorder.evaluations))
    if odd:
        notes["left_out"] = str(odd)
    if recorder.trace.steps:
        usual = recorder.usual_evaluations
        longer = [i for i, count in enumerate(recorder.trace.evaluations) if count > usual]
        if len(longer) == recorder.trace.steps:
            notes["validates_throughout"] = "yes"
        elif longer:
            attachments["traced_validations"] = longer


def _setting(recorder: Recorder) -> Setting:
    formats: dict[str, int] = {}
    for model in recorder.models:
        for parameter in model.parameters():
            name = str(parameter.dtype).removeprefix("torch.")
            formats[name] = formats.get(name, 0) + _numbers(parameter)
    return Setting(
        models=tuple(type(model).__name__ for model in recorder.models),
        optimizers=tuple(_optimizer(one) for one in recorder.optimizers),
        compiled=any_compiled(recorder.models),
        parameter_formats=formats,
        matmul_precision="high" if tf32_is_enabled() else "highest",
        blocks=sum(len(blocks_of(model)) for model in recorder.models),
        batch=_batch(),
        distributed=torch.distributed.is_available() and torch.distributed.is_initialized(),
    )


def _numbers(parameter: torch.Tensor) -> int:
    """One that waits for its first forward has none yet."""
    return 0 if is_lazy(parameter) else parameter.numel()


def _batch() -> int | None:
    """Of the loaders that live now. Their class is asked, since an object may answer for another:
    a proxy that is looked at does whatever its author wrote."""
    loaders = [one for one in gc.get_objects() if issubclass(type(one), DataLoader)]
    # One that wraps another may have none of its own.
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
    """Those that are alike once: each forward of a step saves them anew."""
    alike = [
        msgspec.structs.replace(tensor, times=times) for tensor, times in Counter(saved).items()
    ]
    return sorted(alike, key=lambda tensor: -tensor.bytes)[:_MOST_SAVED]


def _put(held: dict[str, tuple[float, str]], unit: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None:
            held[name] = (value, unit)
