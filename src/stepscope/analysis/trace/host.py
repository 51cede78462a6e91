"""Attribution of CPU spans: phase, named ranges, and the forward operator of each backward
operator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.trace.forward_links import forward_of
from stepscope.analysis.trace.model import Ints, Trace
from stepscope.analysis.trace.nesting import NO_SPAN, nearest, parents

Phase = Literal["forward", "loss", "backward", "optimizer", "outside", "graph", ""]
PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer", "outside", "graph", "")
"""`outside` is the training loop around the model: data, copies, clipping, logging. `graph` is a
CUDA graph replayed in one launch, whose kernels carry no phase. The empty phase is work whose phase
is unknown."""

FORWARD, LOSS, BACKWARD, OPTIMIZER, OUTSIDE, GRAPH, UNKNOWN = range(7)
_NO_PHASE = -1
STEP_EDGE = re.compile(r"^StepEdge#\d+$")
"""Moment at which one step ends and the next begins; used if the program has no range around its
step."""
OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")
STEP_MARK = re.compile(r"^(?:ProfilerStep#|step )\d+$")

_ENGINE = "autograd::engine::evaluate_function: "
_OPTIMIZER_MARKS = ("Optimizer.step#", "Optimizer.zero_grad#")
_MACHINERY = (
    "## ",
    "Torch-Compiled Region",
    "TorchDynamo",
    "AOTDispatcher",
    "Pregraph",
    "DistributedDataParallel.forward",
)
"""Ranges that torch.compile and DDP put around what they run; they name no part of the model."""
_LOSSES = {
    "aten::cross_entropy_loss",
    "aten::nll_loss_nd",
    "aten::mse_loss",
    "aten::binary_cross_entropy_with_logits",
    "aten::kl_div",
}
_PHASE_RANGES = {
    "forward": FORWARD,
    "loss": LOSS,
    "backward": BACKWARD,
    "optimizer": OPTIMIZER,
    "outside": OUTSIDE,
}


@dataclass(frozen=True)
class Host:
    """Attributes of every span of a trace, one entry per span."""

    parent: Ints
    phase: Ints
    phase_known: NDArray[np.bool_]
    """True if the span or an ancestor determines the phase; False if it is assumed."""
    path: Ints
    """Index in `paths` of the named ranges around the span."""
    paths: tuple[tuple[str, ...], ...]
    forward_of: Ints
    """Forward span that created the backward operator this span belongs to."""
    steps: tuple[int, ...]
    """Spans that mark steps, in order of time."""
    edges: tuple[int, ...] = ()
    """Spans that mark where one step ends and the next begins, in order of time."""


def read_host(trace: Trace) -> Host:
    """Attribute every span of a trace."""
    spans, names = trace.spans, trace.names
    parent = parents(spans)
    by_name = _phase_by_name(trace)
    ranges = np.flatnonzero(spans.is_range)
    ranges = ranges[np.argsort(spans.start[ranges], kind="stable")]
    named = np.unique(spans.name[ranges]).tolist()
    steps = [name_id for name_id in named if STEP_MARK.match(names[name_id])]
    edges = [name_id for name_id in named if STEP_EDGE.match(names[name_id])]
    phase, phase_known = _phases(trace, parent, by_name, steps + edges, watched=bool(edges))
    modules = [
        name_id
        for name_id in named
        if by_name[name_id] in (_NO_PHASE, LOSS) and not names[name_id].startswith(_MACHINERY)
    ]
    path, paths = _paths(trace, parent, np.setdiff1d(modules, steps + edges))
    return Host(
        parent,
        phase,
        phase_known,
        path,
        paths,
        forward_of(trace, parent, phase == BACKWARD),
        steps=tuple(ranges[np.isin(spans.name[ranges], steps)].tolist()),
        edges=tuple(ranges[np.isin(spans.name[ranges], edges)].tolist()),
    )


def _phase_by_name(trace: Trace) -> Ints:
    """Return the phase that each span name determines."""
    phase = np.full(max(1, len(trace.names)), _NO_PHASE, np.int64)
    for name_id in np.unique(trace.spans.name).tolist():
        own = _own_phase(trace.names[name_id])
        if own is not None:
            phase[name_id] = own
    return phase


def _phases(
    trace: Trace, parent: Ints, by_name: Ints, steps: list[int], *, watched: bool
) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the phase of every span, inherited from its ancestors, and if it is known."""
    spans = trace.spans
    own_phase = np.where(spans.in_backward, BACKWARD, by_name[spans.name])
    holder = nearest(parent, own_phase != _NO_PHASE)
    marked = bool((by_name[spans.name[spans.is_range]] == FORWARD).any())
    default = (OUTSIDE if watched else UNKNOWN) if marked else FORWARD
    # A range named `forward` inside the backward pass is a recomputation: it stays in the backward
    # pass.
    for index in np.flatnonzero((own_phase >= 0) & (own_phase < BACKWARD)).tolist():
        above = holder[parent[index]] if parent[index] != NO_SPAN else NO_SPAN
        if above != NO_SPAN and own_phase[above] == BACKWARD:
            own_phase[index] = BACKWARD
    inherited = np.where(holder == NO_SPAN, default, own_phase[holder])
    if marked:
        # What the author named otherwise, such as `load_batch`, belongs to the training loop.
        named = nearest(parent, spans.is_range & ~np.isin(spans.name, steps)) != NO_SPAN
        inherited[(inherited == UNKNOWN) & named] = OUTSIDE
    return inherited, holder != NO_SPAN


def _paths(trace: Trace, parent: Ints, modules: Ints) -> tuple[Ints, tuple[tuple[str, ...], ...]]:
    """Return the index of the module ranges around every span, and the list of these paths."""
    spans, names = trace.spans, trace.names
    named = spans.is_range & np.isin(spans.name, modules)
    holder = nearest(parent, named)
    path = np.zeros(len(spans), np.int64)
    numbers: dict[tuple[str, ...], int] = {(): 0}
    listed: list[tuple[str, ...]] = [()]
    for index in np.flatnonzero(named).tolist():
        above = holder[parent[index]] if parent[index] != NO_SPAN else NO_SPAN
        longer = (*listed[path[above] if above != NO_SPAN else 0], names[spans.name[index]])
        path[index] = numbers.setdefault(longer, len(listed))
        if path[index] == len(listed):
            listed.append(longer)
    return np.where(holder == NO_SPAN, 0, path[holder]), tuple(listed)


def _own_phase(name: str) -> int | None:
    if name.startswith(_ENGINE):
        return BACKWARD
    if name.startswith(_OPTIMIZER_MARKS):
        return OPTIMIZER
    if name in _LOSSES:
        return LOSS
    return _PHASE_RANGES.get(name.strip("# ").lower())
