"""What the host's spans say of the work they launch: phase, named ranges, forward of a backward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.trace.forward_links import forward_of
from stepscope.analysis.trace.model import Ints, Trace
from stepscope.analysis.trace.nesting import NOBODY, nearest, parents

Phase = Literal["forward", "loss", "backward", "optimizer", "outside", "graph", ""]
PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer", "outside", "graph", "")
"""`outside` is the training loop around the model: data, copies, clipping, logging. `graph` is what
a CUDA graph replays in one launch, of which its kernels say no phase. The empty one stands for work
that nothing says the phase of."""

FORWARD, LOSS, BACKWARD, OPTIMIZER, OUTSIDE, GRAPH, UNKNOWN = range(7)
_SAYS_NONE = -1
STEP_EDGE = re.compile(r"^StepEdge#\d+$")
"""A moment at which one step ends and the next begins; a program that is only watched has no
range around its step."""
OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")
STEP_MARK = re.compile(r"^(?:ProfilerStep#|step )\d+$")

_ENGINE = "autograd::engine::evaluate_function: "
_OPTIMIZER_MARKS = ("Optimizer.step#", "Optimizer.zero_grad#")
_MACHINERY = (
    "## ", "Torch-Compiled Region", "TorchDynamo", "AOTDispatcher", "Pregraph",
    "DistributedDataParallel.forward",
)  # fmt: skip
"""Ranges that torch.compile and DDP put around what they run: they name no part of the model."""
_LOSSES = {"aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::mse_loss",
           "aten::binary_cross_entropy_with_logits", "aten::kl_div"}  # fmt: skip
_PHASE_RANGES = {"forward": FORWARD, "loss": LOSS, "backward": BACKWARD, "optimizer": OPTIMIZER,
                 "outside": OUTSIDE}  # fmt: skip


@dataclass(frozen=True)
class Host:
    """One entry for every span of a trace."""

    parent: Ints
    phase: Ints
    says_phase: NDArray[np.bool_]
    """Whether it or a span around it says so; without one, the phase is taken for granted."""
    path: Ints
    """The named ranges around it, as a number of `paths`."""
    paths: tuple[tuple[str, ...], ...]
    forward_of: Ints
    """The forward span that made the backward which this span is part of."""
    steps: tuple[int, ...]
    """The spans that mark steps, in order of time."""
    edges: tuple[int, ...] = ()
    """The spans that mark where one step ends and the next begins, in order of time."""


def read_host(trace: Trace) -> Host:
    spans, names = trace.spans, trace.names
    parent = parents(spans)
    is_step = [STEP_MARK.match(name) is not None for name in names]
    is_edge = [STEP_EDGE.match(name) is not None for name in names]
    phase, says_phase = _phases(trace, parent, watched=any(is_edge))
    path, paths = _paths(trace, parent, [a or b for a, b in zip(is_step, is_edge, strict=True)])
    ranges = sorted(np.flatnonzero(spans.is_range).tolist(), key=lambda i: int(spans.start[i]))
    name_of = spans.name.tolist()
    return Host(
        parent, phase, says_phase, path, paths, forward_of(trace, parent, phase == BACKWARD),
        steps=tuple(i for i in ranges if is_step[name_of[i]]),
        edges=tuple(i for i in ranges if is_edge[name_of[i]]),
    )  # fmt: skip


def _phases(trace: Trace, parent: Ints, *, watched: bool) -> tuple[Ints, NDArray[np.bool_]]:
    """Of every span, and whether it is said; one that says none is of the phase around it."""
    spans = trace.spans
    by_name = np.array([_SAYS_NONE if (own := _own_phase(n)) is None else own for n in trace.names])
    said = np.where(spans.in_backward, BACKWARD, by_name[spans.name])
    holder = nearest(parent, said != _SAYS_NONE)
    marked = _has_forward_mark(trace)
    default = (OUTSIDE if watched else UNKNOWN) if marked else FORWARD
    # A range that only says `forward` does not turn a recomputation within backward around.
    for index in np.flatnonzero((said >= 0) & (said < BACKWARD)).tolist():
        above = holder[parent[index]] if parent[index] != NOBODY else NOBODY
        if above != NOBODY and said[above] == BACKWARD:
            said[index] = BACKWARD
    return np.where(holder == NOBODY, default, said[holder]), holder != NOBODY


def _paths(
    trace: Trace, parent: Ints, is_mark: list[bool]
) -> tuple[Ints, tuple[tuple[str, ...], ...]]:
    """The named ranges around every span as a number, and what each number stands for."""
    spans, names = trace.spans, trace.names
    says_module = np.array(
        [
            not mark and _own_phase(name) in (None, LOSS) and not name.startswith(_MACHINERY)
            for name, mark in zip(names, is_mark, strict=True)
        ],
        np.bool_,
    )
    named = spans.is_range & says_module[spans.name]
    holder = nearest(parent, named)
    path = np.zeros(len(spans), np.int64)
    numbers: dict[tuple[str, ...], int] = {(): 0}
    listed: list[tuple[str, ...]] = [()]
    for index in np.flatnonzero(named).tolist():
        above = holder[parent[index]] if parent[index] != NOBODY else NOBODY
        longer = (*listed[path[above] if above != NOBODY else 0], names[spans.name[index]])
        path[index] = numbers.setdefault(longer, len(listed))
        if path[index] == len(listed):
            listed.append(longer)
    return np.where(holder == NOBODY, 0, path[holder]), tuple(listed)


def _own_phase(name: str) -> int | None:
    if name.startswith(_ENGINE):
        return BACKWARD
    if name.startswith(_OPTIMIZER_MARKS):
        return OPTIMIZER
    if name in _LOSSES:
        return LOSS
    return _PHASE_RANGES.get(name.strip("# ").lower())


def _has_forward_mark(trace: Trace) -> bool:
    ranges = np.unique(trace.spans.name[trace.spans.is_range])
    return any(_own_phase(trace.names[name]) == FORWARD for name in ranges)
