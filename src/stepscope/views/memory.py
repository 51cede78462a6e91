"""The memory ledger of one recorded step, of any program: its table and its figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from stepscope.records.memory import (
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
    RECOMPUTED,
    SAVED_KIND,
    TEMPORARIES,
    WEIGHT_COPIES,
    Peaks,
    PhasePeak,
    Saved,
    SavedTensor,
    Standing,
    kind_of,
    saved_bytes,
)
from stepscope.records.schema import Record
from stepscope.report.blocks import Figure, Table
from stepscope.report.tables import col, table
from stepscope.views.builders import grouped
from stepscope.views.figures import curves
from stepscope.views.prediction import lines_table

_MIB, _GIB = 2**20, 2**30
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""The number of a module in a list."""
_FEW = 0.004
"""Share of the peak below which kinds are drawn as one."""
_ORDER = (PARAMETERS, OPTIMIZER, GRADIENTS, WEIGHT_COPIES, SAVED_KIND, RECOMPUTED, TEMPORARIES)
_OTHER = "other"


class Account:
    """The memory ledger of one recorded step, of any program."""

    def __init__(self, record: Record, name: str = "") -> None:
        self.record, self.name = record, name or record.case

    @cached_property
    def phases(self) -> tuple[PhasePeak, ...]:
        return self.record.required("ledger", Peaks)

    @cached_property
    def saved(self) -> tuple[SavedTensor, ...]:
        return self.record.required("saved", Saved)

    @property
    def on_cuda(self) -> bool:
        return self.record.environment.device_kind == "cuda"

    @property
    def peak(self) -> float:
        return self.bytes("peak_bytes") or 0.0

    def bytes(self, name: str, phase: str = "") -> float | None:
        return self.record.quantity(name, phase=phase)

    @cached_property
    def highest(self) -> PhasePeak:
        return max(self.phases, key=lambda peak: peak.allocated)

    @cached_property
    def ends(self) -> tuple[PhasePeak, ...]:
        """Live bytes at the end of each phase; empty in records of older versions."""
        return self.record.attachment("ends", Peaks) or ()

    @cached_property
    def standing(self) -> dict[str, Standing]:
        """Bytes of CUDA's allocator and driver at those moments of a plain step."""
        return self.record.attachment("standing", dict[str, Standing]) or {}

    @property
    def unattributed_share(self) -> float:
        """Largest unattributed share of the peak, over all peaks and ends of phases."""
        left = max(abs(moment.unattributed) for moment in (*self.phases, *self.ends))
        return left / self.highest.allocated if self.highest.allocated else 0

    def line(self, name: str) -> int:
        """Largest size of a line at the peak of any phase."""
        return max((peak.lines.get(name, 0) for peak in self.phases), default=0)

    @cached_property
    def kept(self) -> int:
        """Largest size of the activations saved for backward."""
        return max((saved_bytes(peak.lines) for peak in self.phases), default=0)

    def groups(self, peak: PhasePeak) -> dict[str, int]:
        """Sizes by kind; everything saved for backward is one kind."""
        sizes: dict[str, int] = {}
        for line, size in peak.lines.items():
            kind = kind_of(line)
            sizes[kind] = sizes.get(kind, 0) + size
        if peak.unattributed:
            sizes["unattributed"] = peak.unattributed
        return sizes


def account_table(case: Account) -> Table:
    return lines_table(
        "memory-ledger",
        f"Live memory at the peak of each phase: {case.name}",
        [(peak.phase, peak.lines) for peak in case.phases],
        [
            ("unattributed", *(peak.unattributed for peak in case.phases)),
            ("sum", *(peak.allocated for peak in case.phases)),
        ],
        caption="Activations saved for backward are named by the part of the model and the operator"
        " that saves them. Only `unattributed` is a remainder.",
    )


def saved_table(
    case: Account, title: str = "Saved for backward by the first block and the ends"
) -> Table:
    """Table of the saved tensors in the record; equal ones of repeated modules are one row."""
    saved = _merged(case.saved)
    columns = [
        col("module", lambda tensor: tensor.module or "model"),
        col("operator", lambda tensor: tensor.operator),
        col("shape", lambda tensor: "×".join(map(str, tensor.shape)) or "scalar"),
        col("dtype", lambda tensor: tensor.dtype),
        col(
            "times",
            lambda tensor: tensor.times,
            "count",
            hint="equal tensors of a step; not all of them exist at once",
        ),
        col("bytes", lambda tensor: tensor.bytes, "bytes", hint="of each"),
        col("together", lambda tensor: tensor.times * tensor.bytes, "bytes"),
        col("line of code", lambda tensor: tensor.code),
    ]
    repeated = any(tensor.times > 1 for tensor in saved)
    return table(
        "memory-saved",
        f"{title}: {case.name}",
        saved,
        [
            declared
            for declared in columns
            if repeated or declared.column.title not in ("times", "together")
        ],
        caption="Recorded by autograd's hooks for saved tensors; each storage counts once, for the"
        " operator that saved it first; parameters and autocast's copies of them are left out."
        " An asterisk stands for the numbers of repeated modules.",
    )


def _merged(saved: Sequence[SavedTensor]) -> list[SavedTensor]:
    """Tensors that differ only in the number of their module, merged; the largest sum first."""
    alike = grouped(
        saved,
        lambda one: msgspec.structs.replace(one, module=_NUMBER.sub("*", one.module), times=1),
    )
    merged = [
        msgspec.structs.replace(
            every if len(members) > 1 else members[0], times=sum(one.times for one in members)
        )
        for every, members in alike.items()
    ]
    return sorted(merged, key=lambda one: -one.times * one.bytes)


def stack_figure(case: Account) -> Figure:
    groups = {peak.phase: case.groups(peak) for peak in case.phases}
    kinds = shown_kinds([*groups.values()])
    unit, unit_name = memory_unit(case)
    return Figure(
        name="memory-stack",
        title=f"The peak of each phase by kind of memory: {case.name}",
        kind="stacks",
        curves=curves(
            {
                kind: {x: max(0, size_of(kind, sizes, kinds)) / unit for x, sizes in groups.items()}
                for kind in kinds
            }
        ),
        x_label="phase",
        y_label=f"memory, {unit_name}",
    )


def memory_unit(case: Account) -> tuple[int, str]:
    return (_GIB, "GiB") if case.peak >= _GIB else (_MIB, "MiB")


def shown_kinds(moments: Sequence[Mapping[str, int]]) -> list[str]:
    """Kinds to draw: permanent ones first, at the bottom; those that are never large as one."""
    most: dict[str, int] = {}
    for kinds in moments:
        for kind, size in kinds.items():
            most[kind] = max(most.get(kind, 0), size)
    peak = max(sum(kinds.values()) for kinds in moments)
    large = [kind for kind in most if most[kind] >= _FEW * peak and kind != INPUTS]
    large.sort(key=lambda kind: _ORDER.index(kind) if kind in _ORDER else len(_ORDER))
    return [*large, _OTHER] if len(large) < len(most) else large


def size_of(kind: str, kinds: Mapping[str, int], shown: Sequence[str]) -> int:
    if kind != _OTHER:
        return kinds.get(kind, 0)
    return sum(size for name, size in kinds.items() if name not in shown)
