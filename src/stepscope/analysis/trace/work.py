"""Work of a trace: every kernel, or every operator on a CPU, with its attribution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.kernels.names import Description, describe, describe_operator
from stepscope.analysis.trace.classes import classes
from stepscope.analysis.trace.host import BACKWARD, GRAPH, OPTIMIZER, UNKNOWN, Host, read_host
from stepscope.analysis.trace.model import NO_NUMBER, Ints, Kernels, Trace
from stepscope.analysis.trace.nesting import NO_SPAN, innermost

NO_CALL = -1
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")


@dataclass(frozen=True)
class DeviceWork:
    """One entry per kernel, or per interval of an operator's self time; ordered by start."""

    trace: Trace
    host: Host
    name: Ints
    start: Ints
    end: Ints
    stream: Ints
    kind: Ints
    """Class, as an index of `CLASSES`."""
    call: Ints
    """Runtime call that launched it; NO_CALL if unknown."""
    span: Ints
    """Innermost CPU span around that call; in a CPU trace, the operator itself."""
    descriptions: dict[int, Description]
    """Descriptions by the number of each name that occurs."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def on_device(self) -> bool:
        return self.trace.on_device

    @cached_property
    def latest_end(self) -> Ints:
        """Time at which all work up to each entry has ended; the ends alone are not sorted."""
        return np.maximum.accumulate(self.end) if len(self) else self.end

    @cached_property
    def phase(self) -> Ints:
        phase = np.full(len(self), UNKNOWN, np.int64)
        known = self.span != NO_SPAN
        phase[known] = self.host.phase[self.span[known]]
        unattributed = ~known
        unattributed[known] = ~self.host.phase_known[self.span[known]]
        phase[unattributed & self.replayed] = GRAPH
        return phase

    @cached_property
    def replayed(self) -> NDArray[np.bool_]:
        """True for entries that a CUDA graph launched."""
        names = self.trace.names
        called = np.unique(self.trace.calls.name).tolist()
        graphs = [n for n in called if names[n].startswith(_GRAPH_LAUNCHES)]
        replayed: NDArray[np.bool_] = self.call != NO_CALL
        replayed[replayed] = np.isin(self.trace.calls.name[self.call[replayed]], graphs)
        return replayed

    @cached_property
    def path(self) -> Ints:
        """Path of the named ranges; for a backward operator, of the forward operator that created
        it."""
        path = np.zeros(len(self), np.int64)
        known = self.span != NO_SPAN
        span = self.span[known]
        forward = self.host.forward_of[span]
        backward = (self.host.phase[span] == BACKWARD) & (forward != NO_SPAN)
        path[known] = self.host.path[np.where(backward, forward, span)]
        return path

    @cached_property
    def operator(self) -> Ints:
        """Name of the operator that launched each entry; NO_SPAN if none did."""
        spans = self.trace.spans
        span = self.span.copy()
        while True:
            in_range = span != NO_SPAN
            in_range[in_range] = spans.is_range[span[in_range]]
            if not in_range.any():
                break
            span[in_range] = self.host.parent[span[in_range]]
        name = np.full(len(self), NO_SPAN, np.int64)
        name[span != NO_SPAN] = spans.name[span[span != NO_SPAN]]
        return name

    def attribution(self) -> Attribution:
        """Compute the shares of time with a known launch, operator, phase, class and module."""
        length = self.end - self.start
        total = max(1, int(length.sum()))

        def share(of: np.ndarray[tuple[int], np.dtype[np.bool_]], within: int = total) -> float:
            return int(length[of].sum()) / max(1, within)

        backward = self.phase == BACKWARD
        modules = self.path != 0
        return Attribution(
            launch=share(self.call != NO_CALL) if self.on_device else 1.0,
            operator=share(self.operator != NO_SPAN),
            phase=share(self.phase != UNKNOWN),
            kind=share(self.kind != CLASSES.index("other")),
            module=share(modules | (self.phase == OPTIMIZER)),
            backward_module=share(backward & modules, int(length[backward].sum())),
        )


@dataclass(frozen=True)
class Attribution:
    """Shares of the time to which each of these could be attributed."""

    launch: float
    operator: float
    phase: float
    kind: float
    module: float
    """Share with a named range, or in the optimizer."""
    backward_module: float
    """Share of the backward pass's time alone."""


def device_work(trace: Trace) -> DeviceWork:
    """Attribute every kernel, or every operator on a CPU, to the CPU spans."""
    host = read_host(trace)
    return _kernels(trace, host) if trace.on_device else _operators(trace, host)


def _kernels(trace: Trace, host: Host) -> DeviceWork:
    kernels, calls = _busiest_device(trace.kernels), trace.calls
    call = _launching_call(kernels.correlation, calls.correlation)
    span = np.full(len(kernels), NO_SPAN, np.int64)
    known = call != NO_CALL
    launched = call[known]
    span[known] = innermost(trace.spans, host.parent, calls.thread[launched], calls.start[launched])
    descriptions = _descriptions(trace, kernels.name)
    return DeviceWork(
        trace,
        host,
        kernels.name,
        kernels.start,
        kernels.end,
        kernels.stream,
        classes(trace, host, descriptions, kernels.name, span),
        call,
        span,
        descriptions,
    )


def _descriptions(trace: Trace, name: Ints) -> dict[int, Description]:
    describe_name = describe if trace.on_device else describe_operator
    return {name_id: describe_name(trace.names[name_id]) for name_id in np.unique(name).tolist()}


def _busiest_device(kernels: Kernels) -> Kernels:
    """Keep the kernels of one device: the one with the most work."""
    devices, of = np.unique(kernels.device, return_inverse=True)
    if len(devices) == 1:
        return kernels
    own = of == np.bincount(of, weights=kernels.end - kernels.start).argmax()
    return Kernels(**{name: column[own] for name, column in vars(kernels).items()})


def _launching_call(wanted: Ints, correlations: Ints) -> Ints:
    order = np.argsort(correlations, kind="stable")
    position = np.searchsorted(correlations[order], wanted)
    call = np.full(len(wanted), NO_CALL, np.int64)
    inside = (position < len(order)) & (wanted != NO_NUMBER)
    candidate = order[position[inside]]
    same = correlations[candidate] == wanted[inside]
    call[np.flatnonzero(inside)[same]] = candidate[same]
    return call


def _operators(trace: Trace, host: Host) -> DeviceWork:
    """Entries are the intervals in which an operator itself ran, not one that it called."""
    start, end, span = _self_time(trace, host)
    order = np.argsort(start, kind="stable")
    start, end, span = start[order], end[order], span[order]
    name = trace.spans.name[span]
    descriptions = _descriptions(trace, name)
    return DeviceWork(
        trace,
        host,
        name,
        start,
        end,
        trace.spans.thread[span],
        classes(trace, host, descriptions, name, span),
        np.full(len(start), NO_CALL, np.int64),
        span,
        descriptions,
    )


def _self_time(trace: Trace, host: Host) -> tuple[Ints, Ints, Ints]:
    spans = trace.spans
    operators = np.flatnonzero(~spans.is_range)
    starts, ends, owners = [], [], []
    # When the self time of each open operator resumes: after the last child that has ended.
    begin, finish = spans.start.tolist(), spans.end.tolist()
    resume = begin.copy()
    up, is_range = host.parent.tolist(), spans.is_range.tolist()
    for index in operators.tolist():
        above = up[index]
        while above != NO_SPAN and is_range[above]:
            above = up[above]
        if above != NO_SPAN:
            if begin[index] > resume[above]:
                starts.append(resume[above])
                ends.append(begin[index])
                owners.append(above)
            resume[above] = max(resume[above], finish[index])
    for index in operators.tolist():
        if finish[index] > resume[index]:
            starts.append(resume[index])
            ends.append(finish[index])
            owners.append(index)
    return tuple(np.array(column, np.int64) for column in (starts, ends, owners))  # type: ignore[return-value]
