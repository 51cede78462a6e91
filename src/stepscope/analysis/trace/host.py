"""What the host's spans say of the work they launch: phase, named ranges, forward of a backward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import or_
from typing import Literal

import numpy as np

from stepscope.analysis.trace.forward_links import forward_of
from stepscope.analysis.trace.model import Ints, Trace
from stepscope.analysis.trace.nesting import NOBODY, parents

Phase = Literal["forward", "loss", "backward", "optimizer", "outside", ""]
PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer", "outside", "")
"""`outside` is the training loop around the model: data, copies, clipping, logging. The empty one
stands for work that nothing says the phase of."""

FORWARD, LOSS, BACKWARD, OPTIMIZER, OUTSIDE, UNKNOWN = range(6)
STEP_EDGE = re.compile(r"^StepEdge#\d+$")
"""A moment at which one step ends and the next begins; a program that is only watched has no
range around its step."""
STEP_MARK = re.compile(r"^(?:ProfilerStep#|step )\d+$")

_ENGINE = "autograd::engine::evaluate_function: "
_OPTIMIZER_MARKS = ("Optimizer.step#", "Optimizer.zero_grad#")
_MACHINERY = ("## ", "Torch-Compiled Region", "TorchDynamo", "AOTDispatcher", "Pregraph")
"""Ranges that torch.compile puts around what it runs: they name no part of the model."""
_LOSSES = {"aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::mse_loss",
           "aten::binary_cross_entropy_with_logits", "aten::kl_div"}  # fmt: skip
_PHASE_RANGES = {"forward": FORWARD, "loss": LOSS, "backward": BACKWARD, "optimizer": OPTIMIZER,
                 "outside": OUTSIDE}  # fmt: skip


@dataclass(frozen=True)
class Host:
    """One entry for every span of a trace."""

    parent: Ints
    phase: Ints
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
    own_phase = [_own_phase(name) for name in names]
    marked = _has_forward_mark(trace)
    is_step = [STEP_MARK.match(name) is not None for name in names]
    is_edge = [STEP_EDGE.match(name) is not None for name in names]
    says_module = [
        own in (None, LOSS) and not mark and not name.startswith(_MACHINERY)
        for name, own, mark in zip(names, own_phase, map(or_, is_step, is_edge), strict=True)
    ]
    phase, path = [UNKNOWN] * len(spans), [0] * len(spans)
    paths: dict[tuple[str, ...], int] = {(): 0}
    listed: list[tuple[str, ...]] = [()]
    is_range, name_of, above = spans.is_range.tolist(), spans.name.tolist(), parent.tolist()
    in_backward = spans.in_backward.tolist()
    default = (OUTSIDE if any(is_edge) else UNKNOWN) if marked else FORWARD
    for index, name in enumerate(name_of):
        over = above[index]
        outer = default if over == NOBODY else phase[over]
        own = BACKWARD if in_backward[index] else own_phase[name]
        # A range that only says `forward` does not turn a recomputation within backward around.
        phase[index] = outer if own is None or (own < BACKWARD == outer) else own
        route = 0 if over == NOBODY else path[over]
        if is_range[index] and says_module[name]:
            longer = (*listed[route], names[name])
            route = paths.setdefault(longer, len(listed))
            if route == len(listed):
                listed.append(longer)
        path[index] = route
    ranges = sorted(np.flatnonzero(spans.is_range).tolist(), key=lambda i: int(spans.start[i]))
    found = np.array(phase, np.int64)
    return Host(
        parent, found, np.array(path, np.int64), tuple(listed),
        forward_of(trace, parent, found == BACKWARD),
        steps=tuple(i for i in ranges if is_step[name_of[i]]),
        edges=tuple(i for i in ranges if is_edge[name_of[i]]),
    )  # fmt: skip


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
