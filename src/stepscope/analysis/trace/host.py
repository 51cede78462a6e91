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
    said = _said_by_name(trace)
    ranges = np.flatnonzero(spans.is_range)
    ranges = ranges[np.argsort(spans.start[ranges], kind="stable")]
    named = np.unique(spans.name[ranges]).tolist()
    steps = [number for number in named if STEP_MARK.match(names[number])]
    edges = [number for number in named if STEP_EDGE.match(names[number])]
    phase, says_phase = _phases(trace, parent, said, watched=bool(edges))
    modules = [
        number
        for number in named
        if said[number] in (_SAYS_NONE, LOSS) and not names[number].startswith(_MACHINERY)
    ]
    path, paths = _paths(trace, parent, np.setdiff1d(modules, steps + edges))
    return Host(
        parent, phase, says_phase, path, paths, forward_of(trace, parent, phase == BACKWARD),
        steps=tuple(ranges[np.isin(spans.name[ranges], steps)].tolist()),
        edges=tuple(ranges[np.isin(spans.name[ranges], edges)].tolist()),
    )  # fmt: skip


def _said_by_name(trace: Trace) -> Ints:
    """The phase that each name of a span says."""
    said = np.full(max(1, len(trace.names)), _SAYS_NONE, np.int64)
    for number in np.unique(trace.spans.name).tolist():
        own = _own_phase(trace.names[number])
        if own is not None:
            said[number] = own
    return said


def _phases(
    trace: Trace, parent: Ints, by_name: Ints, *, watched: bool
) -> tuple[Ints, NDArray[np.bool_]]:
    """The phase of every span, and whether it is said; one that says none is of that around it."""
    spans = trace.spans
    said = np.where(spans.in_backward, BACKWARD, by_name[spans.name])
    holder = nearest(parent, said != _SAYS_NONE)
    marked = bool((by_name[spans.name[spans.is_range]] == FORWARD).any())
    default = (OUTSIDE if watched else UNKNOWN) if marked else FORWARD
    # A range that only says `forward` does not turn a recomputation within backward around.
    for index in np.flatnonzero((said >= 0) & (said < BACKWARD)).tolist():
        above = holder[parent[index]] if parent[index] != NOBODY else NOBODY
        if above != NOBODY and said[above] == BACKWARD:
            said[index] = BACKWARD
    return np.where(holder == NOBODY, default, said[holder]), holder != NOBODY


def _paths(
    trace: Trace, parent: Ints, modules: Ints
) -> tuple[Ints, tuple[tuple[str, ...], ...]]:  # fmt: skip
    """The ranges with names of modules around every span as a number, and what each stands for."""
    spans, names = trace.spans, trace.names
    named = spans.is_range & np.isin(spans.name, modules)
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
